r"""Do gradients through softmax vanish as keys grow wider, and does scaling by $1/\sqrt{d_k}$ prevent it?

Unit-normal queries and keys give dot products of variance $d_k$; a softmax of large scores is nearly one-hot, and its
Jacobian $\mathrm{diag}(a) - a a^\top$ nearly zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from regard.bench.measure import Row
from regard.general.scores import Dot, ScaledDot

QUESTION = "softmax-gradient"
WIDTHS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)


def rows(keys: int = 64, draws: int = 256) -> Iterator[Row]:
    """Mean Frobenius norm of the Jacobian of the weights with respect to the scores."""
    torch.manual_seed(0)
    for width in WIDTHS:
        query, key = torch.randn(draws, 1, width), torch.randn(draws, keys, width)
        for name, score in (("dot", Dot()), ("scaled dot", ScaledDot())):
            a = score(query, key).softmax(-1).squeeze(1)
            jacobian = torch.diag_embed(a) - a[:, :, None] * a[:, None, :]
            norm = float(jacobian.flatten(1).norm(dim=1).mean())
            spread = float(jacobian.flatten(1).norm(dim=1).std())
            case = f"d_k {width}, {keys} keys"
            extra = {"width": width, "jacobian": norm, "sd": spread, "largest_weight": float(a.amax(-1).mean())}
            yield Row(QUESTION, case, name, note=f"‖da/de‖ {norm:.4f} ± {spread:.4f}", extra=extra)


def draw(found: Sequence[Row], folder: Path) -> Path:
    """The norm against the width, both scores, as a figure."""
    from matplotlib.figure import Figure

    from regard.report.figures import save

    figure = Figure(figsize=(5.0, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, style in (("dot", "o-"), ("scaled dot", "s-")):
        points = [(row.extra["width"], row.extra["jacobian"]) for row in found if row.what == name]
        axes.plot(*zip(*points, strict=True), style, label=name, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("width of the keys, $d_k$")
    axes.set_ylabel("norm of the softmax Jacobian")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    path = folder / "softmax-gradient.svg"
    save(figure, path)
    return path
