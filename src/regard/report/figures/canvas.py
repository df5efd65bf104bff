"""What every figure shares: colours, checked numbers, a figure that belongs to nobody, and how it is saved."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from regard._errors import refusal
from regard._files import whole
from regard.report.figures.text import missing_letters, need_matplotlib, quiet_glyphs

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.colors
    import matplotlib.figure

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

# Nine equal steps of lightness from ivory over teal to indigo. Lightness alone orders them, so the order
# survives every kind of colour blindness and a black-and-white printer.
_COLOURS = ("#fbfbf2", "#d1e3c8", "#96ceb6", "#5bb5b3", "#1a98af", "#0978a3", "#185791", "#213876", "#1f1c55")
GOLD = "#e8590c"
INK, FAINT = "#22252b", "#9aa0a8"
LABEL_POINTS = 8.0
_SUFFIXES = (".svg", ".png", ".pdf")


@cache
def colormap() -> matplotlib.colors.Colormap:
    """The colours of every figure: ivory to indigo, evenly darker; safe for the colour-blind and in grey."""
    need_matplotlib()
    colors = import_module("matplotlib.colors")
    result: matplotlib.colors.Colormap = colors.LinearSegmentedColormap.from_list("regard", _COLOURS)
    return result


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
    matplotlib = need_matplotlib()
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
        "svg.fonttype": "none" if missing_letters(texts) else "path",
        "text.hinting": "none",  # letters as wide as they were measured
        "pdf.fonttype": 42,  # TrueType: publishers turn Type 3 away
    }
    content = BytesIO()
    with matplotlib.rc_context(settings), quiet_glyphs():
        figure.savefig(
            content,
            format=suffix[1:],
            metadata=nameless[suffix],
            dpi=200,
            bbox_inches="tight",
            pad_inches=0.08,
        )
    return whole(target, lambda draft: _write(draft, content.getvalue()))


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def numbers(values: Any, name: str) -> Array:
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


def root_figure(ax: matplotlib.axes.Axes) -> matplotlib.figure.Figure:
    """The figure that axes stand in, through any subfigures."""
    figure: Any = ax.figure
    while figure is not figure.figure:
        figure = figure.figure
    root: matplotlib.figure.Figure = figure
    return root


def new_figure(width: float, height: float, layout: str | None = None) -> matplotlib.figure.Figure:
    """A figure of its own, in inches, known to no backend."""
    need_matplotlib()
    figure: matplotlib.figure.Figure = import_module("matplotlib.figure").Figure((width, height), layout=layout)
    return figure


def settle(figure: matplotlib.figure.Figure) -> None:
    """Fix what would otherwise be decided at every drawing: LaTeX or not, and where things lie."""
    for text in figure.findobj(import_module("matplotlib.text").Text):
        text.set_usetex(False)
    if figure.get_layout_engine() is not None:
        # A layout engine moves things a little each time.
        with quiet_glyphs(), need_matplotlib().rc_context({"text.hinting": "none"}):
            figure.draw_without_rendering()
        figure.set_layout_engine("none")


def dress_bar(bar: Any) -> None:
    """A colour bar in the style of the figures: no frame, few small numbers."""
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, length=2, pad=2, color=FAINT, labelcolor=INK)
    bar.locator = import_module("matplotlib.ticker").MaxNLocator(4)
    bar.update_ticks()


def say(axes: matplotlib.axes.Axes, message: str) -> None:
    """Write a message where there is nothing to draw."""
    axes.text(0.5, 0.5, message, transform=axes.transAxes, ha="center", va="center", style="italic", color=FAINT)


def colour_scale(shades: Array) -> Any:
    """Colours from zero to the heaviest weight."""
    top = float(shades.max(initial=0.0)) or 1.0
    norm = import_module("matplotlib.colors").Normalize(0.0, top)
    return import_module("matplotlib.cm").ScalarMappable(norm, colormap())


def legible(colour: tuple[float, ...]) -> str:
    """Black or white, whichever stands out more on the colour (WCAG contrast)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "white"
