r"""What the multi-dimensional kernels share: the operands of a call, masks, and their alignment.

For every feature the kernels compute, from scores $e_j$ that are already divided by the temperature,

$$t_j = e_j + G_j / \tau + b_j, \qquad p = \mathrm{softmax}(t), \qquad o = \sum_j r_j p_j v_j$$

with Gumbel noise $G$, a Gaussian exponent $b$, and $r_j$ the dropout factor, times $e^{b_j}$ where the Gaussian is scaled; or the value
$r_j v_j$ of one key alone, which has the gradient of the softmax or none. With $x_j = r_j\, do\, v_j$:

$$dt_j = p_j \Big(x_j - \sum_l p_l x_l\Big)$$

Scores are kept in base 2. The keys that a query may reach under a window are found once for all features, by `reach_kernel`: from `low`
to `high`, the nearest allowed key alone where the window holds none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.triton.activate import SIGMOID, TANH, code_of, value_and_slope
from regard.ops.triton.additive_tile import mask_arguments
from regard.ops.triton.align import ALL, FOR_DROPOUT, FOR_SAMPLE, Align, gumbel, inside, keep, log_gaussian, uniform
from regard.ops.triton.launching import cdiv, quick

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def block_of(X, first, second, first_in, second_in, s_first, s_second):
    """A block (first, second) in float32, zeros outside."""
    at = X + first[:, None] * s_first + second[None, :] * s_second
    return tl.load(at, mask=first_in[:, None] & second_in[None, :], other=0.0).to(tl.float32)


@triton.jit
def _quick_tanh(z):
    """The hardware's, within 2^-11 of itself."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def activate(z, slope, ACT: tl.constexpr, QUICK: tl.constexpr, FAST: tl.constexpr):
    """Value and derivative; `QUICK` takes the hardware's tanh."""
    if QUICK and ACT == 0:
        h = _quick_tanh(z)
        g = 1.0 - h * h
    elif QUICK and ACT == 1:
        t = _quick_tanh(0.5 * z)
        h = 0.5 + 0.5 * t
        g = 0.25 - 0.25 * t * t
    else:
        h, g = value_and_slope(z, ACT, slope, FAST)
    return h, g


@triton.jit
def exp2(x, FAST: tl.constexpr):
    """2^x by the special-function unit, without the detour around results below 2^-126, which are no weights."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def allowed(
    MASK, over, own, over_in, own_in, s_over, s_own, lag,
    OWN_IS_KEY: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Which pairs (over, own) may be read; `lag` = keys - queries aligns the last query with the last key."""
    ok = over_in[:, None] & own_in[None, :]
    if CAUSAL:
        if OWN_IS_KEY:
            ok = ok & (own[None, :] <= over[:, None] + lag)
        else:
            ok = ok & (over[:, None] <= own[None, :] + lag)
    if HAS_MASK:
        ok = ok & (tl.load(MASK + over[:, None] * s_over + own[None, :] * s_own, mask=ok, other=0) != 0)
    return ok


@triton.jit
def within(ok, low, high, over, own, OWN_IS_KEY: tl.constexpr, LOCAL: tl.constexpr):
    """The same, and within the reach of each query."""
    if LOCAL:
        if OWN_IS_KEY:
            ok = ok & (own[None, :] >= low[:, None]) & (own[None, :] <= high[:, None])
        else:
            ok = ok & (over[:, None] >= low[None, :]) & (over[:, None] <= high[None, :])
    return ok


@triton.jit
def noise(SEED, lead, feature, i, j, heat):
    """Gumbel noise over the temperature, in base 2; feature, i and j broadcast."""
    return gumbel(uniform(SEED, lead, feature, i, j, FOR_SAMPLE)) * (heat * LOG2E)


@triton.jit
def bump_of(position, j, window, GAUSSIAN: tl.constexpr):
    """Exponent of the Gaussian in base 2; the two broadcast."""
    if GAUSSIAN:
        bump = log_gaussian(position, j, window) * LOG2E
    else:
        bump = 0.0
    return bump


@triton.jit
def changed(t, bump, SEED, lead, feature, i, j, heat, NOISE: tl.constexpr, GAUSSIAN: tl.constexpr):
    """What the softmax is taken of, from the scores."""
    if NOISE:
        t += noise(SEED, lead, feature, i, j, heat)
    if GAUSSIAN == 1:
        t += bump
    return t


@triton.jit
def gained(x, bump, SEED, lead, feature, i, j, dropout, DROP: tl.constexpr, GAUSSIAN: tl.constexpr, FAST: tl.constexpr):
    """Something times what the weights are multiplied by after the softmax."""
    if DROP:
        x = x * keep(uniform(SEED, lead, feature, i, j, FOR_DROPOUT), dropout)
    if GAUSSIAN == 2:
        x = x * exp2(bump, FAST)
    return x


@triton.jit
def place(index, tokens, F, C: tl.constexpr, BF: tl.constexpr, SPAN):
    """Leading entry, tile of features and first block of tokens of a program that has SPAN blocks."""
    groups, tiles = tl.cdiv(tl.cdiv(tokens, C), SPAN), tl.cdiv(F, BF)
    return (index // (groups * tiles)).to(tl.int64), index // groups % tiles, index % groups * SPAN


@triton.jit
def query_side(POSITION, LOW, HIGH, m, m_in, LOCAL: tl.constexpr):
    """Position and reach of some queries; one that may read nothing reaches from the end to the beginning."""
    if LOCAL:
        position = tl.load(POSITION + m, mask=m_in, other=0.0)
        low = tl.load(LOW + m, mask=m_in, other=2147483647)
        high = tl.load(HIGH + m, mask=m_in, other=-1)
    else:
        position, low, high = m, m, m
    return position, low, high


@triton.jit
def keys_of(low, high, block, N, lag, C: tl.constexpr, R: tl.constexpr, CAUSAL: tl.constexpr, LOCAL: tl.constexpr):
    """From the first block of keys to the end of those that some of a block of queries may read."""
    begin, end = 0, N
    if CAUSAL:
        end = tl.minimum(N, block * C + C + lag)
    if LOCAL:
        begin = tl.min(low, 0) // R * R
        end = tl.minimum(end, tl.max(high, 0) + 1)
    return begin, end


@quick
@triton.jit
def reach_kernel(
    POSITION, MASK, LOW, HIGH,
    spl, sml, smm, smn, window, NQ, N,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The first and last key of each query's window, (L, Nq): its nearest allowed key, the first of equals, where there are none."""
    lead = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * C + tl.arange(0, C)
    m_in = m < NQ
    position = tl.load(POSITION + lead * spl + m, mask=m_in, other=0.0)
    # Of a position that is no number any key will do: its score is NaN.
    lost = position != position
    position = tl.where(lost, 0.0, position)
    seen = tl.zeros((C,), dtype=tl.int32)
    shortest = tl.full((C,), float("inf"), dtype=tl.float32)
    nearest = tl.full((C,), 2147483647, dtype=tl.int32)
    for start in range(0, N, R):
        n = start + tl.arange(0, R)
        ok = allowed(MASK + lead * sml, n, m, n < N, m_in, smn, smm, N - NQ, False, CAUSAL, HAS_MASK)
        near = ok & inside(position[None, :], n[:, None], window) & (lost == 0)[None, :]
        seen = tl.maximum(seen, tl.max(near.to(tl.int32), 0))
        distance = tl.where(ok, tl.abs(n[:, None] - position[None, :]), float("inf"))
        short = tl.min(distance, 0)
        first = tl.min(tl.where(ok & (distance == short[None, :]), n[:, None], 2147483647), 0)
        nearest = tl.where(short < shortest, first, nearest)
        shortest = tl.minimum(short, shortest)
    low = tl.ceil(tl.maximum(position - window, 0.0)).to(tl.int32)
    high = tl.floor(tl.minimum(position + window, N - 1.0)).to(tl.int32)
    low = tl.where(seen > 0, low, nearest)
    high = tl.where(seen > 0, high, tl.where(shortest < float("inf"), nearest, -1))
    tl.store(LOW + lead * NQ + m, low, mask=m_in)
    tl.store(HIGH + lead * NQ + m, high, mask=m_in)


@dataclass(frozen=True)
class Operands:
    """One call: a (L, Nq, D), u (L, N, D), v (L, N, F); w (L or 1, D, F), or (L or 1, F) where hidden units are the features."""

    a: Tensor
    u: Tensor
    w: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    act: str
    align: Align = field(default_factory=Align)

    @cached_property
    def sizes(self) -> tuple[int, int, int, int]:
        """Queries, keys, hidden units, features."""
        return self.a.shape[1], self.u.shape[1], self.a.shape[2], self.v.shape[2]

    @property
    def lead(self) -> int:
        return self.a.shape[0]

    @property
    def on_device(self) -> bool:
        """Whether a device runs the kernels, not the interpreter, which knows no instructions of one and no bfloat16 products."""
        return self.a.device.type == "cuda"

    @property
    def is_half(self) -> bool:
        return self.a.dtype != torch.float32

    @property
    def is_bounded(self) -> bool:
        return code_of(self.act)[0] in (TANH, SIGMOID)

    @property
    def learns(self) -> bool:
        """Whether scores have a gradient."""
        return self.align.choice == ALL or self.align.learns

    def room(self, like: Tensor, whole: bool, *shape: int) -> Tensor:
        """Where a gradient is written: in its own dtype if it is `whole` then, in float32 where it is still added to; zeros without any."""
        dtype = like.dtype if whole else torch.float32
        return like.new_empty(shape, dtype=dtype) if self.learns else like.new_zeros(shape, dtype=dtype)

    def parts_of_w(self, parts: int) -> tuple[int, int]:
        """Leading axes of the gradient of w in so many parts for each leading entry; its sum over the second has the first that w has."""
        return (self.lead, parts) if self.w.shape[0] > 1 else (1, self.lead * parts)

    def reach(self) -> Tensor | None:
        """First and last key of each query's window, (2, L, Nq) int32; None where there is no window."""
        nq, n, _, _ = self.sizes
        if self.align.position is None:
            return None
        both = self.a.new_empty(2, self.lead, nq, dtype=torch.int32)
        _, position, stride, _, window, *_ = self.align.arguments(self.w)
        mask, *mask_strides = mask_arguments(self.mask, self.w)
        reach_kernel[(cdiv(nq, 32), self.lead)](
            position, mask, both[0], both[1], stride, *mask_strides, window, nq, n,
            CAUSAL=self.causal, HAS_MASK=self.mask is not None, R=64, C=32, num_warps=4,
        )  # fmt: skip
        return both

    def arguments(self, reach: Tensor | None) -> tuple[Tensor | float | int, ...]:
        """What every kernel begins with: tensors, the alignment, strides (0 along what is shared), activation, sizes."""
        seed, position, stride, *numbers = self.align.arguments(self.w)
        low, high = (self.w, self.w) if reach is None else reach
        mask, *mask_strides = mask_arguments(self.mask, self.w)
        of_w = self.w.stride()
        _, slope, bound = code_of(self.act)
        return (
            *(self.a, self.u, self.w, self.v, mask, seed, position, low, high),
            *(stride, *numbers),
            *(*self.a.stride(), *self.u.stride(), of_w[0] if self.w.shape[0] > 1 else 0, *of_w[1:], *self.v.stride()),
            *mask_strides,
            *(1.0 / bound, slope, *self.sizes),
        )

    def flags(self) -> dict[str, object]:
        """What the kernels are specialised for."""
        return {
            "ACT": code_of(self.act)[0],
            "CAUSAL": self.causal,
            "HAS_MASK": self.mask is not None,
            "FAST": self.on_device,
            "QUICK": self.on_device and self.is_half,
            **{**self.align.flags(), "LEARNS": self.learns},
        }
