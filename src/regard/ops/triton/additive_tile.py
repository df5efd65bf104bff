r"""Scores of a tile of additive attention, exactly, in float32: one activation per hidden unit and pair.

$$s_{ij} = \sum_d w_d\, \mathrm{act}(a_{id} + u_{jd}) + b_{ij}$$

For tanh, $\tanh(a+u) = 1 - 2/x$ with $x = 1 + e^{2a} e^{2u}$: the exponentials are per token, and two hidden units share a reciprocal.
With the weights inside, $y_d = x_d/w_d = 1/w_d + (e^{2a_d}/w_d)\, e^{2u_d}$ is one multiply-add, and $1/y_1 + 1/y_2 = (y_1 + y_2)/(y_1 y_2)$
two operations; where the scores alone are asked for, two such pairs share a reciprocal again. A tile in which that could overflow shares
less, or computes each pair's own exponential. Weights are divided by the largest of them, and none is smaller than $2^{-30}$ of it: what
that adds to a score is below its rounding.

Scores are symmetric in a and u: the rows of a tile are the tokens that a program owns, queries or keys, its columns those of the other side.
What is summed along rows then stays within four threads. Four hidden units take twelve additions and products and one
reciprocal for each pair of tokens, and everything else in the loop over units is kept small beside that: room behind the last token instead
of a mask for every load, and the layout of a matrix product, in which a thread holds two rows and reads the columns two at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.triton import activate as activations
from regard.ops.triton.activate import SIGMOID, TANH, code_of
from regard.ops.triton.align import Align
from regard.ops.triton.launching import cdiv, power_of_2, quick

# Arguments whose values make no quicker code: a sequence of another length is not worth another compilation.
SIZES = ("NQ", "N", "D", "DV", "sml", "smm", "sbl", "sbm", "spl", "first_query")

# Two hidden units share a reciprocal while |a| + |u| stays below this: (1 + e^42)^2 is still a float32.
SHARED_RANGE = tl.constexpr(21.0)
# The product of four denominators has so many bits at most.
SHARED_BITS = tl.constexpr(121.0)
# The smallest weight, as a share of the largest.
SMALLEST_SHARE = tl.constexpr(2.0**-30)
# That of a unit that is none.
SINGLE_SHARE = tl.constexpr(2.0**-10)
# Hidden units of which something is known together, and how many numbers.
GROUP = tl.constexpr(64)
KNOWN_NUMBERS = tl.constexpr(3)
# Hidden units that are asked for ahead.
ASKED = tl.constexpr(64)

# Tokens of the widest tile; tokens that are laid out have room for a multiple of it.
WIDEST_TILE = 128


def supports(act: str) -> bool:
    """Whether the kernels know an activation."""
    return activations.supports(act) and not act.startswith("tanh:")


@triton.jit
def _reciprocal(x, FAST: tl.constexpr):
    """1/x by the special-function unit, within one unit in the last place; the interpreter divides."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def activate(z, ACT: tl.constexpr, slope):
    """Value and derivative."""
    if ACT == 0:
        # From e^-2|z|, so that neither saturated side loses its derivative to cancellation.
        e = tl.exp(-2.0 * tl.abs(z))
        h = (1.0 - e) / (1.0 + e)
        h = tl.where(z < 0, -h, h)
        g = 4.0 * e / ((1.0 + e) * (1.0 + e))
    elif ACT == 1:
        e = tl.exp(-tl.abs(z))
        h = tl.where(z < 0, e, 1.0) / (1.0 + e)
        g = e / ((1.0 + e) * (1.0 + e))
    elif ACT == 2:
        h = tl.where(z < 0, 0.0, z)
        g = tl.where(z > 0, 1.0, 0.0)
    elif ACT == 3:
        h = tl.where(z > 0, z, slope * z)
        g = tl.where(z > 0, 1.0, slope)
    elif ACT == 4:
        cdf = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        h = z * cdf
        g = cdf + z * tl.exp(-0.5 * z * z) * 0.3989422804014327
    else:
        h = z
        g = z * 0.0 + 1.0
    return h, g


@triton.jit
def unit_of(X, d, at, within, s_unit, s_token, PADDED: tl.constexpr):
    """A hidden unit of some tokens."""
    if PADDED:
        return tl.load(X + d * s_unit + at * s_token)
    return tl.load(X + d * s_unit + at * s_token, mask=within, other=0.0).to(tl.float32)


@triton.jit
def nothing(BR: tl.constexpr, BC: tl.constexpr):
    """Zeros in the layout of a product, which everything that is added to them then has, too."""
    return tl.dot(tl.zeros((BR, 16), dtype=tl.float32), tl.zeros((16, BC), dtype=tl.float32))


@triton.jit
def _sum_of_units(
    R, C, W, KNOWN, r, c, r_in, c_in, srd, srt, scd, sct, SHARED: tl.constexpr, four, slope, D,
    ACT: tl.constexpr, FAST: tl.constexpr, PADDED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Scores of a tile. Where reciprocals are SHARED, by two hidden units or by `four`, R and C hold exponentials and W inverse weights.

    Both ways are in one loop: with one loop each there are not enough registers for what stands around them.
    """
    s = nothing(BR, BC)
    if SHARED:
        r1, r2, c1, c2, w1, w2 = two_units(R, C, W, 0, r, c, r_in, c_in, srd, srt, scd, sct, PADDED)
        for d in range(0, D, 4):
            above, below = fraction(r1, r2, c1, c2, w1, w2)
            ahead = tl.minimum(d + 2, D - 2)
            r1, r2, c1, c2, w1, w2 = two_units(R, C, W, ahead, r, c, r_in, c_in, srd, srt, scd, sct, PADDED)
            above2, below2 = fraction(r1, r2, c1, c2, w1, w2)
            ahead = tl.minimum(d + 4, D - 2)
            r1, r2, c1, c2, w1, w2 = two_units(R, C, W, ahead, r, c, r_in, c_in, srd, srt, scd, sct, PADDED)
            if four:
                s = tl.fma(above * below2 + above2 * below, _reciprocal(below * below2, FAST), s)
            else:
                s = tl.fma(above, _reciprocal(below, FAST), tl.fma(above2, _reciprocal(below2, FAST), s))
        s = tl.load(KNOWN) - tl.load(KNOWN + 1) * s
    else:
        for d in range(0, D):
            w = tl.load(W + d)
            row = unit_of(R, d, r, r_in, srd, srt, PADDED)
            column = unit_of(C, d, c, c_in, scd, sct, PADDED)
            h, g = activate(row[:, None] + column[None, :], ACT, slope)
            s += w * h
    return s


@triton.jit
def fraction(r1, r2, c1, c2, w1, w2):
    """Numerator and denominator of 1/y1 + 1/y2; w1 and w2 are inverse weights."""
    y1 = w1 + (w1 * r1)[:, None] * c1[None, :]
    y2 = w2 + (w2 * r2)[:, None] * c2[None, :]
    return y1 + y2, y1 * y2


@triton.jit
def two_units(ER, EC, W, d, r, c, r_in, c_in, srd, srt, scd, sct, PADDED: tl.constexpr):
    """Exponentials and weights of two hidden units. Loops ask for the next two while they work on these: they come from afar."""
    r1, r2 = unit_of(ER, d, r, r_in, srd, srt, PADDED), unit_of(ER, d + 1, r, r_in, srd, srt, PADDED)
    c1, c2 = unit_of(EC, d, c, c_in, scd, sct, PADDED), unit_of(EC, d + 1, c, c_in, scd, sct, PADDED)
    return r1, r2, c1, c2, tl.load(W + d), tl.load(W + d + 1)


@triton.jit
def ask_ahead(EX, start, s_unit, D, SHARE: tl.constexpr, FAST: tl.constexpr, TOKENS: tl.constexpr):
    """Ask for the first hidden units of tokens that lie side by side, 32 bytes at a time, before a loop over units comes to them.

    That asks for two units while it works on two others, which is long enough for what is near, but not for what comes from afar. What is
    given back are zeros, so that somebody waits for the question (not for the answer).
    """
    zero = tl.zeros((TOKENS,), dtype=tl.int32)
    if SHARE and FAST:
        lane = tl.arange(0, TOKENS)
        at = EX + start + lane % (TOKENS // 8) * 8
        unit = lane // (TOKENS // 8)
        for _ in tl.static_range(0, ASKED, 8):
            zero += tl.inline_asm_elementwise(
                "prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [(at + tl.minimum(unit, D - 1) * s_unit).to(tl.int64)],
                dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
            unit += 8
    return zero


@triton.jit
def largest(TOP, at, inside, SHARE: tl.constexpr):
    """The largest magnitude in a block of tokens, where reciprocals may be shared at all."""
    if SHARE:
        return tl.max(tl.load(TOP + at, mask=inside, other=0.0), 0)
    return 0.0


@triton.jit
def scores_of(
    R, C, ER, EC, W, INVERSES, KNOWN, r, c, r_in, c_in, reach, srd, srt, scd, sct, slope, D,
    ACT: tl.constexpr, SHARE: tl.constexpr, FAST: tl.constexpr, PADDED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Scores of a tile by D hidden units, with their inverse weights and what is known of them together.

    A comparison with NaN is false, so NaN takes the plain path and comes out as NaN.
    """
    if SHARE and reach <= SHARED_RANGE:
        four = reach <= tl.load(KNOWN + 2)
        s = _sum_of_units(
            ER, EC, INVERSES, KNOWN, r, c, r_in, c_in, srd, srt, scd, sct, True, four, slope, D, ACT, FAST, PADDED, BR, BC
        )  # fmt: skip
    else:
        s = _sum_of_units(
            R, C, W, KNOWN, r, c, r_in, c_in, srd, srt, scd, sct, False, False, slope, D, ACT, FAST, PADDED, BR, BC
        )  # fmt: skip
    return s


@triton.jit
def scores(
    R, C, ER, EC, W, BIAS, r, c, r_in, c_in, reach, srd, srt, scd, sct, sbr, sbc, slope, D,
    ACT: tl.constexpr, SHARE: tl.constexpr, HAS_BIAS: tl.constexpr, FAST: tl.constexpr, PADDED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Scores of a tile, bias included; `reach` is the largest |a| + |u| in it."""
    s = scores_of(
        R, C, ER, EC, W, W + D, W + 2 * D, r, c, r_in, c_in, reach, srd, srt, scd, sct, slope, D,
        ACT, SHARE, FAST, PADDED, BR, BC,
    )  # fmt: skip
    if HAS_BIAS:
        s += tl.load(BIAS + r[:, None] * sbr + c[None, :] * sbc, mask=r_in[:, None] & c_in[None, :], other=0.0)
    return s


@triton.jit
def allowed(MASK, m, n, m_in, n_in, smm, smn, offset, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr):
    """Which pairs of a tile are allowed, queries along its rows."""
    return pairs(MASK, m[:, None], n[None, :], m_in[:, None], n_in[None, :], smm, smn, offset, CAUSAL, HAS_MASK)


@triton.jit
def pairs(MASK, m, n, m_in, n_in, smm, smn, offset, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr):
    """Which pairs of a tile are allowed; m and n broadcast, whichever is along its rows."""
    ok = m_in & n_in
    if CAUSAL:
        ok = ok & (n <= m + offset)
    if HAS_MASK:
        ok = ok & (tl.load(MASK + m * smm + n * smn, mask=ok, other=0) != 0)
    return ok


@triton.jit
def queries(ORDER, slot, NQ, ORDERED: tl.constexpr):
    """The queries in some places of the order they are taken in; behind the last one, where nobody stands."""
    if ORDERED:
        return tl.load(ORDER + slot, mask=slot < NQ, other=NQ)
    return slot


@triton.jit
def add_gradients(
    g, R, C, ER, EC, W, DX, DW, r, c, r_in, c_in, reach, srd, srt, scd, sct, std, stt, slope, D,
    ACT: tl.constexpr, SHARE: tl.constexpr, FAST: tl.constexpr, PADDED: tl.constexpr, WITH_W: tl.constexpr,
):  # fmt: skip
    """Add what a tile of G gives to the tokens along its rows, (hidden unit, token); WITH_W, also their part of the gradient of w.

    No other program has these tokens. What stands there is asked for before the work that is added to it.
    """
    DX += r * stt
    DW += r * stt
    if SHARE and reach <= SHARED_RANGE:
        gain = 4.0 if ACT == 0 else 1.0
        back = 2.0 if ACT == 0 else 1.0
        whole = tl.sum(g, 1)
        r1, r2, c1, c2, w1, w2 = two_units(ER, EC, W, 0, r, c, r_in, c_in, srd, srt, scd, sct, PADDED)
        for d in range(0, D, 2):
            # Two units, and their share of w, at once: sums of rows pass through shared memory on their way out.
            unit = (d + tl.arange(0, 2)[None, :]) * std
            to = DX[:, None] + unit
            within = r_in[:, None]
            if WITH_W:
                to = tl.where(tl.arange(0, 2)[None, None, :] == 0, to[:, :, None], (DW[:, None] + unit)[:, :, None])
                within = r_in[:, None, None]
            held = tl.load(to) if PADDED else tl.load(to, mask=within)
            x1, x2 = 1.0 + r1[:, None] * c1[None, :], 1.0 + r2[:, None] * c2[None, :]
            gain1, gain2 = gain * w1, gain * w2
            ahead = tl.minimum(d + 2, D - 2)
            r1, r2, c1, c2, w1, w2 = two_units(ER, EC, W, ahead, r, c, r_in, c_in, srd, srt, scd, sct, PADDED)
            # The reciprocals of two from one division.
            inverse = _reciprocal(x1 * x2, FAST)
            s1, s2 = x2 * inverse, x1 * inverse
            g1, g2 = g * s1, g * s2
            more = tl.join(gain1 * tl.sum(g1 - g1 * s1, 1), gain2 * tl.sum(g2 - g2 * s2, 1))
            if WITH_W:
                more = tl.join(more, tl.join(whole - back * tl.sum(g1, 1), whole - back * tl.sum(g2, 1)))
            if PADDED:
                tl.store(to, held + more)
            else:
                tl.store(to, held + more, mask=within)
    else:
        for d in range(0, D):
            w = tl.load(W + d)
            row = unit_of(R, d, r, r_in, srd, srt, PADDED)
            column = unit_of(C, d, c, c_in, scd, sct, PADDED)
            h, t = activate(row[:, None] + column[None, :], ACT, slope)
            to = DX + d * std
            tl.store(to, tl.load(to, mask=r_in) + w * tl.sum(g * t, 1), mask=r_in)
            if WITH_W:
                to = DW + d * std
                tl.store(to, tl.load(to, mask=r_in) + tl.sum(g * h, 1), mask=r_in)


@triton.jit
def _write_known(KNOWN, constants, bits, scale, ALL: tl.constexpr, EACH: tl.constexpr):
    """What is known of every EACH of ALL units together: the score of nothing, what a fraction counts, the range in which four share.

    That is one of |a| + |u| in which the product of no four denominators overflows. That of two may: then both fractions are nothing.
    """
    at = KNOWN + tl.arange(0, ALL // EACH) * KNOWN_NUMBERS
    four = tl.max(tl.sum(tl.reshape(bits, (ALL // EACH, EACH // 4, 4)), 2), 1)
    tl.store(at, tl.sum(tl.reshape(constants, (ALL // EACH, EACH)), 1))
    tl.store(at + 1, four * 0.0 + scale)
    tl.store(at + 2, (four - SHARED_BITS) * (-0.6931471805599453 / 8))


@triton.jit
def _lay_out_weights(W, TW, D, WIDE, rate, BD: tl.constexpr, EACH: tl.constexpr):
    """Weights, the inverses of their shares in the largest, and what is known of all units and of every group of them.

    A unit that is none has no exponentials: two of them make up for each other, a single one counts little, and that is subtracted.
    """
    d = tl.arange(0, BD)
    w = tl.load(W + d, mask=d < D, other=0.0)
    top = tl.max(tl.abs(w), 0)
    share = tl.maximum(tl.abs(w) / tl.where(top > 0, top, 1.0), SMALLEST_SHARE)
    single = (d == D) & (D % 2 == 1)
    share = tl.where(d < D, share, tl.where(single, SINGLE_SHARE, 1.0))
    sign = tl.where(d < D, tl.where(w < 0, -1.0, 1.0), tl.where(single, 1.0, tl.where(d % 2 == 1, -1.0, 1.0)))
    tl.store(TW + d, w, mask=d < WIDE)
    tl.store(TW + WIDE + d, sign / share, mask=d < WIDE)
    # Both tanh, with 1 - 2/x, and the sigmoid, with 1 - 1/x, subtract as many fractions as the rate of their exponentials says.
    scale = rate * top
    constants = w + tl.where(single, scale * SINGLE_SHARE, 0.0)
    bits = -tl.log2(share)
    _write_known(TW + 2 * WIDE, constants, bits, scale, BD, BD)
    _write_known(TW + 2 * WIDE + KNOWN_NUMBERS, constants, bits, scale, BD, EACH)


@quick
@triton.jit(do_not_specialize=("NQ", "N", "D", "WIDE", "ROOM_Q", "ROOM", "rate", "stw", "leads"))
def layout_kernel(
    A, U, W, TA, TU, TW, EA, EU, ATOP, UTOP, NQ, N, D, WIDE, ROOM_Q, ROOM, rate, stw, leads,
    SHARE: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Some tokens of either side, hidden unit first, in float32; their exponentials, and the largest magnitude of each token."""
    block, lead = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if SHARE and (block == 0 and lead < leads):
        _lay_out_weights(W + lead * D, TW + lead * stw, D, WIDE, rate, BD, EACH)
    split = tl.cdiv(ROOM_Q, BR)
    X, T, E, TOP, count, room = A, TA, EA, ATOP, NQ, ROOM_Q
    if block >= split:
        X, T, E, TOP, count, room, block = U, TU, EU, UTOP, N, ROOM, block - split
    r = block * BR + tl.arange(0, BR)
    d = tl.arange(0, BD)
    inside = (r[:, None] < count) & (d[None, :] < D)
    x = tl.load(X + (lead * count + r[:, None]) * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    at = (lead * WIDE + d[None, :]) * room + r[:, None]
    inside = (r[:, None] < room) & (d[None, :] < WIDE)
    tl.store(T + at, x, mask=inside)
    if SHARE:
        tl.store(E + at, tl.where(d[None, :] < D, tl.exp(x * rate), 0.0), mask=inside)
        # As bits NaN is the largest.
        top = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
        tl.store(TOP + lead * count + r, top, mask=r < count)


class Exact:
    """Operands of one call, (L, N, D) and w (L or 1, D).

    `prepare` lays them out for speed: hidden unit first, so that a tile reads contiguous tokens, with room for whole tiles behind the
    last one (`padded`), and with the exponentials that share reciprocals. Without it they are read as they are, for a fallback that should
    cost nothing when it is not taken.
    """

    def __init__(self, a: Tensor, u: Tensor, w: Tensor, act: str, prepare: bool) -> None:
        self.code, self.slope, _ = code_of(act)
        self.width, self.nq, self.n = a.shape[-1], a.shape[1], u.shape[1]
        self.padded = prepare
        self.share = prepare and self.code in (TANH, SIGMOID)
        self.a, self.u, self.w = a, u, w.float().contiguous()
        self.ea, self.eu, self.a_top, self.u_top = a, u, a, u
        if prepare:
            self._lay_out(a, u, self.w)

    def _lay_out(self, a: Tensor, u: Tensor, w: Tensor) -> None:
        wide = self.width + -self.width % 4
        # Some tokens of all hidden units at once, as many as fit into registers.
        length, padded = a.shape[0], power_of_2(wide)
        block = max(1, min(32, 8192 // padded))
        rooms = [-(-x.shape[1] // WIDEST_TILE) * WIDEST_TILE for x in (a, u)]
        self.a, self.u = (torch.empty(length, wide, room, device=a.device).mT for room in rooms)
        self.ea, self.eu = (torch.empty_like(x) if self.share else x for x in (self.a, self.u))
        if self.share:
            self.a_top, self.u_top = (torch.empty(length, x.shape[1], device=a.device) for x in (a, u))
            # What kernels know of the weights stands behind them.
            known = KNOWN_NUMBERS.value * (1 + padded // min(padded, GROUP.value))
            self.w = torch.empty(len(w), 2 * wide + known, device=a.device)[:, :wide]
        elif wide > self.width:
            self.w = torch.nn.functional.pad(w, (0, wide - self.width))
        layout_kernel[(sum(cdiv(room, block) for room in rooms), length)](
            a.contiguous(), u.contiguous(), w, self.a, self.u, self.w, self.ea, self.eu, self.a_top, self.u_top,
            self.nq, self.n, self.width, wide, *rooms, 2.0 if self.code == TANH else 1.0, self.w.stride(0), len(w),
            SHARE=self.share, BR=block, BD=padded, EACH=min(padded, GROUP.value), num_warps=8 if padded > 64 else 4,
        )  # fmt: skip

    def operands(self) -> tuple[Tensor, ...]:
        return self.a, self.u, self.ea, self.eu, self.a_top, self.u_top, self.w

    def strides(self) -> tuple[int, ...]:
        """Leading, hidden and token strides of a and u, leading stride of w."""
        return (
            *(x.stride(k) for x in (self.a, self.u) for k in (0, 2, 1)),
            self.w.stride(0) if self.w.shape[0] > 1 else 0,
        )

    def flags(self) -> dict[str, bool | int]:
        """What kernels know of the operands at compile time."""
        return {"ACT": self.code, "SHARE": self.share, "PADDED": self.padded}


def mask_arguments(mask: Tensor | None, like: Tensor) -> tuple[Tensor, int, int, int]:
    """A mask (L or 1, Nq or 1, N or 1) of bytes with strides of 0 where it broadcasts."""
    if mask is None:
        return like, 0, 0, 0
    strides = [stride if size > 1 else 0 for stride, size in zip(mask.stride(), mask.shape, strict=True)]
    return mask, strides[0], strides[1], strides[2]


def blocks(dv: int, backward: bool) -> dict[str, int]:
    """Tile sizes and warps.

    A side of a tile has fewer tokens than the program has threads, so that a thread may load those it needs without asking others.
    Values in three bfloat16 parts take six bytes a number and stage; in a fallback, three tf32 passes hold every operand of a product twice, as
    what a tf32 can hold and as the rest. With values of 128 columns a second stage of those no longer fits into the shared memory of a
    processor (227 KiB on Hopper), with 256 not even half as many keys.
    """
    wide = max(16, power_of_2(dv))
    m, n, warps = 64, 64, 4
    if wide > 128:
        n, warps = 32 if backward else 64, 8
    return {"BM": m, "BN": n, "BV": wide, "num_warps": warps, "num_stages": 2 if wide <= 64 else 1}


def arithmetic(on: Tensor) -> dict[str, object]:
    """What only the device has: float32-exact products on tensor cores (three tf32 passes where nothing was prepared), the fast reciprocal."""
    device = on.device.type == "cuda"
    return {"PRECISION": "tf32x3" if device else "ieee", "FAST": device}


@dataclass(frozen=True)
class Conditions:
    """What decides the weights beside the scores."""

    mask: Tensor | None = None  # bytes (L or 1, Nq or 1, N or 1)
    bias: Tensor | None = None  # float32, (L or 1, Nq or 1, N or 1)
    causal: bool = False  # the last query is aligned with the last key
    align: Align = field(default_factory=Align)

    def flags(self) -> dict[str, bool | int]:
        return {
            "ORDERED": self.align.scattered,
            "CAUSAL": self.causal,
            "HAS_MASK": self.mask is not None,
            "HAS_BIAS": self.bias is not None,
            **self.align.flags(),
        }
