"""Graph attention on a GPU: ours beside torch_geometric's GATv2Conv, the same by gathering and scattering, and the dense equation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from regard.bench.beside import as_graphs, measured
from regard.bench.graphs import PEER, Exact, Graph, Layer, cora, drawn, full, geometric, scattered
from regard.bench.measure import Row
from regard.ops.dispatch import execution
from regard.query import GraphAttention

QUESTION = "graph-gpu"
# Beyond this many numbers the padded neighbourhoods of the dense execution are not asked for.
MOST_PADDED = 1 << 31
# Graphs of up to so many edges are measured as CUDA graphs too.
SHORT = 1 << 17


def by_execution(layer: GraphAttention, impl: str) -> Layer:
    """Our layer in one execution."""

    def run(x: Tensor, edges: Tensor) -> Tensor:
        with execution(impl):
            result: Tensor = layer(x, edges)
        return result

    return run


def peers(layer: GraphAttention, graph: Graph) -> dict[str, Layer]:
    """Everyone with the weights of our layer."""
    who: dict[str, Layer] = {"regard": by_execution(layer, "fused"), "gather and scatter by hand": scattered(layer)}
    theirs = geometric(graph)
    if theirs is not None:
        who[PEER] = theirs.cuda()
        layer.load_geometric(theirs.state_dict())
    who["regard, blockwise"] = by_execution(layer, "blockwise")
    if graph.nodes * int(torch.bincount(graph.edges[1]).max()) * graph.heads * graph.width <= MOST_PADDED:
        who["regard, dense"] = by_execution(layer, "dense")
    return who


def measured_on(graph: Graph) -> Iterator[Row]:
    """Forward and training step of all, with errors against float64 of the result and of the gradient of the nodes."""
    dim, edges = graph.heads * graph.width, graph.edges.cuda()
    layer = GraphAttention(dim, graph.heads, self_loops=False, bias=False).cuda()
    x = torch.randn(graph.nodes, dim, device="cuda", requires_grad=True)
    who = peers(layer, graph)
    exact, grad = Exact(layer, x, edges), torch.randn_like(x)
    for what, run in who.items():
        leaves = [x, *(run if isinstance(run, nn.Module) else layer).parameters()]

        def forward(run: Layer = run) -> Tensor:
            return run(x, edges)

        def step(forward: Callable[[], Tensor] = forward, leaves: list[Tensor] = leaves) -> None:
            torch.autograd.grad(forward(), leaves, grad)

        def of_result(run: Layer = run) -> float:
            return exact.of_result(run)

        def of_gradient(run: Layer = run) -> float:
            return exact.of_gradient(run)

        with torch.no_grad():
            row = measured(QUESTION, f"{graph.case}, forward", what, forward, error=of_result)
        yield row
        yield measured(QUESTION, f"{graph.case}, training step", what, step, error=of_gradient)
        if edges.shape[1] <= SHORT:
            yield from as_graphs(QUESTION, graph.case, what, forward, step)


def rows() -> Iterator[Row]:
    """Citations, many edges at random, and every edge there can be."""
    for make in (cora, lambda: drawn(100_000, 2_000_000, 8, 16), lambda: full(2048, 8, 16)):
        torch.manual_seed(0)
        yield from measured_on(make())
        torch.cuda.empty_cache()
