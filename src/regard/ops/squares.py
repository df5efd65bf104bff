r"""Lengths of vectors: $\|x\|^2$, and $x / \max(\|x\|, \epsilon)$, in float32 or wider, of vectors in any precision.

In half precision autograd would keep float32 copies of all vectors, and each step would be a pass over memory. There, outside of graphs and
transforms, squares have a gradient by hand, and on a GPU both have a kernel. Everything else takes the equation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.forms import WIDE, wide
from regard.ops.ready import loaded
from regard.ops.transforms import asks_for_more, transformed

# A vector is held in registers.
WIDEST = 1024


def squares(x: Tensor, over: float = 1.0) -> Tensor:
    """(..., d) -> (...), divided by a number.

    Example:
        >>> squares(torch.tensor([3.0, 4.0], dtype=torch.bfloat16))
        tensor(25.)
        >>> squares(torch.tensor([3.0, 4.0]), over=-2.0)
        tensor(-12.5000)
    """
    if by_kernel(x, "square_rows"):
        from regard.ops.triton.square_rows import SquareRows

        return SquareRows.apply(x, 1.0 / over)  # type: ignore[no-any-return,no-untyped-call]
    if x.dtype in WIDE or torch.compiler.is_compiling() or transformed():
        found: Tensor = wide(x).square().sum(-1)
    else:
        found = _Squares.apply(x)  # type: ignore[no-untyped-call]
    return found if over == 1.0 else found / over


def unit(x: Tensor, epsilon: float) -> Tensor:
    """(..., d), each of length one, or shorter where the given one is shorter than epsilon."""
    if by_kernel(x, "unit_rows"):
        from regard.ops.triton.unit_rows import UnitRows

        found: Tensor = UnitRows.apply(x, epsilon)  # type: ignore[no-untyped-call]
        return found
    return unit_equation(x, epsilon)


def unit_equation(x: Tensor, epsilon: float) -> Tensor:
    """The same by the equation, which has derivatives of every order."""
    # The square is clamped, not the norm, whose gradient at zero would be NaN.
    square = wide(x).square().sum(-1, keepdim=True)
    return (wide(x) * square.clamp(min=epsilon**2).rsqrt()).to(x.dtype)


def by_kernel(x: Tensor, kernels: str) -> bool:
    """Whether a module of kernels gives what is asked for."""
    known = x.device.type == "cuda" and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    if not known or torch.compiler.is_compiling() or transformed():
        return False
    return 0 < x.shape[-1] <= WIDEST and x.numel() > 0 and loaded(kernels)


class _Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
        return norm.square_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        twice = 2 * grad.unsqueeze(-1)
        if asks_for_more(grad):
            return torch.mul(twice, x).to(x.dtype)
        # Multiplied in float32 and rounded once, without a float32 result between.
        return torch.mul(x, twice, out=torch.empty_like(x))
