"""Something that comes in segments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from regard.recipes.planted.task import Batch, choice, of_sign


@dataclass(frozen=True)
class NoisySegments:
    """Say the sign that is written on two segments of the keys, between keys that hold louder numbers at random.

    A key tells by a number whether it lies in a segment: about 1 inside, about -1 outside, with noise of a standard deviation of
    `noise`, so that alone it is often wrong. Its neighbours know more. Whoever reads outside reads `loudness` times the sign.
    """

    n: int = 32
    shortest: int = 5
    longest: int = 8
    noise: float = 1.5
    loudness: float = 6.0

    @property
    def classes(self) -> int:
        """Positive or not."""
        return 2

    @property
    def readout(self) -> Tensor:
        """The logits of the classes from what is read, (classes, 1)."""
        return of_sign(1)

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `query` (count, 1), a one, `key` (count, n, 2), evidence and a one, `value` (count, n, 1); truth `inside` (count, n)."""
        half, place = self.n // 2, torch.arange(self.n)
        inside = torch.zeros(count, self.n, dtype=torch.bool)
        for first in (0, half):
            length = self.shortest + choice(count, self.longest - self.shortest + 1, generator)
            start = first + (torch.rand(count, generator=generator) * (half - length + 1)).long()
            inside |= (place >= start[:, None]) & (place < (start + length)[:, None])
        sign = 2 * choice(count, 2, generator) - 1
        evidence = 2.0 * inside - 1 + self.noise * torch.randn(count, self.n, generator=generator)
        loud = self.loudness * torch.randn(count, self.n, generator=generator)
        value = torch.where(inside, sign[:, None].float(), loud)
        key = torch.stack([evidence, torch.ones_like(evidence)], -1)
        inputs = {"query": torch.ones(count, 1), "key": key, "value": value.unsqueeze(-1)}
        return Batch(inputs, (sign > 0).long(), {"inside": inside})
