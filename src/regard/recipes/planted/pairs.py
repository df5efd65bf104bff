"""Something that has a partner."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from regard.recipes.planted.task import Batch, choice, hidden_signs, of_sign, one_hot, permutations, taken


@dataclass(frozen=True)
class MatchingPair:
    """Find the one item of the first set that has a partner in the second, and say both their signs.

    An item is a code and a sign. The sets share exactly one code. A mean of items tells nothing about its sign; nor does a set
    by itself.
    """

    n: int = 6
    codes: int = 12

    @property
    def dim(self) -> int:
        """Width of an item."""
        return self.codes + 1

    @property
    def classes(self) -> int:
        """Of both signs."""
        return 4

    @property
    def readout(self) -> Tensor:
        """The logits of the classes from the two items of the pair, (classes, 2 dim)."""
        both = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]])
        weight = torch.zeros(self.classes, 2, self.dim)
        weight[..., -1] = both
        return weight.flatten(1)

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `first` and `second`, (count, n, dim); truth by the same names."""
        codes = permutations(count, self.codes, generator)
        place1, set1 = self._set(codes[:, : self.n], self.n - 1, generator)
        place2, set2 = self._set(codes[:, self.n - 1 : 2 * self.n - 1], 0, generator)
        signs = [taken(items, place)[:, -1] > 0 for items, place in ((set1, place1), (set2, place2))]
        target = 2 * signs[0].long() + signs[1].long()
        return Batch({"first": set1, "second": set2}, target, {"first": place1, "second": place2})

    def _set(self, codes: Tensor, shared: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Shuffle codes, add signs; tell where the shared one went."""
        order = permutations(len(codes), self.n, generator)
        place = (order == shared).long().argmax(-1)
        signs = hidden_signs(place, self.n, generator)
        return place, torch.cat([one_hot(codes.gather(1, order), self.codes), signs[..., None]], -1)


@dataclass(frozen=True)
class Lookup:
    """Read the item that has the code of the query, and say its sign: attention in its simplest form."""

    n: int = 6
    codes: int = 12

    @property
    def dim(self) -> int:
        """Width of an item."""
        return self.codes + 1

    @property
    def classes(self) -> int:
        """Positive or not."""
        return 2

    @property
    def readout(self) -> Tensor:
        """The logits of the classes from the item, (classes, dim)."""
        return of_sign(self.dim)

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `query` (count, codes) and `key` (count, n, dim); truth `key`."""
        codes = permutations(count, self.codes, generator)[:, : self.n]
        place = choice(count, self.n, generator)
        signs = hidden_signs(place, self.n, generator)
        items = torch.cat([one_hot(codes, self.codes), signs[..., None]], -1)
        query = one_hot(taken(codes, place), self.codes)
        return Batch({"query": query, "key": items}, (taken(signs, place) > 0).long(), {"key": place})
