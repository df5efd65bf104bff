"""Something that was stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from regard.recipes.planted.task import Batch, choice, hidden_signs, of_sign, taken


@dataclass(frozen=True)
class StoredPattern:
    """Of several queries one is a stored key, with noise; the others are like nothing that is stored. Say the sign of that key.

    Nothing is to be learned: which query is meant can be told from how well the keys answer it.
    """

    n: int = 6
    candidates: int = 4
    dim: int = 32
    noise: float = 0.5

    @property
    def classes(self) -> int:
        """Positive or not."""
        return 2

    @property
    def readout(self) -> Tensor:
        """The logits of the classes from the sign that is read, (classes, 1)."""
        return of_sign(1)

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `query` (count, candidates, dim), `key` (count, n, dim), `value` (count, n, 1); truth `query` and `key`."""

        def units(*shape: int) -> Tensor:
            return torch.nn.functional.normalize(torch.randn(*shape, self.dim, generator=generator), dim=-1)

        key, query = units(count, self.n), units(count, self.candidates)
        place, which = choice(count, self.n, generator), choice(count, self.candidates, generator)
        noisy = torch.nn.functional.normalize(taken(key, place) + self.noise * units(count), dim=-1)
        meant = torch.arange(self.candidates) == which[:, None]
        query = torch.where(meant.unsqueeze(-1), noisy.unsqueeze(1), query)
        signs = hidden_signs(place, self.n, generator)
        inputs = {"query": query, "key": key, "value": signs.unsqueeze(-1)}
        return Batch(inputs, (taken(signs, place) > 0).long(), {"query": which, "key": place})
