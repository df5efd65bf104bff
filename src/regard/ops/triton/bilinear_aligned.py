r"""Activated bilinear attention under any alignment: dropout, Gumbel noise, choices, windows.

With the scores $t_{ij}$ of `bilinear`, and the noise, the factors $r_{ij}$ and the window of `align`: $P = \mathrm{softmax}(t)$,
$o_i = \sum_j r_{ij} P_{ij} v_j$. A choice keeps the largest score of each row beside the softmax and reads that key's value; an empty window
reads the nearest allowed key. Backward, with $x_{ij} = r_{ij}\, do_i \cdot v_j$ and $D_i = \sum_j P_{ij} x_{ij}$:

$$G_{ij} = P_{ij} (x_{ij} - D_i), \qquad dv_j = \sum_i r_{ij} P_{ij}\, do_i$$

from where on it is that of `bilinear`; where a single key was read, its value alone gets the gradient of the context. Tiles that nobody
may read are left out before anything is loaded for them. A program owns its rows: no atomics.

Windows cost as much as they hold. Queries are taken in the order of their positions, so that those of a program read one stretch of keys.
Backward, the kernel of the queries notes from where to where the windows, and the single keys, of every few of them lie; from these notes
each block of keys learns which queries to ask, whatever their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.triton.activate import exp2, value_and_slope
from regard.ops.triton.align import (
    ALL,
    FLAT,
    FOR_DROPOUT,
    Align,
    first_largest,
    gains,
    inside,
    keep,
    log_gaussian,
    log_gaussian_slope,
    noise_of,
    span,
    uniform,
)
from regard.ops.triton.bilinear import (
    LOG2E,
    Gradients,
    Operands,
    Room,
    _allowed,
    _lift,
    _product,
    _rows,
    _scalar,
    default_tile,
    largest_magnitudes,
)
from regard.ops.triton.launching import cdiv, quick

# How many queries share a note of the keys that they reach, and a number past all keys.
GRAIN = tl.constexpr(16)
FAR = tl.constexpr(1 << 30)
# Random numbers are drawn for keys by fours.
DRAWN = tl.constexpr(4)
# Weights, divided by the rate that dropout keeps, on their way into a half-precision product.
LIFT = tl.constexpr(16.0)


@triton.jit
def _queries(ORDER, slot, NQ, ORDERED: tl.constexpr):
    """The queries in some places of the order they are taken in; past the last there is none, which is NQ."""
    if ORDERED:
        return tl.load(ORDER + slot, mask=slot < NQ, other=NQ)
    return slot


@triton.jit
def _scores(
    q, k, GAMMA, n, sgn, scale, shift, gain, rate, slope, N,
    ACT: tl.constexpr, HAS_GAMMA: tl.constexpr, PRECISION: tl.constexpr, DEVICE: tl.constexpr,
):  # fmt: skip
    """Scores of a tile over the temperature, and derivatives of the activation."""
    z = _product(q, tl.trans(k), None, PRECISION, DEVICE) * scale + shift
    h, g = value_and_slope(z, ACT, slope, DEVICE)
    e = h * gain
    if HAS_GAMMA:
        e += tl.load(GAMMA + n.to(tl.int64) * sgn, mask=n < N, other=0.0)[None, :]
    return e * rate, g


@triton.jit
def _nearest(
    MASK, m, position, empty, smm, smn, lag, NQ, N, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The allowed key nearest to the position of each empty row, the first of equals; -1 where there is none."""
    # Of a position that is no number any key will do: it is read as NaN.
    position = tl.where(position == position, position, 0.0)
    pick = tl.full((BM,), -1, dtype=tl.int32)
    near = tl.full((BM,), float("-inf"), dtype=tl.float32)
    if not HAS_MASK:
        # All keys up to the last are allowed: the lower of two as near is that which half a key less is rounded up to.
        last = tl.zeros((BM,), dtype=tl.int32) + N - 1
        if CAUSAL:
            last = tl.minimum(last, m + lag)
        close = tl.ceil(position - 0.5)
        close = tl.where(close > 0.0, close, 0.0)
        pick = tl.minimum(tl.where(close < last, close, last * 1.0).to(tl.int32), last)
        pick = tl.maximum(pick, -1)
    elif tl.max(empty.to(tl.int32), 0) > 0:
        for start in range(0, N, BN):
            n = start + tl.arange(0, BN)
            ok = _allowed(MASK, m[:, None], n[None, :], smm, smn, lag, NQ, N, CAUSAL, HAS_MASK)
            nearness = tl.where(ok, -tl.abs(n[None, :] - position[:, None]), float("-inf"))
            top, first = first_largest(nearness, n, 2147483647)
            wins = top > near
            pick = tl.where(wins, first, pick)
            near = tl.where(wins, top, near)
    return tl.where(empty, pick, -1)


@quick
@triton.jit
def forward_kernel(
    Q, K, V, OFFSET, GAMMA, RATE, MASK, ORDER, O, LSE, SOFT, PICK,
    sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sfb, sfh, sgb, sgh, sgn, smb, smh, smm, smn,
    sob, soh, som, sod, scale, gain, number, slope, H, NQ, N, D, DV,
    SEED, POSITION, spl, rate_of_noise, window, dropout, first_query,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_GAMMA: tl.constexpr,
    HAS_RATE: tl.constexpr, PRECISION: tl.constexpr, DEVICE: tl.constexpr,
    NOISE: tl.constexpr, CHOICE: tl.constexpr, LEARNS: tl.constexpr, LOCAL: tl.constexpr, GAUSSIAN: tl.constexpr,
    DROP: tl.constexpr, ORDERED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    lead = tl.program_id(1).to(tl.int64)
    b, h = lead // H, lead % H
    m = _queries(ORDER + lead * (spl > 0) * NQ, tl.program_id(0) * BM + tl.arange(0, BM), NQ, ORDERED)
    m_in = m < NQ
    i = first_query + m
    d, c = tl.arange(0, BD), tl.arange(0, BV)
    lag = N - NQ
    q = _rows(Q + b * sqb + h * sqh, m, d, sqm, sqd, NQ, D)
    K += b * skb + h * skh
    V += b * svb + h * svh
    MASK += b * smb + h * smh
    GAMMA += b * sgb + h * sgh
    shift = _scalar(OFFSET + b * sfb + h * sfh, 0.0, HAS_OFFSET) / gain
    rate = _scalar(RATE, number, HAS_RATE)
    top = tl.full((BM,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, BV), dtype=tl.float32)
    best = tl.full((BM,), float("-inf"), dtype=tl.float32)
    pick = tl.full((BM,), -1, dtype=tl.int32)
    broken = tl.zeros((BM,), dtype=tl.int32)
    begin, end = 0, N
    if CAUSAL:
        end = tl.minimum(N, tl.maximum(0, tl.max(tl.where(m_in, m, 0), 0) + 1 + lag))
    position = tl.zeros((BM,), dtype=tl.float32)
    if LOCAL:
        position = tl.load(POSITION + lead * spl + m, mask=m_in, other=0.0)
        begin, end = span(position, m_in, window, end, DRAWN)
    for start in range(begin, end, BN):
        n = start + tl.arange(0, BN)
        ok = _allowed(MASK, m[:, None], n[None, :], smm, smn, lag, NQ, N, CAUSAL, HAS_MASK)
        if LOCAL:
            ok = ok & inside(position[:, None], n[None, :], window)
        seen = 1
        if HAS_MASK:
            seen = tl.max(tl.max(ok.to(tl.int32), 1), 0)
        if seen > 0:
            k = _rows(K, n, d, skn, skd, N, D)
            t, g = _scores(
                q, k, GAMMA, n, sgn, scale, shift, gain, rate, slope, N, ACT, HAS_GAMMA, PRECISION, DEVICE,
            )  # fmt: skip
            t = tl.where(ok, t, float("-inf"))
            if NOISE:
                t += noise_of(SEED, lead, i, start, rate_of_noise, BN)
            if CHOICE != 0:
                priority = t
                if CHOICE == 2 and not NOISE:
                    priority = t + noise_of(SEED, lead, i, start, rate_of_noise, BN)
                highest, first = first_largest(priority, n, 2147483647)
                wins = highest > best
                pick = tl.where(wins, first, pick)
                best = tl.where(wins, highest, best)
                broken = tl.maximum(broken, tl.max((priority != priority).to(tl.int32), 1))
            if LEARNS or CHOICE == 0:
                if GAUSSIAN == 1:
                    t += log_gaussian(position[:, None], n[None, :], window)
                new = tl.maximum(top, tl.max(t, 1))
                safe = tl.where(new == float("-inf"), 0.0, new)
                p = exp2((t - safe[:, None]) * LOG2E, DEVICE)
                shrink = exp2((top - safe) * LOG2E, DEVICE)
                mass = mass * shrink + tl.sum(p, 1)
                p = gains(p, SEED, lead, i, start, position, n, dropout, window, DROP, GAUSSIAN, BN)
                v = _rows(V, n, c, svn, svd, N, DV)
                acc = _product(p.to(v.dtype), v, acc * shrink[:, None], PRECISION, DEVICE)
                top = new
    # NaN counts as alive, so that it is seen in the result.
    alive = mass != 0
    mass = tl.where(alive, mass, 1.0)
    out = tl.where(alive[:, None], acc / mass[:, None], 0.0)
    columns = m_in[:, None] & (c < DV)[None, :]
    if CHOICE != 0:
        # NaN is no choice.
        pick = tl.where(broken > 0, -1, pick)
        if LEARNS:
            tl.store(SOFT + (lead * NQ + m[:, None]) * DV + c[None, :], out, mask=columns)
    elif LOCAL:
        empty = m_in & (alive == 0)
        pick = _nearest(MASK, m, position, empty, smm, smn, lag, NQ, N, CAUSAL, HAS_MASK, BM, BN)
        if tl.max((pick >= 0).to(tl.int32), 0) > 0:
            # Its score decides nothing, but whether it is a number.
            near = tl.load(
                K + pick[:, None].to(tl.int64) * skn + d[None, :] * skd,
                mask=(pick >= 0)[:, None] & (d < D)[None, :],
                other=0.0,
            )
            product = tl.sum(q.to(tl.float32) * near.to(tl.float32), 1)
            broken = ((product != product) | (position != position)).to(tl.int32)
    if CHOICE != 0 or LOCAL:
        at = V + pick[:, None].to(tl.int64) * svn + c[None, :] * svd
        read = tl.load(at, mask=(pick >= 0)[:, None] & columns, other=0.0).to(tl.float32)
        factor = tl.full((BM,), 1.0, dtype=tl.float32)
        if DROP:
            factor = keep(uniform(SEED, lead, 0, i, pick, FOR_DROPOUT), dropout)
        if GAUSSIAN == 2:
            factor *= exp2(log_gaussian(position, pick, window) * LOG2E, DEVICE)
        read = read * factor[:, None]
        read = tl.where((broken > 0)[:, None], float("nan"), read)
        if CHOICE == 0:
            out = tl.where((pick >= 0)[:, None], read, out)
        else:
            out = read
        tl.store(PICK + lead * NQ + m, pick, mask=m_in)
    tl.store(
        O + b * sob + h * soh + m[:, None].to(tl.int64) * som + c[None, :] * sod,
        out.to(O.dtype.element_ty),
        mask=columns,
    )
    tl.store(LSE + lead * NQ + m, tl.where(alive, top + tl.log(mass), float("-inf")), mask=m_in)


@triton.jit
def _gradient_of_scores(
    t, do, v, ok, lse, delta, SEED, lead, i, n, start, position, rate_of_noise, window, dropout,
    NOISE: tl.constexpr, GAUSSIAN: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr, DEVICE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """P, P x and G of a tile of scores, and the factors r."""
    if NOISE:
        t += noise_of(SEED, lead, i, start, rate_of_noise, BN)
    if GAUSSIAN == 1:
        t += log_gaussian(position[:, None], n[None, :], window)
    # A row that reads nothing has a mass of zero, and so weights of zero.
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    p = tl.where(ok, exp2((t - lse[:, None]) * LOG2E, DEVICE), 0.0)
    one = tl.full((BM, BN), 1.0, dtype=tl.float32)
    r = gains(one, SEED, lead, i, start, position, n, dropout, window, DROP, GAUSSIAN, BN)
    x = _product(do, tl.trans(v), None, PRECISION, DEVICE) * r
    return p, p * x, tl.where(ok, p * (x - delta[:, None]), 0.0), r


@triton.jit
def _note(NOTES, position, pick, m_in, window, BM: tl.constexpr):
    """Lowest and highest key in the windows of every few queries, then of the single keys that they read, (4, Nq / GRAIN)."""
    few: tl.constexpr = BM // GRAIN
    at = NOTES + tl.program_id(0) * few + tl.arange(0, few)
    total = tl.num_programs(0) * few
    there = m_in & (position == position)
    # Infinities become whole numbers here.
    low = tl.where(there, tl.minimum(tl.maximum(tl.ceil(position - window), 0.0), FAR * 1.0), FAR * 1.0).to(tl.int32)
    high = tl.where(there, tl.maximum(tl.minimum(tl.floor(position + window), FAR * 1.0), -1.0), -1.0).to(tl.int32)
    tl.store(at, tl.min(tl.reshape(low, (few, GRAIN)), 1))
    tl.store(at + total, tl.max(tl.reshape(high, (few, GRAIN)), 1))
    tl.store(at + 2 * total, tl.min(tl.reshape(tl.where(pick >= 0, pick, FAR), (few, GRAIN)), 1))
    tl.store(at + 3 * total, tl.max(tl.reshape(pick, (few, GRAIN)), 1))


@quick
@triton.jit
def reach_kernel(NOTES, REACH, TOTAL, BLOCKS, NQ, BN: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr):
    """From the notes: between which places of the order the windows that meet a block of keys are, and the single keys, (L, blocks, 4)."""
    lead = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BK + tl.arange(0, BK)
    first = block[:, None] * BN
    for kind in tl.static_range(2):
        notes = NOTES + (lead * 4 + 2 * kind) * TOTAL
        begin = tl.full((BK,), FAR, dtype=tl.int32)
        end = tl.zeros((BK,), dtype=tl.int32)
        for start in range(0, TOTAL, BT):
            g = start + tl.arange(0, BT)
            low = tl.load(notes + g, mask=g < TOTAL, other=FAR)[None, :]
            high = tl.load(notes + TOTAL + g, mask=g < TOTAL, other=-1)[None, :]
            meets = (low < first + BN) & (high >= first)
            begin = tl.minimum(begin, tl.min(tl.where(meets, g[None, :], FAR), 1))
            end = tl.maximum(end, tl.max(tl.where(meets, g[None, :] + 1, 0), 1))
        at = REACH + (lead * BLOCKS + block) * 4 + 2 * kind
        tl.store(at, tl.minimum(begin, end) * GRAIN, mask=block < BLOCKS)
        tl.store(at + 1, tl.minimum(end * GRAIN, NQ), mask=block < BLOCKS)


@quick
@triton.jit
def query_grad_kernel(
    Q, K, V, OFFSET, GAMMA, RATE, MASK, ORDER, READ, LSE, PICK, DO, DLSE, TOPS, DELTA, DQ, DOFF, DRATE, DPOSITION, NOTES,
    sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sfb, sfh, sgb, sgh, sgn, smb, smh, smm, smn,
    sdb, sdh, sdm, sdd, scale, gain, number, slope, H, NQ, N, D, DV,
    SEED, POSITION, spl, rate_of_noise, window, dropout, first_query,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_GAMMA: tl.constexpr,
    HAS_RATE: tl.constexpr, HAS_DLSE: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr, DEVICE: tl.constexpr,
    NOISE: tl.constexpr, CHOICE: tl.constexpr, LEARNS: tl.constexpr, LOCAL: tl.constexpr, GAUSSIAN: tl.constexpr,
    DROP: tl.constexpr, ORDERED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries and positions a program owns; of offset and rate as one partial sum.

    For the kernel of the keys: the D of its rows, and which keys they reach.
    """
    lead = tl.program_id(1).to(tl.int64)
    b, h = lead // H, lead % H
    m = _queries(ORDER + lead * (spl > 0) * NQ, tl.program_id(0) * BM + tl.arange(0, BM), NQ, ORDERED)
    m_in = m < NQ
    i = first_query + m
    d, c = tl.arange(0, BD), tl.arange(0, BV)
    lag = N - NQ
    q = _rows(Q + b * sqb + h * sqh, m, d, sqm, sqd, NQ, D)
    do = _rows(DO + b * sdb + h * sdh, m, c, sdm, sdd, NQ, DV)
    read = _rows(READ + lead * NQ * DV, m, c, DV, 1, NQ, DV).to(tl.float32)
    K += b * skb + h * skh
    V += b * svb + h * svh
    MASK += b * smb + h * smh
    GAMMA += b * sgb + h * sgh
    shift = _scalar(OFFSET + b * sfb + h * sfh, 0.0, HAS_OFFSET) / gain
    rate = _scalar(RATE, number, HAS_RATE)
    lift = _lift(TOPS, DV, tl.maximum(1.2, tl.abs(slope)) / tl.maximum(1.0 - dropout, 1e-3), HALF)
    lse = tl.load(LSE + lead * NQ + m, mask=m_in, other=float("-inf"))
    agreed = tl.sum(do.to(tl.float32) * read, 1)
    delta = agreed
    if HAS_DLSE:
        delta -= tl.load(DLSE + lead * NQ + m, mask=m_in, other=0.0)
    tl.store(DELTA + lead * NQ + m, delta, mask=m_in)
    dq = tl.zeros((BM, BD), dtype=tl.float32)
    doff = tl.zeros((BM,), dtype=tl.float32)
    drate = tl.zeros((BM,), dtype=tl.float32)
    moved = tl.zeros((BM,), dtype=tl.float32)
    begin, end = 0, N
    if CAUSAL:
        end = tl.minimum(N, tl.maximum(0, tl.max(tl.where(m_in, m, 0), 0) + 1 + lag))
    position = tl.zeros((BM,), dtype=tl.float32)
    if LOCAL:
        position = tl.load(POSITION + lead * spl + m, mask=m_in, other=0.0)
        begin, end = span(position, m_in, window, end, DRAWN)
    if CHOICE != 0 and not LEARNS:
        end = begin
    for start in range(begin, end, BN):
        n = start + tl.arange(0, BN)
        ok = _allowed(MASK, m[:, None], n[None, :], smm, smn, lag, NQ, N, CAUSAL, HAS_MASK)
        if LOCAL:
            ok = ok & inside(position[:, None], n[None, :], window)
        seen = 1
        if HAS_MASK:
            seen = tl.max(tl.max(ok.to(tl.int32), 1), 0)
        if seen > 0:
            k = _rows(K, n, d, skn, skd, N, D)
            t, g = _scores(
                q, k, GAMMA, n, sgn, scale, shift, gain, rate, slope, N, ACT, HAS_GAMMA, PRECISION, DEVICE,
            )  # fmt: skip
            v = _rows(V, n, c, svn, svd, N, DV)
            p, px, dt, r = _gradient_of_scores(
                t, do, v, ok, lse, delta, SEED, lead, i, n, start, position, rate_of_noise, window, dropout,
                NOISE, GAUSSIAN, DROP, PRECISION, DEVICE, BM, BN,
            )  # fmt: skip
            if HAS_RATE:
                # A score of minus infinity teaches the temperature nothing.
                drate += tl.sum(tl.where(p > 0, dt * t, 0.0), 1)
            if GAUSSIAN == 1:
                moved += tl.sum(dt * log_gaussian_slope(position[:, None], n[None, :], window), 1)
            if GAUSSIAN == 2:
                moved += tl.sum(px * log_gaussian_slope(position[:, None], n[None, :], window), 1)
            dz = dt * g
            if HAS_OFFSET:
                doff += tl.sum(dz, 1)
            dq = _product((dz * lift).to(k.dtype), k, dq, PRECISION, DEVICE)
    tl.store(
        DQ + (lead * NQ + m[:, None]) * D + d[None, :],
        (dq * (rate * gain * scale / lift)).to(DQ.dtype.element_ty),
        mask=m_in[:, None] & (d < D)[None, :],
    )
    place = lead * tl.num_programs(0) + tl.program_id(0)
    if HAS_OFFSET:
        tl.store(DOFF + place, tl.sum(doff, 0) * rate)
    if HAS_RATE:
        tl.store(DRATE + place, tl.sum(drate, 0) / rate)
    if LOCAL:
        pick = tl.load(PICK + lead * NQ + m, mask=m_in, other=-1)
        _note(NOTES + lead * 4 * (tl.num_programs(0) * (BM // GRAIN)), position, pick, m_in, window, BM)
    if GAUSSIAN != 0:
        if GAUSSIAN == 2:
            # An empty window reads the nearest key with the Gaussian alone for a weight: its x is do · o.
            moved += tl.where(pick >= 0, agreed * log_gaussian_slope(position, pick, window), 0.0)
        tl.store(DPOSITION + lead * NQ + m, moved, mask=m_in)


@quick
@triton.jit
def key_grad_kernel(
    Q, K, V, OFFSET, GAMMA, RATE, MASK, ORDER, LSE, PICK, DO, TOPS, DELTA, REACH, DK, DV_OUT, DGAMMA,
    sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sfb, sfh, sgb, sgh, sgn, smb, smh, smm, smn,
    sdb, sdh, sdm, sdd, scale, gain, number, slope, H, NQ, N, D, DV,
    SEED, POSITION, spl, rate_of_noise, window, dropout, first_query,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_GAMMA: tl.constexpr,
    HAS_RATE: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr, DEVICE: tl.constexpr,
    NOISE: tl.constexpr, CHOICE: tl.constexpr, LEARNS: tl.constexpr, LOCAL: tl.constexpr, GAUSSIAN: tl.constexpr,
    DROP: tl.constexpr, ORDERED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys, values and key biases that a program owns."""
    lead = tl.program_id(1).to(tl.int64)
    b, h = lead // H, lead % H
    first = tl.program_id(0) * BN
    n = first + tl.arange(0, BN)
    d, c = tl.arange(0, BD), tl.arange(0, BV)
    lag = N - NQ
    k = _rows(K + b * skb + h * skh, n, d, skn, skd, N, D)
    v = _rows(V + b * svb + h * svh, n, c, svn, svd, N, DV)
    Q += b * sqb + h * sqh
    DO += b * sdb + h * sdh
    MASK += b * smb + h * smh
    GAMMA += b * sgb + h * sgh
    ORDER += lead * (spl > 0) * NQ
    shift = _scalar(OFFSET + b * sfb + h * sfh, 0.0, HAS_OFFSET) / gain
    rate = _scalar(RATE, number, HAS_RATE)
    lift = _lift(TOPS, DV, tl.maximum(1.2, tl.abs(slope)) / tl.maximum(1.0 - dropout, 1e-3), HALF)
    dk = tl.zeros((BN, BD), dtype=tl.float32)
    dv = tl.zeros((BN, BV), dtype=tl.float32)
    dgamma = tl.zeros((BN,), dtype=tl.float32)
    begin, end = 0, NQ
    if CAUSAL:
        begin = tl.maximum(0, first - lag) // BM * BM
    begin_single, end_single = begin, end
    if LOCAL:
        REACH += (lead * tl.num_programs(0) + tl.program_id(0)) * 4
        begin, end = tl.load(REACH), tl.load(REACH + 1)
        begin_single, end_single = tl.load(REACH + 2), tl.load(REACH + 3)
    if CHOICE == 0 or LEARNS:
        for start in range(begin, end, BM):
            m = _queries(ORDER, start + tl.arange(0, BM), NQ, ORDERED)
            m_in = m < NQ
            i = first_query + m
            ok = _allowed(MASK, m[:, None], n[None, :], smm, smn, lag, NQ, N, CAUSAL, HAS_MASK)
            position = tl.zeros((BM,), dtype=tl.float32)
            if LOCAL:
                position = tl.load(POSITION + lead * spl + m, mask=m_in, other=0.0)
                ok = ok & inside(position[:, None], n[None, :], window)
            seen = 1
            if HAS_MASK:
                seen = tl.max(tl.max(ok.to(tl.int32), 1), 0)
            if seen > 0:
                do = _rows(DO, m, c, sdm, sdd, NQ, DV)
                q = _rows(Q, m, d, sqm, sqd, NQ, D)
                t, g = _scores(
                    q, k, GAMMA, n, sgn, scale, shift, gain, rate, slope, N, ACT, HAS_GAMMA, PRECISION, DEVICE,
                )  # fmt: skip
                lse = tl.load(LSE + lead * NQ + m, mask=m_in, other=float("-inf"))
                delta = tl.load(DELTA + lead * NQ + m, mask=m_in, other=0.0)
                p, px, dt, r = _gradient_of_scores(
                    t, do, v, ok, lse, delta, SEED, lead, i, n, first, position, rate_of_noise, window, dropout,
                    NOISE, GAUSSIAN, DROP, PRECISION, DEVICE, BM, BN,
                )  # fmt: skip
                if HAS_GAMMA:
                    dgamma += tl.sum(dt, 0)
                dk = _product(tl.trans((dt * g * lift).to(q.dtype)), q, dk, PRECISION, DEVICE)
                if CHOICE == 0:
                    dv = _product(tl.trans((p * r * LIFT).to(do.dtype)), do, dv, PRECISION, DEVICE)
    if CHOICE != 0 or LOCAL:
        for start in range(begin_single, end_single, BM):
            m = _queries(ORDER, start + tl.arange(0, BM), NQ, ORDERED)
            pick = tl.load(PICK + lead * NQ + m, mask=m < NQ, other=-1)
            hit = (pick[:, None] == n[None, :]) & (n < N)[None, :]
            if tl.max(tl.max(hit.to(tl.int32), 1), 0) > 0:
                position = tl.zeros((BM,), dtype=tl.float32)
                if GAUSSIAN == 2:
                    position = tl.load(POSITION + lead * spl + m, mask=m < NQ, other=0.0)
                read = gains(
                    tl.where(hit, 1.0, 0.0), SEED, lead, first_query + m, first, position, n, dropout, window,
                    DROP, GAUSSIAN, BN,
                )  # fmt: skip
                do = _rows(DO, m, c, sdm, sdd, NQ, DV)
                dv = _product(tl.trans((read * LIFT).to(do.dtype)), do, dv, PRECISION, DEVICE)
    tl.store(
        DK + (lead * N + n[:, None]) * D + d[None, :],
        (dk * (rate * gain * scale / lift)).to(DK.dtype.element_ty),
        mask=(n < N)[:, None] & (d < D)[None, :],
    )
    tl.store(
        DV_OUT + (lead * N + n[:, None]) * DV + c[None, :],
        (dv * (1.0 / LIFT)).to(DV_OUT.dtype.element_ty),
        mask=(n < N)[:, None] & (c < DV)[None, :],
    )
    if HAS_GAMMA:
        tl.store(DGAMMA + lead * N + n, dgamma * rate, mask=n < N)


# Queries, keys, warps and stages of each kernel in half precision where queries have windows: hardly more keys than the windows hold.
WINDOWED = {"forward": (64, 32, 4, 2), "queries": (64, 32, 4, 1), "keys": (64, 32, 4, 1)}


def _tile(x: Operands, align: Align, kernel: str) -> dict[str, int]:
    """As for the gradients of a plain softmax, but for windows."""
    tile = {**default_tile(x, True), "num_stages": 1}
    if align.position is None:
        return tile
    if x.q.device.type != "cuda" or x.q.dtype == torch.float32 or max(tile["BD"], tile["BV"]) > 128:
        # With 16 queries a compiler of the device gives wrong gradients of keys under dropout and a mask.
        return {**tile, "BM": 32}
    return {**tile, **dict(zip(("BM", "BN", "num_warps", "num_stages"), WINDOWED[kernel], strict=True))}


def forward(x: Operands, align: Align) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Contexts (B, H, Nq, d_v), log-sum-exp (B, H, Nq), what the softmax would read where a choice learns from it, the single keys."""
    b, h, nq, _, _, dv = x.sizes
    device = x.v.device
    out = x.v.new_empty(b, h, nq, dv)
    lse = torch.empty(b, h, nq, device=device)
    soft = torch.empty(b, h, nq, dv, device=device) if align.choice != ALL and align.learns else None
    single = align.choice != ALL or align.position is not None
    pick = torch.empty(b, h, nq, dtype=torch.int32, device=device) if single else None
    tile, order = _tile(x, align, "forward"), align.order(x.k.shape[2])
    forward_kernel[(cdiv(nq, tile["BM"]), b * h)](
        *x.tensors(), x.q if order is None else order, out, lse, lse if soft is None else soft, lse if pick is None else pick,
        *x.strides(), *out.stride(), *x.numbers(), *align.arguments(x.q),
        **x.flags(), **align.flags(), ORDERED=order is not None, **tile,
    )  # fmt: skip
    return out, lse, soft, pick


def backward(
    x: Operands,
    align: Align,
    outputs: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    do: Tensor,
    dlse: Tensor | None,
) -> tuple[Gradients, Tensor | None]:
    """Gradients from those of the contexts, in the dtype of the values, and of the log-sum-exp; and of the positions."""
    out, lse, soft, pick = outputs
    b, h, nq, n, _, _ = x.sizes
    device = x.v.device
    tops = largest_magnitudes(x, do)
    of_queries, of_keys = (_tile(x, align, kernel) for kernel in ("queries", "keys"))
    order, position = align.order(n), align.position
    blocks, key_blocks = cdiv(nq, of_queries["BM"]), cdiv(n, of_keys["BN"])
    room, delta = Room.of(x, blocks), torch.empty_like(lse)
    # What there is none of points somewhere else.
    dposition = None
    moved = notes = reach = delta
    total = blocks * of_queries["BM"] // GRAIN.value
    if position is not None:
        # What has no Gaussian does not teach its positions.
        moved = dposition = (torch.zeros if align.gaussian == FLAT else torch.empty)(b * h, nq, device=device)
        notes, reach = (torch.empty(b * h * 4 * size, dtype=torch.int32, device=device) for size in (total, key_blocks))
    flags = {**x.flags(), **align.flags(), "HALF": x.q.dtype == torch.float16, "ORDERED": order is not None}
    tensors = (*x.tensors(), x.q if order is None else order)
    strides, numbers = (*x.strides(), *do.stride()), (*x.numbers(), *align.arguments(x.q))
    pick = lse if pick is None else pick
    query_grad_kernel[(blocks, b * h)](
        *tensors, out if soft is None else soft, lse, pick, do, do if dlse is None else dlse, tops, delta,
        *room.of_queries(), moved, notes,
        *strides, *numbers, **flags, HAS_DLSE=dlse is not None, **of_queries,
    )  # fmt: skip
    if position is not None:
        reach_kernel[(cdiv(key_blocks, 16), b * h)](
            notes, reach, total, key_blocks, nq, BN=of_keys["BN"], BK=16, BT=256
        )
    key_grad_kernel[(key_blocks, b * h)](
        *tensors, lse, pick, do, tops, delta, reach, *room.of_keys(),
        *strides, *numbers, **flags, **of_keys,
    )  # fmt: skip
    if dposition is not None and position is not None and position.shape[0] == 1:
        dposition = dposition.sum(0, keepdim=True)
    return room.gradients(), dposition
