r"""Attention within sequences that stand end to end: time grows with $\sum_s N_s^2$, not with $(\sum_s N_s)^2$.

Sequences of about the same length go together: a plain softmax of several of them is one call with one more leading axis, padded to
the longest, which any execution takes. What is drawn by position, or counts positions, goes sequence by sequence, as parts of the call
that know where they stand. Either way the result is that of the whole call under its mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.ops.banded import Reach, cut_form
from regard.ops.call import Call
from regard.ops.parts import rebuilt, split

# Pairs that are computed, padding included, for each that is asked for: more than that is another group of sequences.
WASTE = 2.0
# Pairs from which a sequence goes alone: there what is computed in vain costs more than another call.
ALONE_ON_CPU, ALONE_ON_DEVICE = 1 << 12, 1 << 22
# It pays where so many times fewer pairs are left.
WORTHWHILE = 2


class Pieces(NamedTuple):
    """Sequences end to end: how many queries and keys each has, and the band of keys within each, low <= j - i' <= high.

    The last query of a sequence stands at its last key: i' = i + keys - queries.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    low: float = -math.inf
    high: float = math.inf

    @property
    def is_banded(self) -> bool:
        return self.low > -math.inf or self.high < math.inf

    @property
    def pairs(self) -> int:
        return sum(q * k for q, k in zip(self.queries, self.keys, strict=True))


class _Sequence(NamedTuple):
    place: int  # among the sequences
    i: range  # its queries, and its keys
    j: range


def why_not_packed(call: Call) -> str | None:
    """The reason why this call is not computed sequence by sequence, or None."""
    pieces = _pieces(call)
    if pieces is None or type(call) is not Call:
        return "no sequences end to end"
    if not getattr(call.align, "is_rowwise", False):
        return f"alignment {type(call.align).__name__} looks at more than the keys that a row may attend"
    if not pieces.pairs:
        return "nothing to attend to"
    if call.pairs < WORTHWHILE * pieces.pairs:
        return "one sequence is most of all"
    return None


def packed(call: Call, execute: Callable[[Call], Tensor]) -> Tensor:
    """Attend within each sequence, by whatever execution each takes."""
    pieces = _pieces(call)
    assert pieces is not None
    plain = call.align.temperature_of_softmax is not None and call.seed is None and call.bias is None
    found, order = [], []
    most = ALONE_ON_CPU if call.device.type == "cpu" else ALONE_ON_DEVICE
    alone = split(call, pieces.queries, pieces.keys)
    for group in _groups(pieces, most // max(1, math.prod(call.lead)) if plain else 0):
        if len(group) == 1 and group[0].j:
            s, i, j = group[0]
            within = _Within.of(pieces, len(i), len(j), len(j) - len(i))
            found.append(execute(rebuilt(call, alone[s], i, j, within)))
        else:
            found.append(_together(call, pieces, group, execute))
        order += [i for each in group for i in each.i]
    context = torch.cat(found, -2) if found else call.value.new_zeros(*call.lead, 0, call.value.shape[-1])
    if order == list(range(call.nq)):
        return context
    place = torch.tensor(order, device=call.device).argsort()
    return context.index_select(-2, place)


def _pieces(call: Call) -> Pieces | None:
    found: Pieces | None = getattr(call.mask, "pieces", None)
    return found


def _sequences(pieces: Pieces) -> Iterator[_Sequence]:
    """Every sequence."""
    queries, keys = ((0, *accumulate(lengths)) for lengths in (pieces.queries, pieces.keys))
    for s in range(len(pieces.queries)):
        yield _Sequence(s, range(queries[s], queries[s + 1]), range(keys[s], keys[s + 1]))


def _groups(pieces: Pieces, most: int) -> Iterator[list[_Sequence]]:
    """Those that ask: of more than so many pairs each by itself, others together while little of what is computed is padding."""
    few = []
    for each in _sequences(pieces):
        if len(each.i) * len(each.j) > most:
            yield [each]
        elif each.i:
            few.append(each)
    group: list[_Sequence] = []
    rows = columns = least = 0
    for each in sorted(few, key=lambda s: (len(s.j), len(s.i)), reverse=True):
        q, k = len(each.i), len(each.j)
        if group and max(rows, q) * columns > WASTE * min(least, q * k):
            yield group
            group = []
        if not group:
            rows, columns, least = q, k, q * k
        group.append(each)
        rows, least = max(rows, q), min(least, q * k)
    if group:
        yield group


def _together(call: Call, pieces: Pieces, group: list[_Sequence], execute: Callable[[Call], Tensor]) -> Tensor:
    """The contexts of some sequences, one after the other: (..., their queries, d_v)."""
    if not group[0].j:
        return call.value.new_zeros(*call.lead, sum(len(each.i) for each in group), call.value.shape[-1])
    queries = _Padded.of([each.i for each in group], call)
    keys = _Padded.of([each.j for each in group], call)
    real = None if keys.is_full or pieces.high <= 0 else keys.real
    ahead = [len(each.j) - len(each.i) for each in group]
    offset = keys.per_sequence(ahead) if pieces.is_banded and len(set(ahead)) > 1 else ahead[0]
    together = replace(
        call,
        form=cut_form(call.form, queries, keys),
        value=keys(call.value),
        query=None,
        key=keys(call.key),
        mask=_Within.of(pieces, queries.rows, keys.rows, offset, real),
    )
    context = execute(together)
    rows = context.movedim(0, -3).flatten(-3, -2)
    return rows if queries.is_full else rows.index_select(-2, queries.kept)


@dataclass(frozen=True)
class _Padded:
    """Rows of several sequences side by side: (..., N, d) as (S, ..., R, d), zeros after the end of each."""

    ranges: list[range]
    axes: int  # leading ones of the call
    device: torch.device

    @staticmethod
    def of(ranges: list[range], call: Call) -> _Padded:
        return _Padded(ranges, len(call.lead), call.device)

    @cached_property
    def rows(self) -> int:
        return max(map(len, self.ranges))

    @property
    def is_full(self) -> bool:
        return all(len(each) == self.rows for each in self.ranges)

    @property
    def real(self) -> Tensor:
        """Which rows are some sequence's, (S, 1, ..., R)."""
        lengths = self.per_sequence([len(each) for each in self.ranges]).squeeze(-1)
        return torch.arange(self.rows, device=self.device) < lengths

    def per_sequence(self, numbers: list[int]) -> Tensor:
        """One number for each sequence, beside its pairs, (S, 1, ..., 1, 1)."""
        return torch.tensor(numbers, device=self.device).view(-1, *(1,) * (self.axes + 2))

    @property
    def kept(self) -> Tensor:
        """Places of the real rows among all."""
        places = [s * self.rows + i for s, each in enumerate(self.ranges) for i in range(len(each))]
        return torch.tensor(places, device=self.device)

    def __call__(self, x: Tensor, own: int = 2) -> Tensor:
        """Take rows along the first of x's `own` last axes."""
        x = x.reshape(*(1,) * (self.axes + own - x.dim()), *x.shape)
        # One more row, of zeros, is what padding reads; every other row is read at most once, so no sum of gradients has an order.
        zeros, n = (0,) * (2 * own - 1) + (1,), x.shape[-own]
        places = [[*each, *[n] * (self.rows - len(each))] for each in self.ranges]
        index = torch.tensor(places, device=self.device).flatten()
        taken = F.pad(x, zeros).index_select(-own, index)
        blocked: Tensor = taken.unflatten(-own, (-1, self.rows)).movedim(-own - 1, 0)
        return blocked


@dataclass(frozen=True)
class _Within:
    """A band of keys within each sequence, and the keys that are no padding."""

    low: float
    high: float
    nq: int
    n: int
    offset: int | Tensor  # query i stands at key i + offset; where sequences differ, (S, 1, ..., 1, 1)
    real: Tensor | None  # (S, 1, ..., N)

    @staticmethod
    def of(pieces: Pieces, nq: int, n: int, offset: int | Tensor, real: Tensor | None = None) -> _Within | None:
        if not pieces.is_banded and real is None:
            return None
        return _Within(pieces.low, pieces.high, nq, n, offset, real)

    @property
    def is_aligned(self) -> bool:
        """Whether query i stands at key i."""
        return isinstance(self.offset, int) and self.offset == 0

    @property
    def is_plain_causal(self) -> bool:
        return self.low == -math.inf and self.high == 0 and self.real is None and self.is_aligned

    @property
    def is_banded(self) -> bool:
        return self.low > -math.inf or self.high < math.inf

    @property
    def reach(self) -> Reach | None:
        bounded = self.is_aligned and -math.inf < self.low <= self.high < math.inf
        return Reach(int(self.low), int(self.high), self.real) if bounded else None

    @property
    def shape(self) -> tuple[int, ...]:
        lead: tuple[int, ...] = () if self.real is None else self.real.shape[:-1]
        if self.is_banded and isinstance(self.offset, Tensor):
            lead = self.offset.shape[:-2]
        return (*lead, self.nq if self.is_banded else 1, self.n)

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        real = None if self.real is None else self.real[..., None, j.start : j.stop]
        if not self.is_banded:
            assert real is not None
            return real
        own = torch.arange(i.start, i.stop, device=device)[:, None] + self.offset
        distance = torch.arange(j.start, j.stop, device=device) - own
        near = (distance >= self.low) & (distance <= self.high)
        return near if real is None else near & real

    def keys(self, device: torch.device) -> Tensor | None:
        return self.tile(range(self.nq), range(self.n), device).any(-2)

    def rows(self, device: torch.device) -> Tensor | None:
        allowed = self.tile(range(self.nq), range(self.n), device).any(-1)
        return allowed.expand(*allowed.shape[:-1], self.nq)
