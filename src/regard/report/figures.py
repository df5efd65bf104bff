"""Figures of attention: the alignment heat map, and token strips, one or several.

Every function returns a `matplotlib.figure.Figure` that belongs to nobody: no backend is chosen, nothing is
registered with pyplot, nothing needs closing. Text is drawn as it is written: dollars, backslashes and angle
brackets mean themselves, and blanks and control characters are made visible.
"""

from __future__ import annotations

import logging
import os
import secrets
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from regard._errors import missing_extra, refusal

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.colors
    import matplotlib.figure
    import numpy.typing as npt

__all__ = ["colormap", "heatmap", "save", "token_strip", "token_strips", "trace_strips"]

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Marks: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

_LOG = logging.getLogger("regard")

# Nine equal steps of lightness from ivory over teal to indigo. Lightness alone orders them, so the order
# survives every kind of colour blindness and a black-and-white printer.
_COLOURS = ("#fbfbf2", "#d1e3c8", "#96ceb6", "#5bb5b3", "#1a98af", "#0978a3", "#185791", "#213876", "#1f1c55")
_GOLD = "#e8590c"
_INK, _FAINT = "#22252b", "#9aa0a8"

_CJK = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK TC", "Noto Sans CJK KR", "Source Han Sans SC"),
    *(
        "Source Han Sans CN",
        "Noto Sans SC",
        "Noto Sans JP",
        "Noto Sans TC",
        "Noto Sans KR",
        "Noto Serif CJK SC",
    ),
    *("PingFang SC", "Hiragino Sans GB", "Hiragino Sans", "Heiti SC", "Heiti TC", "Apple SD Gothic Neo"),
    *("Microsoft YaHei", "SimHei", "SimSun", "Yu Gothic", "MS Gothic", "Malgun Gothic", "Arial Unicode MS"),
    *("WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Droid Sans Fallback", "NanumGothic", "IPAGothic"),
)

_LABEL_POINTS = 8.0
_LABEL_LETTERS = 24
_STRIP_INCHES = 7.2
_SUFFIXES = (".svg", ".png", ".pdf")


def heatmap(
    weights: torch.Tensor | npt.ArrayLike,
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    title: str | None = None,
    gold: torch.Tensor | npt.ArrayLike | Iterable[tuple[int, int]] | None = None,
    ax: matplotlib.axes.Axes | None = None,
) -> matplotlib.figure.Figure:
    """Draw attention weights: a row a query, a column a key, the darker the heavier.

    Args:
        weights: (Nq, N), or (H, Nq, N) for a grid of H panels on one colour scale; a tensor or an array of
            any device and dtype; finite and non-negative.
        queries: one label a row; row numbers when left out.
        keys: one label a column; column numbers when left out.
        title: a line above the figure.
        gold: cells to outline, as a boolean (Nq, N) or (H, Nq, N), or as pairs (query, key).
        ax: axes to draw into, for (Nq, N) only; a figure of its own when left out.

    Returns:
        The figure; that of `ax` where one is given.

    Example:
        >>> figure = heatmap([[0.9, 0.1], [0.2, 0.8]], queries=["the", "cat"], keys=["le", "chat"])
        >>> len(figure.axes)  # the map and its colour bar
        2
    """
    panels, heads = _panels(weights)
    marked = _marked(gold, panels.shape, heads)
    n_queries, n_keys = panels.shape[1:]
    rows = _labels(queries, "queries", n_queries, panels.shape if heads else panels.shape[1:])
    columns = _labels(keys, "keys", n_keys, panels.shape if heads else panels.shape[1:])
    heading = _visible(title or "", edges=False)
    family = _family([*rows, *columns, heading])
    if ax is not None:
        if heads:
            fix = "Leave ax out for a grid of panels, or pass one head."
            raise ValueError(refusal("weights", panels.shape, "shape (Nq, N) where ax is given", fix))
        figure, grid = _root(ax), [ax]
    else:
        figure, grid = _grid(panels.shape, heads)
    if heading:
        place = figure.suptitle if heads else grid[0].set_title
        place(heading, **_plain(family, size=11, color=_INK))
    top = float(panels.max(initial=0.0)) or 1.0
    across = _columns(len(panels))
    meshes = [_panel(axes, panel, top) for axes, panel in zip(grid, panels, strict=True)]
    if meshes[-1] is not None:
        # Before the labels: the bar takes room from the panels, and labels are thinned by the room there is.
        thin = 40 if heads else 24
        _dress(figure.colorbar(meshes[-1], ax=grid, fraction=0.04, pad=0.02, aspect=thin, shrink=0.9))
    for index, axes in enumerate(grid):
        _outline(axes, marked[index])
        left, last = index % across == 0, index + across >= len(panels)
        _ticks(axes, "y", rows if left else None, n_queries, family)
        _ticks(axes, "x", columns if last else None, n_keys, family)
        if heads:
            axes.set_title(f"head {index}", **_plain(family, size=8.5, color=_INK), pad=3)
        if left:
            axes.set_ylabel("queries", **_plain(family, size=_LABEL_POINTS, color=_FAINT))
        if last:
            axes.set_xlabel("keys", **_plain(family, size=_LABEL_POINTS, color=_FAINT))
    if ax is None:
        _settle(figure)
    return figure


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
    shades = _numbers(weights, "weights")
    if shades.ndim not in (1, 2):
        raise ValueError(refusal("weights", shades.shape, "shape (N,) or (R, N)"))
    words = _labels(tokens, "tokens", shades.shape[-1], shades.shape)
    numbered = shades.ndim == 2
    shades = np.atleast_2d(shades)
    heading = _visible(title or "", edges=False)
    family = _family([*words, heading])
    scale = _scale(shades)
    if ax is None:
        lines = _Lines(words, len(shades), numbered, _STRIP_INCHES * 72, 10.0, family)
        figure, axes, slot = _strip_figure(lines.height, bool(heading))
        bar = figure.colorbar(scale, cax=slot, orientation="horizontal")
    else:
        figure, axes = _root(ax), ax
        bar = figure.colorbar(scale, ax=ax, fraction=0.04, pad=0.02, aspect=24)
        lines = _largest(words, len(shades), numbered, ax, family)
    _dress(bar)
    axes.set_axis_off()
    axes.set(xlim=(0, lines.width), ylim=(lines.height, 0))
    if heading:
        axes.set_title(heading, loc="left", **_plain(family, size=11, color=_INK))
    if shades.size:
        _shade(axes, lines, shades, scale, family)
    else:
        bar.remove()
        _say(axes, "no tokens")
    if ax is None:
        _settle(figure)
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
    shades = {name: _numbers(weights, f"weights of {name}") for name, (_, weights) in parts.items()}
    for name, x in shades.items():
        if x.ndim not in (1, 2):
            raise ValueError(refusal(f"weights of {name}", x.shape, "shape (N,) or (R, N)"))
    words = {
        name: _labels(tokens, f"tokens of {name}", shades[name].shape[-1], shades[name].shape)
        for name, (tokens, _) in parts.items()
    }
    heading = _visible(title or "", edges=False)
    family = _family([*(word for some in words.values() for word in some), *parts, heading])
    scale = _scale(np.concatenate([x.ravel() for x in shades.values()]))
    lines = {
        name: _Lines(words[name], len(np.atleast_2d(x)), x.ndim == 2, _STRIP_INCHES * 72, 10.0, family)
        for name, x in shades.items()
    }
    figure, slots, bar = _strips_figure([block.height for block in lines.values()], bool(heading))
    for (name, block), axes in zip(lines.items(), slots, strict=True):
        axes.set_axis_off()
        axes.set(xlim=(0, block.width), ylim=(block.height, 0))
        axes.set_title(_visible(name, edges=False), loc="left", pad=2, **_plain(family, size=8.5, color=_FAINT))
        if words[name]:
            _shade(axes, block, np.atleast_2d(shades[name]), scale, family)
        else:
            _say(axes, "no tokens")
    _dress(figure.colorbar(scale, cax=bar, orientation="horizontal"))
    if heading:
        figure.suptitle(heading, x=0.1 / figure.get_figwidth(), ha="left", **_plain(family, size=11, color=_INK))
    _settle(figure)
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


def save(figure: matplotlib.figure.Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as SVG, PNG or PDF, by the path's suffix, whole or not at all.

    The same figure gives the same bytes: no date, no version, no random identifiers. Folders are made as
    needed. In an SVG, letters are outlines, unless no installed font has them: then they stay text, for the
    reader's own fonts.

    Args:
        figure: what `heatmap` or `token_strip` returned, or any other matplotlib figure.
        path: where to write; ends in .svg, .png or .pdf.

    Returns:
        The path.
    """
    matplotlib = _matplotlib()
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in _SUFFIXES:
        raise ValueError(refusal("path", repr(os.fspath(path)), f"a name ending in {', '.join(_SUFFIXES)}"))
    nameless: dict[str, dict[str, None]] = {
        ".svg": {"Date": None, "Creator": None},
        ".png": {"Software": None},
        ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }
    texts = "".join(text.get_text() for text in figure.findobj(import_module("matplotlib.text").Text))
    settings = {
        "svg.hashsalt": "regard",
        "svg.fonttype": "none" if _missing(texts) else "path",
        "text.hinting": "none",  # letters as wide as they were measured
        "pdf.fonttype": 42,  # TrueType: publishers turn Type 3 away
    }
    content = BytesIO()
    with matplotlib.rc_context(settings), _quiet_glyphs():
        figure.savefig(
            content,
            format=suffix[1:],
            metadata=nameless[suffix],
            dpi=200,
            bbox_inches="tight",
            pad_inches=0.08,
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        draft.write_bytes(content.getvalue())
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    return target


@cache
def colormap() -> matplotlib.colors.Colormap:
    """The colours of every figure: ivory to indigo, evenly darker; safe for the colour-blind and in grey."""
    _matplotlib()
    colors = import_module("matplotlib.colors")
    result: matplotlib.colors.Colormap = colors.LinearSegmentedColormap.from_list("regard", _COLOURS)
    return result


def _numbers(values: Any, name: str) -> Array:
    """The values as a float64 array on the CPU, checked to be weights."""
    expected = "a tensor or an array of real numbers"
    if isinstance(values, torch.Tensor):
        if values.is_complex():
            raise ValueError(refusal(name, values.dtype, expected))
        values = values.detach().cpu().double().numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:  # ragged lists
        raise ValueError(refusal(name, "rows of different lengths", expected)) from error
    if array.dtype.kind not in "biuf":
        raise ValueError(refusal(name, f"an array of {array.dtype}", expected))
    array = array.astype(np.float64)
    for bad, rule in ((~np.isfinite(array), "finite"), (array < 0, "non-negative")):
        if bad.any():
            where = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ValueError(refusal(name, f"{array[where]} at {where}", f"{rule} numbers"))
    return array


def _panels(weights: Any) -> tuple[Array, bool]:
    """Weights as (H, Nq, N), and whether they came with heads."""
    array = _numbers(weights, "weights")
    if array.ndim not in (2, 3):
        raise ValueError(refusal("weights", array.shape, "shape (Nq, N) or (H, Nq, N)"))
    if array.ndim == 3 and not len(array):
        raise ValueError(refusal("weights", array.shape, "at least one head in (H, Nq, N)"))
    return (array, True) if array.ndim == 3 else (array[None], False)


def _marked(gold: Any, shape: tuple[int, ...], heads: bool) -> Marks:
    """Gold cells as booleans of the panels' shape."""
    n_queries, n_keys = shape[1:]
    if gold is None:
        return np.zeros(shape, dtype=bool)
    if isinstance(gold, torch.Tensor):
        gold = gold.detach().cpu().numpy()
    size = f"{shape[1:]} or {shape}" if heads else f"{shape[1:]}"
    expected = f"booleans of shape {size}, or pairs (query, key)"
    try:
        cells = np.asarray(gold if isinstance(gold, np.ndarray) else list(gold))
    except TypeError as error:
        raise ValueError(refusal("gold", repr(gold), expected)) from error
    except ValueError as error:
        raise ValueError(refusal("gold", "rows of different lengths", expected)) from error
    if cells.dtype == bool and (cells.shape == shape[1:] or (heads and cells.shape == shape)):
        return np.broadcast_to(cells, shape)
    marked = np.zeros(shape, dtype=bool)
    if cells.size == 0 and cells.dtype != bool:
        return marked
    if cells.dtype.kind not in "iu" or cells.ndim != 2 or cells.shape[1] != 2:
        raise ValueError(refusal("gold", f"an array of {cells.dtype} of shape {cells.shape}", expected))
    outside = (cells < 0).any(1) | (cells[:, 0] >= n_queries) | (cells[:, 1] >= n_keys)
    if outside.any():
        pair = tuple(int(i) for i in cells[outside][0])
        raise ValueError(refusal("gold", pair, f"pairs within {n_queries} queries and {n_keys} keys"))
    marked[:, cells[:, 0], cells[:, 1]] = True
    return marked


def _labels(labels: Sequence[str] | None, name: str, count: int, shape: tuple[int, ...]) -> list[str]:
    if labels is None:
        return [str(i) for i in range(count)]
    if isinstance(labels, (str, bytes)):
        fix = f"For one label a letter, pass list({name})."
        raise ValueError(refusal(name, f"the single string {labels!r}", "a sequence of strings", fix))
    if len(labels) != count:
        raise ValueError(refusal(name, f"{len(labels)} labels", f"{count} for weights of shape {tuple(shape)}"))
    return [_visible(str(label)) for label in labels]


def _visible(text: str, *, edges: bool = True) -> str:
    """The text with nothing hidden: blanks at its edges, line ends, tabs, control characters get a sign.

    Without `edges` (a title) blanks stay blank and lines may break.
    """
    if not text:
        return "∅" if edges else ""
    signs = {"\n": "↵" if edges else "\n", "\t": "⇥"}
    body = range(len(text) - len(text.lstrip()), len(text.rstrip()))
    shown = []
    for index, letter in enumerate(text):
        if letter in signs:
            shown.append(signs[letter])
        elif unicodedata.category(letter) == "Zs":
            shown.append(" " if index in body or not edges else "␣")
        elif letter.isprintable():
            shown.append(letter)
        else:
            shown.append(letter.encode("unicode_escape").decode())
    return "".join(shown)


def _short(text: str) -> str:
    return text if len(text) <= _LABEL_LETTERS else text[: _LABEL_LETTERS - 1] + "…"


def _matplotlib() -> Any:
    try:
        return import_module("matplotlib")
    except ImportError as error:
        raise ImportError(missing_extra("matplotlib", "evaluate", "figures")) from error


@cache
def _letters(families: tuple[str, ...]) -> frozenset[int]:
    """Code points that the installed fonts among `families` can draw."""
    fonts = import_module("matplotlib.font_manager")
    known: set[int] = set()
    for family in families:
        try:
            path = fonts.findfont(fonts.FontProperties(family=[family]), fallback_to_default=False)
        except ValueError:
            continue
        known |= fonts.get_font(path).get_charmap().keys()
    return frozenset(known)


def _installed() -> list[str]:
    """The user's font families, then the CJK families of this machine."""
    names = {entry.name for entry in import_module("matplotlib.font_manager").fontManager.ttflist}
    return [*_matplotlib().rcParams["font.family"], *(name for name in _CJK if name in names)]


def _missing(text: str) -> str:
    known = _letters(tuple(_installed()))
    return "".join(sorted({letter for letter in text if ord(letter) not in known and letter.isprintable()}))


def _family(texts: list[str]) -> list[str]:
    """Font families that together draw the texts, as far as this machine can; the rest is logged, once."""
    base = list(_matplotlib().rcParams["font.family"])
    needed = {ord(letter) for letter in "".join(texts) if letter.isprintable()} - _letters(tuple(base))
    for name in _installed()[len(base) :]:
        if found := needed & _letters((name,)):
            base.append(name)
            needed -= found
    if needed:
        _report_missing("".join(map(chr, sorted(needed)[:12])))
    return base


@cache
def _report_missing(letters: str) -> None:
    _LOG.warning("no installed font draws %s: install one (for Chinese, say, Noto Sans CJK) or save as SVG", letters)


@contextmanager
def _quiet_glyphs() -> Iterator[None]:
    """Matplotlib warns at every letter without a glyph, at every drawing; `_family` has said so already."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        yield


def _plain(family: list[str], **properties: Any) -> dict[str, Any]:
    """Text properties under which a string is drawn letter by letter."""
    return {"family": family, "parse_math": False, "usetex": False, **properties}


def _root(ax: matplotlib.axes.Axes) -> matplotlib.figure.Figure:
    figure: Any = ax.figure
    while figure is not figure.figure:
        figure = figure.figure
    root: matplotlib.figure.Figure = figure
    return root


def _figure(width: float, height: float, layout: str | None = None) -> matplotlib.figure.Figure:
    _matplotlib()
    figure: matplotlib.figure.Figure = import_module("matplotlib.figure").Figure((width, height), layout=layout)
    return figure


def _settle(figure: matplotlib.figure.Figure) -> None:
    """Fix what would otherwise be decided at every drawing: LaTeX or not, and where things lie."""
    for text in figure.findobj(import_module("matplotlib.text").Text):
        text.set_usetex(False)
    if figure.get_layout_engine() is not None:
        # A layout engine moves things a little each time.
        with _quiet_glyphs(), _matplotlib().rc_context({"text.hinting": "none"}):
            figure.draw_without_rendering()
        figure.set_layout_engine("none")


def _dress(bar: Any) -> None:
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, length=2, pad=2, color=_FAINT, labelcolor=_INK)
    bar.locator = import_module("matplotlib.ticker").MaxNLocator(4)
    bar.update_ticks()


def _say(axes: matplotlib.axes.Axes, message: str) -> None:
    axes.text(0.5, 0.5, message, transform=axes.transAxes, ha="center", va="center", style="italic", color=_FAINT)


def _columns(heads: int) -> int:
    return min(heads, 4) if heads <= 8 else ceil(heads**0.5)


def _grid(shape: tuple[int, ...], heads: bool) -> tuple[matplotlib.figure.Figure, list[matplotlib.axes.Axes]]:
    """A figure whose panels have square cells as long as that leaves them legible."""
    count, n_queries, n_keys = shape
    across = _columns(count)
    down = ceil(count / across)
    longest = 9.0 if not heads else max(9.0 / across, 1.2)
    cell = min(0.34, longest / max(n_queries, n_keys, 1))
    width, height = (max(cell * n, 1.0 if heads else 0.7) for n in (n_keys, n_queries))
    figure = _figure(width * across + 1.6, height * down + 1.2 + 0.2 * down, layout="constrained")
    cells = figure.subplots(down, across, squeeze=False).ravel()
    for spare in cells[count:]:
        spare.remove()
    return figure, list(cells[:count])


def _panel(axes: matplotlib.axes.Axes, panel: Array, top: float) -> Any:
    n_queries, n_keys = panel.shape
    for spine in axes.spines.values():
        spine.set(color=_FAINT, linewidth=0.6)
    axes.set(xlim=(-0.5, max(n_keys, 1) - 0.5), ylim=(max(n_queries, 1) - 0.5, -0.5))
    if not panel.size:
        _say(axes, "no queries" if n_keys else "no keys")
        return None
    style: dict[str, Any] = {"cmap": colormap(), "vmin": 0.0, "vmax": top}
    slim = max(n_queries, n_keys) > 12 * min(n_queries, n_keys)
    if panel.size <= 2500:
        # Vector cells stay sharp in every viewer; beyond a few thousand an image is smaller and quicker.
        edges = (np.arange(n_keys + 1) - 0.5, np.arange(n_queries + 1) - 0.5)
        points = axes.bbox.width / n_keys * 72 / axes.figure.dpi
        mesh: Any = axes.pcolormesh(*edges, panel, edgecolors="white", linewidth=min(0.03 * points, 0.8), **style)
    else:
        mesh = axes.imshow(panel, interpolation="none", **style)
    axes.set_aspect("auto" if slim else "equal")
    return mesh


def _outline(axes: matplotlib.axes.Axes, marked: Marks) -> None:
    """Draw the border between gold cells and the rest."""
    if not marked.any():
        return
    padded = np.pad(marked, 1)
    upright = np.argwhere(padded[1:-1, 1:] != padded[1:-1, :-1]) - 0.5
    level = np.argwhere(padded[1:, 1:-1] != padded[:-1, 1:-1]) - 0.5
    segments = [[(x, y), (x, y + 1)] for y, x in upright] + [[(x, y), (x + 1, y)] for y, x in level]
    lines = import_module("matplotlib.collections").LineCollection(
        segments, colors=_GOLD, linewidths=1.6, capstyle="projecting", clip_on=False, zorder=3
    )
    axes.add_collection(lines, autolim=False)


def _ticks(axes: matplotlib.axes.Axes, side: str, labels: list[str] | None, count: int, family: list[str]) -> None:
    """Label as many rows or columns as there is room for, at even steps."""
    axis = axes.xaxis if side == "x" else axes.yaxis
    axis.set_tick_params(length=0, pad=2)
    if labels is None or not count:
        axis.set_ticks([])
        return
    box = axes.get_window_extent()
    inches = (box.width if side == "x" else box.height) / axes.figure.dpi
    room = max(int(inches * 72 / (1.25 * _LABEL_POINTS)), 1)
    step = next(s for k in range(12) for s in (10**k, 2 * 10**k, 5 * 10**k) if s * room >= count)
    shown = range(0, count, step)
    short = [_short(labels[i]) for i in shown]
    turned = side == "x" and max(map(len, short)) * 0.62 * _LABEL_POINTS > inches * 72 / len(short)
    turn: dict[str, Any] = {"rotation": 90, "va": "top", "ha": "center"} if turned else {}
    axis.set_ticks(list(shown), short, **_plain(family, size=_LABEL_POINTS, color=_INK, **turn))


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
            y += line + (0.8 * size if rows > 1 else 0.0)
        self.height = max(y, line)


def _fit(word: str, size: float, family: list[str], room: float) -> tuple[str, float]:
    """The word, cut short where it is wider than a line, and its width in points."""
    font = import_module("matplotlib.font_manager").FontProperties(family=family, size=size)
    ruler = import_module("matplotlib.textpath").text_to_path
    with _quiet_glyphs():
        width = float(ruler.get_text_width_height_descent(word, font, False)[0])
        if width <= room or len(word) < 2:
            return word, width
        kept = max(int(len(word) * room / width) - 2, 1)
        cut = word[:kept] + "…"
        return cut, float(ruler.get_text_width_height_descent(cut, font, False)[0])


def _largest(words: list[str], rows: int, numbered: bool, ax: matplotlib.axes.Axes, family: list[str]) -> _Lines:
    """The lines in the largest letters that fit into the axes."""
    figure = _root(ax)
    with _quiet_glyphs():
        figure.draw_without_rendering()  # a layout engine moves axes only now
    width, height = (72 * side / figure.dpi for side in (ax.bbox.width, ax.bbox.height))
    for size in (10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0):
        lines = _Lines(words, rows, numbered, width, size, family)
        if lines.height <= height:
            break
    lines.height = max(lines.height, height)
    return lines


def _strip_figure(
    points: float, titled: bool
) -> tuple[matplotlib.figure.Figure, matplotlib.axes.Axes, matplotlib.axes.Axes]:
    """A figure as tall as its text, with a slot for the colour bar beneath."""
    side, head, foot = 0.1, 0.4 if titled else 0.1, 0.34
    width, height = _STRIP_INCHES + 2 * side, points / 72 + head + foot
    figure = _figure(width, height)
    axes = figure.add_axes((side / width, foot / height, _STRIP_INCHES / width, points / 72 / height))
    slot = figure.add_axes((1 - (side + 1.6) / width, 0.2 / height, 1.6 / width, 0.07 / height))
    return figure, axes, slot


def _strips_figure(
    heights: Sequence[float], titled: bool
) -> tuple[matplotlib.figure.Figure, list[matplotlib.axes.Axes], matplotlib.axes.Axes]:
    """A figure with a slot for each text, as tall as it is, and one for the colour bar."""
    side, head, foot, name = 0.1, 0.4 if titled else 0.1, 0.34, 0.24
    width = _STRIP_INCHES + 2 * side
    height = head + foot + sum(points / 72 + name for points in heights)
    figure, slots, top = _figure(width, height), [], height - head
    for points in heights:
        top -= name + points / 72
        slots.append(figure.add_axes((side / width, top / height, _STRIP_INCHES / width, points / 72 / height)))
    bar = figure.add_axes((1 - (side + 1.6) / width, 0.2 / height, 1.6 / width, 0.07 / height))
    return figure, slots, bar


def _scale(shades: Array) -> Any:
    """Colours from zero to the heaviest weight."""
    top = float(shades.max(initial=0.0)) or 1.0
    norm = import_module("matplotlib.colors").Normalize(0.0, top)
    return import_module("matplotlib.cm").ScalarMappable(norm, colormap())


def _shade(axes: matplotlib.axes.Axes, lines: _Lines, shades: Array, scale: Any, family: list[str]) -> None:
    """Draw the boxes and their text."""
    box = import_module("matplotlib.patches").FancyBboxPatch
    style = f"round,pad=0,rounding_size={0.35 * lines.size}"
    for row, index, text, x, y, width in lines.places:
        colour = scale.to_rgba(shades[row, index])
        axes.add_artist(box((x, y), width, lines.box, boxstyle=style, facecolor=colour, edgecolor="none"))
        ink = _plain(family, size=lines.size, color=_legible(colour))
        axes.text(x + width / 2, y + lines.box * 0.69, text, ha="center", va="baseline", **ink)
    if lines.numbered:
        for row, y in enumerate(lines.starts):
            axes.text(0, y + lines.box * 0.69, str(row), size=0.85 * lines.size, color=_FAINT, va="baseline")


def _legible(colour: tuple[float, ...]) -> str:
    """Black or white, whichever stands out more on the colour (WCAG contrast)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "white"
