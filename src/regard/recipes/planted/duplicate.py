"""A word that is to be written a second time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator

from regard.recipes.planted.task import Batch


@dataclass(frozen=True)
class Duplicate:
    """Write 0 w 0 w, where w is drawn anew each time: the second w can be told from the first alone (https://arxiv.org/abs/2001.04451).

    Every token of it stands at the same distance, `n`, before the place from which it is to be told; nothing nearer helps.

    Example:
        >>> batch = Duplicate(n=3, symbols=5).draw(2, Generator().manual_seed(0))
        >>> batch.inputs["tokens"].shape, batch.target.shape
        (torch.Size([2, 8]), torch.Size([2, 3]))
    """

    n: int = 511
    symbols: int = 127

    @property
    def length(self) -> int:
        """Of a whole sequence."""
        return 2 * self.n + 2

    @property
    def classes(self) -> int:
        """The symbols, from 1, and the 0 before each w."""
        return 1 + self.symbols

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `tokens` (count, 2 n + 2), target the second w (count, n), to be told at the places n + 1 to 2 n.

        Truth `tokens` says where in the first w each of it stands.
        """
        device = generator.device
        word = 1 + torch.randint(self.symbols, (count, self.n), generator=generator, device=device)
        once = torch.cat([word.new_zeros(count, 1), word], 1)
        place = 1 + torch.arange(self.n, device=device)
        return Batch({"tokens": torch.cat([once, once], 1)}, word, {"tokens": place.expand(count, self.n)})
