"""How autograd may call the backward of an operator, beside the usual: with several gradients at once, and with none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _WithoutGradient(torch.autograd.Function):
    """Reads something, and has no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def check_gradients(out: Tensor, inputs: Sequence[Tensor]) -> None:
    """Several at once are those that come one by one; from none there is none."""
    several = torch.randn(3, *out.shape).to(out.dtype)
    expected = [torch.autograd.grad(out, inputs, grad, retain_graph=True) for grad in several]
    found = torch.autograd.grad(out, inputs, several, is_grads_batched=True, retain_graph=True)
    for x, *each in zip(found, *expected, strict=True):
        assert torch.equal(x, torch.stack(each))
    nothing = torch.autograd.grad(_WithoutGradient.apply(out), inputs, allow_unused=True)
    assert not any(x is not None and x.any() for x in nothing)
