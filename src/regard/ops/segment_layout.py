r"""Queries and their edges side by side, so that sums over edges need neither padding nor scattering.

Edges come sorted by query. Queries of one degree stand together: some of them and their edges are a full array (queries, degree), the
softmax is an ordinary one, and there are at most $\sqrt{2E}$ different degrees. Rare degrees share a panel with the next larger one, since
a panel costs something by itself: then some slots are empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from regard.ops.random import DROPOUT, least_word, philox, purpose_of

# Numbers of a hidden layer that may be computed for nothing, for the sake of a panel less.
SPARE_ELEMENTS = 1 << 14
# Random numbers that are drawn at once, four to a counter: many small operations each.
DRAWN_COUNTERS = 1 << 14


class Layout(NamedTuple):
    """Where queries and edges stand."""

    rows: Tensor  # (R,), the queries that have edges, by degree
    slots: (
        Tensor  # (S,), the edges of each, one row of slots after another; in an empty one some edge of the same query
    )
    empty: Tensor  # (S,), whether a slot is
    panels: Tensor  # (P, 3), on the CPU: queries, slots of each, how many of all these are empty


class Step(NamedTuple):
    """Some queries with as many slots each."""

    queries: slice
    slots: slice
    degree: int
    has_empty: bool

    def __len__(self) -> int:
        return int(self.queries.stop - self.queries.start)


def laid_out(bounds: Tensor, spare: int, allowed: Tensor | None = None) -> Layout:
    """Where the queries stand whose edges begin and end at some bounds (Nq + 1,).

    Args:
        bounds: of the edges, sorted by query.
        spare: how many slots of a panel may be empty for want of edges.
        allowed: which edges are not to be read as if their slots were empty, (E,).
    """
    degrees = bounds.diff()
    if allowed is not None:
        # A query that may read nothing has no edges.
        count = torch.cat([bounds.new_zeros(1), allowed.long().cumsum(0)])[bounds].diff()
        degrees = torch.where(count > 0, degrees, 0)
    degrees, rows = degrees.sort(stable=True)
    found, counts = torch.unique_consecutive(degrees, return_counts=True)
    table = torch.tensor(_merged(found.tolist(), counts.tolist(), spare), dtype=torch.long).view(-1, 3)
    rows = rows[len(rows) - int(table[:, 0].sum()) :]
    total = int((table[:, 0] * table[:, 1]).sum())
    widths = table[:, 1].repeat_interleave(table[:, 0]).to(bounds.device)
    begin, end = bounds[rows], bounds[rows + 1]
    shift, last = (x.repeat_interleave(widths, output_size=total) for x in (begin - widths.cumsum(0) + widths, end - 1))
    slots = torch.arange(total, device=bounds.device) + shift
    empty, slots = slots > last, torch.minimum(slots, last)
    if allowed is not None:
        empty = empty | ~allowed[slots]
        # Whatever a forbidden edge leads to, it is not touched.
        readable = allowed.nonzero().squeeze(-1)
        instead = readable[torch.searchsorted(readable, begin)].repeat_interleave(widths, output_size=total)
        slots = torch.where(empty, instead, slots)
        ends = (table[:, 0] * table[:, 1]).cumsum(0)
        table[:, 2] = (
            torch.cat([empty.new_zeros(1, dtype=torch.long), empty.long().cumsum(0)])[
                torch.cat([ends.new_zeros(1), ends]).to(empty.device)
            ]
            .diff()
            .cpu()
        )
    return Layout(rows, slots, empty, table)


def _merged(degrees: Sequence[int], counts: Sequence[int], spare: int) -> list[tuple[int, int, int]]:
    """Panels of queries of ascending degrees: queries, slots of each, slots too many."""
    panels: list[tuple[int, int, int]] = []
    for degree, count in zip(degrees, counts, strict=True):
        if degree == 0:
            continue
        queries, slots, unused = panels[-1] if panels else (0, degree, 0)
        unused += queries * (degree - slots)
        if panels and unused <= spare:
            panels[-1] = queries + count, degree, unused
        else:
            panels.append((count, degree, 0))
    return panels


def steps(panels: Tensor, row_bytes: int, budget: int, most: int) -> list[Step]:
    """Panels in parts of which each fits the budget, or has so many queries as were asked for."""
    found: list[Step] = []
    query, slot = 0, 0
    for queries, degree, unused in panels.tolist():
        size = most if most else max(1, budget // (row_bytes * degree))
        for first in range(0, queries, size):
            count = min(size, queries - first)
            found.append(Step(slice(query, query + count), slice(slot, slot + count * degree), degree, unused > 0))
            query, slot = query + count, slot + count * degree
    return found


def kept(
    rows: Tensor, parts: Sequence[Step], heads: int, seed: Tensor, dropout: float, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Dropout factors of every part, (queries, slots, heads): 0 or 1 / (1 - p), those that every execution draws."""
    for some in _by_counters(parts, heads):
        groups = [-(-part.degree // 4) for part in some]
        row = torch.cat([rows[part.queries].repeat_interleave(g) for part, g in zip(some, groups, strict=True)])
        group = torch.cat(
            [torch.arange(g, device=row.device).repeat(len(part)) for part, g in zip(some, groups, strict=True)]
        )
        head = torch.arange(heads, device=row.device)
        nothing = torch.zeros((len(row), heads), dtype=torch.long, device=row.device)
        counter = group[:, None] + nothing, row[:, None] + nothing, head + nothing, purpose_of(DROPOUT, nothing)
        least = least_word(dropout)
        drawn = torch.stack([word >= least for word in philox(seed, counter)], 1).to(dtype)
        drawn = drawn.div_(1.0 - dropout) if dropout < 1.0 else drawn
        ends = [0, *(torch.tensor(groups) * torch.tensor([len(part) for part in some])).cumsum(0).tolist()]
        for part, g, (first, last) in zip(some, groups, pairwise(ends), strict=True):
            yield drawn[first:last].reshape(len(part), 4 * g, heads)[:, : part.degree]


def _by_counters(parts: Sequence[Step], heads: int) -> Iterator[list[Step]]:
    """Parts that draw together."""
    some: list[Step] = []
    counters = 0
    for part in parts:
        some.append(part)
        counters += len(part) * -(-part.degree // 4) * heads
        if counters >= DRAWN_COUNTERS:
            yield some
            some, counters = [], 0
    if some:
        yield some
