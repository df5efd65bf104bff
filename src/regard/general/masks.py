"""Masks: which query may attend which key. True means *may attend*, everywhere.

A mask is a boolean tensor that broadcasts to the scores, or one of these objects, which say the same without writing
queries x keys booleans. They combine with `&` and `|`, with each other and with tensors:

    >>> Causal() & Padding(torch.tensor([3, 5]))
    Causal() & Padding(lengths=[3, 5])

`bind` fixes the sizes of a call (`bound.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard._errors import refusal
from regard.general.bound import (
    Bound,
    BoundBand,
    BoundEither,
    BoundKeys,
    BoundPairs,
    BoundWhere,
    Sizes,
    both,
    broadcasts,
)
from regard.ops.parallel.ranks import current

_FARTHEST = 1 << 53


class Mask:
    """Base of all masks."""

    # Which keys may be read, (..., N), where that is all it says and the others are known to be zero.
    real: Tensor | None = None

    def __and__(self, other: Mask | Tensor) -> Mask:
        return And(self, as_mask(other))

    def __or__(self, other: Mask | Tensor) -> Mask:
        return Or(self, as_mask(other))

    def __rand__(self, other: Mask | Tensor) -> Mask:
        return as_mask(other) & self

    def __ror__(self, other: Mask | Tensor) -> Mask:
        return as_mask(other) | self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let a tensor stand on the left of `&` and `|`."""
        # Inside a compiled function the operator arrives under its other name, whichever side the tensor is on.
        if func in (Tensor.__and__, Tensor.__rand__, Tensor.bitwise_and):
            return as_mask(args[0]) & as_mask(args[1])
        if func in (Tensor.__or__, Tensor.__ror__, Tensor.bitwise_or):
            return as_mask(args[0]) | as_mask(args[1])
        return NotImplemented

    def bind(self, sizes: Sizes) -> Bound:
        """The mask for a call of these sizes; where ranks share the call, for this rank's part of it."""
        if current() is None or sizes.shard is not None:
            return self._bind(sizes)
        from regard.general.shards import bound_over_ranks

        return bound_over_ranks(self, sizes)

    def _bind(self, sizes: Sizes) -> Bound:
        """The same for a whole call."""
        raise NotImplementedError


def as_mask(mask: Mask | Tensor) -> Mask:
    """Wrap a boolean tensor; refuse anything else."""
    if isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor):
        raise TypeError(_no_mask(mask))
    if mask.dtype != torch.bool:
        raise TypeError(
            refusal(
                "mask",
                f"a tensor of {mask.dtype}",
                "torch.bool, True where a query may attend a key",
                "Fix: compare or cast to bool; add numbers to the scores with `bias=` instead.",
            )
        )
    return Pairs(mask)


def _no_mask(given: object) -> str:
    """Refuse what is no mask; a class of masks is one step from it."""
    expected = "a boolean tensor or a mask object such as Causal()"
    if isinstance(given, type) and issubclass(given, Mask):
        return refusal("mask", f"the class {given.__name__}", expected, f"Fix: make one, {given.__name__}(…).")
    return refusal("mask", type(given).__name__, expected)


class Pairs(Mask):
    """A boolean tensor (..., Nq, N)."""

    def __init__(self, allowed: Tensor) -> None:
        self.allowed = allowed

    def __repr__(self) -> str:
        return f"Pairs{tuple(self.allowed.shape)}"

    def __and__(self, other: Mask | Tensor) -> Mask:
        other = as_mask(other)
        return Pairs(self.allowed & other.allowed) if isinstance(other, Pairs) else And(self, other)

    def _bind(self, sizes: Sizes) -> Bound:
        shape, whole = tuple(self.allowed.shape), (*sizes.lead, sizes.nq, sizes.n)
        if not broadcasts(shape, whole):
            fix = ""
            if shape[-1:] == (sizes.n,) and len(shape) <= len(sizes.lead) + 1:
                fix = "Fix: a mask of keys alone is regard.Keys(mask), or mask[:, None, :] for many queries."
            raise ValueError(refusal("mask", f"shape {shape}", f"a shape that broadcasts to {whole}", fix))
        return BoundPairs(self.allowed, sizes)


class Keys(Mask):
    """The same keys for every query: booleans (..., N) whose leading axes are the first ones of the call.

    Args:
        allowed: True for what may be read.
        filled: whether keys and values are known to be zero elsewhere, as what a mechanism of this library has read is: there is
            nothing to be kept out, such as NaN.

    Example:
        >>> Keys(torch.tensor([[True, True, False]]))
        Keys(1, 3)
    """

    def __init__(self, allowed: Tensor, filled: bool = False) -> None:
        as_mask(allowed)
        if isinstance(allowed, Tensor) and allowed.dim() == 0:
            raise ValueError(refusal("allowed", "a tensor without axes", "booleans over the keys, (..., N)"))
        self.allowed = allowed
        self.real = allowed if filled else None

    def __repr__(self) -> str:
        return f"Keys{tuple(self.allowed.shape)}"

    def _bind(self, sizes: Sizes) -> Bound:
        lead, n = tuple(self.allowed.shape[:-1]), self.allowed.shape[-1]
        if n not in (1, sizes.n) or len(lead) > len(sizes.lead) or not broadcasts(lead, sizes.lead[: len(lead)]):
            whole = (*sizes.lead, sizes.n)
            raise ValueError(refusal("mask", f"Keys of shape {(*lead, n)}", f"booleans over the keys, {whole}"))
        allowed = self.allowed.reshape(*lead, *(1,) * (len(sizes.lead) - len(lead)), n)
        return BoundKeys(allowed.expand(*allowed.shape[:-1], sizes.n), sizes, self.real is not None)


class Padding(Mask):
    """The first `lengths` keys of each sequence, for sequences padded on the right.

    Args:
        lengths: true lengths, at most as many as there are keys (which is checked on the CPU, where it stalls nothing); its axes
            are the first leading axes of the call. A list of whole numbers will do on torch's default device.

    Example:
        >>> Padding(torch.tensor([3, 5]))
        Padding(lengths=[3, 5])
    """

    def __init__(self, lengths: Tensor | Sequence[int]) -> None:
        if isinstance(lengths, list | tuple) and all(type(x) is int for x in lengths):
            lengths = torch.tensor(lengths, dtype=torch.long)
        if not isinstance(lengths, Tensor) or lengths.dtype.is_floating_point or lengths.dtype == torch.bool:
            kind = f"a tensor of {lengths.dtype}" if isinstance(lengths, Tensor) else repr(lengths)
            raise TypeError(refusal("lengths", kind, "a tensor of integers, or a list of whole numbers"))
        self.lengths = lengths
        if self._seen() and lengths.numel() and int(lengths.min()) < 0:
            raise ValueError(refusal("lengths", lengths.tolist(), "numbers >= 0"))

    def __repr__(self) -> str:
        return f"Padding(lengths={self.lengths.tolist()})"

    def _bind(self, sizes: Sizes) -> Bound:
        axes = tuple(self.lengths.shape)
        if len(axes) > len(sizes.lead) or not broadcasts(axes, sizes.lead[: len(axes)]):
            expected = f"the first leading axes of the call, {sizes.lead}: one length for each sequence"
            raise ValueError(refusal("lengths", f"shape {axes}", expected))
        if self._seen() and self.lengths.numel() and int(self.lengths.max()) > sizes.n:
            raise ValueError(refusal("lengths", self.lengths.tolist(), f"at most as many as there are keys, {sizes.n}"))
        positions = torch.arange(sizes.n, device=self.lengths.device)
        return Keys(positions < self.lengths[..., None]).bind(sizes)

    def _seen(self) -> bool:
        """Whether the numbers can be looked at without stalling a device or breaking a graph."""
        return self.lengths.device.type == "cpu" and not torch.compiler.is_compiling() and _is_plain(self.lengths)


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor has numbers to look at: not one of torch.func's or a tracer's."""
    return type(x) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(x)


class Band(Mask):
    """Keys within some distance of the query: `low <= j - i <= high`.

    When there are not as many queries as keys, the last query is aligned with the last key, as in cached decoding.
    A softmax over a narrow band takes time and memory linear in the length.
    """

    low: float
    high: float

    def __init__(self, low: float, high: float) -> None:
        for name, bound in (("low", low), ("high", high)):
            if isinstance(bound, bool) or not isinstance(bound, int | float) or bound != bound:
                raise ValueError(refusal(name, repr(bound), "a number"))
        # Distances are whole numbers, and none is longer than an index can be.
        self.low = math.copysign(math.inf, low) if abs(low) > _FARTHEST else math.ceil(low)
        self.high = math.copysign(math.inf, high) if abs(high) > _FARTHEST else math.floor(high)

    def __repr__(self) -> str:
        return f"Band(low={self.low}, high={self.high})"

    def _bind(self, sizes: Sizes) -> Bound:
        return BoundBand(self.low, self.high, sizes)


class Causal(Band):
    """A query attends the keys up to its own position; the last query is aligned with the last key.

    Example:
        >>> Causal().bind(Sizes((), 2, 3)).tile(range(2), range(3), torch.device("cpu")).int().tolist()
        [[1, 1, 0], [1, 1, 1]]
    """

    def __init__(self) -> None:
        super().__init__(-math.inf, 0)

    def __repr__(self) -> str:
        return "Causal()"


class Window(Band):
    """A query attends the keys at most `width` positions away from its own.

    Example:
        >>> Window(1)
        Window(1)
    """

    def __init__(self, width: int) -> None:
        if not isinstance(width, int) or isinstance(width, bool) or width < 0:
            raise ValueError(refusal("width", repr(width), "a whole number >= 0"))
        self.width = width
        super().__init__(-width, width)

    def __repr__(self) -> str:
        return f"Window({self.width})"


class Directional(Band):
    """Strictly earlier keys (`"forward"`) or strictly later ones (`"backward"`), as in DiSAN; never the own position.

    Example:
        >>> Directional("forward")
        Directional('forward')
    """

    def __init__(self, direction: str) -> None:
        if direction not in ("forward", "backward"):
            raise ValueError(refusal("direction", repr(direction), "'forward' or 'backward'"))
        self.direction = direction
        super().__init__(*((-math.inf, -1) if direction == "forward" else (1, math.inf)))

    def __repr__(self) -> str:
        return f"Directional({self.direction!r})"


class Where(Mask):
    """Any relation of positions: a function of indices i (Nq, 1) and j (1, N) that gives booleans.

    Example:
        >>> apart = Where(lambda i, j: i != j)
        >>> apart.bind(Sizes((), 2, 2)).tile(range(2), range(2), torch.device("cpu")).int().tolist()
        [[0, 1], [1, 0]]
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        if not callable(function):
            raise TypeError(refusal("function", type(function).__name__, "a function of indices i and j"))
        self.function = function

    def __repr__(self) -> str:
        return f"Where({getattr(self.function, '__name__', self.function)})"

    def _bind(self, sizes: Sizes) -> Bound:
        return BoundWhere(self.function, sizes)


class And(Mask):
    """Allowed by both."""

    def __init__(self, left: Mask, right: Mask) -> None:
        self.left, self.right = left, right

    def __repr__(self) -> str:
        return f"{self.left!r} & {self.right!r}"

    def _bind(self, sizes: Sizes) -> Bound:
        return both(self.left.bind(sizes), self.right.bind(sizes), sizes)


class Or(Mask):
    """Allowed by either."""

    def __init__(self, left: Mask, right: Mask) -> None:
        self.left, self.right = left, right

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"

    def _bind(self, sizes: Sizes) -> Bound:
        return BoundEither(self.left.bind(sizes), self.right.bind(sizes), sizes)
