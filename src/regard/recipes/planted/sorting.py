"""Numbers that are to be put in order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator

from regard.recipes.planted.task import Batch


@dataclass(frozen=True)
class Sorting:
    """Say the positions of numbers, the smallest first."""

    n: int = 5

    @property
    def dim(self) -> int:
        """Width of a token."""
        return 1

    @property
    def classes(self) -> int:
        """The positions."""
        return self.n

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `tokens` (count, n, 1), numbers from 0 to 1; target (count, n), their positions in order."""
        numbers = torch.rand(count, self.n, generator=generator)
        return Batch({"tokens": numbers.unsqueeze(-1)}, numbers.argsort(-1))
