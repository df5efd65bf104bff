r"""Activated bilinear attention on tensor cores: one product, one activation and one exponential a pair.

$$z_{ij} = (s\, q_i \cdot k_j + o) / c, \qquad t_{ij} = r\,(c\,\mathrm{act}(z_{ij}) + \gamma_j), \qquad L_i = \log \sum_j e^{t_{ij}}, \qquad
  o_i = \sum_j e^{t_{ij} - L_i} v_j$$

Backward, with $P = e^{t - L}$, $D_i = do_i \cdot o_i - dL_i$, $G_{ij} = P_{ij}(do_i \cdot v_j - D_i)$ and $Z = G \odot \mathrm{act}'(z)$:

$$dq_i = r s \sum_j Z_{ij} k_j, \quad dk_j = r s \sum_i Z_{ij} q_i, \quad dv_j = \sum_i P_{ij}\, do_i, \quad
  do = r \sum_{ij} Z_{ij}, \quad d\gamma_j = r \sum_i G_{ij}, \quad dr = \sum_{ij} G_{ij} t_{ij} / r$$

A row of the output belongs to one program: no atomics, the same bits every time. Half-precision operands meet in half-precision products
with float32 sums; P and Z are multiplied by powers of two on their way there, so that float16 does not lose what is small.
Where nothing forbids a pair, no pair is asked whether it is allowed: keys are read in two spans, whole tiles and the rest. Tiles that a mask
forbids as a whole are left out before anything is loaded for them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.tiles import Tile, name_of, tile
from regard.ops.triton.activate import SIGMOID, TANH, code_of, exp2, value, value_and_slope
from regard.ops.triton.launching import cdiv, power_of_2, quick

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Weights are at most one (dropout aside), and 1/N of many: float16 holds both ends of 256 P.
LIFT = tl.constexpr(256.0)
# Bounded scores need no running maximum, as long as e^-2r is no less than float16 holds in full.
BOUNDED_RATE = 4.0


@triton.jit
def _allowed(MASK, i, j, smm, smn, offset, NQ, N, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr):
    """Which pairs of queries i and keys j, shaped to broadcast against each other, are there and may be read."""
    ok = (i < NQ) & (j < N)
    if CAUSAL:
        ok = ok & (j <= i + offset)
    if HAS_MASK:
        ok = ok & (tl.load(MASK + i.to(tl.int64) * smm + j * smn, mask=ok, other=0) != 0)
    return ok


@triton.jit
def _rows(X, r, c, sr, sc, R, C):
    """Rows r of a matrix, (len(r), len(c)), zeros beyond its ends."""
    at = X + r[:, None].to(tl.int64) * sr + c[None, :] * sc
    return tl.load(at, mask=(r[:, None] < R) & (c[None, :] < C), other=0.0)


@triton.jit
def _product(x, y, acc, PRECISION: tl.constexpr, DEVICE: tl.constexpr):
    if not DEVICE:
        # The interpreter would multiply the bits of bfloat16.
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, acc, input_precision=PRECISION)


@triton.jit
def _scalar(X, given, HAS: tl.constexpr):
    if HAS:
        return tl.load(X)
    return given


@triton.jit
def _forward_span(
    top, mass, acc, q, K, V, MASK, GAMMA, m, begin, end,
    skn, skd, svn, svd, smm, smn, sgn, offset, scale, shift, gain, rate, slope, NQ, N, D, DV,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_GAMMA: tl.constexpr, MASKED: tl.constexpr,
    BOUNDED: tl.constexpr, APPROXIMATE: tl.constexpr, PRECISION: tl.constexpr, DEVICE: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Take the keys from begin to end into the state of some queries."""
    d, c = tl.arange(0, BD), tl.arange(0, BV)
    for start in range(begin, end, BN):
        n = start + tl.arange(0, BN)
        seen = 1
        if MASKED:
            ok = _allowed(MASK, m[:, None], n[None, :], smm, smn, offset, NQ, N, CAUSAL, HAS_MASK)
            if HAS_MASK:
                seen = tl.max(tl.max(ok.to(tl.int32), 1), 0)
        if seen > 0:
            k = _rows(K, n, d, skn, skd, N, D)
            z = _product(q, tl.trans(k), None, PRECISION, DEVICE) * scale + shift
            t = value(z, ACT, slope, APPROXIMATE, DEVICE) * (rate * gain * LOG2E)
            if HAS_GAMMA:
                t += (tl.load(GAMMA + n.to(tl.int64) * sgn, mask=n < N, other=0.0) * (rate * LOG2E))[None, :]
            if MASKED:
                t = tl.where(ok, t, float("-inf"))
            if BOUNDED:
                p = exp2(t - top[:, None], DEVICE)
            else:
                new = tl.maximum(top, tl.max(t, 1))
                safe = tl.where(new == float("-inf"), 0.0, new)
                p = exp2(t - safe[:, None], DEVICE)
                shrink = exp2(top - safe, DEVICE)
                mass = mass * shrink
                acc = acc * shrink[:, None]
                top = new
            mass += tl.sum(p, 1)
            v = _rows(V, n, c, svn, svd, N, DV)
            acc = _product(p.to(v.dtype), v, acc, PRECISION, DEVICE)
    return top, mass, acc


@quick
@triton.jit
def forward_kernel(
    Q, K, V, OFFSET, GAMMA, RATE, MASK, O, LSE,
    sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sfb, sfh, sgb, sgh, sgn, smb, smh, smm, smn,
    sob, soh, som, sod, scale, gain, rate, slope, H, NQ, N, D, DV,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_GAMMA: tl.constexpr,
    HAS_RATE: tl.constexpr, BOUNDED: tl.constexpr, APPROXIMATE: tl.constexpr, PRECISION: tl.constexpr, DEVICE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    lead = tl.program_id(1).to(tl.int64)
    b, h = lead // H, lead % H
    # The longest rows of a causal mask first, so that no processor begins one when the others are done.
    block = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    first = block * BM
    m = first + tl.arange(0, BM)
    offset = N - NQ
    q = _rows(Q + b * sqb + h * sqh, m, tl.arange(0, BD), sqm, sqd, NQ, D)
    K += b * skb + h * skh
    V += b * svb + h * svh
    MASK += b * smb + h * smh
    GAMMA += b * sgb + h * sgh
    shift = _scalar(OFFSET + b * sfb + h * sfh, 0.0, HAS_OFFSET) / gain
    rate = _scalar(RATE, rate, HAS_RATE)
    if BOUNDED:
        top = tl.zeros((BM,), dtype=tl.float32) + rate * gain * LOG2E
    else:
        top = tl.full((BM,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, BV), dtype=tl.float32)
    end = N
    whole = N // BN * BN
    if CAUSAL:
        end = tl.minimum(N, tl.maximum(0, first + BM + offset))
        whole = tl.minimum(N, tl.maximum(0, first + 1 + offset)) // BN * BN
    if HAS_MASK:
        whole = 0
    else:
        top, mass, acc = _forward_span(
            top, mass, acc, q, K, V, MASK, GAMMA, m, 0, whole,
            skn, skd, svn, svd, smm, smn, sgn, offset, scale, shift, gain, rate, slope, NQ, N, D, DV,
            ACT, CAUSAL, HAS_MASK, HAS_GAMMA, False, BOUNDED, APPROXIMATE, PRECISION, DEVICE, BN, BD, BV,
        )  # fmt: skip
    top, mass, acc = _forward_span(
        top, mass, acc, q, K, V, MASK, GAMMA, m, whole, end,
        skn, skd, svn, svd, smm, smn, sgn, offset, scale, shift, gain, rate, slope, NQ, N, D, DV,
        ACT, CAUSAL, HAS_MASK, HAS_GAMMA, True, BOUNDED, APPROXIMATE, PRECISION, DEVICE, BN, BD, BV,
    )  # fmt: skip
    # NaN is alive, so that it is seen in the result.
    alive = mass != 0
    mass = tl.where(alive, mass, 1.0)
    c = tl.arange(0, BV)
    tl.store(
        O + b * sob + h * soh + m[:, None].to(tl.int64) * som + c[None, :] * sod,
        tl.where(alive[:, None], acc / mass[:, None], 0.0).to(O.dtype.element_ty),
        mask=(m < NQ)[:, None] & (c < DV)[None, :],
    )
    tl.store(LSE + lead * NQ + m, tl.where(alive, (top + tl.log2(mass)) * LN2, float("-inf")), mask=m < NQ)


@triton.jit
def _log2_mass(LSE, m, NQ):
    """What is subtracted from the scores of some rows; infinity for those that read nothing, which makes their weights zero."""
    lse = tl.load(LSE + m, mask=m < NQ, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit
def _lift(TOPS, DV, slope, HALF: tl.constexpr):
    """A power of two that keeps every entry of Z below what float16 holds, and those of usual size well inside of it."""
    if HALF:
        top = tl.load(TOPS) * tl.load(TOPS + 1) * DV * tl.maximum(1.2, tl.abs(slope))
        exponent = tl.floor(14.0 - tl.log2(tl.maximum(top, 1e-30)))
        return tl.exp2(tl.where(exponent == exponent, tl.maximum(exponent, -100.0), 0.0))
    return 1.0


@triton.jit
def _query_span(
    dq, doff, drate, q, do, log_mass, delta, lift, K, V, MASK, GAMMA, m, begin, end,
    skn, skd, svn, svd, smm, smn, sgn, offset, scale, shift, gain, rate, slope, NQ, N, D, DV,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_GAMMA: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_RATE: tl.constexpr, MASKED: tl.constexpr, APPROXIMATE: tl.constexpr, PRECISION: tl.constexpr, DEVICE: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    d, c = tl.arange(0, BD), tl.arange(0, BV)
    for start in range(begin, end, BN):
        n = start + tl.arange(0, BN)
        seen = 1
        if MASKED:
            ok = _allowed(MASK, m[:, None], n[None, :], smm, smn, offset, NQ, N, CAUSAL, HAS_MASK)
            if HAS_MASK:
                seen = tl.max(tl.max(ok.to(tl.int32), 1), 0)
        if seen > 0:
            k = _rows(K, n, d, skn, skd, N, D)
            z = _product(q, tl.trans(k), None, PRECISION, DEVICE) * scale + shift
            h, g = value_and_slope(z, ACT, slope, DEVICE, APPROXIMATE)
            t = h * (rate * gain * LOG2E)
            if HAS_GAMMA:
                t += (tl.load(GAMMA + n.to(tl.int64) * sgn, mask=n < N, other=0.0) * (rate * LOG2E))[None, :]
            p = exp2(t - log_mass[:, None], DEVICE)
            if MASKED:
                p = tl.where(ok, p, 0.0)
            v = _rows(V, n, c, svn, svd, N, DV)
            dt = p * (_product(do, tl.trans(v), None, PRECISION, DEVICE) - delta[:, None])
            if HAS_RATE:
                # A score of minus infinity teaches the temperature nothing.
                drate += tl.sum(tl.where(p > 0, dt * t, 0.0), 1)
            dz = dt * g
            if HAS_OFFSET:
                doff += tl.sum(dz, 1)
            dq = _product((dz * lift).to(k.dtype), k, dq, PRECISION, DEVICE)
    return dq, doff, drate


@quick
@triton.jit
def query_grad_kernel(
    Q, K, V, OFFSET, GAMMA, RATE, MASK, O, LSE, DO, DLSE, TOPS, LOG_MASS, DELTA, DQ, DOFF, DRATE,
    sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sfb, sfh, sgb, sgh, sgn, smb, smh, smm, smn,
    sob, soh, som, sod, sdb, sdh, sdm, sdd, scale, gain, rate, slope, H, NQ, N, D, DV,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_GAMMA: tl.constexpr,
    HAS_RATE: tl.constexpr, HAS_DLSE: tl.constexpr, HALF: tl.constexpr, APPROXIMATE: tl.constexpr, PRECISION: tl.constexpr, DEVICE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradient of the queries a program owns; of offset and rate as one partial sum a program; the D and L of its rows, for the keys'."""
    lead = tl.program_id(1).to(tl.int64)
    b, h = lead // H, lead % H
    block = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    first = block * BM
    m = first + tl.arange(0, BM)
    offset = N - NQ
    d, c = tl.arange(0, BD), tl.arange(0, BV)
    q = _rows(Q + b * sqb + h * sqh, m, d, sqm, sqd, NQ, D)
    do = _rows(DO + b * sdb + h * sdh, m, c, sdm, sdd, NQ, DV)
    o = _rows(O + b * sob + h * soh, m, c, som, sod, NQ, DV)
    K += b * skb + h * skh
    V += b * svb + h * svh
    MASK += b * smb + h * smh
    GAMMA += b * sgb + h * sgh
    shift = _scalar(OFFSET + b * sfb + h * sfh, 0.0, HAS_OFFSET) / gain
    rate = _scalar(RATE, rate, HAS_RATE)
    lift = _lift(TOPS, DV, slope, HALF)
    log_mass = _log2_mass(LSE + lead * NQ, m, NQ)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(DLSE + lead * NQ + m, mask=m < NQ, other=0.0)
    tl.store(DELTA + lead * NQ + m, delta, mask=m < NQ)
    tl.store(LOG_MASS + lead * NQ + m, log_mass, mask=m < NQ)
    dq = tl.zeros((BM, BD), dtype=tl.float32)
    doff = tl.zeros((BM,), dtype=tl.float32)
    drate = tl.zeros((BM,), dtype=tl.float32)
    end = N
    whole = N // BN * BN
    if CAUSAL:
        end = tl.minimum(N, tl.maximum(0, first + BM + offset))
        whole = tl.minimum(N, tl.maximum(0, first + 1 + offset)) // BN * BN
    if HAS_MASK:
        whole = 0
    else:
        dq, doff, drate = _query_span(
            dq, doff, drate, q, do, log_mass, delta, lift, K, V, MASK, GAMMA, m, 0, whole,
            skn, skd, svn, svd, smm, smn, sgn, offset, scale, shift, gain, rate, slope, NQ, N, D, DV,
            ACT, CAUSAL, HAS_MASK, HAS_GAMMA, HAS_OFFSET, HAS_RATE, False, APPROXIMATE, PRECISION, DEVICE, BN, BD, BV,
        )  # fmt: skip
    dq, doff, drate = _query_span(
        dq, doff, drate, q, do, log_mass, delta, lift, K, V, MASK, GAMMA, m, whole, end,
        skn, skd, svn, svd, smm, smn, sgn, offset, scale, shift, gain, rate, slope, NQ, N, D, DV,
        ACT, CAUSAL, HAS_MASK, HAS_GAMMA, HAS_OFFSET, HAS_RATE, True, APPROXIMATE, PRECISION, DEVICE, BN, BD, BV,
    )  # fmt: skip
    tl.store(
        DQ + (lead * NQ + m[:, None]) * D + d[None, :],
        (dq * (rate * gain * scale / lift)).to(DQ.dtype.element_ty),
        mask=(m < NQ)[:, None] & (d < D)[None, :],
    )
    place = lead * tl.num_programs(0) + block
    if HAS_OFFSET:
        tl.store(DOFF + place, tl.sum(doff, 0) * rate)
    if HAS_RATE:
        tl.store(DRATE + place, tl.sum(drate, 0) * LN2 / rate)


@triton.jit
def _key_span(
    dk, dv, dgamma, k, v, gamma, lift, Q, DO, MASK, LOG_MASS, DELTA, n, begin, end,
    sqm, sqd, sdm, sdd, smm, smn, offset, scale, shift, gain, rate, slope, NQ, N, D, DV,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_GAMMA: tl.constexpr, MASKED: tl.constexpr,
    HALF: tl.constexpr, APPROXIMATE: tl.constexpr, PRECISION: tl.constexpr, DEVICE: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Tiles are (keys, queries) here, so that none is turned on its way into a product."""
    d, c = tl.arange(0, BD), tl.arange(0, BV)
    for start in range(begin, end, BM):
        m = start + tl.arange(0, BM)
        seen = 1
        if MASKED:
            ok = _allowed(MASK, m[None, :], n[:, None], smm, smn, offset, NQ, N, CAUSAL, HAS_MASK)
            if HAS_MASK:
                seen = tl.max(tl.max(ok.to(tl.int32), 1), 0)
        if seen > 0:
            q = _rows(Q, m, d, sqm, sqd, NQ, D)
            z = _product(k, tl.trans(q), None, PRECISION, DEVICE) * scale + shift
            h, g = value_and_slope(z, ACT, slope, DEVICE, APPROXIMATE)
            t = h * (rate * gain * LOG2E)
            if HAS_GAMMA:
                t += gamma[:, None]
            p = exp2(t - tl.load(LOG_MASS + m, mask=m < NQ, other=float("inf"))[None, :], DEVICE)
            if MASKED:
                p = tl.where(ok, p, 0.0)
            do = _rows(DO, m, c, sdm, sdd, NQ, DV)
            lifted = p * LIFT if HALF else p
            dv = _product(lifted.to(do.dtype), do, dv, PRECISION, DEVICE)
            delta = tl.load(DELTA + m, mask=m < NQ, other=0.0)
            dt = p * (_product(v, tl.trans(do), None, PRECISION, DEVICE) - delta[None, :])
            if HAS_GAMMA:
                dgamma += tl.sum(dt, 1)
            dk = _product((dt * g * lift).to(q.dtype), q, dk, PRECISION, DEVICE)
    return dk, dv, dgamma


@quick
@triton.jit
def key_grad_kernel(
    Q, K, V, OFFSET, GAMMA, RATE, MASK, LOG_MASS, DO, TOPS, DELTA, DK, DV_OUT, DGAMMA,
    sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sfb, sfh, sgb, sgh, sgn, smb, smh, smm, smn,
    sdb, sdh, sdm, sdd, scale, gain, rate, slope, H, NQ, N, D, DV,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_GAMMA: tl.constexpr,
    HAS_RATE: tl.constexpr, HALF: tl.constexpr, APPROXIMATE: tl.constexpr, PRECISION: tl.constexpr, DEVICE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys, values and key biases that a program owns."""
    lead = tl.program_id(1).to(tl.int64)
    b, h = lead // H, lead % H
    first = tl.program_id(0) * BN
    n = first + tl.arange(0, BN)
    offset = N - NQ
    d, c = tl.arange(0, BD), tl.arange(0, BV)
    k = _rows(K + b * skb + h * skh, n, d, skn, skd, N, D)
    v = _rows(V + b * svb + h * svh, n, c, svn, svd, N, DV)
    Q += b * sqb + h * sqh
    DO += b * sdb + h * sdh
    MASK += b * smb + h * smh
    shift = _scalar(OFFSET + b * sfb + h * sfh, 0.0, HAS_OFFSET) / gain
    rate = _scalar(RATE, rate, HAS_RATE)
    lift = _lift(TOPS, DV, slope, HALF)
    gamma = tl.zeros((BN,), dtype=tl.float32)
    if HAS_GAMMA:
        gamma = tl.load(GAMMA + b * sgb + h * sgh + n.to(tl.int64) * sgn, mask=n < N, other=0.0) * (rate * LOG2E)
    dk = tl.zeros((BN, BD), dtype=tl.float32)
    dv = tl.zeros((BN, BV), dtype=tl.float32)
    dgamma = tl.zeros((BN,), dtype=tl.float32)
    begin = 0
    whole = 0
    if CAUSAL:
        begin = tl.maximum(0, first - offset) // BM * BM
        # From here on every query sees every key of the program.
        whole = tl.minimum(NQ, tl.cdiv(tl.maximum(0, first + BN - 1 - offset), BM) * BM)
    if HAS_MASK:
        whole = NQ
    if CAUSAL or HAS_MASK:
        dk, dv, dgamma = _key_span(
            dk, dv, dgamma, k, v, gamma, lift, Q, DO, MASK, LOG_MASS + lead * NQ, DELTA + lead * NQ, n, begin, whole,
            sqm, sqd, sdm, sdd, smm, smn, offset, scale, shift, gain, rate, slope, NQ, N, D, DV,
            ACT, CAUSAL, HAS_MASK, HAS_GAMMA, True, HALF, APPROXIMATE, PRECISION, DEVICE, BM, BD, BV,
        )  # fmt: skip
    if not HAS_MASK:
        dk, dv, dgamma = _key_span(
            dk, dv, dgamma, k, v, gamma, lift, Q, DO, MASK, LOG_MASS + lead * NQ, DELTA + lead * NQ, n, whole, NQ,
            sqm, sqd, sdm, sdd, smm, smn, offset, scale, shift, gain, rate, slope, NQ, N, D, DV,
            ACT, CAUSAL, HAS_MASK, HAS_GAMMA, False, HALF, APPROXIMATE, PRECISION, DEVICE, BM, BD, BV,
        )  # fmt: skip
    tl.store(
        DK + (lead * N + n[:, None]) * D + d[None, :],
        (dk * (rate * gain * scale / lift)).to(DK.dtype.element_ty),
        mask=(n < N)[:, None] & (d < D)[None, :],
    )
    tl.store(
        DV_OUT + (lead * N + n[:, None]) * DV + c[None, :],
        (dv * (1.0 / LIFT if HALF else 1.0)).to(DV_OUT.dtype.element_ty),
        mask=(n < N)[:, None] & (c < DV)[None, :],
    )
    if HAS_GAMMA:
        tl.store(DGAMMA + lead * N + n, dgamma * rate, mask=n < N)


class Operands(NamedTuple):
    """One call: q (B, H, Nq, d), k (B, H, N, d), v (B, H, N, d_v) in one dtype, any strides; the rest in float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    offset: Tensor | None  # (B, H)
    key_bias: Tensor | None  # (B, H, N)
    rate: Tensor | None  # (1,), instead of the number
    mask: Tensor | None  # bytes (B or 1, H or 1, Nq or 1, N or 1)
    causal: bool
    scale: float
    number: float  # rate where it is no tensor
    act: str

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """B, H, Nq, N, d and d_v."""
        (b, h, nq, d), (n, dv) = self.q.shape, self.v.shape[2:]
        return b, h, nq, n, d, dv

    def tensors(self) -> tuple[Tensor, ...]:
        """All that kernels point to; what there is none of points somewhere else."""
        given = (self.offset, self.key_bias, self.rate, self.mask)
        return (self.q, self.k, self.v, *(self.q if x is None else x for x in given))

    def strides(self) -> tuple[int, ...]:
        offset = (0, 0) if self.offset is None else self.offset.stride()
        bias = (0, 0, 0) if self.key_bias is None else self.key_bias.stride()
        mask: list[int] = [0] * 4
        if self.mask is not None:
            mask = [step if size > 1 else 0 for step, size in zip(self.mask.stride(), self.mask.shape, strict=True)]
        return (*self.q.stride(), *self.k.stride(), *self.v.stride(), *offset, *bias, *mask)

    def numbers(self) -> tuple[float | int, ...]:
        _, h, nq, n, d, dv = self.sizes
        _, slope, c = code_of(self.act)
        return self.scale / c, c, self.number, slope, h, nq, n, d, dv

    def flags(self) -> dict[str, object]:
        device, single = self.q.device.type == "cuda", self.q.dtype == torch.float32
        return {
            "ACT": code_of(self.act)[0], "CAUSAL": self.causal, "HAS_MASK": self.mask is not None,
            "HAS_OFFSET": self.offset is not None, "HAS_GAMMA": self.key_bias is not None, "HAS_RATE": self.rate is not None,
            "PRECISION": "tf32x3" if single and device else "ieee", "DEVICE": device,
        }  # fmt: skip

    def is_bounded(self) -> bool:
        code, _, c = code_of(self.act)
        bounded = code in (TANH, SIGMOID) and self.key_bias is None and self.rate is None
        return bounded and 0.0 < c * self.number <= BOUNDED_RATE

    def may_approximate(self) -> bool:
        """Whether an error of 5e-4 in the activation is less than the rounding of the operands."""
        return self.q.dtype != torch.float32 and self.rate is None and abs(self.number * code_of(self.act)[2]) <= 1.0


def tile_of(x: Operands, backward: bool) -> Tile:
    """Tile sizes, warps and stages: the best that were measured, or the default."""
    default = default_tile(x, backward)
    return tile(tile_name(x, backward), default) if x.q.device.type == "cuda" else default


def tile_name(x: Operands, backward: bool) -> str:
    """What the tile of a call is measured under."""
    return _name(x.q.get_device(), x.q.dtype, *_widths(x.q.shape[3], x.v.shape[3]), backward)


@functools.cache
def _name(index: int, dtype: torch.dtype, bd: int, bv: int, backward: bool) -> str:
    kernel = "bilinear backward" if backward else "bilinear forward"
    return name_of(torch.cuda.get_device_name(index), kernel, str(dtype).removeprefix("torch."), (bd, bv))


def _widths(d: int, dv: int) -> tuple[int, int]:
    return max(16, power_of_2(d)), max(16, power_of_2(dv))


def default_tile(x: Operands, backward: bool) -> Tile:
    """Tile sizes, warps and stages that suit the width; a small tile under the interpreter."""
    bd, bv = _widths(x.q.shape[3], x.v.shape[3])
    widths, wide = {"BD": bd, "BV": bv}, max(bd, bv)
    if x.q.device.type != "cuda":
        return {"BM": 16, "BN": 32, **widths, "num_warps": 4, "num_stages": 1}
    if x.q.dtype == torch.float32:
        # Three tf32 passes hold every operand twice.
        m, n, warps, stages = (64, 32, 4, 2) if wide <= 64 else (64, 32, 8, 1) if wide <= 128 else (32, 32, 8, 1)
        if backward:
            m, n, stages = (32, 32, 1) if wide <= 128 else (16, 16, 1)
    elif backward:
        m, n, warps, stages = (64, 64, 4, 3) if wide <= 64 else (64, 64, 8, 2) if wide <= 128 else (32, 32, 4, 1)
    else:
        m, n, warps, stages = (128, 64, 4, 3) if wide <= 64 else (128, 64, 8, 3) if wide <= 128 else (128, 32, 8, 2)
    return {"BM": m, "BN": n, **widths, "num_warps": warps, "num_stages": stages}


def forward(x: Operands) -> tuple[Tensor, Tensor]:
    """Contexts (B, H, Nq, d_v) and the log-sum-exp of the scores (B, H, Nq) in float32."""
    b, h, nq, _, _, dv = x.sizes
    out = x.v.new_empty(b, h, nq, dv)
    lse = torch.empty(b, h, nq, device=x.v.device)
    shape = tile_of(x, False)
    forward_kernel[(cdiv(nq, shape["BM"]), b * h)](
        *x.tensors(), out, lse, *x.strides(), *out.stride(), *x.numbers(),
        **x.flags(), BOUNDED=x.is_bounded(), APPROXIMATE=x.may_approximate(), **shape,
    )  # fmt: skip
    return out, lse


class Gradients(NamedTuple):
    """In the order of the operands."""

    q: Tensor
    k: Tensor
    v: Tensor
    offset: Tensor | None
    key_bias: Tensor | None
    rate: Tensor | None


class Room(NamedTuple):
    """Where kernels write gradients; those of offset and rate in parts, as many as there are programs. None where there is no operand."""

    q: Tensor
    k: Tensor
    v: Tensor
    offset: Tensor | None  # (B, H, programs), as that of the rate
    key_bias: Tensor | None
    rate: Tensor | None

    @classmethod
    def of(cls, x: Operands, programs: int) -> Room:
        (b, h, nq, d), (n, dv), device = x.q.shape, x.v.shape[2:], x.q.device
        return cls(
            x.q.new_empty(b, h, nq, d),
            x.k.new_empty(b, h, n, d),
            x.v.new_empty(b, h, n, dv),
            None if x.offset is None else torch.empty(b, h, programs, device=device),
            None if x.key_bias is None else torch.empty(b, h, n, device=device),
            None if x.rate is None else torch.empty(b, h, programs, device=device),
        )

    def of_queries(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the kernel of the queries points to; what there is none of points somewhere else."""
        return self.q, self.q if self.offset is None else self.offset, self.q if self.rate is None else self.rate

    def of_keys(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.k, self.v, self.k if self.key_bias is None else self.key_bias

    def gradients(self) -> Gradients:
        return Gradients(
            self.q,
            self.k,
            self.v,
            None if self.offset is None else self.offset.sum(-1),
            self.key_bias,
            None if self.rate is None else self.rate.sum().reshape(1),
        )


def largest_magnitudes(x: Operands, do: Tensor) -> Tensor:
    """Of do and v, (2,), which float16 needs; elsewhere what nobody reads."""
    if x.q.dtype != torch.float16:
        return do
    return torch.stack([torch.linalg.vector_norm(t, torch.inf, dtype=torch.float32) for t in (do, x.v)])


def backward(x: Operands, out: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> Gradients:
    """Gradients from those of the contexts, in the dtype of the values, and of the log-sum-exp."""
    b, h, nq, n, _, _ = x.sizes
    half = x.q.dtype == torch.float16
    # The error of the slope, 1e-3, is that of a tanh rounded to bfloat16, but twice that of one rounded to float16.
    quick = x.may_approximate() and not half
    tops = largest_magnitudes(x, do)
    shape = tile_of(x, True)
    blocks = cdiv(nq, shape["BM"])
    log_mass, delta = torch.empty_like(lse), torch.empty_like(lse)
    room = Room.of(x, blocks)
    tensors, strides, of_do, numbers = x.tensors(), x.strides(), do.stride(), x.numbers()
    flags = {**x.flags(), "HALF": half, "APPROXIMATE": quick, **shape}
    query_grad_kernel[(blocks, b * h)](
        *tensors, out, lse, do, do if dlse is None else dlse, tops, log_mass, delta, *room.of_queries(),
        *strides, *out.stride(), *of_do, *numbers, **flags, HAS_DLSE=dlse is not None,
    )  # fmt: skip
    key_grad_kernel[(cdiv(n, shape["BN"]), b * h)](
        *tensors, log_mass, do, tops, delta, *room.of_keys(), *strides, *of_do, *numbers, **flags
    )
    return room.gradients()
