r"""Multi-dimensional attention whose hidden units are the features: no product of matrices, features along the lanes.

$$e_{ijf} = w_f\, \mathrm{act}(a_{if} + u_{jf}), \qquad L_{if} = \log \sum_j e^{e_{ijf}}, \qquad o_{if} = \sum_j e^{e_{ijf} - L_{if}} v_{jf}$$

for a softmax over all keys; other alignments change it as `multi_parts` says. Backward, with $P = e^{e - L}$ and
$G_{ijf} = P_{ijf} (do_{if} v_{jf} - do_{if} o_{if})$:

$$da_{if} = w_f \sum_j G_{ijf}\, \mathrm{act}'_{ijf}, \quad du_{jf} = w_f \sum_i G_{ijf}\, \mathrm{act}'_{ijf}, \quad
  dw_f = \sum_{ij} h_{ijf} G_{ijf}, \quad dv_{jf} = \sum_i P_{ijf}\, do_{if}$$

A tile is R x C x features: C tokens that the program owns, R of the other side that it runs over, one after the other in each
thread. Everything is float32; no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.triton.align import FLAT, log_gaussian_slope
from regard.ops.triton.launching import cdiv, power_of_2, quick
from regard.ops.triton.multi_parts import (
    LOG2E,
    Operands,
    activate,
    allowed,
    block_of,
    bump_of,
    changed,
    exp2,
    gained,
    keys_of,
    noise,
    place,
    query_side,
    within,
)


@triton.jit
def _scale(W, f, f_in, swf):
    return tl.load(W + f * swf, mask=f_in, other=0.0).to(tl.float32)


@quick
@triton.jit
def forward_kernel(
    A, U, W, V, MASK, SEED, POSITION, LOW, HIGH, spl, heat, window, dropout, first,
    sal, sam, sad, sul, sun, sud, swl, swf, svl, svn, svf, sml, smm, smn, rate, slope, NQ, N, D, F,
    O, LSE, SOFT, PICK,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, FAST: tl.constexpr, QUICK: tl.constexpr,
    NOISE: tl.constexpr, CHOICE: tl.constexpr, LEARNS: tl.constexpr, LOCAL: tl.constexpr, GAUSSIAN: tl.constexpr, DROP: tl.constexpr,
    WIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Contexts and log-sum-exp (L, Nq, F) of C queries and one tile of features, running over the keys.

    Of a choice the context is the value of one key, `PICK`, and `SOFT` that of the softmax whose gradient it has. A context in half
    precision stands in `SOFT` as it is.
    """
    lead, tile, block = place(tl.program_id(0), NQ, F, C, BF, 1)
    m = block * C + tl.arange(0, C)
    f = tile * BF + tl.arange(0, BF)
    m_in, f_in = m < NQ, f < F
    a = block_of(A + lead * sal, m, f, m_in, f_in, sam, sad) * rate
    w = _scale(W + lead * swl, f, f_in, swf) * LOG2E
    position, low, high = query_side(POSITION + lead * spl, LOW + lead * NQ, HIGH + lead * NQ, m, m_in, LOCAL)
    feature, i = f[None, None, :], (first + m)[None, :, None]
    U += lead * sul
    V += lead * svl
    MASK += lead * sml
    top = tl.full((C, BF), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((C, BF), dtype=tl.float32)
    acc = tl.zeros((C, BF), dtype=tl.float32)
    best = tl.full((C, BF), float("-inf"), dtype=tl.float32)
    pick = tl.full((C, BF), -1, dtype=tl.int32)
    read = tl.zeros((C, BF), dtype=tl.float32)
    broken = tl.zeros((C, BF), dtype=tl.int32)
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
            u = block_of(U, n, f, n_in, f_in, sun, sud) * rate
            v = block_of(V, n, f, n_in, f_in, svn, svf)[:, None, :]
            bump = bump_of(position[None, :, None], j, window, GAUSSIAN)
            h, _ = activate(u[:, None, :] + a[None, :, :], slope, ACT, QUICK, FAST)
            t = changed(h * w[None, None, :], bump, SEED, lead, feature, i, j, heat, NOISE, GAUSSIAN)
            if LOCAL:
                t = tl.where((position == position)[None, :, None], t, float("nan"))
            t = tl.where(ok[:, :, None], t, float("-inf"))
            x = gained(v, bump, SEED, lead, feature, i, j, dropout, DROP, GAUSSIAN, FAST)
            if LEARNS:
                new = tl.maximum(top, tl.max(t, 0))
                safe = tl.where(new == float("-inf"), 0.0, new)
                p = exp2(t - safe[None, :, :], FAST)
                rescale = exp2(top - safe, FAST)
                mass = mass * rescale + tl.sum(p, 0)
                acc = acc * rescale + tl.sum(p * x, 0)
                top = new
            if CHOICE:
                if CHOICE == 2 and not NOISE:
                    t += noise(SEED, lead, feature, i, j, heat)
                largest = tl.max(t, 0)
                # The first of equals, in this block as between blocks.
                at = tl.min(tl.where(ok[:, :, None] & (t == largest[None, :, :]), j, 2147483647), 0)
                better = largest > best
                read = tl.where(better, tl.sum(tl.where(j == at[None, :, :], x, 0.0), 0), read)
                pick = tl.where(better, at, pick)
                best = tl.maximum(best, largest)
                broken = tl.maximum(broken, tl.max((t != t).to(tl.int32), 0))
    # NaN is neither zero nor another number: it stays alive, and so is seen in the result.
    alive = mass != 0
    at = (lead * NQ + m[:, None]) * F + f[None, :]
    inside = m_in[:, None] & f_in[None, :]
    soft = tl.where(alive, acc / tl.where(alive, mass, 1.0), 0.0)
    if CHOICE:
        # NaN is no choice.
        tl.store(O + at, tl.where(broken > 0, float("nan"), read), mask=inside)
        tl.store(PICK + at, tl.where(broken > 0, -1, pick), mask=inside)
    else:
        tl.store(O + at, soft, mask=inside)
    if WIDE:
        tl.store(SOFT + at, soft, mask=inside)
    if LEARNS:
        # Infinity for a row that reads nothing: its weights are then zero in the backward.
        tl.store(LSE + at, tl.where(alive, top + tl.log2(tl.where(alive, mass, 1.0)), float("inf")), mask=inside)


@quick
@triton.jit
def query_grad_kernel(
    A, U, W, V, MASK, SEED, POSITION, LOW, HIGH, spl, heat, window, dropout, first,
    sal, sam, sad, sul, sun, sud, swl, swf, svl, svn, svf, sml, smm, smn, rate, slope, NQ, N, D, F,
    SOFT, LSE, DO, DELTA, DA, DW, DP,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, FAST: tl.constexpr, QUICK: tl.constexpr,
    NOISE: tl.constexpr, CHOICE: tl.constexpr, LEARNS: tl.constexpr, LOCAL: tl.constexpr, GAUSSIAN: tl.constexpr, DROP: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Gradient of a, of the positions, one partial sum a tile of features, and of w, one a program; do o for the keys."""
    lead, tile, block = place(tl.program_id(0), NQ, F, C, BF, 1)
    blocks, tiles = tl.cdiv(NQ, C), tl.cdiv(F, BF)
    m = block * C + tl.arange(0, C)
    f = tile * BF + tl.arange(0, BF)
    m_in, f_in = m < NQ, f < F
    inside = m_in[:, None] & f_in[None, :]
    at = (lead * NQ + m[:, None]) * F + f[None, :]
    position, low, high = query_side(POSITION + lead * spl, LOW + lead * NQ, HIGH + lead * NQ, m, m_in, LOCAL)
    feature, i = f[None, None, :], (first + m)[None, :, None]
    a = block_of(A + lead * sal, m, f, m_in, f_in, sam, sad) * rate
    w = _scale(W + lead * swl, f, f_in, swf)
    do = tl.load(DO + at, mask=inside, other=0.0)
    lse = tl.load(LSE + at, mask=inside, other=float("inf"))
    delta = do * tl.load(SOFT + at, mask=inside, other=0.0)
    tl.store(DELTA + at, delta, mask=inside)
    U += lead * sul
    V += lead * svl
    MASK += lead * sml
    da = tl.zeros((C, BF), dtype=tl.float32)
    dw = tl.zeros((C, BF), dtype=tl.float32)
    dp = tl.zeros((C, BF), dtype=tl.float32)
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
            u = block_of(U, n, f, n_in, f_in, sun, sud) * rate
            v = block_of(V, n, f, n_in, f_in, svn, svf)[:, None, :]
            bump = bump_of(position[None, :, None], j, window, GAUSSIAN)
            h, g = activate(u[:, None, :] + a[None, :, :], slope, ACT, QUICK, FAST)
            t = changed(h * (w * LOG2E)[None, None, :], bump, SEED, lead, feature, i, j, heat, NOISE, GAUSSIAN)
            p = exp2(tl.where(ok[:, :, None], t - lse[None, :, :], float("-inf")), FAST)
            x = gained(do[None, :, :] * v, bump, SEED, lead, feature, i, j, dropout, DROP, GAUSSIAN, FAST)
            dt = p * (x - delta[None, :, :])
            if GAUSSIAN:
                by_position = log_gaussian_slope(position[None, :, None], j, window)
                dp += tl.sum((dt if GAUSSIAN == 1 else p * x) * by_position, 0)
            da += tl.sum(dt * g, 0)
            dw += tl.sum(dt * h, 0)
    tl.store(DA + at, da * w[None, :] * rate, mask=inside)
    tl.store(DW + (lead * blocks + block) * F + f, tl.sum(dw, 0), mask=f_in)
    if GAUSSIAN:
        part = tile * (tl.num_programs(0) // (blocks * tiles)) + lead
        tl.store(DP + part * NQ + m, tl.sum(dp, 1), mask=m_in)


@quick
@triton.jit
def key_grad_kernel(
    A, U, W, V, MASK, SEED, POSITION, LOW, HIGH, spl, heat, window, dropout, first,
    sal, sam, sad, sul, sun, sud, swl, swf, svl, svn, svf, sml, smm, smn, rate, slope, NQ, N, D, F,
    LSE, DO, DELTA, PICK, DU, DV,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, FAST: tl.constexpr, QUICK: tl.constexpr,
    NOISE: tl.constexpr, CHOICE: tl.constexpr, LEARNS: tl.constexpr, LOCAL: tl.constexpr, GAUSSIAN: tl.constexpr, DROP: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Gradients of u and v by the C keys that a program owns, running over the queries."""
    lead, tile, block = place(tl.program_id(0), N, F, C, BF, 1)
    n = block * C + tl.arange(0, C)
    f = tile * BF + tl.arange(0, BF)
    n_in, f_in = n < N, f < F
    feature, j = f[None, None, :], n[None, :, None]
    u = block_of(U + lead * sul, n, f, n_in, f_in, sun, sud) * rate
    v = block_of(V + lead * svl, n, f, n_in, f_in, svn, svf)
    w = _scale(W + lead * swl, f, f_in, swf)
    A += lead * sal
    MASK += lead * sml
    DO += lead * NQ * F
    LSE += lead * NQ * F
    DELTA += lead * NQ * F
    PICK += lead * NQ * F
    du = tl.zeros((C, BF), dtype=tl.float32)
    dv = tl.zeros((C, BF), dtype=tl.float32)
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
                dv += tl.sum(tl.where(pick[:, None, :] == j, x, 0.0), 0)
            if LEARNS:
                a = block_of(A, m, f, m_in, f_in, sam, sad) * rate
                delta = block_of(DELTA, m, f, m_in, f_in, F, 1)
                at = m[:, None] * F + f[None, :]
                lse = tl.load(LSE + at, mask=m_in[:, None] & f_in[None, :], other=float("inf"))
                h, g = activate(a[:, None, :] + u[None, :, :], slope, ACT, QUICK, FAST)
                t = changed(h * (w * LOG2E)[None, None, :], bump, SEED, lead, feature, i, j, heat, NOISE, GAUSSIAN)
                t -= lse[:, None, :]
                if CAUSAL or HAS_MASK or LOCAL:
                    t = tl.where(ok[:, :, None], t, float("-inf"))
                p = exp2(t, FAST)
                if CHOICE == 0:
                    dv += tl.sum(p * x, 0)
                du += tl.sum(p * (x * v[None, :, :] - delta[:, None, :]) * g, 0)
    at = (lead * N + n[:, None]) * F + f[None, :]
    inside = n_in[:, None] & f_in[None, :]
    tl.store(DU + at, du * w[None, :] * rate, mask=inside)
    tl.store(DV + at, dv, mask=inside)


def tile(x: Operands) -> dict[str, int]:
    """Tile sizes and warps: as many owned tokens as make two elements a thread, so that R stays within it."""
    bf = min(64, max(16, power_of_2(x.sizes[3])))
    return {"R": 8, "C": 256 // bf, "BF": bf, "num_warps": 4, "num_stages": 2}


def forward(
    x: Operands, reach: Tensor | None, out: Tensor, lse: Tensor, soft: Tensor | None, pick: Tensor | None
) -> None:
    """Write what the alignment has of these, (L, Nq, F), contiguous; the first in any precision, the rest in float32 and int32."""
    nq, _, _, features = x.sizes
    shape = tile(x)
    # What there is none of points somewhere else.
    given = (lse if y is None else y for y in (soft, pick))
    grid = x.lead * cdiv(features, shape["BF"]) * cdiv(nq, shape["C"])
    forward_kernel[(grid,)](*x.arguments(reach), out, lse, *given, **x.flags(), WIDE=soft is not None, **shape)


def backward(
    x: Operands, reach: Tensor | None, do: Tensor, lse: Tensor, soft: Tensor, pick: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of a, u, w, v, in their dtypes but for w, and the positions (L, Nq); what comes in is contiguous, in float32."""
    nq, n, _, features = x.sizes
    given, flags, shape = x.arguments(reach), x.flags(), tile(x)
    blocks, tiles = cdiv(nq, shape["C"]), cdiv(features, shape["BF"])
    delta, pick = torch.empty_like(do), lse if pick is None else pick
    da, dw = x.room(x.a, True, *do.shape), x.room(do, True, *x.parts_of_w(blocks), features)
    dp = None if x.align.gaussian == FLAT else x.room(do, True, tiles, x.lead, nq)
    if x.learns:
        query_grad_kernel[(x.lead * tiles * blocks,)](
            *given, soft, lse, do, delta, da, dw, da if dp is None else dp, **flags, **shape
        )
    du, dv = x.u.new_empty(x.lead, n, features), x.v.new_empty(x.lead, n, features)
    key_grad_kernel[(x.lead * tiles * cdiv(n, shape["C"]),)](*given, lse, do, delta, pick, du, dv, **flags, **shape)
    return da, du, dw.sum(1), dv, None if dp is None else dp.sum(0)
