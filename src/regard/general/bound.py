"""Masks of a call: of known sizes, and exact about which keys somebody may attend and which queries may attend something.

What nobody may read is zero-filled before anything is computed from it, so `keys` and `rows` must be right, not only safe. What users
write is in `masks.py`; binding one to the sizes of a call gives one of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard._errors import refusal
from regard.ops.banded import Reach
from regard.ops.fill import where
from regard.ops.packed import Pieces
from regard.ops.padded import Extents
from regard.ops.parallel.ranks import Shard
from regard.ops.places import are_known, indices, places, taken
from regard.ops.transforms import transformed

_SCAN_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Sizes:
    """The axes of a call: leading, queries, keys; of all ranks together, with the slice of this one, where `shard` is given."""

    lead: tuple[int, ...]
    nq: int
    n: int
    shard: Shard | None = None


class Bound:
    """A mask for a call of known sizes."""

    sizes: Sizes
    is_plain_causal = False
    is_causal_part = False  # whether it is some rows and columns of one that is, whose places are known
    is_filled = False  # whether what nobody may read, and queries that may read nothing, are zero already
    has_zeros = False  # whether keys and values alone are known to be zero where nobody may read them
    is_cleared = False  # whether whoever made it zeroes the results of queries that may attend nothing

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.sizes.nq, self.sizes.n)

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """What executions have made of the mask, for all calls that share it: the layers of a stack."""
        return {}

    @property
    def reach(self) -> Reach | None:
        """The band of keys around each query, where that is all the mask says beside which keys are real; None elsewhere."""
        return None

    @property
    def extents(self) -> Extents | None:
        """Where the real keys of each entry of the first axis begin and end, where that can be looked at for nothing; None elsewhere."""
        return None

    @property
    def is_keys_alone(self) -> bool:
        """Whether every query may attend the same keys."""
        return False

    def entries(self, chosen: Tensor) -> Bound:
        """The same for some entries of the first axis."""
        return self

    @property
    def pieces(self) -> Pieces | None:
        """Sequences that stand end to end and do not see each other, where that is all the mask says beside a band; None elsewhere."""
        return None

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        """Booleans that broadcast to (..., len(i), len(j))."""
        raise NotImplementedError

    @property
    def scans(self) -> bool:
        """Whether `keys` and `rows` look at every pair."""
        return type(self).keys is Bound.keys

    def meets(self, i: range, j: range) -> bool:
        """Whether any of these queries may attend any of these keys; False only where that is sure without looking."""
        return True

    def span(self, i: range) -> range:
        """Keys outside of which none of these queries may attend any, as far as that is sure without looking."""
        return range(self.sizes.n)

    def part(self, i: range, j: range) -> Bound:
        """Some queries of this rank beside some keys of all ranks."""
        got = f"{type(self).__name__.strip('_')}, a mask of what one rank holds"
        raise TypeError(refusal("mask", got, "inside parallel.context, one that knows the places of all ranks"))

    def also(self, other: Bound) -> Bound:
        """Allowed by both."""
        return both(self, other, self.sizes)

    def joined(self, other: Bound) -> Bound | None:
        """One mask of this kind that allows what both allow; None where there is none."""
        return None

    def packed(self) -> Bound | None:
        """Sequences end to end, of other numbers of queries than of keys: a band beside them counts positions within each."""
        return None

    def within(self, packed: Bound) -> Bound:
        """The same, with positions counted within these sequences."""
        return self

    def origins(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """First query and first key of each query's sequence, (Nq,), where sequences stand end to end; None where there is but one."""
        return None

    def keys(self, device: torch.device) -> Tensor | None:
        """Which keys at least one query may attend, (..., N); None for all."""
        return self._scan(device)[1]

    def rows(self, device: torch.device) -> Tensor | None:
        """Which queries may attend at least one key, (..., Nq); None for all."""
        return self._scan(device)[0]

    def ends(self, device: torch.device) -> Tensor:
        """One more than the last key that each query may attend, (..., Nq); zero where there is none."""
        place = torch.arange(1, self.sizes.n + 1, device=device)
        last = [where(tile, place, 0).amax(-1) for tile in self._panels(device) if self.sizes.n]
        return torch.cat(last, -1) if last else torch.zeros(self.sizes.nq, dtype=torch.int64, device=device)

    def _scan(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Look at every pair, some rows at a time."""
        rows, keys = [], torch.zeros(self.sizes.n, dtype=torch.bool, device=device)
        for tile in self._panels(device):
            rows.append(tile.any(-1))
            keys = keys | tile.any(-2)
        return (torch.cat(rows, -1) if rows else torch.zeros(0, dtype=torch.bool, device=device)), keys

    def _panels(self, device: torch.device) -> Iterator[Tensor]:
        """Booleans (..., some rows, N), until there are no more."""
        nq, n = self.sizes.nq, self.sizes.n
        pairs = math.prod(self.shape[:-2]) * n
        if not are_known(nq, pairs):
            # While a graph is traced a size may be a symbol, on which no loop should depend.
            tile = self.tile(places(0, nq), places(0, n), device)
            yield tile.expand(*tile.shape[:-2], nq, n)
            return
        step = max(1, _SCAN_ELEMENTS // max(1, pairs))
        for i in range(0, nq, step):
            part = range(i, min(i + step, nq))
            tile = self.tile(part, range(n), device)
            yield tile.expand(*tile.shape[:-2], len(part), n)


def _on(device: torch.device, allowed: Tensor) -> Tensor:
    if allowed.device != device:
        raise ValueError(refusal("mask", f"booleans on {allowed.device}", f"the device of the key, {device}"))
    return allowed


@dataclass(frozen=True)
class BoundPairs(Bound):
    """Booleans over pairs."""

    allowed: Tensor
    sizes: Sizes

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.allowed.shape)

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        allowed = self._two_axes(device)
        allowed = allowed if allowed.shape[-2] == 1 else taken(allowed, i, -2)
        return allowed if allowed.shape[-1] == 1 else taken(allowed, j, -1)

    def keys(self, device: torch.device) -> Tensor:
        allowed = self._whole(device)
        return allowed.any(-2).expand(*allowed.shape[:-2], self.sizes.n)

    def rows(self, device: torch.device) -> Tensor:
        allowed = self._whole(device)
        return allowed.any(-1).expand(*allowed.shape[:-2], self.sizes.nq)

    def _whole(self, device: torch.device) -> Tensor:
        """Not written out where an axis is 1, but empty where it is empty: nobody may attend anything there."""
        return self._two_axes(device)[..., : self.sizes.nq, : self.sizes.n]

    def _two_axes(self, device: torch.device) -> Tensor:
        allowed = _on(device, self.allowed)
        return allowed if allowed.dim() > 1 else allowed.reshape(1, -1)


@dataclass(frozen=True)
class BoundKeys(Bound):
    """The same keys for every query."""

    allowed: Tensor  # (..., N)
    sizes: Sizes
    has_zeros: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.allowed.shape[:-1], 1, self.sizes.n)

    @property
    def extents(self) -> Extents | None:
        # On a GPU looking would have the host wait; a subclass may have nothing to look at.
        if (
            torch.compiler.is_compiling()
            or transformed()
            or type(self.allowed) is not Tensor
            or not self.allowed.is_cpu
        ):
            return None
        if "extents" not in self.memo:
            self.memo["extents"] = self._looked_up()
        found: Extents = self.memo["extents"]
        return found

    def _looked_up(self) -> Extents:
        """Over all axes but the first and the keys."""
        axes = self.allowed.dim()
        real = self.allowed[None] if axes == 1 else self.allowed if axes == 2 else self.allowed.flatten(1, -2).any(1)
        if not self.sizes.n:
            return Extents((0,) * len(real), (0,) * len(real), (True,) * len(real))
        first, count = real.to(torch.uint8).argmax(-1), real.sum(-1)
        end = where(real, torch.arange(1, self.sizes.n + 1), 0).amax(-1)
        return Extents(*(tuple(x.tolist()) for x in (first, end, end - first == count)))

    @property
    def is_keys_alone(self) -> bool:
        return True

    def entries(self, chosen: Tensor) -> Bound:
        single = self.allowed.dim() == 1 or self.allowed.shape[0] == 1
        return self if single else replace(self, allowed=self.allowed[chosen])

    def span(self, i: range) -> range:
        extents = self.extents
        if extents is None or not extents.end:
            return super().span(i)
        ends = [(first, end) for first, end, _ in zip(*extents, strict=True) if end > first]
        return range(min(first for first, _ in ends), max(end for _, end in ends)) if ends else range(0)

    def joined(self, other: Bound) -> Bound | None:
        return BoundKeys(self.allowed & other.allowed, self.sizes) if isinstance(other, BoundKeys) else None

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        return _on(device, self.allowed)[..., None, j.start : j.stop]

    def keys(self, device: torch.device) -> Tensor:
        return self.allowed if self.sizes.nq else torch.zeros_like(self.allowed)

    def rows(self, device: torch.device) -> Tensor:
        alive = self.allowed.any(-1, keepdim=True)
        return alive.expand(*alive.shape[:-1], self.sizes.nq)

    def ends(self, device: torch.device) -> Tensor:
        if not self.sizes.n:
            return super().ends(device)
        last = where(self.allowed, torch.arange(1, self.sizes.n + 1, device=device), 0).amax(-1, keepdim=True)
        return last.expand(*last.shape[:-1], self.sizes.nq)


@dataclass(frozen=True)
class BoundBand(Bound):
    """Keys within some distance; the last query stands at the last key."""

    low: float
    high: float
    sizes: Sizes

    @property
    def offset(self) -> int:
        return self.sizes.n - self.sizes.nq

    @property
    def is_plain_causal(self) -> bool:  # type: ignore[override]
        return self.low == -math.inf and self.high == 0 and self.offset == 0

    @property
    def reach(self) -> Reach | None:
        bounded = self.offset == 0 and -math.inf < self.low <= self.high < math.inf
        return Reach(int(self.low), int(self.high)) if bounded else None

    def joined(self, other: Bound) -> Bound | None:
        if not isinstance(other, BoundBand):
            return None
        return BoundBand(max(self.low, other.low), min(self.high, other.high), self.sizes)

    def within(self, packed: Bound) -> Bound:
        return packed.joined(self) or self

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        distance = indices(j, device) - (indices(i, device)[:, None] + self.offset)
        return (distance >= self.low) & (distance <= self.high)

    def meets(self, i: range, j: range) -> bool:
        if not i or not j:
            return False
        nearest, farthest = j[0] - i[-1] - self.offset, j[-1] - i[0] - self.offset
        return farthest >= self.low and nearest <= self.high

    def span(self, i: range) -> range:
        end = i.stop + self.offset + self.high if i else 0
        return between(i.start + self.offset + self.low, end, self.sizes.n)

    def keys(self, device: torch.device) -> Tensor:
        j = torch.arange(self.sizes.n, device=device)
        first = (j - self.high).clamp(min=self.offset)
        last = (j - self.low).clamp(max=self.offset + self.sizes.nq - 1)
        return first <= last

    def rows(self, device: torch.device) -> Tensor:
        i = torch.arange(self.sizes.nq, device=device) + self.offset
        return (i + self.low).clamp(min=0) <= (i + self.high).clamp(max=self.sizes.n - 1)

    def ends(self, device: torch.device) -> Tensor:
        i = torch.arange(self.sizes.nq, device=device) + self.offset
        return where(self.rows(device), (i + self.high + 1).clamp(max=self.sizes.n).long(), 0)


@dataclass(frozen=True)
class BoundWhere(Bound):
    """A function of the indices."""

    function: Callable[[Tensor, Tensor], Tensor]
    sizes: Sizes

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.sizes.lead, self.sizes.nq, self.sizes.n)

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        allowed = self.function(indices(i, device)[:, None], indices(j, device)[None, :])
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
            kind = allowed.dtype if isinstance(allowed, Tensor) else type(allowed).__name__
            raise TypeError(refusal("mask", f"Where(...) that gives {kind}", "a boolean tensor"))
        whole = (*self.sizes.lead, i.stop - i.start, j.stop - j.start)
        if 0 not in whole and not broadcasts(tuple(allowed.shape), whole):
            got = f"Where(...) that gives shape {tuple(allowed.shape)} for {len(i)} queries and {len(j)} keys"
            fix = "Fix: compute it from i and j, which may be some of all indices: table[i, j]."
            raise ValueError(refusal("mask", got, f"a shape that broadcasts to {whole}", fix))
        return allowed


def both(left: Bound, right: Bound, sizes: Sizes) -> Bound:
    """What both allow, as one mask where their kinds make one."""
    joined = left.joined(right) or right.joined(left)
    if joined is not None:
        return joined
    packed = left.packed() or right.packed()
    if packed is not None:
        left, right = left.within(packed), right.within(packed)
    return BoundBoth(left, right, sizes)


@dataclass(frozen=True)
class BoundBoth(Bound):
    """Allowed by both."""

    left: Bound
    right: Bound
    sizes: Sizes

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(torch.broadcast_shapes(self.left.shape, self.right.shape))

    @property
    def reach(self) -> Reach | None:
        band, keys = self._band_and_keys()
        reach = None if band is None else band.reach
        return None if reach is None or keys is None else reach._replace(real=keys.allowed)

    @property
    def extents(self) -> Extents | None:
        band, keys = self._band_and_keys()
        return None if band is None or keys is None else keys.extents

    def entries(self, chosen: Tensor) -> Bound:
        return BoundBoth(self.left.entries(chosen), self.right.entries(chosen), self.sizes)

    def packed(self) -> Bound | None:
        return self.left.packed() or self.right.packed()

    def within(self, packed: Bound) -> Bound:
        return BoundBoth(self.left.within(packed), self.right.within(packed), self.sizes)

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        return self.left.tile(i, j, device) & self.right.tile(i, j, device)

    @property
    def scans(self) -> bool:
        return None in self._band_and_keys()

    def meets(self, i: range, j: range) -> bool:
        return self.left.meets(i, j) and self.right.meets(i, j)

    def span(self, i: range) -> range:
        left, right = self.left.span(i), self.right.span(i)
        return between(max(left.start, right.start), min(left.stop, right.stop), self.sizes.n)

    def keys(self, device: torch.device) -> Tensor | None:
        band, keys = self._band_and_keys()
        if band is None or keys is None:
            return super().keys(device)
        # Every query is allowed the same keys, so a key is read exactly if the band reaches it from some query.
        return band.keys(device) & keys.allowed

    def rows(self, device: torch.device) -> Tensor | None:
        band, keys = self._band_and_keys()
        if band is None or keys is None:
            return super().rows(device)
        # How many allowed keys lie before a position: the band of a query holds one exactly if the count grows over it.
        before = torch.nn.functional.pad(keys.allowed.cumsum(-1), (1, 0))
        i = torch.arange(self.sizes.nq, device=device) + band.offset
        first = (i + band.low).clamp(0, self.sizes.n).long()
        end = (i + band.high + 1).clamp(0, self.sizes.n).long()
        return (before[..., end] > before[..., first]) & (end > first)

    def ends(self, device: torch.device) -> Tensor:
        band, keys = self._band_and_keys()
        if band is None or keys is None or not self.sizes.n:
            return super().ends(device)
        place = torch.arange(1, self.sizes.n + 1, device=device)
        # The last allowed key up to each position: that of a query is the one up to where its band ends.
        last = where(keys.allowed, place, 0).cummax(-1).values[..., (band.ends(device) - 1).clamp(min=0)]
        rows = self.rows(device)
        assert rows is not None
        return where(rows, last, 0)

    def origins(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        return self.left.origins(device) or self.right.origins(device)

    def _band_and_keys(self) -> tuple[BoundBand | None, BoundKeys | None]:
        pair = (self.left, self.right)
        band = next((part for part in pair if isinstance(part, BoundBand)), None)
        keys = next((part for part in pair if isinstance(part, BoundKeys)), None)
        return band, keys


@dataclass(frozen=True)
class BoundEither(Bound):
    """Allowed by either."""

    left: Bound
    right: Bound
    sizes: Sizes

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(torch.broadcast_shapes(self.left.shape, self.right.shape))

    def packed(self) -> Bound | None:
        return self.left.packed() or self.right.packed()

    def within(self, packed: Bound) -> Bound:
        return BoundEither(self.left.within(packed), self.right.within(packed), self.sizes)

    def joined(self, other: Bound) -> Bound | None:
        if self.packed() is None:
            return None
        # A band counts positions as each side does: within sequences on the one, over the whole on the other.
        return BoundEither(both(self.left, other, self.sizes), both(self.right, other, self.sizes), self.sizes)

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        return self.left.tile(i, j, device) | self.right.tile(i, j, device)

    @property
    def scans(self) -> bool:
        return self.left.scans or self.right.scans

    def meets(self, i: range, j: range) -> bool:
        return self.left.meets(i, j) or self.right.meets(i, j)

    def span(self, i: range) -> range:
        left, right = self.left.span(i), self.right.span(i)
        if not left or not right:
            return left or right
        return range(min(left.start, right.start), max(left.stop, right.stop))

    def keys(self, device: torch.device) -> Tensor | None:
        return _either(self.left.keys(device), self.right.keys(device))

    def rows(self, device: torch.device) -> Tensor | None:
        return _either(self.left.rows(device), self.right.rows(device))


def _either(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    return None if left is None or right is None else left | right


def between(first: float, end: float, n: int) -> range:
    """The keys from the first up to the end, of so many."""
    start = int(max(0, min(first, n)))
    return range(start, int(max(start, min(end, n))))


def broadcasts(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to exactly `whole`, right-aligned."""
    return len(shape) <= len(whole) and all(
        size in (1, target) for size, target in zip(reversed(shape), reversed(whole), strict=False)
    )
