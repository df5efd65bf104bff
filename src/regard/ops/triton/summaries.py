"""Summaries of a softmax over additive scores: sums of each row in one pass, and what each key receives in a second one.

Scores are exact, in float32 (additive_tile). In half precision they come from the sine basis where the context would (summaries_sine), and
these kernels return at once unless the range is too wide for it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.triton import summaries_sine
from regard.ops.triton.additive_sine import plan_size, uses_sines
from regard.ops.triton.additive_tile import (
    Conditions,
    Exact,
    allowed,
    arithmetic,
    largest,
    mask_arguments,
    pairs,
    scores,
)
from regard.ops.triton.launching import cdiv, quick
from regard.ops.triton.summary_tile import (
    LN2,
    LOG2E,
    add_largest,
    add_tile,
    no_slots,
    no_sums,
    region_arguments,
    row_flags,
    write_largest,
    write_sums,
)

# Queries and keys of a tile as in the forward of a softmax (keys and queries where a program owns keys).
TILE = {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 1}


@quick
@triton.jit
def rows_kernel(
    A, U, EA, EU, AMAX, UMAX, W, MASK, BIAS, REGION, LSE, ENTROPIES, PLACES, ON, LARGEST, SKIP,
    sal, sad, sam, sul, sud, sun, swl, sml, smm, smn, sbl, sbm, sbn, srl,
    slope, NQ, N, D, K,
    ACT: tl.constexpr, SHARE: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    ENTROPY: tl.constexpr, PLACE: tl.constexpr, HAS_REGION: tl.constexpr, TOPS: tl.constexpr, GUARDED: tl.constexpr,
    FAST: tl.constexpr, SLOTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    if GUARDED:  # noqa: SIM102
        if tl.load(SKIP) != 0:
            return
    lead = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    m_in = m < NQ
    offset = N - NQ
    A += lead * sal
    EA += lead * sal
    U += lead * sul
    EU += lead * sul
    W += lead * swl
    MASK += lead * sml
    BIAS += lead * sbl
    REGION += lead * srl
    top, mass, spread, place, on = no_sums(BM)
    held, key = no_slots(K, BM, SLOTS)
    a_top = largest(AMAX + lead * NQ, m, m_in, SHARE)
    end = N
    if CAUSAL:
        end = tl.minimum(N, tl.program_id(0) * BM + BM + offset)
    for start in range(0, end, BN):
        n = start + tl.arange(0, BN)
        n_in = n < N
        ok = allowed(MASK, m, n, m_in, n_in, smm, smn, offset, CAUSAL, HAS_MASK)
        seen = 1
        if HAS_MASK:
            seen = tl.max(tl.max(ok.to(tl.int32), 1), 0)
        if seen > 0:
            reach = a_top + largest(UMAX + lead * N, n, n_in, SHARE)
            s = scores(
                A, U, EA, EU, W, BIAS, m, n, m_in, n_in, reach, sad, sam, sud, sun, sbm, sbn, slope, D,
                ACT, SHARE, HAS_BIAS, FAST, PADDED, BM, BN,
            )  # fmt: skip
            s = tl.where(ok, s * LOG2E, float("-inf"))
            top, mass, spread, place, on, highest = add_tile(
                s, n, n_in, REGION, top, mass, spread, place, on, ENTROPY, PLACE, HAS_REGION
            )
            if TOPS:
                held, key = add_largest(s, n, highest, held, key, SLOTS)
    at = lead * NQ + m
    lse = write_sums(
        top, mass, spread, place, on, at, m_in, ENTROPIES, PLACES, ON, ENTROPY, PLACE, HAS_REGION
    )  # fmt: skip
    tl.store(LSE + at, lse * LN2, mask=m_in)
    if TOPS:
        write_largest(held, key, lse, at, m_in, LARGEST, K, SLOTS)


@quick
@triton.jit
def keys_kernel(
    A, U, EA, EU, AMAX, UMAX, W, MASK, BIAS, LSE, RECEIVED, SKIP,
    sal, sad, sam, sul, sud, sun, swl, sml, smm, smn, sbl, sbm, sbn,
    slope, NQ, N, D,
    ACT: tl.constexpr, SHARE: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, GUARDED: tl.constexpr,
    FAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What BM keys receive: scores are symmetric in a and u, so keys are the rows of a tile here and queries its columns."""
    if GUARDED:  # noqa: SIM102
        if tl.load(SKIP) != 0:
            return
    lead = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    n_in = n < N
    offset = N - NQ
    A += lead * sal
    EA += lead * sal
    U += lead * sul
    EU += lead * sul
    W += lead * swl
    MASK += lead * sml
    BIAS += lead * sbl
    received = tl.zeros((BM,), dtype=tl.float32)
    u_top = largest(UMAX + lead * N, n, n_in, SHARE)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(tl.program_id(0) * BM - offset, 0) // BN * BN
    for start in range(begin, NQ, BN):
        m = start + tl.arange(0, BN)
        m_in = m < NQ
        lse = tl.load(LSE + lead * NQ + m, mask=m_in, other=float("-inf"))
        reach = u_top + largest(AMAX + lead * NQ, m, m_in, SHARE)
        s = scores(
            U, A, EU, EA, W, BIAS, n, m, n_in, m_in, reach, sud, sun, sad, sam, sbn, sbm, slope, D,
            ACT, SHARE, HAS_BIAS, FAST, PADDED, BM, BN,
        )  # fmt: skip
        attends = m_in & (lse != float("-inf"))
        ok = pairs(MASK, m[None, :], n[:, None], attends[None, :], n_in[:, None], smm, smn, offset, CAUSAL, HAS_MASK)
        p = tl.exp2((s - tl.where(lse == float("-inf"), 0.0, lse)[None, :]) * LOG2E)
        received += tl.sum(tl.where(ok, p, 0.0), 1)
    tl.store(RECEIVED + lead * N + n, received, mask=n_in)


def summaries(
    a: Tensor, u: Tensor, w: Tensor, act: str, given: Conditions, names: Collection[str], region: Tensor | None, k: int
) -> dict[str, Tensor]:
    """The named sums of each row (L, Nq), the k largest weights and their keys (L, Nq, k, 2), what each key receives (L, N).

    a (L, Nq, D), u (L, N, D), w (L or 1, D). `given` is a plain softmax over the allowed keys, with or without a bias; `region` bytes
    (L or 1, N).
    """
    (length, nq), n, like = a.shape[:2], u.shape[1], w.float()
    # What nobody asked for is never written, save the log-sum-exp, which the second pass reads.
    asked = {"log_sum_exp", *names}
    rows = ("log_sum_exp", "entropy", "expected_position", "mass_on")
    found = {name: like.new_empty((length, nq) if name in asked else 0) for name in rows}
    found["topk"] = like.new_empty(length, nq, k, 2)
    found["mass_received"] = like.new_empty((length, n) if "mass_received" in names else 0)
    skip: Tensor | None = None
    # A series of float16 is as exact as its contexts, but not as the entropy of float16 scores.
    if a.dtype == torch.bfloat16 and uses_sines(a, act, given):
        skip = summaries_sine.write(a, u, w, like.new_empty(plan_size(a.dtype)), given, names, region, k, found)
    # Runs only where the device found the range too wide for a series, if there is one.
    _write(Exact(a, u, w, act, prepare=skip is None), given, names, region, k, found, skip)
    return found


def _write(
    x: Exact,
    given: Conditions,
    names: Collection[str],
    region: Tensor | None,
    k: int,
    found: dict[str, Tensor],
    skip: Tensor | None,
) -> None:
    length = x.a.shape[0]
    mask, *mask_strides = mask_arguments(given.mask, x.w)
    bias, *bias_strides = mask_arguments(given.bias, x.w)
    common = {
        **x.flags(),
        "FAST": arithmetic(x.w)["FAST"],
        "CAUSAL": given.causal,
        "HAS_MASK": given.mask is not None,
        "HAS_BIAS": given.bias is not None,
        "GUARDED": skip is not None,
        **TILE,
    }
    inside, inside_stride = region_arguments(region, x.w)
    stop = x.w if skip is None else skip
    rows_kernel[(cdiv(x.nq, TILE["BM"]), length)](
        *x.operands(), mask, bias, inside,
        *(found[name] for name in ("log_sum_exp", "entropy", "expected_position", "mass_on", "topk")), stop,
        *x.strides(), *mask_strides, *bias_strides, inside_stride,
        x.slope, x.nq, x.n, x.w.shape[-1], k, **row_flags(names, k), **common,
    )  # fmt: skip
    if "mass_received" in names:
        keys_kernel[(cdiv(x.n, TILE["BM"]), length)](
            *x.operands(), mask, bias, found["log_sum_exp"], found["mass_received"], stop,
            *x.strides(), *mask_strides, *bias_strides, x.slope, x.nq, x.n, x.w.shape[-1], **common,
        )  # fmt: skip
