"""The map of buckets: what hashed attention sees, in the order in which each round sorts the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from regard._errors import refusal
from regard.report.figures.canvas import (
    FAINT,
    GOLD,
    INK,
    LABEL_POINTS,
    colormap,
    dress_bar,
    new_figure,
    numbers,
    settle,
)
from regard.report.figures.text import font_family, plain, visible

if TYPE_CHECKING:
    import matplotlib.figure
    import numpy.typing as npt
    import torch


def bucket_map(
    weights: torch.Tensor | npt.ArrayLike,
    buckets: torch.Tensor | npt.ArrayLike,
    chunk: int,
    *,
    title: str | None = None,
) -> matplotlib.figure.Figure:
    """Draw the weights of one head as each round sorts its tokens: by bucket, cut into chunks; and, first, as the tokens stand.

    Lines part the chunks; the strips above and beside a panel change from light to dark where a bucket ends. What lies off the
    diagonal of chunks in a round was seen in another one.

    Args:
        weights: (N, N).
        buckets: of each token in every round, (R, N).
        chunk: tokens in a chunk.
        title: a line above the figure.

    Returns:
        The figure.

    Example:
        >>> import torch
        >>> import regard as rg
        >>> attend, tokens = rg.LSHAttention(8, 1, rounds=2, chunk=4).eval(), torch.randn(12, 8)
        >>> with rg.record(attend) as trace:
        ...     context = attend(tokens)
        >>> seen = trace["attention"].call.buckets
        >>> figure = bucket_map(trace["attention"].weights[0], seen.ids[0], seen.chunk)
        >>> len(figure.axes)  # the tokens as they stand, two rounds, and a colour bar
        4
    """
    shown, ids = numbers(weights, "weights"), numbers(buckets, "buckets")
    if shown.ndim != 2 or shown.shape[0] != shown.shape[1] or not shown.size:
        raise ValueError(refusal("weights", shown.shape, "shape (N, N), of at least one token"))
    n = len(shown)
    if ids.ndim != 2 or ids.shape[1] != n:
        raise ValueError(refusal("buckets", ids.shape, f"one for each of {n} tokens in every round, (R, {n})"))
    if chunk < 1:
        raise ValueError(refusal("chunk", chunk, "a number of tokens >= 1"))
    heading = visible(title or "", edges=False)
    labels = ["as they stand", *(f"round {r}" for r in range(len(ids)))]
    family = font_family([*labels, heading])
    side = min(3.2, max(1.6, 0.06 * n))
    figure = new_figure(len(labels) * (side + 0.3) + 1.0, side + 0.9, layout="constrained")
    grid = list(figure.subplots(1, len(labels), squeeze=False).ravel())
    top = float(shown.max()) or 1.0
    mesh: Any = None
    for axes, label, row in zip(grid, labels, [None, *ids], strict=True):
        order = np.arange(n) if row is None else np.argsort(row, kind="stable")
        mesh = axes.imshow(shown[np.ix_(order, order)], cmap=colormap(), vmin=0.0, vmax=top, interpolation="none")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(label, **plain(family, size=8.5, color=INK), pad=10)
        for spine in axes.spines.values():
            spine.set(color=FAINT, linewidth=0.6)
        if row is not None:
            _chunks(axes, n, chunk)
            _strips(axes, row[order])
    grid[0].set_ylabel("queries", **plain(family, size=LABEL_POINTS, color=FAINT))
    for axes in grid:
        axes.set_xlabel("keys", **plain(family, size=LABEL_POINTS, color=FAINT))
    dress_bar(figure.colorbar(mesh, ax=grid, fraction=0.04, pad=0.02, aspect=24, shrink=0.9))
    if heading:
        figure.suptitle(heading, **plain(family, size=11, color=INK))
    settle(figure)
    return figure


def _chunks(axes: Any, n: int, chunk: int) -> None:
    for edge in range(chunk, n, chunk):
        axes.axhline(edge - 0.5, color=FAINT, linewidth=0.5)
        axes.axvline(edge - 0.5, color=FAINT, linewidth=0.5)


def _strips(axes: Any, ids: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    """Buckets along both edges, outside of the panel, in two shades by turns."""
    ends = [*(np.flatnonzero(np.diff(ids)) + 1), len(ids)]
    begin = 0
    for turn, end in enumerate(ends):
        share = begin / len(ids), (end - begin) / len(ids)
        colour = GOLD if turn % 2 else "#f7c9ae"
        across = {"transform": axes.transAxes, "clip_on": False, "facecolor": colour, "linewidth": 0}
        axes.add_patch(_rectangle((share[0], 1.01), share[1], 0.02, across))
        axes.add_patch(_rectangle((-0.03, 1.0 - share[0] - share[1]), 0.02, share[1], across))
        begin = end


def _rectangle(corner: tuple[float, float], width: float, height: float, properties: dict[str, Any]) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, **properties)
