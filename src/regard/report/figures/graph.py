"""A graph whose edges are drawn by their weight."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regard._errors import refusal
from regard.report.figures.canvas import FAINT, GOLD, INK, Array, colour_scale, dress_bar, new_figure, numbers, settle
from regard.report.figures.text import font_family, labelled, plain, shortened, visible

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure
    import numpy.typing as npt

_NODE_POINTS = 15.0
_STEPS = 150


def graph(
    weights: torch.Tensor | npt.ArrayLike,
    edge_index: torch.Tensor | npt.ArrayLike,
    *,
    labels: Sequence[str] | None = None,
    positions: torch.Tensor | npt.ArrayLike | None = None,
    gold: Sequence[int] = (),
    title: str | None = None,
) -> matplotlib.figure.Figure:
    """Draw nodes and the edges between them, the darker and thicker the heavier; a loop is a ring around its node.

    Args:
        weights: (E,), or (H, E) for a panel each of H heads on one colour scale; finite and non-negative.
        edge_index: (2, E), from the first row to the second.
        labels: one a node; numbers when left out. There are as many nodes as labels, or as edges speak of.
        positions: (N, 2), where the nodes stand; when left out they are spread so that neighbours are near.
        gold: edges to mark, such as those that hold the answer.
        title: a line above the figure.

    Returns:
        The figure.

    Example:
        >>> figure = graph([0.9, 0.1, 1.0], [[0, 1, 2], [2, 2, 0]], labels=["a", "b", "c"])
        >>> len(figure.axes)  # the graph and its colour bar
        2
    """
    heads, several = _heads(weights)
    ends = _ends(edge_index, heads.shape[1])
    count = len(labels) if labels is not None else int(ends.max(initial=-1)) + 1
    names = labelled(labels, "labels", count, heads.shape)
    if ends.size and int(ends.max()) >= count:
        raise ValueError(refusal("labels", f"{count} of them", f"one for each of {int(ends.max()) + 1} nodes"))
    places = _spread(ends, count) if positions is None else _placed(positions, count)
    marked = _marked(gold, heads.shape[1])
    heading = visible(title or "", edges=False)
    family = font_family([*names, heading])
    across = min(len(heads), 4)
    figure = new_figure(3.2 * across + 0.8, 3.2 * ceil(len(heads) / across) + 0.4, layout="constrained")
    panels = list(figure.subplots(ceil(len(heads) / across), across, squeeze=False).ravel())
    for spare in panels[len(heads) :]:
        spare.remove()
    scale = colour_scale(heads)
    for index, (axes, head) in enumerate(zip(panels, heads, strict=False)):
        _panel(axes, head, ends, places, scale, marked)
        for place, name in zip(places, names, strict=True):
            axes.text(*place, shortened(name), ha="center", va="center", zorder=4, **plain(family, size=7.5, color=INK))
        if several:
            axes.set_title(f"head {index}", **plain(family, size=8.5, color=INK), pad=3)
    if heading:
        figure.suptitle(heading, **plain(family, size=11, color=INK))
    dress_bar(figure.colorbar(scale, ax=panels[: len(heads)], fraction=0.04, pad=0.02, aspect=30, shrink=0.8))
    settle(figure)
    return figure


def _heads(weights: Any) -> tuple[Array, bool]:
    array = numbers(weights, "weights")
    if array.ndim not in (1, 2) or (array.ndim == 2 and not len(array)):
        raise ValueError(refusal("weights", array.shape, "shape (E,) or (H, E), a weight for each edge"))
    return (array, True) if array.ndim == 2 else (array[None], False)


def _ends(edge_index: Any, edges: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    if isinstance(edge_index, torch.Tensor):
        edge_index = edge_index.detach().cpu().numpy()
    ends = np.asarray(edge_index)
    if ends.shape != (2, edges) or (ends.size and ends.dtype.kind not in "iu"):
        got = f"an array of {ends.dtype} of shape {ends.shape}"
        raise ValueError(refusal("edge_index", got, f"integers of shape {(2, edges)}"))
    if ends.size and int(ends.min()) < 0:
        raise ValueError(refusal("edge_index", int(ends.min()), "indices >= 0"))
    return ends.astype(np.int64)


def _placed(positions: Any, count: int) -> Array:
    places = np.asarray(positions.detach().cpu() if isinstance(positions, torch.Tensor) else positions, dtype=float)
    if places.shape != (count, 2) or not np.isfinite(places).all():
        raise ValueError(refusal("positions", f"shape {places.shape}", f"finite numbers of shape {(count, 2)}"))
    return places


def _marked(gold: Sequence[int], edges: int) -> set[int]:
    found = {int(e) for e in gold}
    outside = [e for e in found if not 0 <= e < edges]
    if outside:
        raise ValueError(refusal("gold", outside[0], f"indices of {edges} edges"))
    return found


def _spread(ends: np.ndarray[Any, np.dtype[np.int64]], count: int) -> Array:
    """Nodes from a circle outwards and together: all push each other off, edges pull (Fruchterman & Reingold 1991)."""
    angle = 2 * np.pi * np.arange(count) / max(count, 1)
    places: Array = np.stack([np.cos(angle), np.sin(angle)], -1)
    if count < 3:
        return places
    near = np.zeros((count, count))
    near[ends[0], ends[1]] = near[ends[1], ends[0]] = 1.0
    ideal = 1 / np.sqrt(count)
    for step in range(_STEPS):
        apart = places[:, None] - places[None]
        distance = np.maximum(np.linalg.norm(apart, axis=-1), 1e-3)
        force = (apart * (ideal**2 / distance**2 - near * distance / ideal)[..., None]).sum(1)
        length = np.maximum(np.linalg.norm(force, axis=-1, keepdims=True), 1e-9)
        # Moves grow shorter, so that nodes come to rest.
        places = places + force / length * np.minimum(length, 0.1 * (1 - step / _STEPS))
    centred: Array = places - places.mean(0)
    return centred


def _panel(
    axes: matplotlib.axes.Axes,
    weights: Array,
    ends: np.ndarray[Any, np.dtype[np.int64]],
    places: Array,
    scale: Any,
    marked: set[int],
) -> None:
    patches = import_module("matplotlib.patches")
    top = float(scale.norm.vmax)
    # Light edges first: heavy ones must not be hidden.
    for e in np.argsort(weights, kind="stable"):
        source, target = (int(end) for end in ends[:, e])
        share = weights[e] / top
        colour, thickness = scale.to_rgba(weights[e]), 0.4 + 2.6 * share
        # Gold lies under the edge, so that its own colour is still seen.
        lines = [("edge", colour, thickness, 1 + share)]
        if int(e) in marked:
            lines.insert(0, ("gold", GOLD, thickness + 2.5, 0.9))
        for kind, drawn, wide, height in lines:
            style: dict[str, Any] = {"linewidth": wide, "edgecolor": drawn, "zorder": height, "gid": f"{kind} {int(e)}"}
            if source == target:
                x, y = places[source]
                axes.scatter(x, y, s=(1.5 * _NODE_POINTS) ** 2, facecolors="none", **style)
                continue
            arrow = patches.FancyArrowPatch(
                places[source],
                places[target],
                arrowstyle="-|>" if kind == "edge" else "-",
                mutation_scale=5 + 5 * share,
                connectionstyle="arc3,rad=0.12",
                shrinkA=_NODE_POINTS / 2 + 1,
                shrinkB=_NODE_POINTS / 2 + 1,
                facecolor=drawn if kind == "edge" else "none",
                **style,
            )
            axes.add_patch(arrow)
    axes.scatter(
        places[:, 0], places[:, 1], s=_NODE_POINTS**2, facecolors="white", edgecolors=FAINT, linewidths=0.8, zorder=3
    )
    axes.set_aspect("equal")
    axes.margins(0.15)
    axes.set_axis_off()
