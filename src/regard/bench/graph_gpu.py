"""Graph attention on a GPU: ours beside torch_geometric's GATv2Conv, the same by gathering and scattering, and the dense equation.

The graph of Cora is not part of the project: `REGARD_DATA` names a folder that holds it; without it a random graph of the same
size stands in.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from importlib import import_module

import torch
from torch import Tensor, nn

from regard.bench.beside import measured
from regard.bench.measure import Row, relative_error
from regard.ops.dispatch import execution
from regard.query import GraphAttention
from regard.query.graph_parts import GATv2Score

QUESTION = "graph-gpu"
PEER = "torch_geometric, GATv2Conv"
CORA = (2708, 10556)
# Beyond this many numbers the padded neighbourhoods of the dense execution are not asked for.
MOST_PADDED = 1 << 31

Layer = Callable[[Tensor, Tensor], Tensor]


def cora() -> tuple[str, int, Tensor]:
    """Name, nodes and edges: of the stored graph, or drawn."""
    folder = os.environ.get("REGARD_DATA")
    if folder is None:
        return "random graph of Cora's size", CORA[0], torch.randint(CORA[0], (2, CORA[1]))
    from regard.recipes.nodes.planetoid import planetoid

    graph = planetoid(folder, "cora")
    return "Cora", len(graph.features), graph.edges


def graphs() -> Iterator[tuple[str, int, Tensor, int, int]]:
    """Name, nodes, edges, heads, width of a head."""
    name, n, edges = cora()
    yield name, n, edges, 8, 8
    yield "random graph", 100_000, torch.randint(100_000, (2, 2_000_000)), 8, 16
    every = torch.arange(2048)
    yield "fully connected", 2048, torch.cartesian_prod(every, every).T.contiguous(), 8, 16


def scattered(layer: GraphAttention) -> Layer:
    """The arithmetic of the same layer as it is usually written: gather by edge, softmax and sum by scattering."""

    def run(x: Tensor, edges: Tensor) -> Tensor:
        n, heads = len(x), layer.heads
        score = layer.attention.score
        assert layer.W_Q is not None
        assert isinstance(score, GATv2Score)
        key, query = (torch.einsum("nd,hcd->nhc", x, w) for w in (layer.W_K[0], layer.W_Q))
        source, target = edges
        read = key[source]
        logits = (score.activation(query[target] + read) * score.w).sum(-1)
        index = target[:, None].expand(-1, heads)
        top = logits.new_full((n, heads), -torch.inf).scatter_reduce(0, index, logits, "amax").detach()
        weight = (logits - top[target]).exp()
        mass = weight.new_zeros(n, heads).index_add(0, target, weight)
        weighed = read * (weight / mass[target])[..., None]
        return torch.zeros_like(key).index_add(0, target, weighed).flatten(1)

    return run


def by_execution(layer: GraphAttention, impl: str) -> Layer:
    """Our layer in one execution."""

    def run(x: Tensor, edges: Tensor) -> Tensor:
        with execution(impl):
            result: Tensor = layer(x, edges)
        return result

    return run


def peers(layer: GraphAttention, dim: int, heads: int, width: int) -> dict[str, Layer]:
    """Everyone with the weights of our layer."""
    who: dict[str, Layer] = {"regard": by_execution(layer, "fused"), "gather and scatter by hand": scattered(layer)}
    try:
        geometric = import_module("torch_geometric.nn")
    except ImportError:
        return who
    theirs = geometric.GATv2Conv(dim, width, heads=heads, add_self_loops=False, bias=False).cuda()
    layer.load_geometric(theirs.state_dict())
    return {**who, PEER: theirs}


def rows() -> Iterator[Row]:
    """Forward and training step, float32; errors of the forward against float64."""
    for name, n, index, heads, width in graphs():
        torch.manual_seed(0)
        dim, edges = heads * width, index.cuda()
        layer = GraphAttention(dim, heads, self_loops=False, bias=False).cuda()
        x = torch.randn(n, dim, device="cuda", requires_grad=True)
        who = peers(layer, dim, heads, width)
        who["regard, blockwise"] = by_execution(layer, "blockwise")
        if n * int(torch.bincount(index[1]).max()) * dim <= MOST_PADDED:
            who["regard, dense"] = by_execution(layer, "dense")
        with torch.no_grad():
            exact = scattered(copy.deepcopy(layer).double())(x.double(), edges)
        case = f"{name}: {n} nodes, {edges.shape[1]} edges, {heads} heads of {width}, float32"
        for what, run in who.items():
            leaves = [x, *(run if isinstance(run, nn.Module) else layer).parameters()]

            def forward(run: Layer = run, x: Tensor = x, edges: Tensor = edges) -> Tensor:
                return run(x, edges)

            def step(forward: Callable[[], Tensor] = forward, leaves: list[Tensor] = leaves) -> None:
                result = forward()
                torch.autograd.grad(result, leaves, torch.ones_like(result))

            def error(forward: Callable[[], Tensor] = forward, exact: Tensor = exact) -> float:
                return relative_error(forward(), exact)

            with torch.no_grad():
                row = measured(QUESTION, f"{case}, forward", what, forward, error=error)
            yield row
            yield measured(QUESTION, f"{case}, training step", what, step)
        del exact
        torch.cuda.empty_cache()
