"""A sentence under arcs: from every head to its words, by weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from regard._errors import refusal
from regard.report.figures.canvas import FAINT, GOLD, INK, colour_scale, dress_bar, new_figure, numbers, say, settle
from regard.report.figures.text import font_family, labelled, plain, shortened, visible

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure
    import numpy.typing as npt

_WORD_INCHES = 0.75
_WIDEST_INCHES = 12.0


def arcs(
    weights: torch.Tensor | npt.ArrayLike,
    words: Sequence[str] | None = None,
    *,
    gold: Iterable[tuple[int, int]] = (),
    least: float = 0.05,
    title: str | None = None,
) -> matplotlib.figure.Figure:
    """Draw a tree of words, or what is known of it: an arrow from each head to each word, the darker and thicker the likelier.

    Args:
        weights: (N, N), one row a word, one column a head, a root on the diagonal, as `DependencyTree` gives them.
        words: one label each; numbers when left out.
        gold: pairs (word, head) to mark, such as those of a known tree.
        least: weights below it are not drawn, unless they are gold.
        title: a line above the figure.

    Returns:
        The figure.

    Example:
        >>> figure = arcs([[0, 1, 0], [0, 1, 0], [0, 1, 0]], ["cats", "sleep", "well"])
        >>> len(figure.axes)  # the sentence and its colour bar
        2
    """
    shares = numbers(weights, "weights")
    if shares.ndim != 2 or shares.shape[0] != shares.shape[1]:
        raise ValueError(
            refusal("weights", shares.shape, "shape (N, N), a row for each word and a column for each head")
        )
    count = len(shares)
    names = labelled(words, "words", count, shares.shape)
    marked = {(int(word), int(head)) for word, head in gold}
    outside = [pair for pair in marked if not all(0 <= place < count for place in pair)]
    if outside:
        raise ValueError(refusal("gold", outside[0], f"pairs of {count} words"))
    heading = visible(title or "", edges=False)
    family = font_family([*names, heading, "root"])
    drawn = sorted(
        (float(shares[i, j]), i, j)
        for i in range(count)
        for j in range(count)
        if shares[i, j] >= least or (i, j) in marked
    )
    highest = max([abs(i - j) for _, i, j in drawn], default=1) / 2 + 1.0
    width = min(_WORD_INCHES * max(count, 3), _WIDEST_INCHES)
    figure = new_figure(width + 0.8, min(0.45 * highest + 0.9, 5.0), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set(xlim=(-0.6, max(count, 1) - 0.4), ylim=(-0.5, highest))
    scale = colour_scale(shares)
    # The likeliest last, on top of the others.
    for share, word, head in drawn:
        _arrow(axes, word, head, highest, share, scale.to_rgba(share) if (word, head) not in marked else GOLD)
    for place, name in enumerate(names):
        axes.text(place, -0.3, shortened(name), ha="center", va="center", **plain(family, size=9, color=INK))
    if any(word == head for _, word, head in drawn):
        axes.text(-0.55, highest, "root", ha="left", va="top", **plain(family, size=8, color=FAINT))
    if not count:
        say(axes, "no words")
    if heading:
        figure.suptitle(heading, **plain(family, size=11, color=INK))
    dress_bar(figure.colorbar(scale, ax=axes, fraction=0.04, pad=0.02, aspect=24, shrink=0.9))
    settle(figure)
    return figure


def _arrow(axes: matplotlib.axes.Axes, word: int, head: int, top: float, share: float, colour: Any) -> None:
    """From a head over the words between to its word; from above to a root."""
    Path = import_module("matplotlib.path").Path
    if word == head:
        line = Path([(word, top), (word, 0.0)])
    else:
        # A cubic curve reaches three quarters of the height of its handles.
        height = abs(word - head) / 2 / 0.75
        line = Path([(head, 0.0), (head, height), (word, height), (word, 0.0)], [Path.MOVETO, *[Path.CURVE4] * 3])
    style = {"arrowstyle": "-|>", "mutation_scale": 7, "shrinkA": 0, "shrinkB": 0}
    patch = import_module("matplotlib.patches").FancyArrowPatch
    axes.add_patch(patch(path=line, color=colour, linewidth=0.6 + 1.6 * min(share, 1.0), fill=False, **style))
