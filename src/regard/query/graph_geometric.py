"""Weights of torch_geometric's GATConv and GATv2Conv under the names they have here.

There, `att_src` belongs to the neighbour, where messages come from, and `att_dst` to the centre, where they go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import dropwhile
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard._errors import refusal
from regard.general.scores import Score
from regard.query.graph_parts import GATScore, GATv2Score

_NAMES = {
    GATScore: {
        "lin.weight": "W_K",
        "lin_src.weight": "W_K",
        "lin_dst.weight": "W_Q",
        "att_src": "attention.score.a_neighbour",
        "att_dst": "attention.score.a_centre",
        "bias": "b",
    },
    GATv2Score: {
        "lin_l.weight": "W_K",
        "lin_l.bias": "b_K",
        "lin_r.weight": "W_Q",
        "lin_r.bias": "b_Q",
        "lin_edge.weight": "W_E",
        "att": "attention.score.w",
        "bias": "b",
    },
}


def arguments(module: nn.Module) -> dict[str, Any]:
    """What makes a `GraphAttention` of a module's kind and sizes."""
    kind, given = type(module).__name__, cast(Any, module)
    if kind not in ("GATConv", "GATv2Conv"):
        raise TypeError(refusal("module", kind, "a GATConv or a GATv2Conv of torch_geometric"))
    if getattr(given, "residual", False):
        raise ValueError(refusal("module", "one with residual=True", "one without: add what you need to the result"))
    if given.edge_dim is not None and given.add_self_loops and given.fill_value != "mean":
        raise ValueError(refusal("module", f"fill_value={given.fill_value!r}", "'mean', of the edges of a node"))
    score = GATScore if kind == "GATConv" else GATv2Score
    dim, shared = given.in_channels, {"shared": True} if getattr(given, "share_weights", False) else {}
    return {
        # There sources stand before targets.
        "dim": dim if isinstance(dim, int) else (dim[1], dim[0]),
        "heads": given.heads,
        "head_dim": given.out_channels,
        "score": score(given.out_channels, given.negative_slope, heads=given.heads, **shared),
        "join": "concat" if given.concat else "mean",
        "edge_dim": given.edge_dim,
        "self_loops": given.add_self_loops,
        "bias": given.bias is not None,
        "dropout": given.dropout,
    }


def fits(theirs: Sequence[int], ours: Sequence[int]) -> bool:
    """Whether a shape is ours, or ours with the heads put together, in front of a width or of nothing."""
    their, own = (tuple(dropwhile(lambda size: size == 1, shape)) for shape in (theirs, ours))
    together = (math.prod(own[:-1]), *own[-1:])
    return their in (own, tuple(dropwhile(lambda size: size == 1, together)), (math.prod(own),))


def translated(state: Mapping[str, Tensor], score: Score) -> dict[str, Tensor]:
    """A state by the names of `GraphAttention`, in any shape of as many numbers."""
    if not isinstance(score, GATScore | GATv2Score):
        raise ValueError(refusal("state", "weights of a graph attention", "a module with score='gat' or 'gatv2'"))
    left = dict(state)
    if isinstance(score, GATv2Score) and score.shared:
        for theirs, same in (("lin_r.weight", "lin_l.weight"), ("lin_r.bias", "lin_l.bias")):
            if theirs in left and not (same in left and torch.equal(left.pop(theirs), left[same])):
                raise ValueError(refusal("state", f"{theirs} that is not {same}", "one matrix, for shared=True"))
    found = {ours: left.pop(theirs) for theirs, ours in _NAMES[type(score)].items() if theirs in left}
    if isinstance(score, GATScore) and {"att_edge", "lin_edge.weight"} <= left.keys():
        # There an edge has a vector of its own; here it speaks through that of the neighbour.
        neighbour, of_edge = found["attention.score.a_neighbour"][0], left.pop("att_edge")[0]
        through = neighbour / neighbour.square().sum(-1, keepdim=True)
        W_E = left.pop("lin_edge.weight").unflatten(0, of_edge.shape)
        found["W_E"] = through[..., None] * (of_edge[:, None] @ W_E)
    if left:
        raise ValueError(refusal("state", sorted(left), f"the weights of a layer for {type(score).__name__}"))
    return found
