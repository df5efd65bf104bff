r"""Gradients of multi-dimensional attention behind a matrix in two passes: once for the queries, once for the keys.

The equations are those of `multi_product`. A tile has its pairs as rows, (R C) x (hidden or features): C tokens that the program owns,
R of the other side that it runs over. What comes out of one product lies in registers as what goes into the next, and sums over the
other side wait until the end. No atomics.

Hidden units and weights of a pair are computed twice, once for its query and once for its key; `multi_product_grads` does it once, but
writes parts of all queries and blocks of keys. This is for windows, where a query reads few keys and parts would be most of the work,
and for a choice that does not learn, where only the values that were read have a gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.triton.align import FLAT, log_gaussian_slope
from regard.ops.triton.launching import cdiv, power_of_2, quick
from regard.ops.triton.multi_parts import (
    Operands,
    activate,
    allowed,
    block_of,
    bump_of,
    changed,
    exp2,
    gained,
    keys_of,
    place,
    query_side,
    within,
)
from regard.ops.triton.multi_product import PROGRAMS, arithmetic, in_pieces, is_narrow, pinned, scored, shrunk


@quick
@triton.jit
def query_grad_kernel(
    A, U, W, V, MASK, SEED, POSITION, LOW, HIGH, spl, heat, window, dropout, first,
    sal, sam, sad, sul, sun, sud, swl, swd, swf, svl, svn, svf, sml, smm, smn, rate, slope, NQ, N, D, F,
    SOFT, LSE, DO, DELTA, DA, DW, DP, SPAN,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, FAST: tl.constexpr, QUICK: tl.constexpr,
    NOISE: tl.constexpr, CHOICE: tl.constexpr, LEARNS: tl.constexpr, LOCAL: tl.constexpr, GAUSSIAN: tl.constexpr, DROP: tl.constexpr,
    SCALED: tl.constexpr, PIECES: tl.constexpr, PRODUCT: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Gradient of a and of the positions, one partial sum a tile of features, and of W, one a program; do o for the keys."""
    lead, tile, start_block = place(tl.program_id(0), NQ, F, C, BF, SPAN)
    groups, tiles = tl.cdiv(tl.cdiv(NQ, C), SPAN), tl.cdiv(F, BF)
    d = tl.arange(0, BD)
    f = tile * BF + tl.arange(0, BF)
    d_in, f_in = d < D, f < F
    w, factor = shrunk(block_of(W + lead * swl, d, f, d_in, f_in, swd, swf), 0, SCALED)
    w1, w2, w3 = in_pieces(w, PIECES, PRODUCT)
    back = block_of(W + lead * swl, f, d, f_in, d_in, swf, swd).to(BACK)
    feature = f[None, None, :]
    A += lead * sal
    U += lead * sul
    V += lead * svl
    MASK += lead * sml
    part = tile * (tl.num_programs(0) // (groups * tiles)) + lead
    dw = tl.zeros((BF, BD), dtype=tl.float32)
    for block in range(start_block, tl.minimum(start_block + SPAN, tl.cdiv(NQ, C))):
        m = block * C + tl.arange(0, C)
        m_in = m < NQ
        i = (first + m)[None, :, None]
        inside = m_in[:, None] & f_in[None, :]
        at = (lead * NQ + m[:, None]) * F + f[None, :]
        position, low, high = query_side(POSITION + lead * spl, LOW + lead * NQ, HIGH + lead * NQ, m, m_in, LOCAL)
        a = block_of(A, m, d, m_in, d_in, sam, sad) * rate
        do = tl.load(DO + at, mask=inside, other=0.0)
        lse = tl.load(LSE + at, mask=inside, other=float("inf"))
        delta = do * tl.load(SOFT + at, mask=inside, other=0.0)
        tl.store(DELTA + at, delta, mask=inside)
        da = tl.zeros((R * C, BD), dtype=tl.float32)
        dp = tl.zeros((R, C, BF), dtype=tl.float32)
        begin, end = keys_of(low, high, block, N, N - NQ, C, R, CAUSAL, LOCAL)
        for start in range(begin, end, R):
            n = start + tl.arange(0, R)
            n_in = n < N
            j = n[:, None, None]
            ok = allowed(MASK, n, m, n_in, m_in, smn, smm, N - NQ, False, CAUSAL, HAS_MASK)
            ok = within(ok, low, high, n, m, False, LOCAL)
            # A tile that the mask forbids as a whole is left out; without a mask there is no branch.
            reached = True
            if HAS_MASK:
                reached = tl.max(tl.max(ok.to(tl.int32), 1), 0) > 0
            if reached:
                u = block_of(U, n, d, n_in, d_in, sun, sud) * rate
                v = block_of(V, n, f, n_in, f_in, svn, svf)[:, None, :]
                bump = bump_of(position[None, :, None], j, window, GAUSSIAN)
                h, g = activate(tl.reshape(u[:, None, :] + a[None, :, :], (R * C, BD)), slope, ACT, QUICK, FAST)
                h1, h2, h3 = in_pieces(h, PIECES, PRODUCT)
                e = scored(h1, h2, h3, w1, w2, w3, PIECES, PRECISION, FAST)
                t = tl.reshape(e * factor[None, :], (R, C, BF))
                t = changed(t, bump, SEED, lead, feature, i, j, heat, NOISE, GAUSSIAN)
                p = exp2(tl.where(ok[:, :, None], t - lse[None, :, :], float("-inf")), FAST)
                x = gained(do[None, :, :] * v, bump, SEED, lead, feature, i, j, dropout, DROP, GAUSSIAN, FAST)
                dt = p * (x - delta[None, :, :])
                if GAUSSIAN:
                    by_position = log_gaussian_slope(position[None, :, None], j, window)
                    dp += (dt if GAUSSIAN == 1 else p * x) * by_position
                dt = tl.reshape(dt, (R * C, BF)).to(BACK)
                dh = tl.dot(dt, back, input_precision=PRECISION)
                da += dh * g
                dw = tl.dot(tl.trans(dt), pinned(h, dh, FAST).to(BACK), dw, input_precision=PRECISION)
        da = tl.sum(tl.reshape(da, (R, C, BD)), 0)
        tl.store(DA + (part * NQ + m[:, None]) * D + d[None, :], da * rate, mask=m_in[:, None] & d_in[None, :])
        if GAUSSIAN:
            tl.store(DP + part * NQ + m, tl.sum(tl.sum(dp, 0), 1), mask=m_in)
    DW += (lead * groups + start_block // SPAN) * D * F
    tl.store(DW + d[None, :] * F + f[:, None], dw, mask=f_in[:, None] & d_in[None, :])


@quick
@triton.jit
def key_grad_kernel(
    A, U, W, V, MASK, SEED, POSITION, LOW, HIGH, spl, heat, window, dropout, first,
    sal, sam, sad, sul, sun, sud, swl, swd, swf, svl, svn, svf, sml, smm, smn, rate, slope, NQ, N, D, F,
    LSE, DO, DELTA, PICK, DU, DV,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, FAST: tl.constexpr, QUICK: tl.constexpr,
    NOISE: tl.constexpr, CHOICE: tl.constexpr, LEARNS: tl.constexpr, LOCAL: tl.constexpr, GAUSSIAN: tl.constexpr, DROP: tl.constexpr,
    SCALED: tl.constexpr, PIECES: tl.constexpr, PRODUCT: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Gradients of u, one partial sum a tile of features, and of v, by the C keys that a program owns, running over the queries."""
    lead, tile, block = place(tl.program_id(0), N, F, C, BF, 1)
    blocks, tiles = tl.cdiv(N, C), tl.cdiv(F, BF)
    n = block * C + tl.arange(0, C)
    d = tl.arange(0, BD)
    f = tile * BF + tl.arange(0, BF)
    n_in, d_in, f_in = n < N, d < D, f < F
    feature, j = f[None, None, :], n[None, :, None]
    u = block_of(U + lead * sul, n, d, n_in, d_in, sun, sud) * rate
    v = block_of(V + lead * svl, n, f, n_in, f_in, svn, svf)
    w, factor = shrunk(block_of(W + lead * swl, d, f, d_in, f_in, swd, swf), 0, SCALED)
    w1, w2, w3 = in_pieces(w, PIECES, PRODUCT)
    back = block_of(W + lead * swl, f, d, f_in, d_in, swf, swd).to(BACK)
    A += lead * sal
    MASK += lead * sml
    DO += lead * NQ * F
    LSE += lead * NQ * F
    DELTA += lead * NQ * F
    PICK += lead * NQ * F
    du = tl.zeros((R * C, BD), dtype=tl.float32)
    dv = tl.zeros((R, C, BF), dtype=tl.float32)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(0, block * C - (N - NQ)) // R * R
    for start in range(begin, NQ, R):
        m = start + tl.arange(0, R)
        m_in = m < NQ
        i = (first + m)[:, None, None]
        position, low, high = query_side(POSITION + lead * spl, LOW + lead * NQ, HIGH + lead * NQ, m, m_in, LOCAL)
        reached = True
        if CAUSAL or HAS_MASK or LOCAL:
            ok = allowed(MASK, m, n, m_in, n_in, smm, smn, N - NQ, True, CAUSAL, HAS_MASK)
            ok = within(ok, low, high, m, n, True, LOCAL)
            if HAS_MASK or LOCAL:
                reached = tl.max(tl.max(ok.to(tl.int32), 1), 0) > 0
        if reached:
            bump = bump_of(position[:, None, None], j, window, GAUSSIAN)
            do = block_of(DO, m, f, m_in, f_in, F, 1)[:, None, :]
            x = gained(do, bump, SEED, lead, feature, i, j, dropout, DROP, GAUSSIAN, FAST)
            if CHOICE:
                at = m[:, None] * F + f[None, :]
                pick = tl.load(PICK + at, mask=m_in[:, None] & f_in[None, :], other=-1)
                dv += tl.where(pick[:, None, :] == j, x, 0.0)
            if LEARNS:
                a = block_of(A, m, d, m_in, d_in, sam, sad) * rate
                delta = block_of(DELTA, m, f, m_in, f_in, F, 1)
                at = m[:, None] * F + f[None, :]
                lse = tl.load(LSE + at, mask=m_in[:, None] & f_in[None, :], other=float("inf"))
                h, g = activate(tl.reshape(a[:, None, :] + u[None, :, :], (R * C, BD)), slope, ACT, QUICK, FAST)
                h1, h2, h3 = in_pieces(h, PIECES, PRODUCT)
                e = scored(h1, h2, h3, w1, w2, w3, PIECES, PRECISION, FAST)
                t = tl.reshape(e * factor[None, :], (R, C, BF))
                t = changed(t, bump, SEED, lead, feature, i, j, heat, NOISE, GAUSSIAN)
                t -= lse[:, None, :]
                if CAUSAL or HAS_MASK or LOCAL:
                    t = tl.where(ok[:, :, None], t, float("-inf"))
                p = exp2(t, FAST)
                if CHOICE == 0:
                    dv += p * x
                dt = p * (x * v[None, :, :] - delta[:, None, :])
                dt = tl.reshape(dt, (R * C, BF)).to(BACK)
                du += tl.dot(dt, back, input_precision=PRECISION) * g
    part = tile * (tl.num_programs(0) // (blocks * tiles)) + lead
    du = tl.sum(tl.reshape(du, (R, C, BD)), 0)
    tl.store(DU + (part * N + n[:, None]) * D + d[None, :], du * rate, mask=n_in[:, None] & d_in[None, :])
    tl.store(DV + (lead * N + n[:, None]) * F + f[None, :], tl.sum(dv, 0), mask=n_in[:, None] & f_in[None, :])


def tile(x: Operands, owner: str) -> dict[str, int]:
    """Tile sizes and warps where a program owns a "query" or a "key".

    Four warps have 64 pairs: with fewer, two of them would compute the same hidden units. Wide layers take fewer features at a time, so
    that registers and shared memory (227 KiB on Hopper) hold them.
    """
    _, _, width, features = x.sizes
    bd, bf = (max(16, power_of_2(size)) for size in (width, features))
    wide = bd > 64
    if not x.is_half:
        return {"R": 8, "C": 8, "BD": bd, "BF": min(bf, 32), "num_warps": 4, "num_stages": 1}
    large = bd > 128 and x.a.dtype == torch.float16
    # Without room for a second stage in registers, one is quicker.
    stages = 1 if owner == "key" or wide else 3
    r, warps = 16 if wide and not large else 8, 8 if wide else 4
    if x.a.dtype == torch.bfloat16 and max(bd, bf) <= 64:
        stages = 2
    return {"R": r, "C": 8, "BD": bd, "BF": min(bf, 32 if bd > 128 else 64), "num_warps": warps, "num_stages": stages}


def backward(
    x: Operands, reach: Tensor | None, do: Tensor, lse: Tensor, soft: Tensor, pick: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of a, u, w, v, in float32 or in their dtypes, and the positions (L, Nq); what comes in is contiguous, in float32."""
    nq, n, width, features = x.sizes
    given, flags = x.arguments(reach), arithmetic(x, is_narrow(x))
    shape = tile(x, "query")
    blocks, tiles = cdiv(nq, shape["C"]), cdiv(features, shape["BF"])
    span = min(blocks, cdiv(x.lead * blocks, PROGRAMS))
    groups = cdiv(blocks, span)
    delta, pick = torch.empty_like(do), lse if pick is None else pick
    da = x.room(x.a, tiles == 1, tiles, x.lead, nq, width)
    dw = x.room(do, True, *x.parts_of_w(groups), width, features)
    dp = None if x.align.gaussian == FLAT else x.room(do, True, tiles, x.lead, nq)
    if x.learns:
        query_grad_kernel[(x.lead * tiles * groups,)](
            *given, soft, lse, do, delta, da, dw, da if dp is None else dp, span, **flags, **shape
        )
    shape = tile(x, "key")
    tiles = cdiv(features, shape["BF"])
    du = x.u.new_empty(tiles, x.lead, n, width, dtype=x.u.dtype if tiles == 1 else torch.float32)
    dv = x.v.new_empty(x.lead, n, features)
    key_grad_kernel[(x.lead * tiles * cdiv(n, shape["C"]),)](*given, lse, do, delta, pick, du, dv, **flags, **shape)
    da, du = (g[0] if g.shape[0] == 1 else g.sum(0) for g in (da, du))
    return da, du, dw.sum(1), dv, None if dp is None else dp.sum(0)
