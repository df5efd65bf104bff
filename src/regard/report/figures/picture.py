"""A picture, and over it what was looked at."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from math import ceil
from typing import TYPE_CHECKING, Any

import torch

from regard._errors import refusal
from regard.report.figures.canvas import INK, Array, colour_scale, dress_bar, new_figure, numbers, settle
from regard.report.figures.text import font_family, plain, visible

if TYPE_CHECKING:
    import matplotlib.figure
    import numpy.typing as npt

_ACROSS = 4


def picture_maps(
    image: torch.Tensor | npt.ArrayLike,
    maps: Mapping[str, torch.Tensor | npt.ArrayLike],
    *,
    pictures: Mapping[str, torch.Tensor | npt.ArrayLike] | None = None,
    title: str | None = None,
) -> matplotlib.figure.Figure:
    """Draw a picture, and beside it the same picture under each map of weights, on one colour scale: the darker the heavier.

    Args:
        image: (C, H, W) with one channel or three, from 0 to 1.
        maps: by name, weights (rows, columns) of a grid of places that covers the picture; finite and non-negative.
        pictures: by name, other pictures in the shape of the first, to stand beside it, such as what a model made of it.
        title: a line above the figure.

    Returns:
        The figure.

    Example:
        >>> figure = picture_maps(torch.rand(1, 8, 8), {"read": torch.rand(4, 4)})
        >>> len(figure.axes)  # the picture, the map and its colour bar
        3
    """
    shown = {"": _pixels(image, "image")} | {name: _pixels(x, "pictures") for name, x in (pictures or {}).items()}
    weights = {name: numbers(x, f"maps[{name!r}]") for name, x in maps.items()}
    for name, x in weights.items():
        if x.ndim != 2 or not x.size:
            raise ValueError(refusal(f"maps[{name!r}]", f"shape {x.shape}", "rows and columns of places"))
    count = len(shown) + len(weights)
    across = min(count, _ACROSS)
    names = [visible(name, edges=False) for name in (*shown, *weights)]
    heading = visible(title or "", edges=False)
    family = font_family([*names, heading])
    rows, columns = next(iter(shown.values())).shape[:2]
    figure = new_figure(2.2 * across + 0.8, (2.2 * rows / columns + 0.3) * ceil(count / across) + 0.4, "constrained")
    panels = list(figure.subplots(ceil(count / across), across, squeeze=False).ravel())
    for spare in panels[count:]:
        spare.remove()
    for axes, name in zip(panels, names, strict=False):
        axes.set_axis_off()
        axes.set_title(name, **plain(family, size=8.5, color=INK), pad=3)
    for axes, pixels in zip(panels, shown.values(), strict=False):
        axes.imshow(pixels, cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest")
    if weights:
        scale = colour_scale(import_module("numpy").concatenate([x.ravel() for x in weights.values()]))
        extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)
        first = next(iter(shown.values()))
        # Pale and without colours, or what is bright in the picture would look like what is light on the scale.
        pale = 0.7 + 0.3 * (first if first.ndim == 2 else first.mean(-1))
        for axes, x in zip(panels[len(shown) :], weights.values(), strict=False):
            axes.imshow(pale, cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest")
            axes.imshow(x, cmap=scale.cmap, norm=scale.norm, extent=extent, alpha=0.7, interpolation="nearest")
        drawn = panels[len(shown) : count]
        dress_bar(figure.colorbar(scale, ax=drawn, fraction=0.04, pad=0.02, aspect=30, shrink=0.8))
    if heading:
        figure.suptitle(heading, **plain(family, size=11, color=INK))
    settle(figure)
    return figure


def _pixels(image: Any, name: str) -> Array:
    """(H, W) or (H, W, 3)."""
    array = numbers(image, name)
    if array.ndim != 3 or array.shape[0] not in (1, 3) or not array.size:
        raise ValueError(refusal(name, f"shape {array.shape}", "(C, H, W) with one channel or three"))
    if array.max() > 1:
        raise ValueError(refusal(name, f"{array.max():g}", "values from 0 to 1", "Fix: divide bytes by 255."))
    return array[0] if len(array) == 1 else array.transpose(1, 2, 0)
