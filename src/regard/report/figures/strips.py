"""Token strips: a text shaded by its weights, or several texts beneath each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regard._errors import refusal
from regard.report.figures.canvas import (
    FAINT,
    INK,
    Array,
    colour_scale,
    dress_bar,
    legible,
    new_figure,
    numbers,
    root_figure,
    say,
    settle,
)
from regard.report.figures.text import font_family, labelled, plain, quiet_glyphs, visible

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure
    import numpy.typing as npt

# The widest text, and the colour bar beneath it.
_STRIP_INCHES, _BAR_INCHES = 7.2, 1.6


def token_strip(
    tokens: Sequence[str],
    weights: torch.Tensor | npt.ArrayLike,
    *,
    title: str | None = None,
    ax: matplotlib.axes.Axes | None = None,
) -> matplotlib.figure.Figure:
    """Write tokens one after the other, each shaded by its weight, in as many lines as they need.

    Args:
        tokens: N tokens.
        weights: (N,), or (R, N) to repeat the text once a row, each row shaded by its own weights on one
            colour scale; finite and non-negative.
        title: a line above the figure.
        ax: axes to write into, in letters as large as fit; a figure as tall as the text when left out.

    Returns:
        The figure; that of `ax` where one is given.

    Example:
        >>> figure = token_strip(["not", " bad", " at", " all"], [0.4, 0.5, 0.05, 0.05])
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['not', '␣bad', '␣at', '␣all']
    """
    shades = numbers(weights, "weights")
    if shades.ndim not in (1, 2):
        raise ValueError(refusal("weights", shades.shape, "shape (N,) or (R, N)"))
    words = labelled(tokens, "tokens", shades.shape[-1], shades.shape)
    numbered = shades.ndim == 2
    shades = np.atleast_2d(shades)
    heading = visible(title or "", edges=False)
    family = font_family([*words, heading])
    scale = colour_scale(shades)
    if ax is None:
        lines = _Lines(words, len(shades), numbered, _STRIP_INCHES * 72, 10.0, family)
        figure, (axes,), slot = _strips_figure([lines], heading, family)
        bar = figure.colorbar(scale, cax=slot, orientation="horizontal")
    else:
        figure, axes = root_figure(ax), ax
        bar = figure.colorbar(scale, ax=ax, fraction=0.04, pad=0.02, aspect=24)
        lines = _largest(words, len(shades), numbered, ax, family)
    dress_bar(bar)
    axes.set_axis_off()
    axes.set(xlim=(0, lines.width), ylim=(lines.height, 0))
    if heading:
        axes.set_title(heading, loc="left", **plain(family, size=11, color=INK))
    if shades.size:
        _shade(axes, lines, shades, scale, family)
    else:
        bar.remove()
        say(axes, "no tokens")
    if ax is None:
        settle(figure)
    return figure


def token_strips(
    parts: Mapping[str, tuple[Sequence[str], torch.Tensor | npt.ArrayLike]], *, title: str | None = None
) -> matplotlib.figure.Figure:
    """Write several texts beneath each other, each under its name and shaded by its own weights, on one colour scale.

    For attention with several inputs or levels: left, target and right; the sentences of a document.

    Args:
        parts: by name, N tokens and their weights: (N,), or (R, N) to repeat the text once a row, such as a hop.
        title: a line above the figure.

    Returns:
        The figure.

    Example:
        >>> left, right = (["not", "bad"], [0.8, 0.2]), (["at", "all"], [0.5, 0.5])
        >>> figure = token_strips({"left": left, "right": right})
        >>> [axes.get_title(loc="left") for axes in figure.axes[:2]]
        ['left', 'right']
    """
    if not parts:
        raise ValueError(refusal("parts", "none", "at least one text with its weights"))
    shades = {name: numbers(weights, f"weights of {name}") for name, (_, weights) in parts.items()}
    for name, x in shades.items():
        if x.ndim not in (1, 2):
            raise ValueError(refusal(f"weights of {name}", x.shape, "shape (N,) or (R, N)"))
    words = {
        name: labelled(tokens, f"tokens of {name}", shades[name].shape[-1], shades[name].shape)
        for name, (tokens, _) in parts.items()
    }
    heading = visible(title or "", edges=False)
    family = font_family([*(word for some in words.values() for word in some), *parts, heading])
    scale = colour_scale(np.concatenate([x.ravel() for x in shades.values()]))
    lines = {
        name: _Lines(words[name], len(np.atleast_2d(x)), x.ndim == 2, _STRIP_INCHES * 72, 10.0, family)
        for name, x in shades.items()
    }
    figure, slots, bar = _strips_figure(list(lines.values()), heading, family, named=True)
    for (name, block), axes in zip(lines.items(), slots, strict=True):
        axes.set_axis_off()
        axes.set(xlim=(0, block.width), ylim=(block.height, 0))
        axes.set_title(visible(name, edges=False), loc="left", pad=2, **plain(family, size=8.5, color=FAINT))
        if words[name]:
            _shade(axes, block, np.atleast_2d(shades[name]), scale, family)
        else:
            say(axes, "no tokens")
    dress_bar(figure.colorbar(scale, cax=bar, orientation="horizontal"))
    if heading:
        width, height = figure.get_size_inches()
        place = {"x": 0.1 / width, "y": 1 - 0.08 / height, "ha": "left", "va": "top"}
        figure.suptitle(heading, **place, **plain(family, size=11, color=INK))
    settle(figure)
    return figure


def trace_strips(
    trace: Any, tokens: Mapping[str, Sequence[str]], *, example: int = 0, title: str | None = None
) -> matplotlib.figure.Figure:
    """Draw what attentions with a single query read, from a trace: a strip a path, a row a call.

    Args:
        trace: what `regard.record` gave.
        tokens: by path, the tokens of the example; weights beyond them are padding.
        example: its place in the batch.
        title: a line above the figure.

    Returns:
        The figure.

    Example:
        >>> import regard as rg
        >>> rotate = rg.RotatoryAttention(4, hops=2)
        >>> with rg.record(rotate) as trace:
        ...     summary = rotate(torch.randn(1, 1, 4), torch.randn(1, 2, 4), torch.randn(1, 3, 4))
        >>> figure = trace_strips(trace, {"left": ["not", "bad"], "right": ["at", "all", "!"]})
        >>> [axes.get_title(loc="left") for axes in figure.axes[:2]]
        ['left', 'right']
    """
    parts: dict[str, tuple[Sequence[str], Any]] = {}
    for path, words in tokens.items():
        rows = []
        for call in trace[path]:
            weights = call.weights[example].detach()
            if weights.dim() == 2 and call.call.form.multi:
                weights = weights.mean(-1)
            if weights.dim() != 1:
                got = f"weights {tuple(weights.shape)} at {path!r}"
                raise ValueError(refusal("trace", got, "those of a single query; draw many with heatmap"))
            rows.append(weights[: len(words)])
        parts[path] = words, torch.stack(rows) if len(rows) > 1 else rows[0]
    return token_strips(parts, title=title)


class _Lines:
    """Tokens laid out in lines, in points: `places` holds (row, token, text, x, y, width) of every box."""

    places: list[tuple[int, int, str, float, float, float]]
    starts: list[float]

    def __init__(
        self, words: list[str], rows: int, numbered: bool, width: float, size: float, family: list[str]
    ) -> None:
        self.width, self.size, self.numbered = width, size, numbered
        self.box, self.places, self.starts = 1.7 * size, [], []
        margin = (0.8 + 0.6 * len(str(rows - 1))) * size if numbered else 0.0
        gap, line = 0.22 * size, 2.0 * size
        measured = {word: _fit(word, size, family, width - margin - size) for word in set(words)}
        y = 0.0
        for row in range(rows):
            x = margin
            self.starts.append(y)
            for index, word in enumerate(words):
                text, wide = measured[word]
                wide += 0.8 * size
                if x > margin and x + wide > width:
                    x, y = margin, y + line
                self.places.append((row, index, text, x, y, wide))
                x += wide + gap
            # Rows of several lines stand apart, so that it is seen which lines belong together.
            y += line + (0.8 * size if y > self.starts[-1] else 0.0)
        self.right = max((x + wide for *_, x, _, wide in self.places), default=0.0)
        self.height = max((top + self.box for *_, top, _ in self.places), default=line)


def _fit(word: str, size: float, family: list[str], room: float) -> tuple[str, float]:
    """The word, cut short where it is wider than a line, and its width in points."""
    width = _measure(word, size, family)
    if width <= room or len(word) < 2:
        return word, width
    cut = word[: max(int(len(word) * room / width) - 2, 1)] + "…"
    return cut, _measure(cut, size, family)


def _measure(text: str, size: float, family: list[str]) -> float:
    """Its width in points."""
    font = import_module("matplotlib.font_manager").FontProperties(family=family, size=size)
    ruler = import_module("matplotlib.textpath").text_to_path
    with quiet_glyphs():
        return float(ruler.get_text_width_height_descent(text, font, False)[0])


def _largest(words: list[str], rows: int, numbered: bool, ax: matplotlib.axes.Axes, family: list[str]) -> _Lines:
    """The lines in the largest letters that fit into the axes."""
    figure = root_figure(ax)
    with quiet_glyphs():
        figure.draw_without_rendering()  # a layout engine moves axes only now
    width, height = (72 * side / figure.dpi for side in (ax.bbox.width, ax.bbox.height))
    for size in (10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0):
        lines = _Lines(words, rows, numbered, width, size, family)
        if lines.height <= height:
            break
    lines.height = max(lines.height, height)
    return lines


def _strips_figure(
    blocks: Sequence[_Lines], heading: str, family: list[str], named: bool = False
) -> tuple[matplotlib.figure.Figure, list[matplotlib.axes.Axes], matplotlib.axes.Axes]:
    """A figure with a slot for each text, as tall and as wide as they are, and one for the colour bar beneath."""
    side, foot, name = 0.1, 0.38, 0.24 if named else 0.0
    titles = [_measure(line, 11.0, family) for line in heading.split("\n") if line]
    head = 0.1 + 0.2 * len(titles)
    points = max([block.right for block in blocks] + titles) / 72
    inside = min(max(points, _BAR_INCHES), _STRIP_INCHES)
    width = inside + 2 * side
    height = head + foot + sum(block.height / 72 + name for block in blocks) + 0.08 * (len(blocks) - 1)
    figure, slots, top = new_figure(width, height), [], height - head
    for block in blocks:
        block.width = 72 * inside
        top -= name + block.height / 72
        slots.append(figure.add_axes((side / width, top / height, inside / width, block.height / 72 / height)))
        top -= 0.08
    bar = figure.add_axes((1 - (side + _BAR_INCHES) / width, 0.2 / height, _BAR_INCHES / width, 0.07 / height))
    return figure, slots, bar


def _shade(axes: matplotlib.axes.Axes, lines: _Lines, shades: Array, scale: Any, family: list[str]) -> None:
    """Draw the boxes and their text."""
    box = import_module("matplotlib.patches").FancyBboxPatch
    style = f"round,pad=0,rounding_size={0.35 * lines.size}"
    for row, index, text, x, y, width in lines.places:
        colour = scale.to_rgba(shades[row, index])
        axes.add_artist(box((x, y), width, lines.box, boxstyle=style, facecolor=colour, edgecolor="none"))
        ink = plain(family, size=lines.size, color=legible(colour))
        axes.text(x + width / 2, y + lines.box * 0.69, text, ha="center", va="baseline", **ink)
    if lines.numbered:
        for row, y in enumerate(lines.starts):
            axes.text(0, y + lines.box * 0.69, str(row), size=0.85 * lines.size, color=FAINT, va="baseline")
