r"""Vectors of length one, in one pass over memory in each direction.

$$y = x\, r, \qquad r = \max(\|x\|, \epsilon)^{-1}, \qquad dx = r\,(dy - [\|x\| \ge \epsilon]\, (dy \cdot x r)\, x r)$$

Sums and products are in float32; the backward reads the vectors again rather than keep what the forward knew.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.squares import unit_equation
from regard.ops.transforms import asks_for_more
from regard.ops.triton.launching import cdiv, power_of_2, quick

# Numbers that a program holds.
ELEMENTS = 4096


@triton.jit
def _unit(x, least):
    """Unit vectors, the factors, and which vectors are long enough."""
    square = tl.sum(x * x, 1)
    # NaN is not short, and so is seen in the result.
    short = square < least
    r = tl.rsqrt(tl.where(short, least, square))
    return x * r[:, None], r, short


@quick
@triton.jit
def forward_kernel(X, Y, least, ROWS, D, BM: tl.constexpr, BD: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    at = m[:, None] * D + d[None, :]
    inside = (m < ROWS)[:, None] & (d < D)[None, :]
    y, _, _ = _unit(tl.load(X + at, mask=inside, other=0.0).to(tl.float32), least)
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=inside)


@quick
@triton.jit
def backward_kernel(X, G, DX, least, ROWS, D, BM: tl.constexpr, BD: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    at = m[:, None] * D + d[None, :]
    inside = (m < ROWS)[:, None] & (d < D)[None, :]
    y, r, short = _unit(tl.load(X + at, mask=inside, other=0.0).to(tl.float32), least)
    g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
    along = tl.where(short, 0.0, tl.sum(g * y, 1))
    tl.store(DX + at, ((g - along[:, None] * y) * r[:, None]).to(DX.dtype.element_ty), mask=inside)


def by_rows(kernel: Any, x: Tensor, number: float, *tensors: Tensor) -> None:
    """Launch a kernel on contiguous tensors, with a number, over the vectors (..., d) of x."""
    d = x.shape[-1]
    rows, width = x.numel() // d, power_of_2(d)
    each = max(1, ELEMENTS // width)
    kernel[(cdiv(rows, each),)](*tensors, number, rows, d, BM=each, BD=width, num_warps=4)


class UnitRows(torch.autograd.Function):
    """Vectors (..., d) of length one, contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float) -> Tensor:
        ctx.epsilon = epsilon
        ctx.save_for_backward(x)
        x = x.contiguous()
        y = torch.empty_like(x)
        by_rows(forward_kernel, x, epsilon**2, x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        if asks_for_more(grad):
            # Derivatives of a higher order are those of the equation, and so are several at once.
            further = torch.is_grad_enabled()
            with torch.enable_grad():
                y = unit_equation(x, ctx.epsilon)
            return torch.autograd.grad(y, x, grad, create_graph=further)[0], None
        x = x.contiguous()
        dx = torch.empty_like(x)
        by_rows(backward_kernel, x, ctx.epsilon**2, x, grad.to(x.dtype).contiguous(), dx)
        return dx, None
