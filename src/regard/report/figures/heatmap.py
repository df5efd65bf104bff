"""The alignment heat map."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from math import ceil
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from regard._errors import refusal
from regard.report.figures.canvas import (
    FAINT,
    GOLD,
    INK,
    LABEL_POINTS,
    Array,
    colormap,
    dress_bar,
    new_figure,
    numbers,
    root_figure,
    say,
    settle,
)
from regard.report.figures.text import font_family, labelled, plain, shortened, visible

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure
    import numpy.typing as npt

Marks: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]


def heatmap(
    weights: torch.Tensor | npt.ArrayLike,
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    title: str | None = None,
    gold: torch.Tensor | npt.ArrayLike | Iterable[tuple[int, int]] | None = None,
    names: tuple[str, str] = ("queries", "keys"),
    ax: matplotlib.axes.Axes | None = None,
) -> matplotlib.figure.Figure:
    """Draw attention weights: a row a query, a column a key, the darker the heavier.

    Args:
        weights: (Nq, N), or (H, Nq, N) for a grid of H panels on one colour scale; (N,) for the one row of a single query, whose
            words are easier to read in a `token_strip`. A tensor or an array of any device and dtype; finite and non-negative.
        queries: one label a row; row numbers when left out, and nothing beside a single query.
        keys: one label a column; column numbers when left out.
        title: a line above the figure.
        gold: cells to outline, as a boolean of the shape of the weights, one for all heads or one a head, or as pairs (query, key).
        names: what rows and columns are, written beside them: ("answer", "input"), say.
        ax: axes to draw into, not for heads; a figure of its own when left out.

    Returns:
        The figure; that of `ax` where one is given.

    Example:
        >>> figure = heatmap([[0.9, 0.1], [0.2, 0.8]], queries=["the", "cat"], keys=["le", "chat"])
        >>> len(figure.axes)  # the map and its colour bar
        2
    """
    panels, shape = _panels(weights)
    heads, nameless = len(shape) == 3, len(shape) == 1 and queries is None
    marked = _marked(gold, panels.shape, shape)
    n_queries, n_keys = panels.shape[1:]
    rows = labelled(queries, "queries", n_queries, shape)
    columns = labelled(keys, "keys", n_keys, shape)
    if isinstance(names, str) or len(names) != 2:
        raise ValueError(refusal("names", repr(names), "two, of the rows and of the columns"))
    beside, below = (visible(name, edges=False) for name in names)
    heading = visible(title or "", edges=False)
    family = font_family([*rows, *columns, heading, beside, below])
    if ax is not None:
        if heads:
            fix = "Leave ax out for a grid of panels, or pass one head."
            raise ValueError(refusal("weights", panels.shape, "shape (Nq, N) where ax is given", fix))
        figure, grid = root_figure(ax), [ax]
    else:
        figure, grid = _grid(panels.shape, heads)
    if heading:
        place = figure.suptitle if heads else grid[0].set_title
        place(heading, **plain(family, size=11, color=INK))
    top = float(panels.max(initial=0.0)) or 1.0
    across = _columns(len(panels))
    meshes = [_panel(axes, panel, top) for axes, panel in zip(grid, panels, strict=True)]
    if meshes[-1] is not None:
        # Before the labels: the bar takes room from the panels, and labels are thinned by the room there is.
        thin = 40 if heads else 24
        dress_bar(figure.colorbar(meshes[-1], ax=grid, fraction=0.04, pad=0.02, aspect=thin, shrink=0.9))
    for index, axes in enumerate(grid):
        _outline(axes, marked[index])
        left, last = index % across == 0, index + across >= len(panels)
        _ticks(axes, "y", rows if left and not nameless else None, n_queries, family)
        _ticks(axes, "x", columns if last else None, n_keys, family)
        if heads:
            axes.set_title(f"head {index}", **plain(family, size=8.5, color=INK), pad=3)
        if left and not nameless:
            axes.set_ylabel(beside, **plain(family, size=LABEL_POINTS, color=FAINT))
        if last:
            axes.set_xlabel(below, **plain(family, size=LABEL_POINTS, color=FAINT))
    if ax is None:
        settle(figure)
    return figure


def _panels(weights: Any) -> tuple[Array, tuple[int, ...]]:
    """Weights as (H, Nq, N), and the shape in which they came."""
    array = numbers(weights, "weights")
    if array.ndim not in (1, 2, 3):
        raise ValueError(refusal("weights", array.shape, "shape (N,), (Nq, N) or (H, Nq, N)"))
    if array.ndim == 3 and not len(array):
        raise ValueError(refusal("weights", array.shape, "at least one head in (H, Nq, N)"))
    return array.reshape((1,) * (3 - array.ndim) + array.shape), array.shape


def _marked(gold: Any, shape: tuple[int, ...], given: tuple[int, ...]) -> Marks:
    """Gold cells as booleans of the panels' shape, for weights that came in another one."""
    n_queries, n_keys = shape[1:]
    if gold is None:
        return np.zeros(shape, dtype=bool)
    if isinstance(gold, torch.Tensor):
        gold = gold.detach().cpu().numpy()
    fitting = {shape[1:], given}
    size = " or ".join(map(str, sorted(fitting, key=len)))
    expected = f"booleans of shape {size}, or pairs (query, key)"
    try:
        cells = np.asarray(gold if isinstance(gold, np.ndarray) else list(gold))
    except TypeError as error:
        raise ValueError(refusal("gold", repr(gold), expected)) from error
    except ValueError as error:
        raise ValueError(refusal("gold", "rows of different lengths", expected)) from error
    if cells.dtype == bool and cells.shape in fitting:
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
    figure = new_figure(width * across + 1.6, height * down + 1.2 + 0.2 * down, layout="constrained")
    cells = figure.subplots(down, across, squeeze=False).ravel()
    for spare in cells[count:]:
        spare.remove()
    return figure, list(cells[:count])


def _panel(axes: matplotlib.axes.Axes, panel: Array, top: float) -> Any:
    n_queries, n_keys = panel.shape
    for spine in axes.spines.values():
        spine.set(color=FAINT, linewidth=0.6)
    axes.set(xlim=(-0.5, max(n_keys, 1) - 0.5), ylim=(max(n_queries, 1) - 0.5, -0.5))
    if not panel.size:
        say(axes, "no queries" if n_keys else "no keys")
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
        segments, colors=GOLD, linewidths=1.6, capstyle="projecting", clip_on=False, zorder=3
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
    room = max(int(inches * 72 / (1.25 * LABEL_POINTS)), 1)
    step = next(s for k in range(12) for s in (10**k, 2 * 10**k, 5 * 10**k) if s * room >= count)
    shown = range(0, count, step)
    short = [shortened(labels[i]) for i in shown]
    turned = side == "x" and max(map(len, short)) * 0.62 * LABEL_POINTS > inches * 72 / len(short)
    turn: dict[str, Any] = {"rotation": 90, "va": "top", "ha": "center"} if turned else {}
    axis.set_ticks(list(shown), short, **plain(family, size=LABEL_POINTS, color=INK, **turn))
