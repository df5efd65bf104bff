"""Which keys of a rank some queries may reach, as far as masks and windows say it without being looked at; and panels that suit that."""

from __future__ import annotations

from regard.ops.blockwise import CPU_PANEL_ELEMENTS, GPU_PANEL_ELEMENTS
from regard.ops.parallel.sharded import ShardedCall

# To begin another block costs as much as so many of its scores.
BLOCK_ON_CPU, BLOCK_ON_DEVICE = 1 << 16, 1 << 22
LEAST_ROWS = 64


def span(call: ShardedCall, i: range) -> range:
    """The keys of all ranks beside which some queries of this rank can be computed as if there were no others."""
    found = range(call.shard.n)
    if call.mask is not None:
        found = call.mask.part(range(call.nq), found).span(i)  # type: ignore[attr-defined]
    # A window may hold fewer keys than its mask allows.
    chosen = getattr(call.align, "span", None)
    window = None if chosen is None else chosen(call, i)
    return found if window is None else _common(found, window)


def reached(call: ShardedCall, i: range, owner: int) -> range:
    """The keys of one rank, counted among all, that any of these queries may attend; an empty range where there are none."""
    first = call.shard.first_keys[owner]
    j = range(first, first + call.shard.keys[owner])
    if not i or not j:
        return range(first, first)
    # What lies between two bands is in their span.
    if call.mask is not None and not call.mask.part(i, j).meets(range(len(i)), range(len(j))):  # type: ignore[attr-defined]
        return range(first, first)
    return _common(j, span(call, i))


def rows_of_block(call: ShardedCall, key_elements: int) -> int:
    """Query rows of a panel: what fits a budget beside the keys of a rank that it reaches, and costs least.

    Args:
        call: this rank's part.
        key_elements: numbers that a pair of a query and a key needs at once, over all leading axes.
    """
    on_cpu = call.device.type == "cpu"
    budget = (CPU_PANEL_ELEMENTS if on_cpu else GPU_PANEL_ELEMENTS) // max(1, key_elements)
    rows = max(1, budget // max(1, *call.shard.keys))
    if rows >= call.nq and call.nq <= LEAST_ROWS:
        return rows
    block = (BLOCK_ON_CPU if on_cpu else BLOCK_ON_DEVICE) // max(1, key_elements)
    costs = {}
    tried = LEAST_ROWS
    while tried < 2 * call.nq:
        widest, pairs, blocks = _sampled(call, tried)
        if min(tried, call.nq) * widest <= budget:
            costs[tried] = pairs + blocks * block / tried
        tried *= 2
    return min(costs, key=lambda r: costs[r]) if costs else rows


def _sampled(call: ShardedCall, rows: int) -> tuple[int, float, float]:
    """Of panels of so many rows: the most keys of a block, and how many keys and blocks a panel has; by three panels."""
    begins = {0, max(0, call.nq - rows) // 2, max(0, call.nq - rows)}
    found = [
        [len(reached(call, range(i, min(i + rows, call.nq)), owner)) for owner in range(call.shard.ranks.size)]
        for i in begins
    ]
    widest = max(max(each) for each in found)
    blocks = sum(n > 0 for each in found for n in each)
    return widest, sum(map(sum, found)) / len(found), blocks / len(found)


def _common(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))
