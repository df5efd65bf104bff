"""A sequence that is to be written backwards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator

from regard.recipes.planted.task import Batch, choice


@dataclass(frozen=True)
class Reversal:
    """Write a sequence of any length up to n from its end to its beginning, then stop.

    Tokens are `begin`, `end` and the symbols after them; every source ends in `end` and is padded with it.
    """

    n: int = 6
    symbols: int = 8

    begin = 0
    end = 1

    @property
    def classes(self) -> int:
        """All tokens."""
        return 2 + self.symbols

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `source` and `target`, what was written before, both (count, n + 1), and `mask`, True for real tokens of the source.

        The target holds what is to be written; truth `source` says where each of it stands in the source.
        """
        n, place = self.n, torch.arange(self.n + 1)
        length = 1 + choice(count, n, generator).unsqueeze(-1)
        symbols = 2 + torch.randint(self.symbols, (count, n + 1), generator=generator)
        source = torch.where(place < length, symbols, self.end)
        # Token t of the target is token length - 1 - t of the source; after the last one stands the end.
        origin = torch.where(place < length, length - 1 - place, length)
        written = source.gather(1, origin)
        before = torch.cat([torch.full((count, 1), self.begin), written[:, :-1]], 1)
        return Batch({"source": source, "target": before, "mask": place <= length}, written, {"source": origin})
