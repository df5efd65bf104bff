r"""What a softmax over additive scores looks at, without its weights: sums over the keys of each row, in one pass.

With $p_j = e^{s_j - m}$, $m$ the largest score so far, a row keeps $\sum p$, $\sum p\,(s - m)$, $\sum p\,j$ and the mass on a
region; all shrink by $e^{m - m'}$ when the maximum grows to $m'$, the second after $(m - m') \sum p$ was added. Then

$$L = m + \log \sum p, \qquad H = \log \sum p - \frac{\sum p\,(s - m)}{\sum p}, \qquad \mathrm{E}[j] = \frac{\sum p\,j}{\sum p}$$

The k largest scores of a row stand in k slots; a tile hands its largest over while one of its rows has a larger one than it holds.

What a key receives, $\sum_i e^{s_{ij} - L_i}$, is a second pass, of programs that own keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.triton.additive_tile import (
    SHARED_RANGE,
    Conditions,
    Exact,
    allowed,
    arithmetic,
    largest,
    mask_arguments,
    scores,
)
from regard.ops.triton.align import first_largest


@triton.jit
def rows_kernel(
    A, U, EA, EU, AMAX, UMAX, W, MASK, BIAS, REGION, LSE, ENTROPY, PLACE, ON, TOP, KEY,
    sal, sad, sam, sul, sud, sun, swl, sml, smm, smn, sbl, sbm, sbn, srl,
    slope, NQ, N, D, K,
    ACT: tl.constexpr, SHARE: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_REGION: tl.constexpr, TOPS: tl.constexpr,
    FAST: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
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
    top = tl.full((BM,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BM,), dtype=tl.float32)
    spread = tl.zeros((BM,), dtype=tl.float32)
    place = tl.zeros((BM,), dtype=tl.float32)
    on = tl.zeros((BM,), dtype=tl.float32)
    slot = tl.arange(0, BK)
    # No score is larger than what stands in the slots beyond k.
    held = tl.where((slot < K)[None, :], float("-inf"), float("inf")) + tl.zeros((BM, BK), dtype=tl.float32)
    key = tl.full((BM, BK), -1, dtype=tl.int32)
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
            shared = a_top + largest(UMAX + lead * N, n, n_in, SHARE) <= SHARED_RANGE
            s = scores(
                A, U, EA, EU, W, BIAS, m, n, m_in, n_in, shared, sad, sam, sud, sun, sbm, sbn, slope, D,
                ACT, SHARE, HAS_BIAS, FAST, BM, BN,
            )  # fmt: skip
            s = tl.where(ok, s, float("-inf"))
            new = tl.maximum(top, tl.max(s, 1))
            safe = tl.where(new == float("-inf"), 0.0, new)
            p = tl.exp(s - safe[:, None])
            rescale = tl.exp(top - safe)
            shift = tl.where(top == float("-inf"), 0.0, top - safe)
            spread = rescale * (spread + shift * mass) + tl.sum(tl.where(p == 0, 0.0, p * (s - safe[:, None])), 1)
            mass = mass * rescale + tl.sum(p, 1)
            place = place * rescale + tl.sum(p * n[None, :].to(tl.float32), 1)
            if HAS_REGION:
                inside = tl.load(REGION + n, mask=n_in, other=0) != 0
                on = on * rescale + tl.sum(tl.where(inside[None, :], p, 0.0), 1)
            top = new
            if TOPS:
                more = tl.max((tl.max(s, 1) > tl.min(held, 1)).to(tl.int32), 0)
                while more > 0:
                    highest, first = first_largest(s, n, 2147483647)
                    least = tl.min(held, 1)
                    wins = highest > least
                    place_of = tl.min(tl.where(held == least[:, None], slot[None, :], BK), 1)
                    put = wins[:, None] & (slot[None, :] == place_of[:, None])
                    held = tl.where(put, highest[:, None], held)
                    key = tl.where(put, first[:, None], key)
                    s = tl.where(wins[:, None] & (n[None, :] == first[:, None]), float("-inf"), s)
                    more = tl.max(wins.to(tl.int32), 0)
    alive = mass != 0
    total = tl.where(alive, mass, 1.0)
    lse = tl.where(alive, top + tl.log(total), float("-inf"))
    at = lead * NQ + m
    tl.store(LSE + at, lse, mask=m_in)
    tl.store(ENTROPY + at, tl.where(alive, tl.log(total) - spread / total, 0.0), mask=m_in)
    tl.store(PLACE + at, tl.where(alive, place / total, float("nan")), mask=m_in)
    if HAS_REGION:
        tl.store(ON + at, on / total, mask=m_in)
    if TOPS:
        weight = tl.where(key >= 0, tl.exp(held - tl.where(alive, lse, 0.0)[:, None]), 0.0)
        slots = m_in[:, None] & (slot < K)[None, :]
        tl.store(TOP + at[:, None] * K + slot[None, :], weight, mask=slots)
        tl.store(KEY + at[:, None] * K + slot[None, :], key, mask=slots)


@triton.jit
def keys_kernel(
    A, U, EA, EU, AMAX, UMAX, W, MASK, BIAS, LSE, RECEIVED,
    sal, sad, sam, sul, sud, sun, swl, sml, smm, smn, sbl, sbm, sbn,
    slope, NQ, N, D,
    ACT: tl.constexpr, SHARE: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    FAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    lead = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    n_in = n < N
    offset = N - NQ
    A += lead * sal
    EA += lead * sal
    U += lead * sul
    EU += lead * sul
    W += lead * swl
    MASK += lead * sml
    BIAS += lead * sbl
    received = tl.zeros((BN,), dtype=tl.float32)
    u_top = largest(UMAX + lead * N, n, n_in, SHARE)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(tl.program_id(0) * BN - offset, 0) // BM * BM
    for start in range(begin, NQ, BM):
        m = start + tl.arange(0, BM)
        m_in = m < NQ
        ok = allowed(MASK, m, n, m_in, n_in, smm, smn, offset, CAUSAL, HAS_MASK)
        lse = tl.load(LSE + lead * NQ + m, mask=m_in, other=float("-inf"))
        shared = u_top + largest(AMAX + lead * NQ, m, m_in, SHARE) <= SHARED_RANGE
        s = scores(
            A, U, EA, EU, W, BIAS, m, n, m_in, n_in, shared, sad, sam, sud, sun, sbm, sbn, slope, D,
            ACT, SHARE, HAS_BIAS, FAST, BM, BN,
        )  # fmt: skip
        ok = ok & (lse != float("-inf"))[:, None]
        received += tl.sum(tl.where(ok, tl.exp(s - tl.where(lse == float("-inf"), 0.0, lse)[:, None]), 0.0), 0)
    tl.store(RECEIVED + lead * N + n, received, mask=n_in)


def summaries(x: Exact, given: Conditions, region: Tensor | None, k: int, receives: bool) -> dict[str, Tensor]:
    """Sums of each row (L, Nq), the k largest weights and their keys (L, Nq, k) from the largest down, and, on request, what each key receives (L, N).

    `given` is a plain softmax over the allowed keys, with or without a bias; `region` bytes (L or 1, N).
    """
    length = x.a.shape[0]
    mask, *mask_strides = mask_arguments(given.mask, x.w)
    bias, *bias_strides = mask_arguments(given.bias, x.w)
    flags = {"CAUSAL": given.causal, "HAS_MASK": given.mask is not None, "HAS_BIAS": given.bias is not None}
    common = {
        "ACT": x.code,
        "SHARE": x.share,
        "FAST": arithmetic(x.w)["FAST"],
        **flags,
        "num_warps": 4,
        "num_stages": 1,
    }
    found = {name: x.w.new_empty(length, x.nq) for name in ("log_sum_exp", "entropy", "expected_position", "mass_on")}
    top, key = x.w.new_empty(length, x.nq, k), x.w.new_empty((length, x.nq, k), dtype=torch.int32)
    rows_kernel[(triton.cdiv(x.nq, 64), length)](
        *x.operands(), mask, bias, x.w if region is None else region, *found.values(), top, key,
        *x.strides(), *mask_strides, *bias_strides, 0 if region is None or len(region) == 1 else region.stride(0),
        x.slope, x.nq, x.n, x.w.shape[-1], k,
        HAS_REGION=region is not None, TOPS=k > 0, BK=triton.next_power_of_2(max(1, k)), BM=64, BN=64, **common,
    )  # fmt: skip
    if k:
        top, order = top.sort(dim=-1, descending=True, stable=True)
        found |= {"top": top, "key": key.gather(-1, order)}
    if receives:
        found["mass_received"] = received = x.w.new_empty(length, x.n)
        keys_kernel[(triton.cdiv(x.n, 64), length)](
            *x.operands(), mask, bias, found["log_sum_exp"], received, *x.strides(), *mask_strides, *bias_strides,
            x.slope, x.nq, x.n, x.w.shape[-1], BM=64, BN=64, **common,
        )  # fmt: skip
    return found
