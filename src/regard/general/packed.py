"""A mask of sequences that stand end to end in one, instead of side by side with padding."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from regard._errors import refusal
from regard.general.bound import Bound, BoundBand, Sizes, between
from regard.general.masks import Mask
from regard.ops.fill import where
from regard.ops.packed import Pieces


class Packed(Mask):
    """Several sequences end to end: a query attends the keys of its own sequence.

    Nothing is padded, and what is computed grows with the pairs within the sequences. `Causal()`, `Window(w)` and other bands that are
    joined by `&` hold within each sequence, as if it stood alone: its last query stands at its last key. A local alignment counts
    positions from the first key of the sequence.

    Args:
        lengths: of the sequences, which add up to the number of keys: whole numbers, or a tensor of them on the CPU, so that no device has
            to be waited for.
        queries: of the same sequences, in queries, where there are not as many as keys.

    Example:
        >>> Packed([2, 1]).bind(Sizes((), 3, 3)).tile(range(3), range(3), torch.device("cpu")).int().tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """

    def __init__(self, lengths: Sequence[int] | Tensor, queries: Sequence[int] | Tensor | None = None) -> None:
        self.lengths = _numbers("lengths", lengths)
        self.queries = self.lengths if queries is None else _numbers("queries", queries)
        if len(self.queries) != len(self.lengths):
            expected = f"one for each sequence, {len(self.lengths)}"
            raise ValueError(refusal("queries", f"{len(self.queries)} numbers", expected))

    def __repr__(self) -> str:
        asking = "" if self.queries == self.lengths else f", queries={list(self.queries)}"
        return f"Packed({list(self.lengths)}{asking})"

    def _bind(self, sizes: Sizes) -> Bound:
        total, asked = sum(self.lengths), sum(self.queries)
        if total != sizes.n:
            fix = "Fix: give the number of keys of every sequence; padding at the end of sequences is Padding(lengths)."
            if self.queries == self.lengths and total == sizes.nq:
                fix = "Fix: these are of the queries, queries=…; lengths are of the keys."
            expected = f"{sizes.n}, as there are keys"
            raise ValueError(refusal("lengths", f"numbers that add up to {total}", expected, fix))
        if asked != sizes.nq:
            fix = "Fix: pass queries=…, their number in each sequence." if self.queries == self.lengths else ""
            expected = f"{sizes.nq}, as there are queries"
            raise ValueError(refusal("queries", f"numbers that add up to {asked}", expected, fix))
        return _BoundPacked(Pieces(self.queries, self.lengths), sizes)


def _numbers(name: str, lengths: object) -> tuple[int, ...]:
    expected = "whole numbers >= 0, one for each sequence"
    if isinstance(lengths, Tensor):
        if lengths.dim() != 1 or lengths.dtype.is_floating_point or lengths.dtype == torch.bool:
            raise TypeError(refusal(name, f"a tensor of {lengths.dtype} with {lengths.dim()} axes", expected))
        if lengths.device.type != "cpu":
            fix = "Fix: keep them on the host; .tolist() once, not in every step."
            raise ValueError(refusal(name, f"a tensor on {lengths.device}", "one on the CPU", fix))
        lengths = lengths.tolist()
    if isinstance(lengths, str) or not isinstance(lengths, Sequence):
        raise TypeError(refusal(name, type(lengths).__name__, expected))
    if any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in lengths):
        raise ValueError(refusal(name, repr(list(lengths)), expected))
    return tuple(lengths)


@dataclass(frozen=True)
class _BoundPacked(Bound):
    """Every query has an interval of keys: those of its sequence, within a band."""

    sequences: Pieces
    sizes: Sizes

    @property
    def pieces(self) -> Pieces:
        return self.sequences

    def joined(self, other: Bound) -> Bound | None:
        pieces = self.sequences
        if isinstance(other, _BoundPacked) and other.sequences[:2] == pieces[:2]:
            band: Pieces | BoundBand = other.sequences
        elif isinstance(other, BoundBand):
            band = other
        else:
            return None
        low, high = max(pieces.low, band.low), min(pieces.high, band.high)
        return replace(self, sequences=pieces._replace(low=low, high=high))

    def packed(self) -> Bound | None:
        queries, keys, *_ = self.sequences
        return None if queries == keys else _BoundPacked(Pieces(queries, keys), self.sizes)

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        key = torch.arange(j.start, j.stop, device=device)
        first, end = (x[i.start : i.stop, None] for x in self._intervals(device))
        return (key >= first) & (key < end)

    def meets(self, i: range, j: range) -> bool:
        span = self.span(i)
        return bool(span) and bool(j) and max(span.start, j[0]) <= min(span[-1], j[-1])

    def span(self, i: range) -> range:
        if not i:
            return range(0)
        queries, keys = ((0, *accumulate(lengths)) for lengths in (self.sequences.queries, self.sequences.keys))
        first, last = (bisect_right(queries, row) - 1 for row in (i[0], i[-1]))
        # Where the first and the last of these queries stand, each aligned with the keys at the end of its sequence.
        at, until = (row + keys[s + 1] - queries[s + 1] for row, s in ((i[0], first), (i[-1], last)))
        low, high = max(keys[first], at + self.sequences.low), min(keys[last + 1] - 1, until + self.sequences.high)
        if first < last:
            # What lies between reads from the end of the first sequence up to the start of the last.
            low, high = min(low, keys[first + 1]), max(high, keys[last] - 1)
        return between(low, high + 1, self.sizes.n)

    def keys(self, device: torch.device) -> Tensor:
        # A key has an interval of queries, likewise.
        turned = Pieces(self.sequences.keys, self.sequences.queries, -self.sequences.high, -self.sequences.low)
        first, end = _BoundPacked(turned, replace(self.sizes, nq=self.sizes.n, n=self.sizes.nq))._intervals(device)
        return end > first

    def rows(self, device: torch.device) -> Tensor:
        first, end = self._intervals(device)
        return end > first

    def ends(self, device: torch.device) -> Tensor:
        first, end = self._intervals(device)
        return where(end > first, end, 0)

    def origins(self, device: torch.device) -> tuple[Tensor, Tensor]:
        first_query, first, *_ = self._sequences(device)
        return first_query, first

    def _intervals(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """First key, and one more than the last, of each query, (Nq,)."""
        _, first, end, ahead = self._sequences(device)
        # No key is farther than that, and an infinity is no index.
        farthest = self.sizes.nq + self.sizes.n
        low, high = (int(max(-farthest, min(x, farthest))) for x in (self.sequences.low, self.sequences.high))
        i = torch.arange(self.sizes.nq, device=device) + ahead
        return torch.maximum(first, i + low), torch.minimum(end, i + high + 1)

    def _sequences(self, device: torch.device) -> tuple[Tensor, ...]:
        """First query, first key, one more than the last key, and how far keys end behind queries, of each query's sequence."""
        if torch.compiler.is_compiling():
            # A graph computes them once, and cannot be traced through what is cached.
            return self._counted(device)
        if device not in self.memo:
            self.memo[device] = self._counted(device)
        found: tuple[Tensor, ...] = self.memo[device]
        return found

    def _counted(self, device: torch.device) -> tuple[Tensor, ...]:
        queries, keys = (torch.tensor(x, device=device, dtype=torch.int64) for x in self.sequences[:2])
        asked, end = queries.cumsum(0), keys.cumsum(0)
        # Given the sum, the host need not ask the device how many there are.
        return tuple(
            x.repeat_interleave(queries, output_size=self.sizes.nq)
            for x in (asked - queries, end - keys, end, end - asked)
        )
