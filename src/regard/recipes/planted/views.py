"""The same things, seen in two ways."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from regard.recipes.planted.task import Batch, permutations


@dataclass(frozen=True)
class PairedViews:
    """Two sets of views of the same things, through different linear maps and in different orders: which is which?

    The maps are the same in every example; noise is added to each view.
    """

    n: int = 5
    things: int = 6
    first_dim: int = 8
    second_dim: int = 11
    noise: float = 0.1

    @property
    def classes(self) -> int:
        """Places of the partner."""
        return self.n

    def _map(self, dim: int, seed: int) -> Tensor:
        generator = Generator().manual_seed(seed)
        return torch.randn(dim, self.things, generator=generator) / math.sqrt(self.things)

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `first` (count, n, first_dim) and `second` (count, n, second_dim); target (count, n), the partner of each of the first."""
        things = torch.randn(count, self.n, self.things, generator=generator)
        order = permutations(count, self.n, generator)
        others = things.gather(1, order.unsqueeze(-1).expand_as(things))
        views = []
        for seen, dim, seed in ((things, self.first_dim, 1), (others, self.second_dim, 2)):
            view = seen @ self._map(dim, seed).mT
            views.append(view + self.noise * torch.randn(view.shape, generator=generator))
        partner = order.argsort(-1)
        return Batch({"first": views[0], "second": views[1]}, partner, {"second": partner})
