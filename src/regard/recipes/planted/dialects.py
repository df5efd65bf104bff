"""Questions that are asked in several ways."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from regard.recipes.planted.task import Batch, choice, hidden_signs, of_sign, one_hot, permutations, taken


@dataclass(frozen=True)
class Dialects:
    """Read the item that a query means, and say its sign; what a code means depends on the dialect of the query.

    In the first dialect a query names the code of the item itself, in the second that before it. Items of both readings are there: whoever
    asks in one way for all is left with a guess between two.
    """

    n: int = 6
    codes: int = 8

    @property
    def token_dim(self) -> int:
        """Width of a query: dialect and code."""
        return self.codes + 2

    @property
    def classes(self) -> int:
        """Positive or not."""
        return 2

    @property
    def readout(self) -> Tensor:
        """The logits of the classes from the sign that is read, (classes, 1)."""
        return of_sign(1)

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `query` (count, codes + 2), `key` (count, n, codes), `value` (count, n, 1); truth `key` and `dialect`."""
        named = choice(count, self.codes, generator)
        following = (named + 1) % self.codes
        # Any other codes beside the two that the query may mean.
        rest = 1 + permutations(count, self.codes - 2, generator)[:, : self.n - 2]
        codes = torch.cat([named[:, None], following[:, None], (following[:, None] + rest) % self.codes], 1)
        order = permutations(count, self.n, generator)
        dialect = choice(count, 2, generator)
        place = (order == dialect[:, None]).long().argmax(-1)
        signs = hidden_signs(place, self.n, generator)
        query = torch.cat([one_hot(dialect, 2), one_hot(named, self.codes)], -1)
        inputs = {"query": query, "key": one_hot(codes.gather(1, order), self.codes), "value": signs.unsqueeze(-1)}
        return Batch(inputs, (taken(signs, place) > 0).long(), {"key": place, "dialect": dialect})
