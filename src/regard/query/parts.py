"""What the mechanisms of this family share: masks of whole inputs, and inputs that hold nothing where nobody looks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard._errors import refusal
from regard.general.bound import Bound, Sizes
from regard.general.inputs import refuse_nested
from regard.general.masks import Keys, Mask, as_mask
from regard.general.scores.base import width
from regard.ops.banded import Reach
from regard.ops.dispatch import autocasting
from regard.ops.packed import Pieces
from regard.ops.padded import Extents


class Others(Mask):
    """Every position but one's own; the last query is aligned with the last key.

    Example:
        >>> Others().bind(Sizes((), 2, 2)).tile(range(2), range(2), torch.device("cpu")).int().tolist()
        [[0, 1], [1, 0]]
    """

    def __repr__(self) -> str:
        return "Others()"

    def _bind(self, sizes: Sizes) -> Bound:
        return _BoundOthers(sizes)


@dataclass(frozen=True)
class _BoundOthers(Bound):
    sizes: Sizes

    @property
    def offset(self) -> int:
        return self.sizes.n - self.sizes.nq

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        own = torch.arange(i.start, i.stop, device=device)[:, None] + self.offset
        return torch.arange(j.start, j.stop, device=device) != own

    def keys(self, device: torch.device) -> Tensor:
        position = torch.arange(self.sizes.n, device=device)
        return (position != self.offset) if self.sizes.nq == 1 else torch.full_like(position, self.sizes.nq > 0).bool()

    def rows(self, device: torch.device) -> Tensor:
        own = torch.arange(self.sizes.nq, device=device) + self.offset
        return (own != 0) if self.sizes.n == 1 else torch.full_like(own, self.sizes.n > 0).bool()


class Filled(Mask):
    """A mask of inputs that hold zeros wherever nobody looks; with `heads`, the same for every head.

    Args:
        bound: the mask of the inputs before they were split into heads.
        heads: whether the call has an axis of heads that the mask does not have.
        cleared: whether what comes out for queries that may attend nothing is zeroed later, or read by nobody.
    """

    def __init__(self, bound: Bound, heads: bool = False, cleared: bool = False) -> None:
        self.bound, self.heads, self.cleared = bound, heads, cleared

    def bind(self, sizes: Sizes) -> Bound:
        return _BoundFilled(self.bound, self.heads, sizes, self.cleared)


@dataclass(frozen=True)
class _BoundFilled(Bound):
    bound: Bound
    heads: bool
    sizes: Sizes
    is_cleared: bool = False
    is_filled = True

    @property
    def memo(self) -> dict[Any, Any]:
        return self.bound.memo

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.bound.shape
        return (*shape[:-2], 1, *shape[-2:]) if self.heads and len(shape) > 2 else shape

    @property
    def is_plain_causal(self) -> bool:  # type: ignore[override]
        return self.bound.is_plain_causal

    @property
    def is_causal_part(self) -> bool:  # type: ignore[override]
        return self.bound.is_causal_part

    @property
    def reach(self) -> Reach | None:
        reach = self.bound.reach
        return reach if reach is None or reach.real is None else reach._replace(real=self._spread(reach.real, 1))

    @property
    def pieces(self) -> Pieces | None:
        return self.bound.pieces

    @property
    def extents(self) -> Extents | None:
        return self.bound.extents

    @property
    def is_keys_alone(self) -> bool:
        return self.bound.is_keys_alone

    def entries(self, chosen: Tensor) -> Bound:
        return replace(self, bound=self.bound.entries(chosen))

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        return self._spread(self.bound.tile(i, j, device), 2)

    def meets(self, i: range, j: range) -> bool:
        return self.bound.meets(i, j)

    def span(self, i: range) -> range:
        return self.bound.span(i)

    def part(self, i: range, j: range) -> Bound:
        # A query that may attend nothing here may attend something elsewhere: nobody zeroes this part of its result.
        sizes = replace(self.sizes, nq=len(i), n=len(j))
        return replace(self, bound=self.bound.part(i, j), sizes=sizes, is_cleared=False)

    def keys(self, device: torch.device) -> Tensor | None:
        keys = self.bound.keys(device)
        return None if keys is None else self._spread(keys, 1)

    def rows(self, device: torch.device) -> Tensor | None:
        rows = self.bound.rows(device)
        return None if rows is None else self._spread(rows, 1)

    def ends(self, device: torch.device) -> Tensor:
        return self._spread(self.bound.ends(device), 1)

    def origins(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        return self.bound.origins(device)

    def _spread(self, x: Tensor, own: int) -> Tensor:
        """Insert the axis of heads before the mask's own last axes."""
        return x.unsqueeze(-own - 1) if self.heads and x.dim() > own else x


def of_tokens(mask: Tensor | None, pairs: Mask | Tensor | None) -> Mask | None:
    """One mask of pairs from the real tokens (..., N) and what each may look at."""
    if mask is None:
        return None if pairs is None else as_mask(pairs)
    return Keys(mask) if pairs is None else Keys(mask) & as_mask(pairs)


def one_of(argument: str, value: object, known: tuple[str, ...]) -> str:
    """Check a choice."""
    if value not in known:
        raise ValueError(refusal(argument, repr(value), f"one of {', '.join(known)}"))
    return str(value)


def widths(argument: str, given: int | tuple[int, ...], count: int) -> tuple[int, ...]:
    """So many widths, from one number for all or one for each."""
    each = (given,) * count if isinstance(given, int) else tuple(given)
    if len(each) != count:
        raise ValueError(refusal(argument, repr(given), f"a whole number >= 1, or {count} of them"))
    return tuple(width(argument, d) for d in each)


def operand(name: str, x: Tensor, weight: Tensor, dim: int | None = None) -> None:
    """Refuse an input (..., d) that cannot be multiplied by a weight, of `dim` columns or of as many as its last axis says."""
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        got = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(refusal(name, got, "a floating-point tensor"))
    refuse_nested(name, x)
    dim = weight.shape[-1] if dim is None else dim
    if x.dim() == 0 or x.shape[-1] != dim:
        raise ValueError(refusal(name, f"shape {tuple(x.shape)}", f"width {dim}: (..., {dim})"))
    if x.dtype != weight.dtype and not autocasting(x.device):
        fix = "Fix: convert the module or the inputs, or use torch.autocast."
        raise TypeError(refusal(name, f"a tensor of {x.dtype}", f"the module's dtype, {weight.dtype}", fix))


def check_asked(mask: Tensor | None) -> None:
    """Refuse what is no mask of queries."""
    if mask is not None and (not isinstance(mask, Tensor) or mask.dtype != torch.bool):
        got = f"a tensor of {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(refusal("mask", got, "booleans, True where there is something to ask"))


def is_plain(x: Tensor) -> bool:
    """Whether a tensor has numbers to look at: not one of torch.func's or a tracer's."""
    if torch.compiler.is_compiling() or x.device.type == "meta":
        return False
    return type(x) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def in_range(name: str, index: Tensor, low: int, high: int, expected: str, **sizes: int) -> None:
    """Refuse indices below `low`, or not below `high`; what is expected is a format of `high` and other sizes."""
    # Only where looking at the numbers stalls no device and breaks no graph.
    if not is_plain(index) or index.device.type != "cpu" or index.numel() == 0:
        return
    least, most = int(index.min()), int(index.max())
    if least < low or most >= high:
        # Written here: a size that is a symbol of a graph would become a number by being written.
        raise IndexError(refusal(name, f"indices from {least} to {most}", expected.format(high=high, **sizes)))


def uncast(device: torch.device) -> AbstractContextManager[object]:
    """The operands of a call already have autocast's dtype; what is computed from them must stay wide."""
    return torch.autocast(device.type, enabled=False) if autocasting(device) else nullcontext()
