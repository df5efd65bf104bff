r"""Gradients of multi-dimensional attention behind a matrix, hidden units and weights of a pair computed once.

The equations are those of `multi_product`. A program owns C keys and runs over the queries, R at a time. A tile has its pairs as
columns, (hidden or features) x (C R), as in the forward: what goes into the next product passes through shared memory, and a sum over
the keys that a program owns stays within a thread, or four of them. Sums over queries, for u and v, and over pairs, for W, wait until
the end. What a tile adds to the gradient of its queries is written down, as a part, and parts are summed over the keys afterwards, in
an order that is the same in every run: no atomics.

Parts of all queries would be Nq D N / C numbers. So queries come in panels: the parts of one are summed before the next is begun, and
the gradients of u, v and W go on from where the panel before has left them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.triton.bfloat_parts import cut, product
from regard.ops.triton.launching import cdiv, power_of_2, quick
from regard.ops.triton.multi_parts import Operands, activate, allowed, block_of, changed, exp2, gained, place
from regard.ops.triton.multi_product import PROGRAMS, arithmetic, in_pieces, is_narrow, pinned, scored, shrunk

# Numbers in the parts of a panel: 256 MiB. Of eight queries there may be more, of which parts are linear in the keys.
PANEL = 2**26


@quick
@triton.jit
def grad_kernel(
    A, U, W, V, MASK, SEED, POSITION, LOW, HIGH, spl, heat, window, dropout, first,
    sal, sam, sad, sul, sun, sud, swl, swd, swf, svl, svn, svf, sml, smm, smn, rate, slope, NQ, N, D, F,
    SOFT, LSE, DO, PICK, PART, DU, DW, DV, begin, end, SPAN,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, FAST: tl.constexpr, QUICK: tl.constexpr,
    NOISE: tl.constexpr, CHOICE: tl.constexpr, LEARNS: tl.constexpr, LOCAL: tl.constexpr, GAUSSIAN: tl.constexpr, DROP: tl.constexpr,
    SCALED: tl.constexpr, PIECES: tl.constexpr, CUT: tl.constexpr, PRODUCT: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr,
    RAGGED: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Queries `begin` to `end`: parts of the gradient of a, one a block of keys and tile of features, and what u, v and W gain."""
    lead, tile, start_block = place(tl.program_id(0), N, F, C, BF, SPAN)
    blocks, tiles = tl.cdiv(N, C), tl.cdiv(F, BF)
    groups = tl.cdiv(blocks, SPAN)
    part = tile * (tl.num_programs(0) // (groups * tiles)) + lead
    later = begin > 0
    d = tl.arange(0, BD)
    f = tile * BF + tl.arange(0, BF)
    d_in, f_in = d < D, f < F
    w, factor = shrunk(block_of(W + lead * swl, f, d, f_in, d_in, swf, swd), 1, SCALED)
    w1, w2, w3 = in_pieces(w, PIECES, PRODUCT)
    back = block_of(W + lead * swl, d, f, d_in, f_in, swd, swf).to(BACK)
    if CUT:
        back1, back2, back3 = cut(back)
    feature = f[:, None, None]
    A += lead * sal
    U += lead * sul
    V += lead * svl
    MASK += lead * sml
    DO += lead * NQ * F
    SOFT += lead * NQ * F
    LSE += lead * NQ * F
    PICK += lead * NQ * F
    DU += part * N * D
    DV += lead * N * F
    DW += (lead * groups + start_block // SPAN) * D * F + d[:, None] * F + f[None, :]
    w_in = d_in[:, None] & f_in[None, :]
    dw = tl.load(DW, mask=w_in & later, other=0.0)
    for block in range(start_block, tl.minimum(start_block + SPAN, blocks)):
        n = block * C + tl.arange(0, C)
        n_in = n < N
        j = n[None, :, None]
        u = block_of(U, d, n, d_in, n_in, sud, sun) * rate
        v = block_of(V, f, n, f_in, n_in, svf, svn)[:, :, None]
        # Of two queries that a thread holds side by side these are one sum, in half the registers.
        du = tl.zeros((BD, C, R // 2), dtype=tl.float32)
        dv = tl.zeros((BF, C, R // 2), dtype=tl.float32)
        PARTS = PART + (part * blocks + block) * (end - begin) * D
        start_query = begin
        if CAUSAL:
            # Queries before all of these keys have no part of them.
            start_query = tl.minimum(tl.maximum(begin, (block * C - (N - NQ)) // R * R), end)
            for start in range(begin, start_query, R):
                m = start + tl.arange(0, R)
                none = tl.zeros((BD, R), dtype=tl.float32)
                tl.store(PARTS + (m - begin)[None, :] * D + d[:, None], none, mask=d_in[:, None] & (m < end)[None, :])
        for start in range(start_query, end, R):
            m = start + tl.arange(0, R)
            m_in = m < end
            i = (first + m)[None, None, :]
            da = tl.zeros((BD, R), dtype=tl.float32)
            # A tile that the mask forbids as a whole is left out; without a mask there is no branch.
            reached = True
            if CAUSAL or HAS_MASK or RAGGED:
                ok = allowed(MASK, n, m, n_in, m_in, smn, smm, N - NQ, False, CAUSAL, HAS_MASK)
                if HAS_MASK:
                    reached = tl.max(tl.max(ok.to(tl.int32), 1), 0) > 0
            if reached:
                a = block_of(A, d, m, d_in, m_in, sad, sam) * rate
                at, at_in = m[None, :] * F + f[:, None], f_in[:, None] & m_in[None, :]
                do = tl.load(DO + at, mask=at_in, other=0.0)
                delta = do * tl.load(SOFT + at, mask=at_in, other=0.0)
                lse = tl.load(LSE + at, mask=at_in, other=float("inf"))
                h, g = activate(tl.reshape(u[:, :, None] + a[:, None, :], (BD, C * R)), slope, ACT, QUICK, FAST)
                # Beside sums, which keep the layout of a product from tile to tile.
                h = pinned(h, tl.reshape(tl.join(du, du), (BD, C * R)), FAST)
                h1, h2, h3 = in_pieces(h, PIECES, PRODUCT)
                e = scored(w1, w2, w3, h1, h2, h3, PIECES, PRECISION, FAST)
                t = tl.reshape(e, (BF, C, R)) * factor[:, None, None]
                t = changed(t, 0.0, SEED, lead, feature, i, j, heat, NOISE, GAUSSIAN) - lse[:, None, :]
                if CAUSAL or HAS_MASK or RAGGED:
                    t = tl.where(ok[None, :, :], t, float("-inf"))
                p = exp2(t, FAST)
                x = gained(do[:, None, :], 0.0, SEED, lead, feature, i, j, dropout, DROP, GAUSSIAN, FAST)
                if CHOICE:
                    pick = tl.load(PICK + at, mask=at_in, other=-1)
                    read = tl.where(pick[:, None, :] == j, x, 0.0)
                else:
                    read = p * x
                one, other = tl.split(tl.reshape(read, (BF, C, R // 2, 2)))
                dv = dv + one + other
                dt = tl.reshape(p * (x * v - delta[:, None, :]), (BF, C * R)).to(BACK)
                if CUT:
                    dt1, dt2, dt3 = cut(dt)
                    dz = product(back1, back2, back3, dt1, dt2, dt3, FAST) * g
                else:
                    dz = tl.dot(back, dt, input_precision=PRECISION) * g
                one, other = tl.split(tl.reshape(dz, (BD, C, R // 2, 2)))
                du = du + one + other
                da = tl.sum(tl.reshape(dz, (BD, C, R)), 1)
                if CUT:
                    if PIECES != 3:
                        h1, h2, h3 = cut(h)
                    dw += product(h1, h2, h3, tl.trans(dt1), tl.trans(dt2), tl.trans(dt3), FAST)
                else:
                    dw = tl.dot(h.to(BACK), tl.trans(dt), dw, input_precision=PRECISION)
            tl.store(PARTS + (m - begin)[None, :] * D + d[:, None], da * rate, mask=d_in[:, None] & m_in[None, :])
        at, at_in = n[None, :] * D + d[:, None], d_in[:, None] & n_in[None, :]
        before = tl.load(DU + at, mask=at_in & later, other=0.0)
        tl.store(DU + at, before + tl.sum(du, 2) * rate, mask=at_in)
        at, at_in = n[None, :] * F + f[:, None], f_in[:, None] & n_in[None, :]
        before = tl.load(DV + at, mask=at_in & later, other=0.0)
        tl.store(DV + at, before + tl.sum(dv, 2), mask=at_in)
    tl.store(DW, dw, mask=w_in)


def tile(x: Operands) -> dict[str, int]:
    """Tile sizes and warps: as many keys as registers hold beside the sums over queries, and fewer parts for it.

    What meets in tf32 has tiles of eight queries: the transpose of narrower ones can have a layout that the compiler refuses. With two
    stages a tile would wait for loads that have just begun; with three they are begun a tile ahead. Measured on an H200, float32, width 64:
    1.77 ms, with as many queries as keys have here and the reverse 1.92, in tf32 2.4.
    """
    _, _, width, features = x.sizes
    bd, bf = (max(16, power_of_2(size)) for size in (width, features))
    if x.a.dtype == torch.bfloat16:
        r, c, warps = 4, 16 if bd <= 64 else 8, 4 if bd <= 128 else 8
    elif not x.is_half and is_narrow(x):
        r, c, warps = 4, 8, 4
    else:
        r, c, warps = 8, 8 if x.is_half and bd <= 128 else 4, 4 if bd <= 64 else 8
    return {"R": r, "C": c, "BD": bd, "BF": min(bf, 64), "num_warps": warps, "num_stages": 3}


def backward(
    x: Operands, do: Tensor, lse: Tensor, soft: Tensor, pick: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a, u, w and v, in float32 or in their dtypes; what comes in is (L, Nq, F), contiguous, in float32."""
    nq, n, width, features = x.sizes
    shape = tile(x)
    blocks, tiles = cdiv(n, shape["C"]), cdiv(features, shape["BF"])
    span = min(blocks, cdiv(x.lead * blocks, PROGRAMS))
    groups = cdiv(blocks, span)
    of_query = tiles * x.lead * blocks * width
    rows = min(nq, max(8, PANEL // of_query // 8 * 8))
    single, several = rows == nq, (tiles, x.lead) if tiles > 1 else (x.lead,)
    du = x.room(x.u, single and tiles == 1, *several, n, width)
    dw = do.new_empty(*x.parts_of_w(groups), width, features)
    dv = x.room(x.v, single, x.lead, n, features)
    found = []
    parts = do.new_empty(rows * of_query)
    given, flags, pick = x.arguments(None), arithmetic(x, is_narrow(x)), lse if pick is None else pick
    for begin in range(0, nq, rows):
        end = min(begin + rows, nq)
        grad_kernel[(x.lead * tiles * groups,)](
            *(*given, soft, lse, do, pick, parts, du, dw, dv, begin, end, span),
            **flags, CUT=not x.is_half and is_narrow(x), RAGGED=n % shape["C"] > 0, **shape,
        )  # fmt: skip
        of_panel = parts if single else parts[: (end - begin) * of_query]
        found.append(of_panel.view(*several, blocks, end - begin, width).sum(-3))
    da = found[0] if single else torch.cat(found, -2)
    da, du = (g if tiles == 1 else g.sum(0) for g in (da, du))
    return da, du, dw.sum(1), dv
