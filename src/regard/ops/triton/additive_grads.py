r"""Additive attention, exactly, in float32: its gradients.

With $P = e^{t - L}$, $x_{ij} = r_{ij}\, do_i \cdot v_j$, $D_i = \sum_j P_{ij} x_{ij}$ and $G_{ij} = P_{ij}(x_{ij} - D_i)$:

$$da_{id} = w_d \sum_j G_{ij}\, \mathrm{act}'(z_{ijd}), \quad du_{jd} = w_d \sum_i G_{ij}\, \mathrm{act}'(z_{ijd}), \quad
  dw_d = \sum_{ij} G_{ij}\, \mathrm{act}(z_{ijd}), \quad dv_j = \sum_i r_{ij} P_{ij}\, do_i, \quad db_{ij} = G_{ij}$$

Where a single key was read, by a choice or from an empty window, the value of that key alone gets the gradient of the context.

The rows of G sum to zero, and what is left of da and dw after that is small beside their terms. So $D_i$, which comes from a rounded context,
is corrected by the row sums of G that the kernel of the keys finds, before the kernel of the queries uses it.

No atomics: a program owns its rows, sums over programs are finished by the launcher. `skip` as in the forward.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.triton.additive_tile import (
    SIZES,
    Conditions,
    Exact,
    add_gradients,
    allowed,
    arithmetic,
    ask_ahead,
    blocks,
    largest,
    mask_arguments,
    pairs,
    queries,
    scores,
)
from regard.ops.triton.align import ALL, FLAT, gains, inside, log_gaussian, log_gaussian_slope, noise_of, span
from regard.ops.triton.bfloat_parts import cut, in_parts, load_parts, product
from regard.ops.triton.launching import cdiv, quick


@triton.jit
def _gradient_of_scores(s, x, gain, ok, lse, delta):
    """What is read (r P), P x and G of a tile of scores; x is do · v, gain r, and lse and delta are along the queries of the tile.

    Queries that read nothing have an infinite lse.
    """
    p = tl.where(ok, tl.exp(s - lse), 0.0)
    x = x * gain
    return p * gain, p * x, tl.where(ok, p * (x - delta), 0.0)


@triton.jit
def _log_sums(LSE, m, m_in):
    """The log-sum-exp of some queries, infinite where nothing is read, and whether something is."""
    lse = tl.load(LSE + m, mask=m_in, other=float("-inf"))
    alive = lse > float("-inf")
    return tl.where(alive, lse, float("inf")), alive


@quick
@triton.jit(do_not_specialize=SIZES)
def query_grad_kernel(
    A, U, EA, EU, AMAX, UMAX, W, V, DO, V_PARTS, DO_PARTS, MASK, BIAS, LSE, DELTA, EXCESS, PICK, ORDER, DA, DW, DBIAS, DPOSITION, SKIP,
    sal, sad, sam, sul, sud, sun, swl, svl, svn, svd, sgl, sgm, sgd, svp, svt, sgp, sgt, sml, smm, smn, sbl, sbm, sbn, stl, std, stt,
    slope, NQ, N, D, DV, SEED, POSITION, spl, rate, window, dropout, first_query,
    ACT: tl.constexpr, SHARE: tl.constexpr, PADDED: tl.constexpr, ORDERED: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    NOISE: tl.constexpr, CHOICE: tl.constexpr, LEARNS: tl.constexpr, LOCAL: tl.constexpr, GAUSSIAN: tl.constexpr, DROP: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr, GUARDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    """Gradients of a (D, Nq), the bias and the positions by rows that a program owns, and of w as what each query adds, (D, Nq)."""
    if GUARDED:  # noqa: SIM102
        if tl.load(SKIP) != 0:
            return
    lead = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BM + tl.arange(0, BM)
    m_in = slot < NQ
    m = queries(ORDER + lead * (spl > 0) * NQ, slot, NQ, ORDERED)
    i = first_query + m
    c = tl.arange(0, BV)
    A += lead * sal
    EA += lead * sal
    U += lead * sul
    EU += lead * sul
    W += lead * swl
    V += lead * svl
    DO += lead * sgl
    V_PARTS += lead * svt
    DO_PARTS += lead * sgt
    MASK += lead * sml
    BIAS += lead * sbl
    DA += lead * stl
    DW += lead * stl
    DBIAS += lead * NQ * N
    offset = N - NQ
    # Whether more than the number of keys decides which pairs there are.
    BY_PAIR: tl.constexpr = CAUSAL or HAS_MASK or HAS_BIAS or LOCAL
    lse, alive = _log_sums(LSE + lead * NQ, m, m_in)
    delta = tl.load(DELTA + lead * NQ + m, mask=m_in, other=0.0)
    if PADDED:
        do1, do2, do3 = load_parts(DO_PARTS, m[:, None] * BV + c[None, :], sgp)
    else:
        do = tl.load(DO + m[:, None] * sgm + c[None, :] * sgd, mask=m_in[:, None] & (c[None, :] < DV), other=0.0)
        do = do.to(tl.float32)
    a_top = largest(AMAX + lead * NQ, m, m_in, SHARE)
    begin, end = 0, N
    if CAUSAL:
        end = tl.minimum(N, tl.max(m, 0) + 1 + offset)
    position = tl.zeros((BM,), dtype=tl.float32)
    moved = tl.zeros((BM,), dtype=tl.float32)
    if LOCAL:
        position = tl.load(POSITION + lead * spl + m, mask=m_in, other=0.0)
        begin, end = span(position, m_in, window, end, BN)
    # Keys that none of these queries reads have left nothing for them.
    refined = delta
    for k in range(begin // BN, tl.cdiv(end, BN)):
        refined += tl.load(EXCESS + (lead * tl.cdiv(N, BN) + k) * NQ + m, mask=m_in, other=0.0)
    for start in range(begin, end, BN):
        n = start + tl.arange(0, BN)
        n_in = n < N
        if BY_PAIR:
            ok = allowed(MASK, m, n, alive, n_in, smm, smn, offset, CAUSAL, HAS_MASK)
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
            if PADDED:
                v1, v2, v3 = load_parts(V_PARTS, n[:, None] * BV + c[None, :], svp)
                x = product(do1, do2, do3, tl.trans(v1), tl.trans(v2), tl.trans(v3), FAST)
            else:
                v = tl.load(V + n[:, None] * svn + c[None, :] * svd, mask=n_in[:, None] & (c[None, :] < DV), other=0.0)
                x = tl.dot(do, tl.trans(v.to(tl.float32)), input_precision=PRECISION)
            if NOISE:
                s += noise_of(SEED, lead, i, start, rate, BN)
            if GAUSSIAN == 1:
                s += log_gaussian(position[:, None], n[None, :], window)
            gain = 1.0
            if DROP or GAUSSIAN == 2:
                gain = gains(
                    tl.full((BM, BN), 1.0, dtype=tl.float32), SEED, lead, i, start, position, n, dropout, window,
                    DROP, GAUSSIAN, BN,
                )  # fmt: skip
            if not BY_PAIR:
                # Not before, or it would be kept for every pair of tokens meanwhile.
                ok = n_in[None, :]
            read, px, g = _gradient_of_scores(s, x, gain, ok, lse[:, None], refined[:, None])
            if GAUSSIAN != 0:
                moving = g if GAUSSIAN == 1 else px
                moved += tl.sum(moving * log_gaussian_slope(position[:, None], n[None, :], window), 1)
            if WANTED:
                tl.store(DBIAS + m[:, None].to(tl.int64) * N + n[None, :], g, mask=m_in[:, None] & n_in[None, :])
            add_gradients(
                g, A, U, EA, EU, W, DA, DW, m, n, m_in, n_in, reach, sad, sam, sud, sun, std, stt, slope, D,
                ACT, SHARE, FAST, PADDED, True,
            )  # fmt: skip
    if GAUSSIAN != 0:
        if GAUSSIAN == 2:
            # An empty window reads the nearest key with the Gaussian alone for a weight: its x is do · o.
            pick = tl.load(PICK + lead * NQ + m, mask=m_in, other=-1)
            moved += tl.where(pick >= 0, delta * log_gaussian_slope(position, pick, window), 0.0)
        tl.store(DPOSITION + lead * NQ + m, moved, mask=m_in)


@quick
@triton.jit(do_not_specialize=SIZES)
def key_grad_kernel(
    A, U, EA, EU, AMAX, UMAX, W, V, DO, V_PARTS, DO_PARTS, MASK, BIAS, LSE, DELTA, EXCESS, PICK, ORDER, DU, DV_OUT, SKIP,
    sal, sad, sam, sul, sud, sun, swl, svl, svn, svd, sgl, sgm, sgd, svp, svt, sgp, sgt, sml, smm, smn, sbl, sbm, sbn, stl, std, stt,
    slope, NQ, N, D, DV, SEED, POSITION, spl, rate, window, dropout, first_query,
    ACT: tl.constexpr, SHARE: tl.constexpr, PADDED: tl.constexpr, ORDERED: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    NOISE: tl.constexpr, CHOICE: tl.constexpr, LEARNS: tl.constexpr, LOCAL: tl.constexpr, GAUSSIAN: tl.constexpr, DROP: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr, GUARDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of u (D, N) and v (N, d_v) by keys that a program owns."""
    if GUARDED:  # noqa: SIM102
        if tl.load(SKIP) != 0:
            return
    lead = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BN
    n = first + tl.arange(0, BN)
    n_in = n < N
    c = tl.arange(0, BV)
    A += lead * sal
    EA += lead * sal
    U += lead * sul
    EU += lead * sul
    W += lead * swl
    V += lead * svl
    DO += lead * sgl
    V_PARTS += lead * svt
    DO_PARTS += lead * sgt
    MASK += lead * sml
    BIAS += lead * sbl
    DU += lead * stl
    offset = N - NQ
    BY_PAIR: tl.constexpr = CAUSAL or HAS_MASK or HAS_BIAS or LOCAL
    u_top = largest(UMAX + lead * N, n, n_in, SHARE)
    if PADDED:
        v1, v2, v3 = load_parts(V_PARTS, n[:, None] * BV + c[None, :], svp)
    else:
        v = tl.load(V + n[:, None] * svn + c[None, :] * svd, mask=n_in[:, None] & (c[None, :] < DV), other=0.0)
        v = v.to(tl.float32)
    dv = tl.zeros((BN, BV), dtype=tl.float32)
    begin = 0
    if CAUSAL and not ORDERED:
        begin = tl.maximum(0, (first - offset) // BM * BM)
    for start in range(begin, NQ, BM):
        slot = start + tl.arange(0, BM)
        m_in = slot < NQ
        m = queries(ORDER + lead * (spl > 0) * NQ, slot, NQ, ORDERED)
        i = first_query + m
        position = tl.zeros((BM,), dtype=tl.float32)
        pick = tl.full((BM,), -1, dtype=tl.int32)
        seen = 1
        if CHOICE != 0 or LOCAL:
            pick = tl.load(PICK + lead * NQ + m, mask=m_in, other=-1)
        if LOCAL:
            position = tl.load(POSITION + lead * spl + m, mask=m_in, other=0.0)
            # Whether a window reaches these keys, before anything is done for each pair.
            reaches = (tl.ceil(position - window) < first + BN) & (tl.floor(position + window) >= first)
            reads = (pick >= first) & (pick < first + BN)
            seen = tl.max((m_in & (reaches | reads)).to(tl.int32), 0)
        elif HAS_MASK:
            ok = pairs(MASK, m[None, :], n[:, None], m_in[None, :], n_in[:, None], smm, smn, offset, CAUSAL, HAS_MASK)
            seen = tl.max(tl.max((ok | (pick[None, :] == n[:, None])).to(tl.int32), 1), 0)
        if seen > 0:
            lse, alive = _log_sums(LSE + lead * NQ, m, m_in)
            if BY_PAIR:
                ok = pairs(
                    MASK, m[None, :], n[:, None], alive[None, :], n_in[:, None], smm, smn, offset, CAUSAL, HAS_MASK
                )
            if LOCAL:
                ok = ok & inside(position[None, :], n[:, None], window)
            if PADDED:
                do1, do2, do3 = load_parts(DO_PARTS, m[:, None] * BV + c[None, :], sgp)
            else:
                do = tl.load(
                    DO + m[:, None] * sgm + c[None, :] * sgd, mask=m_in[:, None] & (c[None, :] < DV), other=0.0
                )
                do = do.to(tl.float32)
            gain = 1.0
            if DROP or GAUSSIAN == 2:
                gain = tl.trans(
                    gains(
                        tl.full((BM, BN), 1.0, dtype=tl.float32), SEED, lead, i, first, position, n, dropout, window,
                        DROP, GAUSSIAN, BN,
                    )
                )  # fmt: skip
            if CHOICE == 0 or LEARNS:
                delta = tl.load(DELTA + lead * NQ + m, mask=m_in, other=0.0)
                asked = ask_ahead(EA, start, sad, D, SHARE and not ORDERED, FAST, BM)
                reach = largest(AMAX + lead * NQ + asked, m, m_in, SHARE) + u_top
                s = scores(
                    U, A, EU, EA, W, BIAS, n, m, n_in, m_in, reach, sud, sun, sad, sam, sbn, sbm, slope, D,
                    ACT, SHARE, HAS_BIAS, FAST, PADDED, BN, BM,
                )  # fmt: skip
                if PADDED:
                    x = product(v1, v2, v3, tl.trans(do1), tl.trans(do2), tl.trans(do3), FAST)
                else:
                    x = tl.dot(v, tl.trans(do), input_precision=PRECISION)
                if NOISE:
                    s += tl.trans(noise_of(SEED, lead, i, first, rate, BN))
                if GAUSSIAN == 1:
                    s += log_gaussian(position[None, :], n[:, None], window)
                if not BY_PAIR:
                    ok = n_in[:, None]
                read, px, g = _gradient_of_scores(s, x, gain, ok, lse[None, :], delta[None, :])
                tl.store(EXCESS + (lead * tl.num_programs(0) + tl.program_id(0)) * NQ + m, tl.sum(g, 0), mask=m_in)
            if CHOICE != 0 or LOCAL:
                single = tl.where(m_in[None, :] & (pick[None, :] == n[:, None]), 1.0, 0.0) * gain
                read = single if CHOICE != 0 else read + single
            # Before the loop over hidden units, so that nobody holds the weights in it.
            if PADDED:
                r1, r2, r3 = cut(read)
                dv += product(r1, r2, r3, do1, do2, do3, FAST)
            else:
                dv = tl.dot(read, do, dv, input_precision=PRECISION)
            if CHOICE == 0 or LEARNS:
                add_gradients(
                    g, U, A, EU, EA, W, DU, DU, n, m, n_in, m_in, reach, sud, sun, sad, sam, std, stt, slope, D,
                    ACT, SHARE, FAST, PADDED, False,
                )  # fmt: skip
    columns = n_in[:, None] & (c[None, :] < DV)
    tl.store(DV_OUT + (lead * N + n[:, None]) * DV + c[None, :], dv.to(DV_OUT.dtype.element_ty), mask=columns)


def backward(
    x: Exact,
    v: Tensor,
    given: Conditions,
    lse: Tensor,
    pick: Tensor | None,
    do: Tensor,
    delta: Tensor,
    skip: Tensor | None,
    into: tuple[Tensor, Tensor, Tensor, Tensor],
    wants_bias: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Add to the gradients of a, of w by query, and of u, and write that of v, unless `skip` is nonzero.

    Gives those of w (L, D), of the bias (L, Nq, N) and of the positions (L, Nq), where there are any.
    The first three of `into` have the shape of the operands a, a and u, with their room, in float32, the first two with the same strides;
    the fourth is contiguous.
    """
    length, dv = x.a.shape[0], v.shape[-1]
    align = given.align
    mask, sml, smm, smn = mask_arguments(given.mask, x.w)
    bias, sbl, sbm, sbn = mask_arguments(given.bias, x.w)
    tile = blocks(dv, True)
    da, dw, du, dvalue = into
    grid_q, grid_k = cdiv(x.nq, tile["BM"]), cdiv(x.n, tile["BN"])
    width = x.w.shape[-1]
    dbias = torch.zeros(length, x.nq, x.n, device=v.device) if wants_bias else None
    dposition = None if align.gaussian == FLAT else torch.zeros(length, x.nq, device=v.device)
    order = align.order(x.n)
    v_parts, do_parts = (in_parts(v, x.u.shape[1]), in_parts(do, x.a.shape[1])) if x.padded else (v, do)
    # Where every pair is looked at, every program of keys writes what the queries will read of it.
    every = given.mask is None and not given.causal and align.position is None
    excess = (torch.empty if every else torch.zeros)(length, grid_k, x.nq, device=v.device)
    flags = {**x.flags(), **given.flags(), **arithmetic(v), "GUARDED": skip is not None}
    rows = (da, dw, dw if dbias is None else dbias, dw if dposition is None else dposition)
    launches: list[tuple[Any, int, tuple[Tensor, ...], Tensor, dict[str, bool]]] = [
        (key_grad_kernel, grid_k, (du, dvalue), du, {})
    ]
    if align.choice == ALL or align.learns:
        launches.append((query_grad_kernel, grid_q, rows, da, {"WANTED": wants_bias}))
    tensors = (
        *x.operands(), v, do, v_parts, do_parts, mask, bias, lse, delta, excess,
        lse if pick is None else pick, x.w if order is None else order,
    )  # fmt: skip
    parts = (*v_parts.stride()[:2], *do_parts.stride()[:2])
    strides = (*x.strides(), *v.stride(), *do.stride(), *parts, sml, smm, smn, sbl, sbm, sbn)
    numbers = (x.slope, x.nq, x.n, width, dv, *align.arguments(x.w))
    for kernel, grid, results, target, more in launches:
        to_lead, to_token, to_unit = target.stride()
        kernel[(grid, length)](
            *tensors, *results, x.w if skip is None else skip, *strides, to_lead, to_unit, to_token, *numbers,
            **flags, **more, **tile,
        )  # fmt: skip
    of_w = dw.sum(1)
    return of_w if width == x.width else of_w[:, : x.width], dbias, dposition
