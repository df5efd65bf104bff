r"""Do stacked graph attentions over-smooth, as stacked means do?

How far are the nodes, after $L$ layers, from all being the same:

$$\mu = \lVert X - \mathbf{1}\bar{x}^\top \rVert_F \,/\, \lVert X \rVert_F$$

the measure of Wu et al. 2023 (https://arxiv.org/abs/2305.16102) over the size of $X$. The layers are untrained: random matrices, a
nonlinearity between. *Mean* are the same layers with their weights made uniform, *residual* adds what a layer was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.bench.measure import Row
from regard.observe import intervene
from regard.query import GATv2Score, GraphAttention

QUESTION = "oversmoothing"
DEPTHS = (2, 4, 8, 16, 32)
KINDS = ("GATv2", "GAT", "GATv2, sparsemax", "GATv2, ten times the scores", "mean", "GATv2, residual")


class Stack(nn.Module):
    """Graph attentions one after the other.

    Args:
        layers: of the same width.
        residual: add what a layer was given to what it gives.
    """

    def __init__(self, layers: Sequence[GraphAttention], residual: bool) -> None:
        super().__init__()
        self.layers, self.residual = nn.ModuleList(layers), residual

    def forward(self, nodes: Tensor, edge_index: Tensor) -> Tensor:
        """The nodes after the last layer."""
        for layer in self.layers:
            found = torch.tanh(layer(nodes, edge_index))
            nodes = nodes + found if self.residual else found
        return nodes


def spread(nodes: Tensor) -> float:
    """How far the nodes (N, d) are from their mean, relative to their size: 0 where all are the same."""
    return float((nodes - nodes.mean(0)).norm() / nodes.norm())


def _layer(kind: str, width: int) -> GraphAttention:
    layer = GraphAttention(
        width, 4, score="gat" if kind == "GAT" else "gatv2", align="sparsemax" if "sparsemax" in kind else None
    )
    if "ten times" in kind:
        assert isinstance(layer.attention.score, GATv2Score)
        with torch.no_grad():
            layer.attention.score.w.mul_(10)
    return layer


def _connected(n: int, degree: int, generator: torch.Generator) -> Tensor:
    """A ring with random chords, both ways."""
    ring = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
    chords = torch.randint(n, (2, n * (degree - 2) // 2), generator=generator)
    one_way = torch.cat([ring, chords], 1)
    return torch.cat([one_way, one_way.flip(0)], 1)


def rows(n: int = 400, degree: int = 8, width: int = 32, seeds: int = 8) -> Iterator[Row]:
    """Mean and spread over seeds, each with a graph, features and layers of its own."""
    for kind in KINDS:
        found: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
        for seed in range(seeds):
            torch.manual_seed(seed)
            edges = _connected(n, degree, torch.Generator().manual_seed(seed))
            layers = [_layer(kind, width) for _ in range(max(DEPTHS))]
            nodes = torch.randn(n, width)
            for depth in DEPTHS:
                model = Stack(layers[:depth], "residual" in kind)
                with torch.no_grad(), intervene(model, "uniform") if kind == "mean" else nullcontext():
                    found[depth].append(spread(model(nodes, edges)))
        for depth in DEPTHS:
            of_seeds = torch.tensor(found[depth])
            mean, sd = float(of_seeds.mean()), float(of_seeds.std())
            extra = {"depth": depth, "spread": mean, "sd": sd, "seeds": seeds}
            yield Row(QUESTION, f"{depth} layers, {n} nodes", kind, note=f"µ {mean:.2e} ± {sd:.1e}", extra=extra)


def draw(found: Sequence[Row], folder: Path) -> Path:
    """The spread against the depth, one line a kind."""
    from matplotlib.figure import Figure

    from regard.report.figures import save

    figure = Figure(figsize=(6.2, 3.4), layout="constrained")
    axes = figure.subplots()
    for kind, style in zip(KINDS, ("o-", "s-", "^-", "v-", "x--", "d-"), strict=True):
        points = [(row.extra["depth"], row.extra["spread"]) for row in found if row.what == kind]
        axes.plot(*zip(*points, strict=True), style, label=kind, markersize=4)
    axes.set_yscale("log")
    axes.set_xticks(DEPTHS, [str(depth) for depth in DEPTHS])
    axes.set_xlabel("layers")
    axes.set_ylabel("distance of the nodes from their mean")
    axes.legend(frameon=False, fontsize=7)
    path = folder / "oversmoothing.svg"
    save(figure, path)
    return path
