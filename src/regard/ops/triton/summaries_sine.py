r"""Summaries of additive attention in half precision, from the sine basis (additive_sine): scores of a tile are a matrix product.

The basis leaves out a constant of each row, $\alpha\, w \cdot a_i$. It changes no weight; a log-sum-exp that is asked for gets it back.
Without a series for the range of the data these kernels return at once and leave the results to the exact ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.triton.additive_sine import Sine, product, tile_of
from regard.ops.triton.additive_tile import Conditions, allowed, mask_arguments
from regard.ops.triton.launching import cdiv, quick
from regard.ops.triton.summary_tile import (
    LN2,
    LOG2E,
    Summary,
    add_largest,
    add_tile,
    no_slots,
    no_sums,
    write_largest,
    write_sums,
)

ROWS_TILE = {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 3}
KEYS_TILE = {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 3}


@quick
@triton.jit
def rows_kernel(
    PHI, PSI, BETA, A, W, MASK, CENTRED, LSE, TERMS, SCALES, REGION, ENTROPIES, PLACES, ON, LARGEST,
    sw, sml, smm, smn, NQ, N, D, srl, K,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, WHOLE: tl.constexpr, ENTROPY: tl.constexpr, PLACE: tl.constexpr,
    HAS_REGION: tl.constexpr, TOPS: tl.constexpr, SLOTS: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Sums of BM rows; their log-sum-exp in base 2 without the constant, and on request (WHOLE) in base e with it."""
    terms = tl.load(TERMS)
    if terms == 0:
        return
    inner = terms * 2 * DP
    lead = tl.program_id(1).to(tl.int64)
    scale = tl.load(SCALES + 1) * LOG2E
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    m_in = m < NQ
    row, column = (lead * NQ).to(tl.int32) + tl.program_id(0) * BM, (lead * N).to(tl.int32)
    BETA += lead * N
    MASK += lead * sml
    REGION += lead * srl
    offset = N - NQ
    top, mass, spread, place, on = no_sums(BM)
    held, key = no_slots(K, BM, SLOTS)
    end = N
    if CAUSAL:
        end = tl.minimum(N, tl.program_id(0) * BM + BM + offset)
    for start in range(0, end, BN):
        n = start + tl.arange(0, BN)
        n_in = n < N
        s = product(PHI, PSI, row, column + start, inner, BM, BN, BK)
        s = s * scale + tl.load(BETA + n, mask=n_in, other=0.0)[None, :] * LOG2E
        s = tl.where(allowed(MASK, m, n, m_in, n_in, smm, smn, offset, CAUSAL, HAS_MASK), s, float("-inf"))
        top, mass, spread, place, on, highest = add_tile(
            s, n, n_in, REGION, top, mass, spread, place, on, ENTROPY, PLACE, HAS_REGION
        )
        if TOPS:
            held, key = add_largest(s, n, highest, held, key, SLOTS)
    at = lead * NQ + m
    lse = write_sums(
        top, mass, spread, place, on, at, m_in, ENTROPIES, PLACES, ON, ENTROPY, PLACE, HAS_REGION
    )  # fmt: skip
    tl.store(CENTRED + at, lse, mask=m_in)
    if TOPS:
        write_largest(held, key, lse, at, m_in, LARGEST, K, SLOTS)
    if WHOLE:
        d = tl.arange(0, DP)
        a = tl.load(A + at[:, None] * D + d[None, :], mask=m_in[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        w = tl.load(W + lead * sw + d, mask=d < D, other=0.0)
        tl.store(LSE + at, lse * LN2 + tl.load(SCALES) * tl.sum(a * w[None, :], 1), mask=m_in)


@quick
@triton.jit
def keys_kernel(
    PSI, PHI, BETA, MASK, CENTRED, RECEIVED, TERMS, SCALES, sml, smm, smn, NQ, N,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """What BM keys receive; they are the rows of a tile here, so that a sum over queries stays within a warp."""
    terms = tl.load(TERMS)
    if terms == 0:
        return
    inner = terms * 2 * DP
    lead = tl.program_id(1).to(tl.int64)
    scale = tl.load(SCALES + 1) * LOG2E
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    n_in = n < N
    row, column = (lead * N).to(tl.int32) + tl.program_id(0) * BM, (lead * NQ).to(tl.int32)
    beta = tl.load(BETA + lead * N + n, mask=n_in, other=0.0) * LOG2E
    MASK += lead * sml
    offset = N - NQ
    received = tl.zeros((BM,), dtype=tl.float32)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(tl.program_id(0) * BM - offset, 0) // BN * BN
    for start in range(begin, NQ, BN):
        m = start + tl.arange(0, BN)
        m_in = m < NQ
        # A row without keys gives nothing: its weights are 2^-inf.
        lse = tl.load(CENTRED + lead * NQ + m, mask=m_in, other=float("-inf"))
        lse = tl.where(lse == float("-inf"), float("inf"), lse)
        s = product(PSI, PHI, row, column + start, inner, BM, BN, BK)
        p = tl.exp2(s * scale + (beta[:, None] - lse[None, :]))
        if HAS_MASK:
            p = tl.where(allowed(MASK, n, m, n_in, m_in, smn, smm, 0, False, HAS_MASK), p, 0.0)
        if CAUSAL:
            p = tl.where(n[:, None] <= m[None, :] + offset, p, 0.0)
        received += tl.sum(p, 1)
    tl.store(RECEIVED + lead * N + n, received, mask=n_in)


def write(sine: Sine, given: Conditions, summary: Summary, lse: Tensor | None) -> None:
    """Write what is found of a plain softmax, if the range allows; `lse` (L, Nq) is what its contexts left, without the constant."""
    mask, *mask_strides = mask_arguments(given.mask, sine.bias)
    flags = {"CAUSAL": given.causal, "HAS_MASK": given.mask is not None, "DP": sine.dp}
    # A mask and many slots take registers.
    narrow = {"BN": 128} if given.mask is not None or summary.k > 8 else {}
    wanted = summary.flags()
    centred = torch.empty(sine.length, sine.nq, device=sine.bias.device) if lse is None else lse * LOG2E.value
    if lse is None or any(wanted[name] for name in ("ENTROPY", "PLACE", "HAS_REGION", "TOPS")):
        tile = tile_of(sine.a, {**ROWS_TILE, **narrow}, given)
        whole = summary.found["log_sum_exp"] if lse is None else centred
        rows_kernel[(cdiv(sine.nq, tile["BM"]), sine.length)](
            *sine.descriptors(tile), sine.bias, sine.a, sine.w, mask, centred, whole, sine.terms, sine.scales, *summary.tensors(centred),
            sine.w_stride(), *mask_strides, sine.nq, sine.n, sine.width, *summary.numbers(),
            WHOLE=lse is None and "log_sum_exp" in summary.names, **wanted, **flags, **tile,
        )  # fmt: skip
    if "mass_received" in summary.names:
        tile = tile_of(sine.a, {**KEYS_TILE, **narrow}, given)
        keys_kernel[(cdiv(sine.n, tile["BM"]), sine.length)](
            *sine.descriptors(tile, own_keys=True), sine.bias, mask, centred, summary.found["mass_received"], sine.terms, sine.scales,
            *mask_strides, sine.nq, sine.n, **flags, **tile,
        )  # fmt: skip


def with_constant(sine: Sine, lse: Tensor) -> Tensor:
    """The log-sum-exp of the scores, from that which leaves out what the basis does not compute."""
    constant = sine.scales[0] * (sine.a.float() * (sine.w if len(sine.w) == 1 else sine.w[:, None])).sum(-1)
    return lse + torch.where(sine.terms != 0, constant.view(lse.shape), 0.0)
