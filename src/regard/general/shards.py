"""Masks of a sequence that ranks share: every rank knows the mask of the whole, and looks at its own part of it.

What a mask says by positions (`Causal`, `Window`, `Padding`, `Where`) it says of the positions in the whole sequence. What is written out
goes with what the rank holds: `Keys`, and booleans without an axis of queries, with its keys; others with its queries, over all keys.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regard._errors import refusal
from regard.general.bound import Bound, BoundEither, Sizes, between, broadcasts
from regard.general.masks import And, Keys, Mask, Or, Padding, Pairs, Where
from regard.ops.banded import Reach
from regard.ops.parallel.ranks import Shard, shard_of

# Letters of a mask's description.
_LONGEST = 80


def bound_over_ranks(mask: Mask, sizes: Sizes) -> Bound:
    """A mask for the queries and keys of this rank; every rank must ask."""
    shard = shard_of(sizes.nq, sizes.n, sizes.lead, same={"mask": _said(mask)})
    assert shard is not None
    whole = replace(sizes, nq=shard.nq, n=shard.n, shard=shard)
    first, own = shard.first_key, shard.first_query
    return _BoundPart(
        _whole(mask, whole, sizes), shard, range(own, own + sizes.nq), range(first, first + sizes.n), sizes
    )


def _said(mask: Mask) -> str:
    """What a mask says of positions in the whole sequence, in words; of what goes with a rank's own tokens, its kind alone."""
    if isinstance(mask, And | Or):
        return f"({_said(mask.left)} {'&' if isinstance(mask, And) else '|'} {_said(mask.right)})"
    # To read lengths off a device would stall it.
    told = not isinstance(mask, Keys | Pairs | Where) and not (isinstance(mask, Padding) and mask.lengths.is_cuda)
    words = repr(mask) if told else type(mask).__name__
    # A note between ranks has little room.
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}… ({zlib.crc32(words.encode()):08x})"


def _whole(mask: Mask, whole: Sizes, own: Sizes) -> Bound:
    """The mask of all ranks."""
    if isinstance(mask, And):
        return _whole(mask.left, whole, own).also(_whole(mask.right, whole, own))
    if isinstance(mask, Or):
        return BoundEither(_whole(mask.left, whole, own), _whole(mask.right, whole, own), whole)
    if isinstance(mask, Keys):
        return _whole_keys(mask, whole, own)
    if isinstance(mask, Pairs):
        return _whole_pairs(mask, whole, own)
    if type(mask).bind is not Mask.bind:
        expected = "inside parallel.context, a mask that knows the places of all ranks"
        raise TypeError(refusal("mask", type(mask).__name__, expected))
    return mask._bind(whole)


def _whole_keys(mask: Keys, whole: Sizes, own: Sizes) -> Bound:
    mask._bind(replace(own, shard=whole.shard))  # refuses what does not fit the keys of this rank
    assert whole.shard is not None
    allowed = mask.allowed.expand(*mask.allowed.shape[:-1], own.n)
    ranks = whole.shard.ranks
    ranks.agree("sharing a mask of keys", {"mask": [*allowed.shape[:-1], "keys"]}, {})
    return Keys(ranks.gathered(allowed, -1, whole.shard.keys))._bind(whole)


def _whole_pairs(mask: Pairs, whole: Sizes, own: Sizes) -> Bound:
    assert whole.shard is not None
    ranks = whole.shard.ranks
    allowed = mask.allowed if mask.allowed.dim() > 1 else mask.allowed.reshape(1, -1)
    lead, (rows, columns) = tuple(allowed.shape[:-2]), allowed.shape[-2:]
    # Which of the two it is must be seen in all ranks together: a single key looks like no axis of keys at all.
    said = ranks.agree("sharing a mask", {"mask": len(lead)}, {"lead": lead, "rows": rows, "columns": columns})
    if all(each["rows"] == 1 and each["columns"] == n for each, n in zip(said, whole.shard.keys, strict=True)):
        ranks.agree("sharing a mask of keys", {"mask": [*lead, "keys"]}, {})
        return Pairs(ranks.gathered(allowed, -1, whole.shard.keys))._bind(whole)
    fits = [
        each["rows"] in (1, nq) and each["columns"] in (1, whole.n) and broadcasts(tuple(each["lead"]), own.lead)
        for each, nq in zip(said, whole.shard.queries, strict=True)
    ]
    if not all(fits):
        got = "; ".join(f"rank {r}: {(*each['lead'], each['rows'], each['columns'])}" for r, each in enumerate(said))
        expected = (
            f"the rank's queries over the keys of all ranks, (..., {own.nq}, {whole.n}), or its keys, (..., 1, {own.n})"
        )
        raise ValueError(refusal("mask", f"shapes {got}", expected))
    return _BoundOwnRows(allowed, whole)


@dataclass(frozen=True)
class _BoundOwnRows(Bound):
    """Booleans of this rank's queries over the keys of all."""

    allowed: Tensor  # (..., Nq of this rank or 1, N of all ranks or 1)
    sizes: Sizes
    scans = True

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, rows, columns = self.allowed.shape
        return (*lead, 1 if rows == 1 else self.sizes.nq, columns)

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        assert self.sizes.shard is not None
        first = self.sizes.shard.first_query
        rows = slice(None) if self.allowed.shape[-2] == 1 else slice(i.start - first, i.stop - first)
        columns = slice(None) if self.allowed.shape[-1] == 1 else slice(j.start, j.stop)
        return self.allowed[..., rows, columns]


@dataclass(frozen=True)
class _BoundPart(Bound):
    """Some queries and some keys of a mask of all ranks."""

    bound: Bound
    shard: Shard
    places: range  # of the queries
    key_places: range
    sizes: Sizes
    _known: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, rows, columns = self.bound.shape
        return (*lead, 1 if rows == 1 else len(self.places), 1 if columns == 1 else len(self.key_places))

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        return self.bound.tile(_within(self.places, i), _within(self.key_places, j), device)

    def meets(self, i: range, j: range) -> bool:
        return self.bound.meets(_within(self.places, i), _within(self.key_places, j))

    def span(self, i: range) -> range:
        reached, own = self.bound.span(_within(self.places, i)), self.key_places
        start = max(reached.start, own.start) - own.start
        return between(start, min(reached.stop, own.stop) - own.start, len(own))

    @property
    def is_causal_part(self) -> bool:  # type: ignore[override]
        return self.bound.is_plain_causal

    @property
    def reach(self) -> Reach | None:
        reach = self.bound.reach
        if reach is None:
            return None
        real = None if reach.real is None else _cut(reach.real, self.key_places)
        return reach._replace(real=real, ahead=self.places.start - self.key_places.start)

    def part(self, i: range, j: range) -> Bound:
        if self.shard.ranks.size == 1 and (len(i), len(j)) == (self.shard.nq, self.shard.n):
            return self.bound
        return self._part(i, j)

    def _part(self, i: range, j: range) -> _BoundPart:
        return _BoundPart(self.bound, self.shard, _within(self.places, i), j, replace(self.sizes, nq=len(i), n=len(j)))

    def also(self, other: Bound) -> Bound:
        if not isinstance(other, _BoundPart):
            return super().also(other)
        return replace(self, bound=self.bound.also(other.bound), _known={})

    def keys(self, device: torch.device) -> Tensor | None:
        """Which of these keys a query of any rank may attend. Every rank must ask."""
        found: Tensor | None = self._once("keys", lambda: self._cut_keys(device))
        return found

    def rows(self, device: torch.device) -> Tensor | None:
        found: Tensor | None = self._once("rows", lambda: self._cut_rows(device))
        return found

    def ends(self, device: torch.device) -> Tensor:
        if self.bound.scans:
            return super(_BoundPart, self._over_all()).ends(device)
        return _cut(self.bound.ends(device), self.places)

    def origins(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        found = self.bound.origins(device)
        return None if found is None else (_cut(found[0], self.places), _cut(found[1], self.places))

    def _cut_keys(self, device: torch.device) -> Tensor | None:
        if not self.bound.scans:
            found = self.bound.keys(device)
            return None if found is None else _cut(found, self.key_places)
        # Nobody sees every pair: each rank looks at its own rows, and all put together what they found.
        mine = self._scanned(device)[1].expand(*self.sizes.lead, self.shard.n)
        return _cut(self.shard.ranks.summed(mine), self.key_places)

    def _cut_rows(self, device: torch.device) -> Tensor | None:
        if self.bound.scans:
            return self._scanned(device)[0]
        found = self.bound.rows(device)
        return None if found is None else _cut(found, self.places)

    def _scanned(self, device: torch.device) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self._once("scan", lambda: self._over_all()._scan(device))
        return found

    def _over_all(self) -> _BoundPart:
        """These queries beside the keys of all ranks."""
        return self._part(range(len(self.places)), range(self.shard.n))

    def _once(self, name: str, find: Any) -> Any:
        if name not in self._known:
            self._known[name] = find()
        return self._known[name]


def _within(whole: range, part: range) -> range:
    return range(whole.start + part.start, whole.start + part.stop)


def _cut(x: Tensor, places: range) -> Tensor:
    return x[..., places.start : places.stop]
