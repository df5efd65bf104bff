"""What the tests of this family share."""

from __future__ import annotations

import torch
from torch import Tensor

import regard as rg
from tests.feature.common import normal

POSITIONS = ("sinusoidal", "learned", "rotary", "alibi", "relative", "transformer-xl", "directional")
RELATIVE = POSITIONS[2:]
EXECUTIONS = {
    "auto": lambda: rg.execution("auto"),
    "dense": lambda: rg.execution("dense"),
    "blockwise": lambda: rg.execution("blockwise", panel=2),
}
REAL = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed)
