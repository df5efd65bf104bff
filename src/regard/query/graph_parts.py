"""What graph attention is made of: the two scores of its papers, and edges that are sorted once."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from regard._errors import refusal
from regard.general.scores.base import AdditiveForm, Heads, Score, head_axes, vector, width
from regard.ops.activations import activation
from regard.ops.edges import EdgeMask, Edges, lasting, reached
from regard.query.parts import in_range, is_plain


class GATScore(Score):
    r"""The score of GAT (Veličković et al. 2018, https://arxiv.org/abs/1710.10903), of nodes that are already projected.

    $$e_{ij} = \mathrm{LeakyReLU}\big(a_\text{centre} \cdot q_i + a_\text{neighbour} \cdot k_j\big)$$

    It is monotone in $a_\text{neighbour} \cdot k_j$: all queries rank the keys alike, whatever they ask (Brody et al. 2022).

    Args:
        dim: width of queries and keys.
        slope: of the LeakyReLU below zero.
        heads: leading axes of the parameters.

    Example:
        >>> GATScore(3)(torch.randn(2, 5, 3), torch.randn(2, 7, 3)).shape
        torch.Size([2, 5, 7])
    """

    def __init__(self, dim: int, slope: float = 0.2, heads: Heads = ()) -> None:
        super().__init__()
        self.query_dim = self.key_dim = width("dim", dim)
        lead = self.head_shape = head_axes(heads)
        self.a_centre, self.a_neighbour = vector(*lead, dim), vector(*lead, dim)
        self.activation = activation(f"leaky_relu:{float(slope)}")

    def reduce(self, query: Tensor | None, key: Tensor) -> AdditiveForm:
        assert query is not None
        a, u = query @ self.a_centre.unsqueeze(-1), key @ self.a_neighbour.unsqueeze(-1)
        return AdditiveForm(a, u, a.new_ones(1), self.activation)

    def extra_repr(self) -> str:
        return f"dim={self.key_dim}, activation={self.activation.spec!r}"


class GATv2Score(Score):
    r"""The score of GATv2 (Brody, Alon & Yahav 2022, https://arxiv.org/abs/2105.14491), of nodes that are already projected.

    $$e_{ij} = w \cdot \mathrm{LeakyReLU}(q_i + k_j)$$

    The additive score without its two matrices, which the values have a use for as well.

    Args:
        dim: width of queries and keys.
        slope: of the LeakyReLU below zero.
        heads: leading axes of the parameters.
        shared: nodes that ask are projected as those that are read, $W_Q = W_K$ and $b_Q = b_K$; for the layer to do.

    Example:
        >>> GATv2Score(3)(torch.randn(2, 5, 3), torch.randn(2, 7, 3)).shape
        torch.Size([2, 5, 7])
    """

    def __init__(self, dim: int, slope: float = 0.2, heads: Heads = (), shared: bool = False) -> None:
        super().__init__()
        self.shared = bool(shared)
        self.query_dim = self.key_dim = width("dim", dim)
        lead = self.head_shape = head_axes(heads)
        self.w = vector(*lead, dim)
        self.activation = activation(f"leaky_relu:{float(slope)}")

    def reduce(self, query: Tensor | None, key: Tensor) -> AdditiveForm:
        assert query is not None
        return AdditiveForm(query, key, self.w, self.activation)

    def extra_repr(self) -> str:
        return f"dim={self.key_dim}, activation={self.activation.spec!r}, shared={self.shared}"


@dataclass(frozen=True, eq=False)
class Graph:
    """Edges of a graph, loops included, and what of it may be read."""

    edges: Edges
    mask: EdgeMask
    read: Tensor | None  # which sources somebody reads; None for all
    asking: Tensor | None  # which targets read something; None for all


def _some(which: Tensor) -> Tensor | None:
    """None where all are true, if one may look."""
    return None if is_plain(which) and which.device.type == "cpu" and bool(which.all()) else which


def graph(
    edge_index: Tensor,
    sizes: tuple[int, int],
    mask: Tensor | None,
    edge_type: Tensor | None,
    *,
    types: int = 1,
    loops: bool = False,
) -> Graph:
    """The graph of an edge index (2, E), sources above targets; the same one while nothing of it has changed.

    Args:
        edge_index: (2, E).
        sizes: number of targets and of sources.
        mask: True for edges that may be read, (E,).
        edge_type: (E,), from 0.
        types: number of types, that of the loops included.
        loops: add an edge from each node to itself, after all others, of the last type; those that are there already are masked.
    """
    given = (edge_index, mask, edge_type)
    if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(edge_index):
        fix = "Fix: call it for each graph, or make one graph of them, with nodes of their own."
        raise ValueError(refusal("edge_index", "several under torch.vmap", "that of one graph", fix))
    if not all(x is None or (is_plain(x) and not x.is_inference()) for x in given):
        return _built(edge_index, sizes, mask, edge_type, types, loops)
    known: _Known | None = _known.get(edge_index)
    if known is not None and known.is_of(given, (sizes, types, loops)) and known.holds(edge_index, mask, edge_type):
        return known.graph
    made = lasting(lambda: _built(edge_index, sizes, mask, edge_type, types, loops))
    masked = lasting(lambda: None if mask is None or mask.device.type != "cpu" else mask.clone())
    _known[edge_index] = _Known(made, [_Stamp.of(x) for x in given], (sizes, types, loops), masked)
    return made


@dataclass(frozen=True)
class _Stamp:
    """A tensor as it was, without holding it."""

    ref: weakref.ref[Tensor]
    version: int

    @staticmethod
    def of(x: Tensor | None) -> _Stamp | None:
        return None if x is None else _Stamp(weakref.ref(x), x._version)


@dataclass(frozen=True)
class _Known:
    graph: Graph
    stamps: list[_Stamp | None]
    settings: object
    mask: Tensor | None  # a copy, on a CPU: that of the graph has the loops in it

    def is_of(self, given: tuple[Tensor | None, ...], settings: object) -> bool:
        """Whether it was made from these tensors, and nobody has written to them since."""
        same = (
            x is None if stamp is None else x is not None and stamp.ref() is x and stamp.version == x._version
            for stamp, x in zip(self.stamps, given, strict=True)
        )
        return self.settings == settings and all(same)

    def holds(self, edge_index: Tensor, mask: Tensor | None, edge_type: Tensor | None) -> bool:
        """Whether they still have the numbers that it was made from.

        What writes to memory without telling torch, through an array of numpy or `.data`, leaves the version as it was. On a CPU a look
        costs little beside reading along the edges; elsewhere it would wait for the device.
        """
        if edge_index.device.type != "cpu":
            return True
        edges = self.graph.edges
        source, target = (end.to(torch.long) for end in edge_index.unbind())
        row = source if edge_type is None else source * edges.types + edge_type.to(torch.long)
        same = torch.equal(row, edges.source[: len(row)]) and torch.equal(target, edges.target[: len(target)])
        return same and (mask is None or self.mask is None or torch.equal(mask, self.mask))


# Layers that are stacked read the same edges, and so does every epoch.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _signed(index: Tensor) -> Tensor:
    """Indices in a dtype that torch compares: of unsigned numbers it knows little more than bytes."""
    return index.to(torch.long) if index.dtype in (torch.uint16, torch.uint32, torch.uint64) else index


def _built(
    edge_index: Tensor,
    sizes: tuple[int, int],
    mask: Tensor | None,
    edge_type: Tensor | None,
    types: int,
    loops: bool,
) -> Graph:
    n_targets, n_sources = sizes
    edge_index, edge_type = _signed(edge_index), None if edge_type is None else _signed(edge_type)
    in_range("edge_index", edge_index[0], 0, n_sources, "indices of {high} sources")
    in_range("edge_index", edge_index[1], 0, n_targets, "indices of {high} targets")
    # Copies: what is remembered, or recorded, must neither change with the edges nor keep them alive.
    source, target = (end.to(torch.long, copy=True) for end in edge_index.unbind())
    mask = None if mask is None else mask.clone()
    if edge_type is not None:
        in_range("edge_type", edge_type, 0, types - loops, "indices of {high} edge types")
    if loops:
        apart = source != target
        mask = apart if mask is None else mask & apart
        if is_plain(mask) and mask.device.type == "cpu" and bool(mask.all()):
            mask = None
        own = torch.arange(n_targets, device=edge_index.device)
        source, target = torch.cat([source, own]), torch.cat([target, own])
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(own, dtype=torch.bool)])
        if edge_type is not None:
            edge_type = torch.cat([edge_type, torch.full_like(own, types - 1, dtype=edge_type.dtype)])
    row = source if edge_type is None else source * types + edge_type
    edges = Edges.of(row, target, n_targets, types)
    read, asking = _some(reached(source, n_sources, mask)), _some(reached(target, n_targets, mask))
    return Graph(edges, EdgeMask(mask, edges), read, asking)
