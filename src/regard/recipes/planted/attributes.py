"""Something that is like the question in one respect."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from regard.recipes.planted.task import Batch, choice, hidden_signs, of_sign, one_hot, permutations, taken


@dataclass(frozen=True)
class AttributeLookup:
    """Read the item that has the colour of the query, or the one that has its shape, as a condition says, and say its sign.

    One item has the colour alone, another the shape alone. The query does not tell which is meant, nor does the condition tell what
    to look for.
    """

    n: int = 6
    codes: int = 8

    @property
    def dim(self) -> int:
        """Width of query and key: colour and shape."""
        return 2 * self.codes

    @property
    def classes(self) -> int:
        """Positive or not."""
        return 2

    @property
    def readout(self) -> Tensor:
        """The logits of the classes from the sign that is read, (classes, 1)."""
        return of_sign(1)

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `query` (count, dim), `condition` (count, 2), `key` (count, n, dim), `value` (count, n, 1); truth `key`."""
        halves, places = [], []
        for _ in range(2):
            codes = permutations(count, self.codes, generator)[:, : self.n]
            halves.append(codes)
            places.append(choice(count, self.n, generator))
        # No item has both: where the draws fall together, the second moves on.
        places[1] = torch.where(places[0] == places[1], (places[1] + 1) % self.n, places[1])
        asked = torch.cat([one_hot(taken(c, p), self.codes) for c, p in zip(halves, places, strict=True)], -1)
        which = choice(count, 2, generator)
        place = torch.where(which == 0, places[0], places[1])
        signs = hidden_signs(place, self.n, generator)
        inputs = {
            "query": asked,
            "condition": one_hot(which, 2),
            "key": torch.cat([one_hot(codes, self.codes) for codes in halves], -1),
            "value": signs.unsqueeze(-1),
        }
        return Batch(inputs, (taken(signs, place) > 0).long(), {"key": place})
