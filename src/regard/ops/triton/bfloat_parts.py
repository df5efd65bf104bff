r"""Products of float32 matrices, as exact as float32, from bfloat16 parts.

$x = x_1 + x_2 + x_3$ with eight leading bits in each part: a float32 is the sum of its parts, whatever its magnitude. Of the nine products of
parts the three smallest are below the rounding of the largest and left out. The other six take tensor cores as long as three products of
tf32 parts would, but nothing has to pass through shared memory on their way: in 16 bits a tile that comes out of a product lies in
registers as the next product wants its left operand, and the right operand is read as it stands in memory, along either side. So what many
programs read is taken apart once for all of them (`in_parts`), and what a program computes in its registers (`cut`).

Tensor cores cut off what they add, where float32 additions round. So the products of a tile are added up from nothing, the smallest
first, and the tile to others by float32 additions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.triton.launching import cdiv, power_of_2, quick


@triton.jit
def _leading(x):
    """The leading eight bits of each number. The largest float32 would be rounded to infinity."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def cut(x):
    """The parts of what is in registers, where rounding would take more operations."""
    first = _leading(x)
    rest = x - first
    second = _leading(rest)
    return first.to(tl.bfloat16), second.to(tl.bfloat16), (rest - second).to(tl.bfloat16)


@triton.jit
def load_parts(PARTS, at, part):
    """The parts of some numbers; `part` is how far one part of a number is from the next."""
    FIRST = PARTS + at
    SECOND = FIRST + part
    return tl.load(FIRST), tl.load(SECOND), tl.load(SECOND + part)


@triton.jit
def product(x1, x2, x3, y1, y2, y3, FAST: tl.constexpr):
    """The product of x and y, both in parts, in float32."""
    p = _dot(x3, y1, tl.zeros((x1.shape[0], y1.shape[1]), dtype=tl.float32), FAST)
    p = _dot(x2, y2, p, FAST)
    p = _dot(x1, y3, p, FAST)
    p = _dot(x2, y1, p, FAST)
    p = _dot(x1, y2, p, FAST)
    return _dot(x1, y1, p, FAST)


@triton.jit
def _dot(x, y, p, FAST: tl.constexpr):
    if FAST:
        return tl.dot(x, y, p)
    # The interpreter would multiply the bits of bfloat16.
    return tl.dot(x.to(tl.float32), y.to(tl.float32), p, input_precision="ieee")


@quick
@triton.jit(do_not_specialize=("N", "DV", "ROOM"))
def parts_kernel(X, PARTS, sxl, sxn, sxd, N, DV, ROOM, part, BR: tl.constexpr, BV: tl.constexpr):
    lead = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.arange(0, BV)
    inside = (n[:, None] < N) & (c[None, :] < DV)
    x = tl.load(X + lead * sxl + n[:, None] * sxn + c[None, :] * sxd, mask=inside, other=0.0).to(tl.float32)
    first = _leading(x)
    rest = x - first
    # Rounded, so that what the products leave out has either sign.
    second = rest.to(tl.bfloat16)
    third = rest - second.to(tl.float32)
    TO = PARTS + (lead * ROOM + n[:, None]) * BV + c[None, :]
    within = n[:, None] < ROOM
    tl.store(TO, first.to(tl.bfloat16), mask=within)
    TO += part
    tl.store(TO, second, mask=within)
    TO += part
    tl.store(TO, third.to(tl.bfloat16), mask=within)


def in_parts(x: Tensor, room: int) -> Tensor:
    """The parts (3, L, room, columns) of x (L, N, d): zeros behind the last token, and behind the last column up to a power of two."""
    length, n, width = x.shape
    wide = max(16, power_of_2(width))
    parts = torch.empty(3, length, room, wide, dtype=torch.bfloat16, device=x.device)
    block = max(1, min(power_of_2(room), 4096 // wide))
    parts_kernel[(cdiv(room, block), length)](
        x, parts, *x.stride(), n, width, room, parts.stride(0), BR=block, BV=wide, num_warps=4
    )
    return parts
