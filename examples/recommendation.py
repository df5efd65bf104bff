"""Recommendation with long- and short-term preference: SHAN (Ying et al. 2018, https://doi.org/10.24963/ijcai.2018/546).

A user reads the items of the past into one vector, then that vector and the items of this session into another. Both levels ask
with the user: hierarchical attention with a basic query.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

import regard as rg
from regard.recipes.planted import Batch, accuracy, fit


def preference(dim: int) -> rg.Attention:
    """u · relu(W v + b) over items v, which are also what is read."""
    return rg.Attention("dot", key_map=nn.Sequential(nn.Linear(dim, dim), nn.ReLU()))


class Recommender(nn.Module):
    def __init__(self, users: int, items: int, dim: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.past, self.session = preference(dim), preference(dim)

    def forward(self, user: Tensor, past: Tensor, session: Tensor) -> Tensor:
        """Scores of all items as the next one."""
        u = self.users(user)
        long_term = self.past(u, self.items(past))
        current = torch.cat([long_term.unsqueeze(-2), self.items(session)], -2)
        return self.session(u, current) @ self.items.weight.mT


@dataclass(frozen=True)
class Shop:
    """Items have categories, users a favourite one. They buy the item of their favourite category that they have just seen."""

    users: int = 12
    categories: int = 6
    of_each: int = 4

    @property
    def classes(self) -> int:
        return self.categories * self.of_each

    def draw(self, count: int, generator: Generator) -> Batch:
        user = torch.randint(self.users, (count,), generator=generator)
        favourite = user % self.categories
        # One item of each category, in random order; of old, mostly of the favourite category.
        which = torch.randint(self.of_each, (count, self.categories), generator=generator)
        seen = torch.arange(self.categories) * self.of_each + which
        order = torch.rand(count, self.categories, generator=generator).argsort(-1)
        old = torch.randint(self.of_each, (count, 5), generator=generator) + (favourite * self.of_each)[:, None]
        other = torch.randint(self.classes, (count, 5), generator=generator)
        past = torch.where(torch.rand(count, 5, generator=generator) < 0.6, old, other)
        bought = seen[torch.arange(count), favourite]
        place = (order == favourite[:, None]).long().argmax(-1)
        return Batch({"user": user, "past": past, "session": seen.gather(1, order)}, bought, {"session": place})


def main(steps: int = 300) -> dict[str, float]:
    torch.manual_seed(0)
    shop = Shop()
    model = Recommender(shop.users, shop.classes, dim=16)
    fit(model, shop, steps=steps, lr=0.03)
    batch = shop.draw(512, Generator().manual_seed(1))
    with torch.no_grad(), rg.record(model) as trace:
        model(**batch.inputs)
        # The first of what is read in the session is the long-term vector.
        on_bought = trace["session"].weights[torch.arange(512), 1 + batch.truth["session"]].mean()
    found = {"hit rate": accuracy(model, shop), "chance": 1 / shop.categories, "weight on the item": float(on_bought)}
    print(", ".join(f"{name} {value:.2f}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main()
