"""What a call would be computed from again, and whether it is still what it was."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.ops.call import Call
from regard.ops.held import tensors_of

Stamps = list[tuple[Tensor, int]]


def made_of(call: Call) -> Iterator[Tensor]:
    """Every tensor of a call, its mask and its alignment; inference tensors keep no count of their changes."""
    return _countable([call.query, call.key, *_read_again(call)])


def _read_again(call: Call) -> list[object]:
    """What an execution reads: queries and keys as they were given are in the form, and what was prepared of them."""
    parts = [*vars(call.form).values(), call.value, call.bias, call.mask, call.align]
    return [*call.prepared.values(), *(x for part in parts for x in tensors_of(part))]


def _countable(parts: list[object]) -> Iterator[Tensor]:
    for part in parts:
        if isinstance(part, Tensor) and not part.is_inference():
            yield part


def stamps(call: Call) -> Stamps:
    """The tensors of a call as they are now."""
    return [(x, x._version) for x in made_of(call)]


def changed(then: Stamps) -> bool:
    """Whether any of these tensors has been written to since."""
    return any(x._version != version for x, version in then)


def stamps_of_recomputed(call: Call) -> Stamps:
    """The same for what a backward computes again; nothing where nobody counts, or none will."""
    tracing = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if tracing or not torch.is_grad_enabled():
        return []
    return [(x, x._version) for x in _countable(_read_again(call))]
