r"""Which tokens see each other: those of one bucket, in one chunk or in neighbouring ones, in some round of hashing.

In every round the tokens are sorted by bucket and cut into chunks of $m$; a token sees those of its bucket in its own chunk and in
the neighbouring ones. A pair counts once, however many rounds see it. A token sees itself only where it sees nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.ops.call import Mask

# The bucket of a token that takes no part; larger than any other, so that such tokens are sorted to the end.
HOLE = torch.iinfo(torch.int16).max


@dataclass(frozen=True, eq=False)
class Buckets:
    """The buckets of some tokens in every round, and where sorting puts the tokens."""

    ids: Tensor  # (..., R, N), from 0; HOLE for a token that takes no part
    order: Tensor  # (..., R, N), which token stands at each place
    in_order: Tensor  # (..., R, N), the bucket of the token at each place
    rank: Tensor  # (..., R, N), the place of each token
    chunk: int
    across: bool  # whether chunks are all that counts

    @staticmethod
    def of(ids: Tensor, chunk: int, across: bool = False) -> Buckets:
        """Sort tokens by bucket, those of one bucket as they stand."""
        in_order, order = ids.sort(dim=-1, stable=True)
        place = torch.arange(ids.shape[-1], device=ids.device).expand_as(order)
        rank = torch.empty_like(order).scatter(-1, order, place)
        return Buckets(ids, order, in_order, rank, max(1, min(chunk, ids.shape[-1])), across)

    def over(self, lead: tuple[int, ...]) -> Buckets:
        """The same for all of these leading axes."""
        if tuple(self.ids.shape[:-2]) == lead:
            return self
        ids, order, in_order, rank = (
            x.expand(*lead, *x.shape[-2:]) for x in (self.ids, self.order, self.in_order, self.rank)
        )
        return replace(self, ids=ids, order=order, in_order=in_order, rank=rank)

    @property
    def rounds(self) -> int:
        return self.ids.shape[-2]

    @property
    def chunks(self) -> int:
        """How many there are in a round."""
        return -(-self.ids.shape[-1] // self.chunk)

    @property
    def spots(self) -> Tensor:
        """Bucket and chunk of each token as one number: those of one bucket in neighbouring chunks differ by one."""
        chunk = self.rank // self.chunk
        return chunk if self.across else self.ids.long() * (2 * self.chunks + 2) + chunk


@dataclass(frozen=True, eq=False)
class HashedMask:
    """Who sees whom in at least one round, (..., N, N), within a band of distances and whatever else is allowed."""

    buckets: Buckets
    low: float = -math.inf
    high: float = math.inf
    others: Mask | None = None

    is_filled = True

    @property
    def ahead(self) -> bool:
        """Whether the next chunk is seen: not where nobody looks ahead."""
        return self.high > 0

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, _, n = self.buckets.ids.shape
        return (*lead, n, n)

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        """Booleans (..., len(i), len(j))."""
        n, rows = self.shape[-1], slice(i.start, i.stop)
        spots, seen = self.buckets.spots, torch.zeros((), dtype=torch.bool, device=device)
        for r in range(self.buckets.rounds):
            apart = spots[..., r, rows, None] - spots[..., r, None, :]
            seen = seen | (apart == 0) | (apart == 1) | ((apart == -1) if self.ahead else False)
        real = self.buckets.ids[..., 0, :] != HOLE
        position = torch.arange(n, device=device)
        distance = position - position[rows, None]
        seen = seen & real[..., rows, None] & real[..., None, :] & (distance >= self.low) & (distance <= self.high)
        if self.others is not None:
            seen = seen & self.others.tile(i, range(n), device)
        own = distance == 0
        alone = ~(seen & ~own).any(-1, keepdim=True)
        return (seen & (~own | alone))[..., j.start : j.stop]

    def keys(self, device: torch.device) -> Tensor | None:
        """Tokens that take part."""
        return self.buckets.ids[..., 0, :] != HOLE

    def rows(self, device: torch.device) -> Tensor | None:
        n = self.shape[-1]
        if self.low <= 0 <= self.high and self.others is None:
            return self.keys(device)
        return torch.cat([self.tile(range(i, i + 1), range(n), device).any(-1) for i in range(n)], -1) if n else None

    def also(self, other: Mask) -> HashedMask:
        """Allowed by both; the chunks stay as they are."""
        return replace(self, others=other if self.others is None else _Both(self.others, other))


@dataclass(frozen=True)
class _Both:
    """Allowed by two masks."""

    left: Mask
    right: Mask

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(torch.broadcast_shapes(self.left.shape, self.right.shape))

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        return self.left.tile(i, j, device) & self.right.tile(i, j, device)

    def keys(self, device: torch.device) -> Tensor | None:
        return None

    def rows(self, device: torch.device) -> Tensor | None:
        return None
