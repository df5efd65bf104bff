"""Do gradients survive many hops? Their norm at the first query, against the number of hops, for every transform.

Untrained multi-hop attention, each hop with weights of its own: what reaches the first query from a loss on the last context,
relative to what reaches it through one hop. Summaries say that gradients vanish or explode over hops and that a residual transform
keeps them alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from regard.bench.measure import Row
from regard.query import MultiHopAttention

QUESTION = "hop-gradients"
HOPS = (1, 2, 4, 8, 16, 32)
TRANSFORMS = ("identity", "residual", "sum", "gru", "attention")


def norm(transform: str, hops: int, seed: int, width: int = 32, n: int = 16, batch: int = 64) -> float:
    """Mean over a batch of the norm of the gradient at the first query."""
    torch.manual_seed(seed)
    # Without the context in the score, so that the query alone carries what was asked from hop to hop.
    attend = MultiHopAttention(width, hops, transform=transform, share=False, see_context=False)
    query = torch.randn(batch, width, requires_grad=True)
    key, value, side = (torch.randn(batch, n, width) for _ in range(3))
    context = attend(query, key, value, side=side if transform == "attention" else None)
    (found,) = torch.autograd.grad(context, query, torch.randn_like(context))
    return float(found.norm(dim=-1).mean())


def rows(seeds: int = 10) -> Iterator[Row]:
    """Every transform and number of hops."""
    for transform in TRANSFORMS:
        first = None
        for hops in HOPS:
            found = torch.tensor([norm(transform, hops, seed) for seed in range(seeds)])
            mean, spread = float(found.mean()), float(found.std())
            first = mean if first is None else first
            extra = {"hops": hops, "norm": mean, "std": spread, "relative": mean / first, "seeds": seeds}
            note = f"norm {mean:.3g} ± {spread:.1g}, {mean / first:.3g} of one hop"
            yield Row(QUESTION, f"{hops} hops, width 32, N 16", transform, note=note, extra=extra)


def draw(found: Sequence[Row], folder: Path) -> Path:
    """Both axes logarithmic, a line a transform."""
    from regard.report.figures import save
    from regard.report.figures.canvas import FAINT, INK, colormap, new_figure

    figure = new_figure(5.2, 3.4, layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(row.what for row in found))
    for k, (name, marker) in enumerate(zip(names, "osv^D", strict=False)):
        points = [row.extra for row in found if row.what == name]
        colour = colormap()(0.35 + 0.6 * k / max(1, len(names) - 1))
        x, y = [p["hops"] for p in points], [p["norm"] for p in points]
        axes.plot(x, y, f"{marker}-", color=colour, markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(HOPS), [str(hops) for hops in HOPS])
    axes.set_xlabel("hops")
    axes.set_ylabel("gradient at the first query")
    axes.set_title("What reaches the first query", fontsize=10, color=INK)
    axes.grid(color=FAINT, alpha=0.3, linewidth=0.5)
    axes.legend(fontsize=7, frameon=False)
    return save(figure, folder / f"{QUESTION}.svg")
