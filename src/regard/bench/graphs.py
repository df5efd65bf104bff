"""Graphs that attention along edges is measured on, and who is measured with the weights of our layer."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from regard.bench.measure import relative_error
from regard.query import GraphAttention
from regard.query.graph_parts import GATv2Score

PEER = "torch_geometric, GATv2Conv"
CORA = (2708, 10556)
# Edges that are computed in float64.
MOST_EXACT = 1 << 18

Layer = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Graph:
    """Edges, and the layer that reads them."""

    name: str
    nodes: int
    edges: Tensor  # (2, E), sources above targets
    heads: int
    width: int  # of a head

    @property
    def case(self) -> str:
        return (
            f"{self.name}: {self.nodes} nodes, {self.edges.shape[1]} edges, {self.heads} heads of {self.width}, float32"
        )


def cora() -> Graph:
    """The citations of Cora, which are not part of the project, from the folder that `REGARD_DATA` names; without it as many at random."""
    folder = os.environ.get("REGARD_DATA")
    if folder is None:
        return drawn(*CORA, 8, 8, "random graph of Cora's size")
    from regard.recipes.nodes.planetoid import planetoid

    found = planetoid(folder, "cora")
    return Graph("Cora", len(found.features), found.edges, 8, 8)


def drawn(nodes: int, edges: int, heads: int, width: int, name: str = "random graph") -> Graph:
    """Edges between any nodes, at random."""
    return Graph(name, nodes, torch.randint(nodes, (2, edges)), heads, width)


def full(nodes: int, heads: int, width: int) -> Graph:
    """Every node reads every node."""
    every = torch.arange(nodes)
    return Graph("fully connected", nodes, torch.cartesian_prod(every, every).T.contiguous(), heads, width)


def geometric(graph: Graph) -> torch.nn.Module | None:
    """The layer of torch_geometric, where it is installed."""
    try:
        found = import_module("torch_geometric.nn")
    except ImportError:
        return None
    dim = graph.heads * graph.width
    made: torch.nn.Module = found.GATv2Conv(dim, graph.width, heads=graph.heads, add_self_loops=False, bias=False)
    return made


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


class Exact:
    """Result and gradient of the nodes in float64, for a random gradient of the result.

    Of large graphs that of the first nodes, with the edges to them: what is kept of every edge would not fit into a memory.
    """

    def __init__(self, layer: GraphAttention, x: Tensor, edges: Tensor) -> None:
        self.x, self.edges = x, edges
        before = torch.bincount(edges[1], minlength=len(x)).cumsum(0)
        self.rows = max(1, int((before <= MOST_EXACT).sum()))
        self.cotangent = torch.cat([torch.randn_like(x[: self.rows]), torch.zeros_like(x[self.rows :])])
        leaf = x.detach().double().requires_grad_()
        run = scattered(copy.deepcopy(layer).double())
        self.result = run(leaf, edges[:, edges[1] < self.rows])
        (self.grad,) = torch.autograd.grad(self.result, leaf, self.cotangent.double())
        self.result = self.result.detach()

    def of_result(self, run: Layer) -> float:
        """Error of the result."""
        with torch.no_grad():
            return relative_error(run(self.x, self.edges)[: self.rows], self.result[: self.rows])

    def of_gradient(self, run: Layer) -> float:
        """Error of the gradient of the nodes."""
        (grad,) = torch.autograd.grad(run(self.x, self.edges), self.x, self.cotangent)
        return relative_error(grad, self.grad)
