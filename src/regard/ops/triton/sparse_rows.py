r"""Rows under sparsemax and entmax, aligned while they are on the chip: scores are read once, weights written once.

$$p_j = [x_j - \tau]_+^{1/\rho}, \qquad x_j = \rho\,(z_j - \max z), \qquad \rho = \alpha - 1, \qquad \sum_j p_j = 1$$

The sum is 1 or more at $\tau = -1$ and falls with $\tau$. For $\alpha \le 2$ it is convex, so Newton's steps from there rise to the root and never
pass it, in about as many steps as the logarithm of the number of keys. For $\alpha = 2$ a step is $\tau = (\sum_{S} x_j - 1) / |S|$ over the
keys $S$ above the last one, and the root is exact once these are the same; for 1.5 a last step solves the sum over the keys found; otherwise
the weights are divided by their sum. Above 2 the sum has no bounded slope: the threshold is bisected until no number lies between.

Backward, with $s_j = p_j^{2 - \alpha}$ where $p_j > 0$, and 0 elsewhere:

$$\bar g = \frac{\sum_j s_j g_j}{\sum_j s_j}, \qquad dz_j = s_j (g_j - \bar g), \qquad
  d\alpha = \frac{1}{\rho} \sum_j p_j \Big(\frac{1}{\rho} - \log p_j\Big) (g_j - \bar g)$$

All of it follows from the weights: nothing else is kept, and derivatives of a higher order are those of these equations. A score that is
exactly at the threshold of sparsemax has weight 0 and no gradient here, where the equation by sorting counts it among those that share one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.triton.launching import cdiv, power_of_2, quick

# What is known of alpha: 2, 1.5, between 1 and 2, above 2.
SPARSEMAX, ENTMAX, CONVEX, STEEP = range(4)
# Numbers that a program of several short rows holds: eight a thread, since the addresses of many rows take registers too, and a row that
# needs many steps keeps few others waiting.
ELEMENTS = 1024
# One more Newton step from so near squares the distance.
NEAR = tl.constexpr(1e-6)


@triton.jit
def _power(x, exponent):
    """X to a power where it is positive, zero elsewhere."""
    positive = x > 0.0
    return tl.where(positive, tl.exp2(exponent * tl.log2(tl.where(positive, x, 1.0))), 0.0)


@triton.jit
def _by_projection(x, BM: tl.constexpr, BN: tl.constexpr):
    """Weights of sparsemax. Every turn of the loop leaves fewer keys to some row, so there is a last one."""
    tau = tl.full((BM,), -1.0, dtype=tl.float32)
    fewest = tl.full((BM,), BN + 1.0, dtype=tl.float32)
    moving = tl.max((fewest > 0).to(tl.int32), 0)
    while moving > 0:
        inside = x > tau[:, None]
        size = tl.sum(inside.to(tl.float32), 1)
        total = tl.sum(tl.where(inside, x, 0.0), 1)
        tau = tl.where(size > 0, tl.div_rn(total - 1.0, tl.maximum(size, 1.0)), tau)
        moving = tl.max((size < fewest).to(tl.int32), 0)
        fewest = tl.minimum(fewest, size)
    return tl.maximum(x - tau[:, None], 0.0)


@triton.jit
def _by_newton(x, power, KIND: tl.constexpr, BM: tl.constexpr):
    """Weights for alpha below 2, where each step comes nearer from below."""
    tau = tl.full((BM,), -1.0, dtype=tl.float32)
    moving = tl.max((tau < 0).to(tl.int32), 0)
    while moving > 0:
        slack = tl.maximum(x - tau[:, None], 0.0)
        steep = slack if KIND == 1 else _power(slack, power - 1.0)
        excess = tl.sum(steep * slack, 1) - 1.0
        slope = tl.sum(steep, 1) * power
        step = tl.where(excess > 0, excess / tl.where(slope > 0, slope, 1.0), 0.0)
        moving = tl.max(((excess > NEAR) & (tau + step > tau)).to(tl.int32), 0)
        tau += step
    if KIND == 1:
        inside = x > tau[:, None]
        size = tl.maximum(tl.sum(inside.to(tl.float32), 1), 1.0)
        mean = tl.div_rn(tl.sum(tl.where(inside, x, 0.0), 1), size)
        apart = tl.where(inside, x - mean[:, None], 0.0)
        rest = tl.maximum(tl.div_rn(1.0 - tl.sum(apart * apart, 1), size), 1.1754943508222875e-38)
        slack = tl.where(inside, tl.maximum(x - (mean - tl.sqrt_rn(rest))[:, None], 0.0), 0.0)
        p = slack * slack
    else:
        p = _power(x - tau[:, None], power)
    return p


@triton.jit
def _by_bisection(x, power, BM: tl.constexpr):
    """Weights for alpha above 2."""
    low = tl.full((BM,), -1.0, dtype=tl.float32)
    high = tl.full((BM,), 0.0, dtype=tl.float32)
    middle = 0.5 * (low + high)
    moving = tl.max((low < high).to(tl.int32), 0)
    while moving > 0:
        enough = tl.sum(_power(x - middle[:, None], power), 1) >= 1.0
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        middle = 0.5 * (low + high)
        moving = tl.max(((low < middle) & (middle < high)).to(tl.int32), 0)
    # The slope tells how far below the next number the root is.
    tau = low
    for _ in range(2):
        slack = x - tau[:, None]
        steep = _power(slack, power - 1.0)
        excess = tl.sum(_power(slack, power), 1) - 1.0
        slope = tl.sum(steep, 1) * power
        tau += tl.where(slope > 0, excess / tl.where(slope > 0, slope, 1.0), 0.0)
    return _power(x - tau[:, None], power)


@quick
@triton.jit
def forward_kernel(
    Z, MASK, ALPHA, P, rate, ROWS, NQ, N, sml, smm, smn,
    KIND: tl.constexpr, LEARNED: tl.constexpr, HAS_MASK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Weights of some complete rows."""
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    at = m[:, None] * N + n[None, :]
    here = (m < ROWS)[:, None] & (n < N)[None, :]
    z = tl.load(Z + at, mask=here, other=float("-inf")).to(tl.float32)
    if HAS_MASK:
        place = (m // NQ * sml + m % NQ * smm)[:, None] + n[None, :].to(tl.int64) * smn
        z = tl.where(tl.load(MASK + place, mask=here, other=0) != 0, z, float("-inf"))
    if LEARNED:
        rate = tl.load(ALPHA).to(tl.float32) - 1.0
    # A maximum passes over NaN; infinity is not passed over.
    top = tl.max(tl.where(z != z, float("inf"), z), 1)
    lost = top == float("inf")
    usual = (top > float("-inf")) & (top < float("inf"))
    x = z - tl.where(usual, top, 0.0)[:, None]
    if KIND == 1:
        x = x * 0.5
    elif KIND != 0:
        x = x * rate
    x = tl.where(usual[:, None], x, float("-inf"))
    if KIND == 0:
        p = _by_projection(x, BM, BN)
    elif KIND == 1:
        p = _by_newton(x, 2.0, KIND, BM)
    else:
        p = _by_newton(x, 1.0 / rate, KIND, BM) if KIND == 2 else _by_bisection(x, 1.0 / rate, BM)
        total = tl.sum(p, 1)
        p = p / tl.where(total > 0, total, 1.0)[:, None]
    # No threshold separates NaN or infinity from the rest: such a row is NaN, as under softmax.
    p = tl.where(lost[:, None] & (z != float("-inf")), float("nan"), p)
    tl.store(P + at, p.to(P.dtype.element_ty), mask=here)


@quick
@triton.jit
def backward_kernel(
    P, G, ALPHA, DZ, DALPHA, rate, ROWS, N,
    KIND: tl.constexpr, LEARNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of the scores of some rows, and what each row adds to that of alpha."""
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    at = m[:, None] * N + n[None, :]
    here = (m < ROWS)[:, None] & (n < N)[None, :]
    p = tl.load(P + at, mask=here, other=0.0).to(tl.float32)
    g = tl.load(G + at, mask=here, other=0.0).to(tl.float32)
    inside = p > 0.0
    g = tl.where(inside, g, 0.0)
    if LEARNED:
        rate = tl.load(ALPHA).to(tl.float32) - 1.0
    if KIND == 0:
        s = inside.to(tl.float32)
    elif KIND == 1:
        s = tl.sqrt(tl.where(inside, p, 0.0))
    else:
        s = _power(p, 1.0 - rate)
    total = tl.sum(s, 1)
    total = tl.where(total > 0, total, 1.0)
    mean = tl.sum(s * g, 1) / total
    if KIND != 0:
        # Where nearly all weight is on one key, what is left of its gradient is less than a rounding of the mean.
        mean += tl.sum(s * (g - mean[:, None]), 1) / total
    apart = tl.where(inside, g - mean[:, None], 0.0)
    tl.store(DZ + at, (s * apart).to(DZ.dtype.element_ty), mask=here)
    if LEARNED:
        turned = tl.where(inside, p * (1.0 / rate - tl.log(tl.where(inside, p, 1.0))), 0.0)
        tl.store(DALPHA + m, tl.sum(turned * apart, 1) / rate, mask=m < ROWS)


def _kind(learned: Tensor | None, alpha: float) -> int:
    if learned is not None:
        return CONVEX
    return {2.0: SPARSEMAX, 1.5: ENTMAX}.get(alpha, CONVEX if alpha < 2 else STEEP)


def _blocks(rows: int, n: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid, and rows and numbers of a program."""
    width = max(16, power_of_2(n))
    each = min(max(1, ELEMENTS // width), power_of_2(rows)) if width <= 512 else 1
    # With more than 16 numbers a thread, registers leave a processor fewer warps at once.
    warps = 4 if width <= 2048 else 8 if width <= 4096 else 16
    return (cdiv(rows, each),), {"BM": each, "BN": width, "num_warps": warps}


def aligned(scores: Tensor, mask: Tensor | None, learned: Tensor | None, alpha: float) -> Tensor:
    """Weights (L, Nq, N) of scores in the same dtype, zero in rows that may read nothing.

    mask bytes (L or 1, Nq or 1, N or 1); alpha is a number above 1, or `learned`, which is one in [1, 2] in memory.
    """
    scores = scores.contiguous()
    nq, n = scores.shape[-2:]
    rows = scores.numel() // n
    weights = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    strides = [0, 0, 0]
    if mask is not None:
        strides = [stride if size > 1 else 0 for stride, size in zip(mask.stride(), mask.shape, strict=True)]
    grid, blocks = _blocks(rows, n)
    forward_kernel[grid](
        scores, scores if mask is None else mask, scores if learned is None else learned, weights, alpha - 1.0,
        rows, nq, n, *strides, KIND=_kind(learned, alpha), LEARNED=learned is not None, HAS_MASK=mask is not None, **blocks,
    )  # fmt: skip
    return weights


def gradients(grad: Tensor, weights: Tensor, learned: Tensor | None, alpha: float) -> tuple[Tensor, Tensor]:
    """Gradients of the scores, in their dtype, and of alpha, empty where it is not learned."""
    weights, grad = weights.contiguous(), grad.contiguous()
    n = weights.shape[-1]
    rows = weights.numel() // n
    found = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
    of_rows = torch.empty(0 if learned is None else rows, dtype=torch.float32, device=weights.device)
    grid, blocks = _blocks(rows, n)
    backward_kernel[grid](
        weights, grad, weights if learned is None else learned, found, of_rows, alpha - 1.0,
        rows, n, KIND=_kind(learned, alpha), LEARNED=learned is not None, **blocks,
    )  # fmt: skip
    return found, of_rows if learned is None else of_rows.sum().to(learned.dtype).reshape(learned.shape)
