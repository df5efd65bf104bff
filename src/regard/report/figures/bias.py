"""The map of a bias: what positions add to the scores, above and below zero."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regard._errors import refusal
from regard.report.figures.canvas import FAINT, INK, LABEL_POINTS, Array, dress_bar, new_figure, say, settle
from regard.report.figures.text import font_family, need_matplotlib, plain, visible

if TYPE_CHECKING:
    import matplotlib.colors
    import matplotlib.figure
    import numpy.typing as npt

# Equally light at equal distance from zero: the sign is told by the hue, the size by the lightness.
_COLOURS = ("#7a2e00", "#c65a11", "#eda56a", "#fbfbf2", "#77bdb5", "#0978a3", "#1f1c55")


@cache
def diverging() -> matplotlib.colors.Colormap:
    """Rust below zero, ivory at it, indigo above."""
    need_matplotlib()
    colors = import_module("matplotlib.colors")
    result: matplotlib.colors.Colormap = colors.LinearSegmentedColormap.from_list("regard-diverging", _COLOURS)
    return result


def bias_map(
    bias: torch.Tensor | npt.ArrayLike, *, title: str | None = None, names: list[str] | None = None
) -> matplotlib.figure.Figure:
    """Draw what is added to the scores: a row a query, a column a key, zero the lightest; minus infinity is left blank.

    Args:
        bias: (Nq, N), or (P, Nq, N) for panels side by side on one scale, such as heads.
        title: a line above the figure.
        names: one for each panel; `head 0`, `head 1`, … when left out.

    Returns:
        The figure.

    Example:
        >>> import regard as rg
        >>> i, j = torch.arange(5)[:, None], torch.arange(5)[None]
        >>> tokens = torch.zeros(2, 5, 4)
        >>> figure = bias_map(rg.AlibiPosition(heads=2).bias(tokens, tokens)(i, j))
        >>> len(figure.axes)  # two heads and a colour bar
        3
    """
    panels = _numbers(bias)
    labels = [f"head {h}" for h in range(len(panels))] if names is None else [visible(name) for name in names]
    if len(labels) != len(panels):
        raise ValueError(refusal("names", f"{len(labels)} of them", f"one for each of {len(panels)} panels"))
    count, n_queries, n_keys = panels.shape
    side = min(2.4, max(1.2, 0.16 * max(n_queries, n_keys)))
    figure = new_figure(count * (side + 0.3) + 1.3, side + 0.9, layout="constrained")
    grid = list(figure.subplots(1, count, squeeze=False).ravel())
    heading = visible(title or "", edges=False)
    family = font_family([*labels, heading])
    finite = np.abs(panels[np.isfinite(panels)])
    reach = float(finite.max(initial=0.0)) or 1.0
    mesh: Any = None
    for axes, panel, label in zip(grid, panels, labels, strict=True):
        if panel.size:
            shown = np.ma.masked_invalid(panel)
            mesh = axes.imshow(shown, cmap=diverging(), vmin=-reach, vmax=reach, interpolation="none")
        else:
            say(axes, "no queries" if n_keys else "no keys")
        for spine in axes.spines.values():
            spine.set(color=FAINT, linewidth=0.6)
        axes.tick_params(labelsize=7, length=2, pad=2, color=FAINT, labelcolor=INK)
        axes.set_xlabel("keys", **plain(family, size=LABEL_POINTS, color=FAINT))
        if count > 1 or names is not None:
            axes.set_title(label, **plain(family, size=8.5, color=INK), pad=3)
    grid[0].set_ylabel("queries", **plain(family, size=LABEL_POINTS, color=FAINT))
    if mesh is not None:
        dress_bar(figure.colorbar(mesh, ax=grid, fraction=0.04, pad=0.02, aspect=24, shrink=0.9))
    if heading:
        figure.suptitle(heading, **plain(family, size=11, color=INK))
    settle(figure)
    return figure


def _numbers(bias: Any) -> Array:
    """As (P, Nq, N) in float64."""
    array = np.asarray(
        bias.detach().cpu().double().numpy() if isinstance(bias, torch.Tensor) else bias, dtype=np.float64
    )
    if array.ndim not in (2, 3) or (array.ndim == 3 and not len(array)):
        raise ValueError(refusal("bias", array.shape, "shape (Nq, N) or (P, Nq, N)"))
    if np.isnan(array).any() or np.isposinf(array).any():
        raise ValueError(refusal("bias", "NaN or infinity", "numbers, or minus infinity where nothing may be attended"))
    return array if array.ndim == 3 else array[None]
