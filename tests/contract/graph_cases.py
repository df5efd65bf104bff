"""Graph attention as a case: every target has an edge from every source of its batch entry, and the mask is one of edges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import regard as rg
from tests.contract.cases import WIDTHS, Case, Inputs

HEADS, HEAD_DIM, EDGE_DIM, TYPES = 2, 3, 5, 2


def edges_of(b: int, nq: int, n: int, device: torch.device) -> Tensor:
    """All edges of b graphs that have nothing to do with each other."""
    target, source = torch.arange(b * nq, device=device), torch.arange(b * n, device=device)
    pairs = (b, nq, n)
    targets = target.view(b, nq, 1).expand(pairs).reshape(-1)
    return torch.stack([source.view(b, 1, n).expand(pairs).reshape(-1), targets])


def _along_edges(module: nn.Module, inputs: Inputs) -> Tensor:
    targets, sources, mask = inputs.tensors["query"], inputs.tensors["key"], inputs.masks["mask"]
    edge_index = edges_of(*mask.shape, mask.device)
    # Places within a batch entry.
    j, i = edge_index[0] % max(mask.shape[2], 1), edge_index[1] % max(mask.shape[1], 1)
    more: dict[str, Any] = {}
    if module.W_E is not None:
        # Features of the edge that neither end has alone.
        waves = [torch.sin((k + 1.0) * j + i) for k in range(EDGE_DIM)]
        more["edge_attr"] = torch.stack(waves, -1).to(targets.dtype)
    if module.edge_types is not None:
        more["edge_type"] = (i + j) % TYPES
    found = module(targets.flatten(0, 1), edge_index, sources.flatten(0, 1), mask=mask.flatten(), **more)
    return found.unflatten(0, targets.shape[:2])


def _case(entry: str, name: str, **options: Any) -> Case:
    widths = (WIDTHS["query_dim"], WIDTHS["key_dim"])
    options = {"self_loops": False, "bias": False, "head_dim": HEAD_DIM} | options
    return Case(
        name=name,
        entry=entry,
        make=lambda: rg.GraphAttention(widths, HEADS, **options),
        tensors={"query": ("b", "nq", widths[0]), "key": ("b", "n", widths[1])},
        masks={"mask": ("b", "nq", "n")},
        result=("b", "nq", HEADS * HEAD_DIM if options.get("join") != "mean" else HEAD_DIM),
        call=_along_edges,
    )


CASES = [
    _case("graph-attention", "graph-attention"),
    _case("graph-attention", "graph-attention, features of edges", edge_dim=EDGE_DIM, join="mean"),
    _case("graph-attention", "graph-attention, types of edges", edge_types=TYPES),
    _case("gat", "gat", score="gat"),
]
