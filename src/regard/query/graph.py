"""Graph attention: a node reads its neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.parts import AlignLike, ScoreLike, attentions
from regard.general.alignments import Alignment
from regard.general.scores import Score
from regard.general.scores.base import before, matrix, width, zeros
from regard.ops import hooks
from regard.ops.dispatch import autocasting, execute
from regard.ops.edges import EdgeCall, rows_at
from regard.ops.fill import kept_rows
from regard.ops.random import draw_seed
from regard.query import graph_geometric
from regard.query.graph_parts import GATScore, GATv2Score, Graph, graph
from regard.query.parts import one_of, operand, widths

_OWN = {"gat": GATScore, "gatv2": GATv2Score}
_JOINS = ("concat", "mean")


@register(
    name="graph-attention",
    also=("gatv2",),
    zh="图注意力",
    path="query/graph",
    equation="e_ij = w · LeakyReLU(W_Q h_i + W_K h_j + W_E f_ij),  h'_i = Σ_{j ∈ N(i)} softmax_j(e_ij) W_K h_j",
    paper="Brody, Alon & Yahav, How Attentive are Graph Attention Networks?, ICLR 2022",
    year=2022,
    time="E H d activations + N H d d_f",
    memory="E + N H d (softmax of additive scores); a panel of neighbourhoods otherwise",
    choose="what may be read is given by edges: molecules, citations, meshes, scenes; neighbours matter differently to each node",
    avoid="answers lie many hops away: a layer reaches one hop, and deep stacks over-smooth",
)
@register(
    name="gat",
    zh="图注意力网络（GAT，静态排序）",
    path="query/graph",
    preset={"score": "gat"},
    equation="e_ij = LeakyReLU(a_centre · W h_i + a_neighbour · W h_j),  h'_i = Σ_{j ∈ N(i)} softmax_j(e_ij) W h_j",
    paper="Veličković et al., Graph Attention Networks, ICLR 2018",
    year=2018,
    time="E H activations + N H d d_f",
    memory="E + N H d",
    choose="published models and weights; some neighbours matter more, to whomever",
    avoid="nodes should rank their neighbours differently: here all rank them alike (graph-attention)",
    example="""
    >>> edges = torch.tensor([[0, 1, 2], [1, 2, 2]])  # from the first row to the second
    >>> GraphAttention(6, heads=2, score="gat")(torch.randn(3, 6), edges).shape
    torch.Size([3, 6])
    """,
)
class GraphAttention(nn.Module):
    r"""Nodes read their neighbours (GATv2: Brody et al. 2022, https://arxiv.org/abs/2105.14491; GAT: Veličković et al. 2018, https://arxiv.org/abs/1710.10903).

    $$e_{ij} = \mathrm{score}\big(W_Q h_i + b_Q,\; W_K h_j + b_K + W_E f_{ij}\big), \qquad
      a_i = \mathrm{align}\big(\{e_{ij}\}_{j \in N(i)}\big), \qquad h_i' = \Big[\sum_{j \in N(i)} a_{ij} v_j\Big]_{1 \dots H} + b$$

    with $v_j = W_K h_j + b_K$ for the two scores of the papers, `"gatv2"`, $w \cdot \mathrm{LeakyReLU}(q_i + k_j)$, and `"gat"`,
    $\mathrm{LeakyReLU}(a_\text{centre} \cdot q_i + a_\text{neighbour} \cdot k_j)$, which has $W_Q = W_K$ as well; and $v_j = W_V h_j$
    for any other score. $N(i)$ are the sources of the edges to $i$. The nonlinearity between layers is left to who stacks them. A
    node without edges reads zero.

    With `edge_types` every type has its own $W_K$ and $W_V$ (and so have the loops), which is what a heterogeneous graph needs. Edges
    are sorted once and remembered while `edge_index` stays as it is. Under a trace the weights of the edges are at `attention`, (H, E),
    in the order of `edge_index`, loops after all others; `trace["attention"].call.edges.edge_index` has their ends. To erase or to
    give weights goes by edge too. `from_geometric` makes one of a layer of torch_geometric, `load_geometric` takes its weights.
    A softmax of additive scores takes memory linear in nodes and edges, with nothing of edges x width; but with `edge_dim` every edge has a
    key of its own, and these are of edges x heads x width.

    Args:
        dim: width of the nodes, or of targets and sources.
        heads: $H$.
        head_dim: width of a head; the width of the targets over $H$ when not given.
        score: `"gatv2"`, `"gat"`, or any other: a name, a class, a function of the widths, or a ready-made score with `heads=H`.
        align: among the neighbours of a node; softmax when not given. Not local or reinforced, which need
            positions, nor trees and matchings, which are decided by all nodes together.
        join: `"concat"` for heads side by side, or `"mean"`.
        edge_dim: width of the features $f_{ij}$ of edges.
        edge_types: number of types of edges.
        self_loops: let every node read itself, once, whatever loops there are; its edge has the mean features of the others.
        bias: have $b_Q$, $b_K$ and $b$.
        **options: arguments of a score or alignment given by name; `dropout`, `impl`. Of `"gatv2"`, `shared=True` is $W_Q = W_K$ and
            $b_Q = b_K$.

    Example:
        >>> edges = torch.tensor([[0, 1, 2], [1, 2, 2]])  # from the first row to the second
        >>> GraphAttention(6, heads=2)(torch.randn(3, 6), edges).shape
        torch.Size([3, 6])
        >>> read = GraphAttention((6, 5), heads=2, score="scaled-dot", align="sparsemax", self_loops=False)
        >>> read(torch.randn(3, 6), edges, torch.randn(7, 5)).shape  # three read seven
        torch.Size([3, 6])
    """

    def __init__(
        self,
        dim: int | tuple[int, int],
        heads: int,
        *,
        head_dim: int | None = None,
        score: ScoreLike = "gatv2",
        align: AlignLike = None,
        join: str = "concat",
        edge_dim: int | None = None,
        edge_types: int | None = None,
        self_loops: bool = True,
        bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        target_dim, source_dim = widths("dim", dim, 2)
        self.heads, self.join, self.self_loops = width("heads", heads), one_of("join", join, _JOINS), bool(self_loops)
        if head_dim is None and target_dim % self.heads:
            fix = "Fix: pass head_dim=…, the width of a head."
            raise ValueError(refusal("heads", heads, f"a divisor of the width {target_dim}", fix))
        H, d = self.heads, width("head_dim", target_dim // self.heads if head_dim is None else head_dim)
        self.edge_types = None if edge_types is None else width("edge_types", edge_types)
        # Loops are a type of their own.
        T = 1 if self.edge_types is None else self.edge_types + self.self_loops
        self.W_K, self.b_K = matrix(T, H, d, source_dim), zeros(T, H, d) if bias else None
        made = _OWN.get(score, score) if isinstance(score, str) else score
        self.attention = attentions({"attention": (d, d)}, made, align, options, heads=H)["attention"]
        own = isinstance(self.attention.score, GATScore | GATv2Score)
        one = _asks_as_it_reads(self.attention.score, isinstance(dim, int) and T == 1)
        if one and (T > 1 or target_dim != source_dim):
            got = f"dim={dim}" if T == 1 else f"{T} types of edges, loops included"
            raise ValueError(refusal("shared", f"True beside {got}", "False where nodes or edges are of several kinds"))
        self.W_Q, self.b_Q = None if one else matrix(H, d, target_dim), None if one or not bias else zeros(H, d)
        self.W_V = None if own else matrix(T, H, d, source_dim)
        self.W_E = None if edge_dim is None else matrix(H, d, width("edge_dim", edge_dim))
        self.b = zeros(H * d if join == "concat" else d) if bias else None
        self._check_parts(d)

    def forward(
        self,
        nodes: Float[Tensor, "n d"],
        edge_index: Int[Tensor, "2 e"],
        source: Float[Tensor, "m ds"] | None = None,
        *,
        edge_attr: Float[Tensor, "e de"] | None = None,
        edge_type: Int[Tensor, " e"] | None = None,
        mask: Bool[Tensor, " e"] | None = None,
    ) -> Float[Tensor, "n out"]:
        """Read along the edges.

        Args:
            nodes: (N, d), those that read. Several graphs are one graph without edges between them.
            edge_index: (2, E), from sources (first row) to targets (second row).
            source: (M, d_s), those that are read, in a bipartite graph; the nodes when not given.
            edge_attr: (E, d_e), the features of the edges, where there is an `edge_dim`.
            edge_type: (E,), from 0, where there are `edge_types`.
            mask: True for edges that may be read, (E,).

        Returns:
            (N, H d), or (N, d) for a mean of heads.
        """
        self._check(nodes, edge_index, source, edge_attr, edge_type, mask)
        read = nodes if source is None else source
        g = graph(
            edge_index,
            (nodes.shape[0], read.shape[0]),
            mask,
            edge_type,
            types=self.W_K.shape[0],
            loops=self.self_loops,
        )
        attr = None if edge_attr is None else self._attr(edge_attr, g)
        call = hooks.changed(self.attention, self._call(kept_rows(nodes, g.asking), kept_rows(read, g.read), g, attr))
        context = execute(call, self.attention.impl)
        hooks.seen(self.attention, call)
        joined = context.movedim(-3, -2)
        joined = joined.flatten(-2) if self.join == "concat" else joined.mean(-2)
        return joined if self.b is None else joined + self.b

    def _call(self, nodes: Tensor, source: Tensor, g: Graph, attr: Tensor | None) -> EdgeCall:
        """Everything that decides the result."""
        key = _projected(source, self.W_K, self.b_K)
        if self.W_Q is None:
            query = key if source is nodes else _projected(nodes, self.W_K, self.b_K)
        else:
            query = _projected(nodes, self.W_Q[None], None if self.b_Q is None else self.b_Q[None])
        value = key if self.W_V is None else _projected(source, self.W_V, None)
        by_edge = attr is not None and self.W_E is not None
        if attr is not None and self.W_E is not None:
            key = rows_at(key, g.edges.source) + _projected(attr, self.W_E[None], None)
        score, align = self.attention.score, self.attention.align
        score.check_widths(query, key)
        if autocasting(value.device) and value.dtype == torch.float32:
            value = value.to(torch.get_autocast_dtype(value.device.type))
        dropout = self.attention.dropout if self.training else 0.0
        random = dropout > 0.0 or align.needs_seed(self.training)
        before(score, query, key)
        before(align)
        return EdgeCall(
            form=score.reduce(query, key),
            value=value,
            align=align,
            query=query,
            key=key,
            mask=g.mask,
            dropout=dropout,
            training=self.training,
            seed=draw_seed(value.device) if random else None,
            edges=g.edges,
            by_edge=by_edge,
        )

    def _attr(self, attr: Tensor, g: Graph) -> Tensor:
        """Features of all edges: zeros where an edge may not be read, for a loop the mean of the other edges of its node."""
        count = attr.shape[0]
        allowed = None if g.mask.allowed is None else g.mask.allowed[:count]
        attr = kept_rows(attr, allowed)
        if not self.self_loops:
            return attr
        target = g.edges.target[:count]
        ones = attr.new_ones(count) if allowed is None else allowed.to(attr.dtype)
        # In place of `index_add`, which on a GPU adds in an order of its own each time.
        degrees = attr.new_zeros(g.edges.n_targets).index_put((target,), ones, accumulate=True)
        total = attr.new_zeros(g.edges.n_targets, attr.shape[-1]).index_put((target,), attr, accumulate=True)
        return torch.cat([attr, total / degrees.clamp(min=1).unsqueeze(-1)])

    @classmethod
    def from_geometric(cls, module: nn.Module, **options: Any) -> GraphAttention:
        """The same function as a `GATConv` or `GATv2Conv` of torch_geometric, with copies of its weights.

        Args:
            module: without `residual`, and with `fill_value="mean"`.
            **options: such as `impl`; everything else is the module's.
        """
        ours = cls(**graph_geometric.arguments(module), **options)
        first = next(module.parameters())
        ours = ours.to(first.device, first.dtype)
        ours.load_geometric(module)
        return ours.train(module.training)

    @torch.no_grad()
    def load_geometric(self, state: Mapping[str, Tensor] | nn.Module) -> None:
        """Take over the weights of a `GATConv` or `GATv2Conv`, or of its `state_dict`; a bias that it has not is zero."""
        if isinstance(state, nn.Module):
            state = state.state_dict()
        elif not isinstance(state, Mapping):
            raise TypeError(refusal("state", type(state).__name__, "a GATConv or a GATv2Conv, or its state_dict"))
        found, own = graph_geometric.translated(state, self.attention.score), dict(self.named_parameters())
        missing = sorted(name for name in own.keys() - found.keys() if not name.startswith("b"))
        if missing or not found.keys() <= own.keys():
            got = f"no {', '.join(missing)}" if missing else ", ".join(sorted(found.keys() - own.keys()))
            raise ValueError(refusal("state", got, f"what this module has: {', '.join(own)}"))
        for name, x in found.items():
            if not graph_geometric.fits(x.shape, own[name].shape):
                got = f"{name} of shape {tuple(x.shape)}"
                raise ValueError(
                    refusal("state", got, f"the heads and widths of this module, {tuple(own[name].shape)}")
                )
        for name, parameter in own.items():
            parameter.copy_(found[name].reshape(parameter.shape) if name in found else torch.zeros_like(parameter))

    def _check_parts(self, d: int) -> None:
        """Refuse scores and alignments that do not go along edges."""
        attention, score = self.attention, self.attention.score
        # What it prepares depends on more than a row of scores: positions, or the rows of other nodes.
        if type(attention.align).prepare is not Alignment.prepare:
            got = type(attention.align).__name__
            raise ValueError(refusal("align", got, "an alignment that needs no positions: neighbours have none"))
        if attention.key_map is not None or attention.value_map is not None:
            raise ValueError(
                refusal("score", "an attention with maps of its own", "one without: nodes are projected here")
            )
        if score.head_shape not in ((), (self.heads,)):
            raise ValueError(
                refusal("score", f"heads={score.head_shape}", f"heads={self.heads}, or none for one that all share")
            )
        if score.features not in (None, d):
            raise ValueError(refusal("features", score.features, f"the width of a head, {d}"))

    def _check(
        self,
        nodes: Tensor,
        edge_index: Tensor,
        source: Tensor | None,
        edge_attr: Tensor | None,
        edge_type: Tensor | None,
        mask: Tensor | None,
    ) -> None:
        """Refuse what does not fit, naming the argument."""
        read = () if source is None else (("source", source, self.W_K.shape[-1]),)
        for name, x, d in (("nodes", nodes, self._target_dim), *read):
            if isinstance(x, Tensor) and (x.dim() != 2 or x.shape[-1] != d):
                raise ValueError(refusal(name, f"shape {tuple(x.shape)}", f"(N, {d})"))
            operand(name, x, self.W_K, d)
        for name, x in (("edge_index", edge_index), ("edge_attr", edge_attr), ("edge_type", edge_type), ("mask", mask)):
            if not isinstance(x, Tensor) and (x is not None or name == "edge_index"):
                raise TypeError(refusal(name, type(x).__name__, "a tensor"))
        if source is not None and self.self_loops:
            fix = "Fix: self_loops=False."
            raise ValueError(refusal("source", "nodes of their own", "none: a loop leads from a node to itself", fix))
        if source is None and nodes.shape[-1] != self.W_K.shape[-1]:
            raise ValueError(refusal("source", None, f"(M, {self.W_K.shape[-1]})"))
        if not _is_whole(edge_index) or edge_index.dim() != 2 or edge_index.shape[0] != 2:
            got = f"a tensor of {edge_index.dtype}, shape {tuple(edge_index.shape)}"
            raise ValueError(refusal("edge_index", got, "integers (2, E), sources above targets"))
        E = edge_index.shape[1]
        if (edge_attr is None) != (self.W_E is None):
            expected = "nothing, without edge_dim" if self.W_E is None else f"features (E, {self.W_E.shape[-1]})"
            raise ValueError(refusal("edge_attr", None if edge_attr is None else "a tensor", expected))
        if edge_attr is not None and self.W_E is not None and edge_attr.shape != (E, self.W_E.shape[-1]):
            raise ValueError(refusal("edge_attr", f"shape {tuple(edge_attr.shape)}", f"{(E, self.W_E.shape[-1])}"))
        if edge_attr is not None and self.W_E is not None:
            operand("edge_attr", edge_attr, self.W_E)
        if (edge_type is None) != (self.edge_types is None):
            expected = "nothing, without edge_types" if self.edge_types is None else "the type of each edge, (E,)"
            raise ValueError(refusal("edge_type", None if edge_type is None else "a tensor", expected))
        if edge_type is not None and (not _is_whole(edge_type) or edge_type.shape != (E,)):
            got = f"a tensor of {edge_type.dtype}, shape {tuple(edge_type.shape)}"
            raise ValueError(refusal("edge_type", got, f"integers {(E,)}"))
        if mask is not None and (mask.dtype != torch.bool or mask.shape != (E,)):
            got = f"a tensor of {mask.dtype}, shape {tuple(mask.shape)}"
            raise ValueError(refusal("mask", got, f"booleans over the edges, {(E,)}"))

    @property
    def _target_dim(self) -> int:
        return self.W_K.shape[-1] if self.W_Q is None else self.W_Q.shape[-1]

    def extra_repr(self) -> str:
        kinds = "" if self.edge_types is None else f", edge_types={self.edge_types}"
        return f"heads={self.heads}, join={self.join!r}, self_loops={self.self_loops}{kinds}"


def _asks_as_it_reads(score: Score, alike: bool) -> bool:
    """Whether nodes ask with the matrix by which they are read: in GAT where nodes and edges are of one kind, elsewhere where asked for."""
    return (isinstance(score, GATScore) and alike) or (isinstance(score, GATv2Score) and score.shared)


def _is_whole(x: Tensor) -> bool:
    """Whether a tensor holds integers; booleans are none."""
    return not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool)


def _projected(x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    """Project (N, d) by all types and heads (T, H, d_h, d) with one product: (H, N T, d_h), the types of a node side by side."""
    flat = x @ W.flatten(0, 2).mT
    flat = flat if b is None else flat + b.flatten()
    return flat.view(-1, *W.shape[1:3]).movedim(-2, -3)
