"""Graph attention on a CPU, beside the GATv2Conv of torch_geometric with the same weights: time, memory, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from regard._errors import missing_extra
from regard.bench.graphs import PEER, Exact, Graph, Layer, cora, drawn, full, geometric
from regard.bench.measure import Row, cpu_peak_mib
from regard.bench.paired import paired_seconds
from regard.query import GraphAttention

QUESTION = "graph-cpu"

_MEMORY = """
import torch, regard as rg
from torch_geometric.nn import GATv2Conv
torch.set_num_threads(1)
edges, nodes, heads, width = torch.load(argv[0]), int(argv[1]), int(argv[2]), int(argv[3])
who, step = argv[4], argv[5] == "step"
torch.manual_seed(0)
theirs = GATv2Conv(heads * width, width, heads=heads, add_self_loops=False, bias=False)
attend = rg.GraphAttention.from_geometric(theirs) if who == "regard" else theirs
x = torch.randn(nodes, heads * width, requires_grad=step)
small = torch.randint(64, (2, 256))
attend(x[:64], small).sum().backward() if step else attend(x[:64], small)
x.grad = None
ready()
torch.set_grad_enabled(step)
result = attend(x, edges)
if step:
    result.sum().backward()
"""


def _step(run: Layer, x: Tensor, edges: Tensor, leaves: list[Tensor], grad: Tensor) -> Callable[[], None]:
    def both() -> None:
        torch.autograd.grad(run(x, edges), leaves, grad)

    return both


def _forward(run: Layer, x: Tensor, edges: Tensor) -> Callable[[], None]:
    def alone() -> None:
        with torch.no_grad():
            run(x, edges)

    return alone


def measured_on(graph: Graph, budget: float = 4.0) -> Iterator[Row]:
    """Forward and training step; processor time of one thread, the runs of both taken in turns."""
    theirs = geometric(graph)
    if theirs is None:
        raise ImportError(missing_extra("torch_geometric", "graph", "regard bench graph-cpu"))
    ours = GraphAttention.from_geometric(theirs)
    x, edges = torch.randn(graph.nodes, graph.heads * graph.width, requires_grad=True), graph.edges
    exact, grad = Exact(ours, x, edges), torch.randn_like(x)
    who: dict[str, torch.nn.Module] = {"regard": ours, PEER: theirs}
    for what, runs, error in (
        ("forward", [_forward(run, x, edges) for run in who.values()], exact.of_result),
        (
            "training step",
            [_step(run, x, edges, [x, *run.parameters()], grad) for run in who.values()],
            exact.of_gradient,
        ),
    ):
        times = paired_seconds(runs[0], runs[1], budget, least=3)
        with TemporaryDirectory() as folder:
            stored = Path(folder, "edges.pt")
            torch.save(edges, stored)
            for name, taken in zip(who, times, strict=True):
                short, kind = "regard" if name == "regard" else "peer", "forward" if what == "forward" else "step"
                peak = cpu_peak_mib(_MEMORY, stored, graph.nodes, graph.heads, graph.width, short, kind)
                yield Row(QUESTION, f"{graph.case}, {what}", name, taken, peak, error(who[name]))


def rows() -> Iterator[Row]:
    """Citations, every edge there can be, and many edges at random."""
    torch.set_num_threads(1)
    for make in (cora, lambda: full(1024, 8, 16), lambda: drawn(100_000, 2_000_000, 8, 16)):
        torch.manual_seed(0)
        yield from measured_on(make())
