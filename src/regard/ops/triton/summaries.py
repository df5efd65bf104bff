"""Summaries of a softmax over additive scores: sums of each row in one pass, and what each key receives in a second one.

Scores are exact, in float32 (additive_tile). In half precision they come from the sine basis where the context would (summaries_sine), and
these kernels return at once unless the range is too wide for it. Where contexts are computed too, the rows are summed up in the same pass
(additive_exact); the one here is for a call that was recorded without.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.triton import summaries_sine
from regard.ops.triton.additive_sine import Sine, plan_size, uses_sines
from regard.ops.triton.additive_tile import (
    Conditions,
    Exact,
    allowed,
    arithmetic,
    ask_ahead,
    largest,
    mask_arguments,
    pairs,
    scores,
)
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

# Queries and keys of a tile as in the forward of a softmax (keys and queries where a program owns keys).
TILE = {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 1}


@quick
@triton.jit
def rows_kernel(
    A, U, EA, EU, AMAX, UMAX, W, MASK, BIAS, LSE, SKIP, REGION, ENTROPIES, PLACES, ON, LARGEST,
    sal, sad, sam, sul, sud, sun, swl, sml, smm, smn, sbl, sbm, sbn,
    slope, NQ, N, D, srl, K,
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
            asked = ask_ahead(EU, start, sud, D, SHARE, FAST, BN)
            reach = a_top + largest(UMAX + lead * N + asked, n, n_in, SHARE)
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
        asked = ask_ahead(EA, start, sad, D, SHARE, FAST, BN)
        reach = u_top + largest(AMAX + lead * NQ + asked, m, m_in, SHARE)
        s = scores(
            U, A, EU, EA, W, BIAS, n, m, n_in, m_in, reach, sud, sun, sad, sam, sbn, sbm, slope, D,
            ACT, SHARE, HAS_BIAS, FAST, PADDED, BM, BN,
        )  # fmt: skip
        attends = m_in & (lse != float("-inf"))
        ok = pairs(MASK, m[None, :], n[:, None], attends[None, :], n_in[:, None], smm, smn, offset, CAUSAL, HAS_MASK)
        p = tl.exp2((s - tl.where(lse == float("-inf"), 0.0, lse)[None, :]) * LOG2E)
        received += tl.sum(tl.where(ok, p, 0.0), 1)
    tl.store(RECEIVED + lead * N + n, received, mask=n_in)


def room_for(
    a: Tensor, u: Tensor, names: Collection[str], region: Tensor | None, k: int, along: bool = False
) -> Summary:
    """Where sums of each row go (L, Nq), the k largest weights and their keys (L, Nq, k, 2), and what each key receives (L, N).

    a (L, Nq, D), u (L, N, D); `region` bytes (L or 1, N). Contexts that are computed along with it leave the log-sum-exp.
    """
    (length, nq), n = a.shape[:2], u.shape[1]
    rows = [name for name in ("entropy", "expected_position", "mass_on") if name in names]
    # The second pass reads the log-sum-exp, whether or not somebody wants it.
    rows += [] if along else ["log_sum_exp"]
    found = {name: a.new_empty(length, nq, dtype=torch.float32) for name in rows}
    if k > 0:
        found["topk"] = a.new_empty(length, nq, k, 2, dtype=torch.float32)
    if "mass_received" in names:
        found["mass_received"] = a.new_empty(length, n, dtype=torch.float32)
    return Summary(names, region, k, found)


def summaries(
    a: Tensor, u: Tensor, w: Tensor, act: str, given: Conditions, names: Collection[str], region: Tensor | None, k: int
) -> Mapping[str, Tensor]:
    """What is wanted of the weights, where no context is computed; w is (L or 1, D).

    `given` is a plain softmax over the allowed keys, with or without a bias.
    """
    summary = room_for(a, u, names, region, k)
    lse, skip = summary.found["log_sum_exp"], None
    if with_sines(a, act, given):
        sine = Sine(a, u, w, w.new_empty(plan_size(a.dtype), dtype=torch.float32), fresh=True)
        summaries_sine.write(sine, given, summary, None)
        skip = sine.terms
    # Runs only where the device found the range too wide for a series, if there is one.
    x = Exact(a, u, w, act, prepare=skip is None)
    _rows(x, given, summary, skip)
    _received(x, given, lse, summary, skip)
    return summary.found


def with_sines(a: Tensor, act: str, given: Conditions) -> bool:
    """Whether summaries come from the sine basis: a series of float16 is as exact as its contexts, not as the entropy of float16 scores."""
    return a.dtype == torch.bfloat16 and uses_sines(a, act, given)


def same_pass(a: Tensor, act: str, given: Conditions) -> bool:
    """Whether what computes the contexts of a softmax also finds its summaries."""
    return with_sines(a, act, given) or not uses_sines(a, act, given)


def beside_contexts(x: Exact, sine: Sine | None, given: Conditions, lse: Tensor, summary: Summary) -> None:
    """The rest of a summary whose rows the exact kernel has summed up beside its contexts, which left the log-sum-exp."""
    skip = None if sine is None else sine.terms
    if sine is not None:
        summaries_sine.write(sine, given, summary, lse)
    _received(x, given, lse, summary, skip)
    if "log_sum_exp" in summary.names:
        # The backward keeps its own: what is recorded may be changed in place.
        summary.found["log_sum_exp"] = lse.clone() if sine is None else summaries_sine.with_constant(sine, lse)


def _common(x: Exact, given: Conditions, skip: Tensor | None) -> dict[str, object]:
    return {
        **x.flags(),
        "FAST": arithmetic(x.w)["FAST"],
        "CAUSAL": given.causal,
        "HAS_MASK": given.mask is not None,
        "HAS_BIAS": given.bias is not None,
        "GUARDED": skip is not None,
        **TILE,
    }


def _rows(x: Exact, given: Conditions, summary: Summary, skip: Tensor | None) -> None:
    mask, *mask_strides = mask_arguments(given.mask, x.w)
    bias, *bias_strides = mask_arguments(given.bias, x.w)
    rows_kernel[(cdiv(x.nq, TILE["BM"]), x.a.shape[0])](
        *x.operands(), mask, bias, summary.found["log_sum_exp"], x.w if skip is None else skip, *summary.tensors(x.w),
        *x.strides(), *mask_strides, *bias_strides, x.slope, x.nq, x.n, x.w.shape[-1], *summary.numbers(),
        **summary.flags(), **_common(x, given, skip),
    )  # fmt: skip


def _received(x: Exact, given: Conditions, lse: Tensor, summary: Summary, skip: Tensor | None) -> None:
    """What each key receives, if somebody wants it."""
    if "mass_received" not in summary.names:
        return
    mask, *mask_strides = mask_arguments(given.mask, x.w)
    bias, *bias_strides = mask_arguments(given.bias, x.w)
    keys_kernel[(cdiv(x.n, TILE["BM"]), x.a.shape[0])](
        *x.operands(), mask, bias, lse, summary.found["mass_received"], x.w if skip is None else skip,
        *x.strides(), *mask_strides, *bias_strides, x.slope, x.nq, x.n, x.w.shape[-1], **_common(x, given, skip),
    )  # fmt: skip
