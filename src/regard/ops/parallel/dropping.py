"""Dropout of tokens that ranks share: which numbers are dropped is drawn by the tokens' places in the whole sequence."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.ops.blockwise import CPU_PANEL_ELEMENTS, GPU_PANEL_ELEMENTS
from regard.ops.fill import where
from regard.ops.parallel.ranks import shard_of
from regard.ops.random import DROPOUT, at_least


def dropped_by_place(x: Tensor, p: float) -> Tensor:
    """Drop numbers of this rank's tokens (..., N, d), as a context of one rank would those of all. Every rank must ask."""
    tokens = x if x.dim() > 1 else x.unsqueeze(0)
    *lead, n, width = tokens.shape
    same = {"dropout": p, "width": width}
    shard = shard_of(n, n, tuple(lead), what="dropping what tokens hold", same=same, drawn_on=x.device)
    assert shard is not None
    assert shard.seed is not None
    keep = torch.empty(tokens.shape, dtype=torch.bool, device=x.device)
    # A counter and its words take many times the room of what they decide.
    most = CPU_PANEL_ELEMENTS if x.device.type == "cpu" else GPU_PANEL_ELEMENTS
    rows = max(1, most // max(1, math.prod(lead) * width))
    for i in range(0, n, rows):
        places = range(shard.first_query + i, shard.first_query + min(i + rows, n))
        keep[..., i : i + rows, :] = at_least(p, shard.seed, tuple(lead), None, places, range(width), DROPOUT)
    return where(keep.view(x.shape), x / (1.0 - p) if p < 1.0 else x, 0.0)
