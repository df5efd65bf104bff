"""Sequences of items that go round a circle in equal steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator

from regard.recipes.planted.task import Batch, choice


@dataclass(frozen=True)
class Strides:
    """Say which item comes next, where each sequence has a step of its own.

    No item tells the next one by itself; any two whose places are known do.
    """

    items: int = 11
    n: int = 6
    steps: int = 4

    @property
    def classes(self) -> int:
        """The items."""
        return self.items

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `items` (count, n) and `mask`, True for those that were seen, three at least; target the next one."""
        first, step = choice(count, self.items, generator), 1 + choice(count, self.steps, generator)
        length = 3 + choice(count, self.n - 2, generator)
        place = torch.arange(self.n)
        walk = (first[:, None] + step[:, None] * place) % self.items
        seen = place < length[:, None]
        return Batch({"items": torch.where(seen, walk, 0), "mask": seen}, (first + step * length) % self.items)
