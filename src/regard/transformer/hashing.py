r"""Hashing of directions: vectors that point the same way mostly fall into the same bucket (https://arxiv.org/abs/2001.04451).

A random matrix $R$ of $c$ directions has $b = 2c$ buckets, $h(x) = \mathrm{argmax}\, [xR;\, -xR]$. Many buckets are pairs of few,

$$h(x) = h_1(x) + b_1 h_2(x), \qquad b = b_1 b_2,$$

and a vector is compared with $(b_1 + b_2) / 2$ directions in place of $b_1 b_2 / 2$: of $N$ vectors in $b \sim N$ buckets, $N^{3/2}$ times
rather than $N^2$.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from regard._errors import refusal
from regard.general.scores.base import width
from regard.ops.blockwise import CPU_PANEL_ELEMENTS, GPU_PANEL_ELEMENTS
from regard.ops.buckets import HOLE
from regard.ops.fill import where

# Directions of one hash; for more there are two.
MOST_DIRECTIONS = 64

BucketsLike = int | tuple[int, ...] | None


def check_buckets(buckets: BucketsLike) -> BucketsLike:
    """Return a number of buckets, or one for each of the hashes that make it up; or refuse them."""
    if buckets is None or buckets == 1:
        return buckets
    parts = (buckets,) if isinstance(buckets, int) else tuple(buckets)
    if not parts or any(width("buckets", part) % 2 for part in parts) or math.prod(parts) > HOLE:
        expected = (
            f"1, or an even number up to {HOLE - 1}: each direction and its opposite; or several, with such a product"
        )
        raise ValueError(refusal("buckets", buckets, expected))
    return buckets if isinstance(buckets, int) else parts


def directions(buckets: BucketsLike, n: int, chunk: int, padded: bool) -> tuple[int, ...]:
    """Directions of each hash, for n tokens of which some may be padding."""
    if buckets is not None:
        return tuple(part // 2 for part in ((buckets,) if isinstance(buckets, int) else buckets))
    first, second = _sides(-(-n // chunk))
    if not second:
        return (max(1, first),)
    if 4 * first * second > HOLE:
        fix = "Fix: a longer chunk, or so many buckets."
        raise ValueError(refusal("tokens", f"{n} of them in chunks of {chunk}", f"at most {HOLE} buckets", fix))
    # Without its padding a sequence may be short enough for one hash.
    return max(first, MOST_DIRECTIONS) if padded else first, second


def own_directions(real: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Directions that each of two hashes has for a sequence without its padding, (...): those of `directions`."""
    total = -(-real.sum(-1) // chunk)
    first = (total.double() / 2).sqrt().ceil().long()
    second = -(-total // (2 * first).clamp(min=1))
    two = total > MOST_DIRECTIONS
    return torch.where(two, first, total), where(two, second, 0)


def _sides(total: int) -> tuple[int, int]:
    """One direction, which is two buckets, for every chunk: all in one hash, or in two whose buckets are as many in pairs."""
    if total <= MOST_DIRECTIONS:
        return total, 0
    first = math.ceil(math.sqrt(total / 2))
    return first, -(-total // (2 * first))


def bucket_ids(query: Tensor, rotations: Tensor, counts: Sequence[int], own: Sequence[Tensor] | None = None) -> Tensor:
    """The bucket of each vector in every round, (..., H, R, N) in int16.

    Args:
        query: (..., H, N, d).
        rotations: the directions of all hashes, one hash after the other, (H, d, R, sum of counts).
        counts: how many directions each hash has.
        own: how many of them it has for each sequence, (...); all when not given.
    """
    parts = rotations.split(list(counts), -1)
    # With their opposites beside them: the largest product tells the side as well.
    table = torch.cat([side for part in parts for side in (part, -part)], -1).to(query.dtype)
    rounds, columns = table.shape[-2:]
    budget = CPU_PANEL_ELEMENTS if query.device.type == "cpu" else GPU_PANEL_ELEMENTS
    rows = max(1, budget // max(1, math.prod(query.shape[:-2]) * rounds * columns))
    limits: Sequence[Tensor | None] = (None,) * len(counts) if own is None else own
    found = [_of_panel(panel, table, counts, limits) for panel in query.split(rows, -2)]
    return found[0] if len(found) == 1 else torch.cat(found, -1)


def _of_panel(query: Tensor, table: Tensor, counts: Sequence[int], limits: Sequence[Tensor | None]) -> Tensor:
    """Buckets of some vectors (..., H, n, d), by the directions and their opposites (H, d, R, columns)."""
    turned = (query @ table.flatten(-2)).unflatten(-1, table.shape[-2:]).split([2 * count for count in counts], -1)
    each = []
    for sides, count, limit in zip(turned, counts, limits, strict=False):
        if limit is not None:
            there = torch.arange(2 * count, device=query.device) % count < limit[..., None, None, None, None]
            sides = where(there, sides, -math.inf)
        each.append(sides.argmax(-1))
    ids: Tensor = each[-1]
    for found, count in zip(each[-2::-1], counts[-2::-1], strict=True):
        ids = found + 2 * count * ids
    return ids.transpose(-1, -2).to(torch.int16, memory_format=torch.contiguous_format)
