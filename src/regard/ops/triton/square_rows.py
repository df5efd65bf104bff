r"""Squared lengths of vectors, times a factor, in one pass over memory in each direction.

$$y = f\, \|x\|^2, \qquad dx = 2 f\, dy\, x$$

Sums and products are in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.transforms import asks_for_more
from regard.ops.triton.launching import quick
from regard.ops.triton.unit_rows import by_rows


@quick
@triton.jit
def forward_kernel(X, Y, factor, ROWS, D, BM: tl.constexpr, BD: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    x = tl.load(X + m[:, None] * D + d[None, :], mask=(m < ROWS)[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    tl.store(Y + m, tl.sum(x * x, 1) * factor, mask=m < ROWS)


@quick
@triton.jit
def backward_kernel(X, G, DX, factor, ROWS, D, BM: tl.constexpr, BD: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    at = m[:, None] * D + d[None, :]
    inside = (m < ROWS)[:, None] & (d < D)[None, :]
    g = tl.load(G + m, mask=m < ROWS, other=0.0) * (2.0 * factor)
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(DX + at, (x * g[:, None]).to(DX.dtype.element_ty), mask=inside)


class SquareRows(torch.autograd.Function):
    """Of vectors (..., d) in up to single precision: (...), in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.save_for_backward(x)
        y = x.new_empty(x.shape[:-1], dtype=torch.float32)
        by_rows(forward_kernel, x, factor, x.contiguous(), y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        if asks_for_more(grad):
            # Derivatives of a higher order are those of the equation, and so are several at once.
            return torch.mul((2.0 * ctx.factor * grad).unsqueeze(-1), x).to(x.dtype), None
        x = x.contiguous()
        dx = torch.empty_like(x)
        by_rows(backward_kernel, x, ctx.factor, x, grad.contiguous(), dx)
        return dx, None
