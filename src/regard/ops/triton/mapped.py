"""vmap of an operator with leading axes: the mapped axis is folded into the first of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.ops.axes import why_too_many

Operator = Callable[..., tuple[Tensor, ...]]


def fold(x: Tensor | None, dim: int | None, size: int, length: int, shared: bool = False) -> Tensor | None:
    """(L, ...) or (1, ...), with a mapped axis at `dim` or none, as (size * L, ...).

    What is `shared` stays as it is where it has one entry for all.
    """
    if x is None or (shared and dim is None and x.shape[0] == 1):
        return x
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.expand(size, length, *x.shape[2:]).flatten(0, 1).contiguous()


def too_many(size: int, length: int) -> bool:
    """Whether a launch has no room for the folded axis."""
    return why_too_many(size * length) is not None


def unfold(
    found: Sequence[Tensor], size: int, axes: Sequence[int]
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Results with the mapped axis apart again, before the axis named for each; empty ones have none."""
    apart, dims = [], []
    for x, axis in zip(found, axes, strict=True):
        apart.append(x.unflatten(axis, (size, -1)) if x.numel() else x)
        dims.append(axis if x.numel() else None)
    return tuple(apart), tuple(dims)


def one_by_one(
    operator: Operator, size: int, in_dims: Sequence[Any], args: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The operator for each entry of the mapped axis: for what is drawn by leading index, which must not see it folded in."""
    each = [
        operator(*(x.select(d, k) if isinstance(d, int) else x for x, d in zip(args, in_dims, strict=True)))
        for k in range(size)
    ]
    found = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
    return found, (0,) * len(found)
