"""Places of queries and keys, also where a graph is traced whose sizes are symbols: one graph is for all of them then.

A symbol that is compared becomes a condition of the graph, and one that is counted becomes a number. So nothing here compares: whether a
size is known is asked of what traces, and panels of a number of queries that nobody knows are a fixed number of panels, each of one
rule. Their last rows may lie beyond the last query; they are that one once more, and left out of the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

# Panels of a number of queries that is a symbol: each is written into the graph.
PANELS_OF_GRAPH = 8


class Places:
    """A range of places whose ends may be symbols, as sizes are while a graph is traced: a range would fix them."""

    def __init__(self, start: int, stop: int, total: int | None = None) -> None:
        self.start, self.stop = start, stop
        self.total = total  # of all places, where the range may reach beyond them

    def __len__(self) -> int:
        return self.stop - self.start


def places(start: int, stop: int) -> range:
    """The places from one up to another."""
    return cast(range, Places(start, stop)) if torch.compiler.is_compiling() else range(start, stop)


def are_known(*sizes: int) -> bool:
    """Whether sizes are numbers, not symbols of a graph that is being traced; what is traced does not depend on having asked."""
    if not torch.compiler.is_compiling():
        return all(type(size) is int for size in sizes)
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return all(has_static_value(size) for size in sizes)


def product_of_known(sizes: Iterable[int]) -> int:
    """The product of those sizes that are numbers."""
    return math.prod([size for size in sizes if are_known(size)])


def panels_of_graph(count: int) -> list[range]:
    """The places of so many queries, at least two, in panels for a number that nobody knows."""
    # Of two queries or more a panel has two rows or more, so that none is ever taken for an axis that broadcasts.
    rows = (count + 2 * PANELS_OF_GRAPH - 1) // PANELS_OF_GRAPH
    return [cast(range, Places(k * rows, k * rows + rows, count)) for k in range(PANELS_OF_GRAPH)]


def _total(i: range) -> int | None:
    """How many places there are in all, where some may reach beyond them."""
    return getattr(i, "total", None)


def indices(i: range, device: torch.device) -> Tensor:
    """Places as numbers; beyond the last there is the last again."""
    found, total = torch.arange(i.start, i.stop, device=device), _total(i)
    return found if total is None else found.clamp(max=total - 1)


def taken(x: Tensor, i: range, axis: int) -> Tensor:
    """What stands at some places of an axis, the last or the one before it."""
    if _total(i) is not None:
        return x.index_select(axis, indices(i, x.device))
    if i.stop - i.start == x.shape[axis]:
        return x
    rows = slice(i.start, i.stop)
    return x[..., rows] if axis == -1 else x[..., rows, :]
