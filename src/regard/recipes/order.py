"""Which examples an update sees: a function of the seed and the number of the update alone, so that a run can be resumed anywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Examples of so many batches are sorted by length together, so that those of a batch are nearly equally long.
_POOL = 32


class Order:
    """Every example once before any is seen again, in an order that differs from round to round.

    Args:
        count: number of examples.
        batch: examples of an update; all of them where there are fewer.
        seed: of the order.
        lengths: of the examples, where batches of like lengths are wanted: less padding, and fewer orders.

    Example:
        >>> order = Order(6, 2, seed=0)
        >>> sorted(order.chosen(0) + order.chosen(1) + order.chosen(2))
        [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, count: int, batch: int, seed: int, lengths: Sequence[int] | None = None) -> None:
        self.count, self.batch, self.seed = count, min(batch, count), seed
        self.lengths = None if lengths is None else torch.tensor(lengths)
        # What does not fill a batch waits for another round: no update is noisier than the others.
        self.rounds = count // self.batch
        self._round, self._batches = -1, torch.empty(0, dtype=torch.long)

    def chosen(self, update: int) -> list[int]:
        """Numbers of the examples of an update."""
        number, place = divmod(update, self.rounds)
        if number != self._round:
            self._round, self._batches = number, self._drawn(number)
        found: list[int] = self._batches[place].tolist()
        return found

    def _drawn(self, number: int) -> torch.Tensor:
        """The batches of a round, (rounds, batch)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = torch.randperm(self.count, generator=generator)[: self.rounds * self.batch]
        if self.lengths is None:
            return order.reshape(self.rounds, self.batch)
        pools = order.split(self.batch * _POOL)
        order = torch.cat([pool[self.lengths[pool].argsort(stable=True)] for pool in pools])
        return order.reshape(self.rounds, self.batch)[torch.randperm(self.rounds, generator=generator)]
