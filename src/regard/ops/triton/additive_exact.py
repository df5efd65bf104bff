r"""Additive attention, exactly, in float32: the forward.

$$s_{ij} = \sum_d w_d\, \mathrm{act}(a_{id} + u_{jd}) + b_{ij}, \qquad L_i = \log \sum_j e^{t_{ij}}, \qquad o_i = \sum_j r_{ij} e^{t_{ij} - L_i} v_j$$

with $t$ and $r$ of the alignment (see align). A choice keeps the largest score of each row beside the softmax and reads that key's value;
an empty window reads the nearest allowed key. One program owns some rows.

What somebody wants to know of a softmax (summary_tile) is summed up on the way: the context is what it is without.

`skip` is a device integer: a nonzero value makes every program return at once, so that a faster path may take over without
the host knowing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from regard.ops.triton.additive_tile import (
    SIZES,
    Conditions,
    Exact,
    allowed,
    arithmetic,
    ask_ahead,
    blocks,
    largest,
    mask_arguments,
    queries,
    scores,
)
from regard.ops.triton.align import (
    ALL,
    FOR_DROPOUT,
    first_largest,
    gains,
    inside,
    keep,
    log_gaussian,
    noise_of,
    span,
    uniform,
)
from regard.ops.triton.bfloat_parts import cut, in_parts, load_parts, product
from regard.ops.triton.launching import cdiv, quick
from regard.ops.triton.summary_tile import (
    LN2,
    LOG2E,
    Summary,
    add_largest,
    add_sums,
    no_slots,
    no_sums,
    write_largest,
    write_sums,
)


@triton.jit
def _nearest(MASK, BIAS, m, m_in, position, empty, N, smm, smn, sbm, sbn, offset,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The allowed key nearest to the position of each empty row, the first of equals; -1 where there is none."""
    # Of a position that is no number any key will do: it is read as NaN.
    position = tl.where(position == position, position, 0.0)
    pick = tl.full((BM,), -1, dtype=tl.int32)
    near = tl.full((BM,), float("-inf"), dtype=tl.float32)
    if tl.max(empty.to(tl.int32), 0) > 0:
        for start in range(0, N, BN):
            n = start + tl.arange(0, BN)
            n_in = n < N
            ok = allowed(MASK, m, n, m_in, n_in, smm, smn, offset, CAUSAL, HAS_MASK)
            if HAS_BIAS:
                bias = tl.load(BIAS + m[:, None] * sbm + n[None, :] * sbn, mask=ok, other=float("-inf"))
                ok = ok & (bias != float("-inf"))
            distance = tl.where(ok, -tl.abs(n[None, :] - position[:, None]), float("-inf"))
            top, first = first_largest(distance, n, 2147483647)
            wins = top > near
            pick = tl.where(wins, first, pick)
            near = tl.where(wins, top, near)
    return tl.where(empty, pick, -1)


@quick
@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    A, U, EA, EU, AMAX, UMAX, W, V, PARTS, MASK, BIAS, O, SOFT, LSE, PICK, ORDER, SKIP, REGION, ENTROPIES, PLACES, ON, LARGEST,
    sal, sad, sam, sul, sud, sun, swl, svl, svn, svd, spp, spt, sml, smm, smn, sbl, sbm, sbn, sol, som, sod,
    slope, NQ, N, D, DV, SEED, POSITION, spl, rate, window, dropout, first_query, srl, K,
    ACT: tl.constexpr, SHARE: tl.constexpr, PADDED: tl.constexpr, ORDERED: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    NOISE: tl.constexpr, CHOICE: tl.constexpr, LEARNS: tl.constexpr, LOCAL: tl.constexpr, GAUSSIAN: tl.constexpr, DROP: tl.constexpr,
    ENTROPY: tl.constexpr, PLACE: tl.constexpr, HAS_REGION: tl.constexpr, TOPS: tl.constexpr, SLOTS: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr, GUARDED: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    if GUARDED:  # noqa: SIM102
        if tl.load(SKIP) != 0:
            return
    lead = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BM + tl.arange(0, BM)
    m_in = slot < NQ
    m = queries(ORDER + lead * (spl > 0) * NQ, slot, NQ, ORDERED)
    i = first_query + m
    c = tl.arange(0, BV)
    REGION += lead * srl
    A += lead * sal
    EA += lead * sal
    U += lead * sul
    EU += lead * sul
    W += lead * swl
    V += lead * svl
    PARTS += lead * spt
    MASK += lead * sml
    BIAS += lead * sbl
    offset = N - NQ
    # Whether more than the number of keys decides which pairs there are.
    BY_PAIR: tl.constexpr = CAUSAL or HAS_MASK or LOCAL
    # The largest score is one in base 2, those in the slots are as they come. So is the largest under a bias, which may be one that stands for
    # a mask: of a row at -1e30 the product in base 2 rounds away more than any power can hold.
    top, mass, spread, place, on = no_sums(BM)
    held, key = no_slots(K, BM, SLOTS)
    acc = tl.zeros((BM, BV), dtype=tl.float32)
    best = tl.full((BM,), float("-inf"), dtype=tl.float32)
    pick = tl.full((BM,), -1, dtype=tl.int32)
    broken = tl.zeros((BM,), dtype=tl.int32)
    a_top = largest(AMAX + lead * NQ, m, m_in, SHARE)
    begin, end = 0, N
    if CAUSAL:
        end = tl.minimum(N, tl.max(m, 0) + 1 + offset)
    position = tl.zeros((BM,), dtype=tl.float32)
    if LOCAL:
        position = tl.load(POSITION + lead * spl + m, mask=m_in, other=0.0)
        begin, end = span(position, m_in, window, end, BN)
    for start in range(begin, end, BN):
        n = start + tl.arange(0, BN)
        n_in = n < N
        if BY_PAIR:
            ok = allowed(MASK, m, n, m_in, n_in, smm, smn, offset, CAUSAL, HAS_MASK)
        if LOCAL:
            ok = ok & inside(position[:, None], n[None, :], window)
        seen = 1
        if HAS_MASK or LOCAL:
            seen = tl.max(tl.max(ok.to(tl.int32), 1), 0)
        if seen > 0:
            asked = ask_ahead(EU, start, sud, D, SHARE, FAST, BN)
            reach = a_top + largest(UMAX + lead * N + asked, n, n_in, SHARE)
            s = scores(
                A, U, EA, EU, W, BIAS, m, n, m_in, n_in, reach, sad, sam, sud, sun, sbm, sbn, slope, D,
                ACT, SHARE, HAS_BIAS, FAST, PADDED, BM, BN,
            )  # fmt: skip
            if not BY_PAIR:
                # Not before, or it would be kept for every pair of tokens meanwhile. Nobody reads what other rows hold.
                ok = n_in[None, :]
            s = tl.where(ok, s, float("-inf"))
            if NOISE:
                s += noise_of(SEED, lead, i, start, rate, BN)
            if CHOICE != 0:
                priority = s
                if CHOICE == 2 and not NOISE:
                    priority = s + noise_of(SEED, lead, i, start, rate, BN)
                highest, first = first_largest(priority, n, 2147483647)
                wins = highest > best
                pick = tl.where(wins, first, pick)
                best = tl.where(wins, highest, best)
                broken = tl.maximum(broken, tl.max((priority != priority).to(tl.int32), 1))
            if LEARNS or CHOICE == 0:
                if GAUSSIAN == 1:
                    s += log_gaussian(position[:, None], n[None, :], window)
                highest = tl.max(s, 1)
                new = tl.maximum(top, highest if HAS_BIAS else highest * LOG2E)
                safe = tl.where(new == float("-inf"), 0.0, new)
                if HAS_BIAS:
                    below = (s - safe[:, None]) * LOG2E
                    shift = (top - safe) * LOG2E
                else:
                    below = s * LOG2E - safe[:, None]
                    shift = top - safe
                p = tl.exp2(below)
                rescale = tl.exp2(shift)
                spread, place, on = add_sums(
                    p, below, n, n_in, REGION, shift, rescale, mass, spread, place, on, ENTROPY, PLACE, HAS_REGION
                )
                mass = mass * rescale + tl.sum(p, 1)
                if DROP or GAUSSIAN == 2:
                    p = gains(p, SEED, lead, i, start, position, n, dropout, window, DROP, GAUSSIAN, BN)
                if PADDED:
                    v1, v2, v3 = load_parts(PARTS, n[:, None] * BV + c[None, :], spp)
                    p1, p2, p3 = cut(p)
                    acc = acc * rescale[:, None] + product(p1, p2, p3, v1, v2, v3, FAST)
                else:
                    v = tl.load(
                        V + n[:, None] * svn + c[None, :] * svd, mask=n_in[:, None] & (c[None, :] < DV), other=0.0
                    )
                    acc = acc * rescale[:, None]
                    acc = tl.dot(p, v.to(tl.float32), acc, input_precision=PRECISION)
                top = new
                if TOPS:
                    held, key = add_largest(s, n, highest, held, key, SLOTS)
    # NaN counts as alive, so that it is seen in the result.
    alive = mass != 0
    out = tl.where(alive[:, None], acc / tl.where(alive, mass, 1.0)[:, None], 0.0)
    columns = m_in[:, None] & (c[None, :] < DV)
    soft = out
    if CHOICE != 0:
        # NaN is no choice.
        pick = tl.where(broken > 0, -1, pick)
    elif LOCAL:
        pick = _nearest(
            MASK, BIAS, m, m_in, position, m_in & (alive == 0), N, smm, smn, sbm, sbn, offset,
            CAUSAL, HAS_MASK, HAS_BIAS, BM, BN,
        )  # fmt: skip
        if tl.max((pick >= 0).to(tl.int32), 0) > 0:
            # Its score decides nothing, but whether it is a number.
            broken = (position != position).to(tl.int32)
            for k in range(0, D):
                z = tl.load(A + m * sam + k * sad, mask=pick >= 0, other=0.0).to(tl.float32)
                z += tl.load(U + pick * sun + k * sud, mask=pick >= 0, other=0.0).to(tl.float32)
                broken = tl.maximum(broken, (z != z).to(tl.int32))
    if CHOICE != 0 or LOCAL:
        read = tl.load(V + pick[:, None] * svn + c[None, :] * svd, mask=(pick >= 0)[:, None] & columns, other=0.0)
        gain = tl.full((BM,), 1.0, dtype=tl.float32)
        if DROP:
            gain = keep(uniform(SEED, lead, 0, i, pick, FOR_DROPOUT), dropout)
        if GAUSSIAN == 2:
            gain *= tl.exp(log_gaussian(position, pick, window))
        read = read.to(tl.float32) * gain[:, None]
        read = tl.where((broken > 0)[:, None], float("nan"), read)
        out = tl.where((pick >= 0)[:, None], read, out) if CHOICE == 0 else read
        tl.store(PICK + lead * NQ + m, pick, mask=m_in)
    if WIDE:
        tl.store(SOFT + (lead * NQ + m[:, None]) * DV + c[None, :], out if CHOICE == 0 else soft, mask=columns)
    tl.store(O + lead * sol + m[:, None] * som + c[None, :] * sod, out.to(O.dtype.element_ty), mask=columns)
    log = tl.log(tl.where(alive, mass, 1.0))
    lse = tl.where(alive, top + log if HAS_BIAS else top * LN2 + log, float("-inf"))
    tl.store(LSE + lead * NQ + m, lse, mask=m_in)
    if ENTROPY or PLACE or HAS_REGION or TOPS:
        at = lead * NQ + m
        lse = write_sums(
            top * LOG2E if HAS_BIAS else top, mass, spread, place, on, at, m_in, ENTROPIES, PLACES, ON, ENTROPY, PLACE, HAS_REGION
        )  # fmt: skip
        if TOPS:
            write_largest(held * LOG2E, key, lse, at, m_in, LARGEST, K, SLOTS)


def forward(
    x: Exact, v: Tensor, given: Conditions, out: Tensor, soft: Tensor | None, lse: Tensor, pick: Tensor | None, skip: Tensor | None,
    summary: Summary | None = None,
) -> None:  # fmt: skip
    """Write out (L, Nq, d_v) and lse (L, Nq), unless there is a `skip` that is nonzero on the device.

    Where there is room, also `soft`, what the softmax weights read in float32, and `pick` (-1: none), which single key was read by a
    choice or in an empty window. Of a softmax, the rows of a summary as well.
    """
    length, dv = x.a.shape[0], v.shape[-1]
    told = Summary() if summary is None else summary
    mask, sml, smm, smn = mask_arguments(given.mask, x.w)
    bias, sbl, sbm, sbn = mask_arguments(given.bias, x.w)
    sums = given.align.choice == ALL or given.align.learns
    parts = in_parts(v, x.u.shape[1]) if x.padded and sums else v
    tile, order = blocks(dv, False), given.align.order(x.n)
    forward_kernel[(cdiv(x.nq, tile["BM"]), length)](
        *x.operands(), v, parts, mask, bias, out, lse if soft is None else soft, lse, lse if pick is None else pick,
        x.w if order is None else order, x.w if skip is None else skip, *told.tensors(x.w),
        *x.strides(), *v.stride(), *parts.stride()[:2], sml, smm, smn, sbl, sbm, sbn, *out.stride(),
        x.slope, x.nq, x.n, x.w.shape[-1], dv, *given.align.arguments(x.w), *told.numbers(),
        **x.flags(), **given.flags(), **told.flags(), **arithmetic(v), GUARDED=skip is not None, WIDE=soft is not None, **tile,
    )  # fmt: skip
