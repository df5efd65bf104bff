"""A sequence in which every place is to say what stands at another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator

from regard.recipes.planted.task import Batch, one_hot


@dataclass(frozen=True)
class Mirror:
    """Say at every place which symbol stands at the same distance from the other end.

    Where to look is a matter of places alone, and no symbol tells anything of another.
    """

    n: int = 6
    symbols: int = 4

    @property
    def classes(self) -> int:
        """The symbols."""
        return self.symbols

    def draw(self, count: int, generator: Generator) -> Batch:
        """Input `tokens` (count, n, symbols); target (count, n); truth `tokens`, where each place should look."""
        symbols = torch.randint(self.symbols, (count, self.n), generator=generator)
        place = torch.arange(self.n).flip(0).expand(count, -1)
        return Batch({"tokens": one_hot(symbols, self.symbols)}, symbols.flip(1), {"tokens": place})
