r"""Additive scores written out, for alignments that must see complete rows: a panel of queries and all keys, one feature.

$$E_{ij} = \sum_d w_d\, \mathrm{act}(z_{ijd}), \qquad z_{ijd} = a_{id} + u_{jd}$$

Backward, from $G = dE$:

$$da_{id} = w_d \sum_j G_{ij}\, \mathrm{act}'(z_{ijd}), \quad du_{jd} = w_d \sum_i G_{ij}\, \mathrm{act}'(z_{ijd}), \quad
  dw_d = \sum_{ij} G_{ij}\, \mathrm{act}(z_{ijd})$$

The arithmetic of a tile is that of `additive_tile`, exactly, in float32. No atomics: a program owns some tokens of one side and reads a part
of the other; sums over parts and programs are finished by the launcher. A panel has few queries where there are many keys, and would keep
few processors busy without parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.triton.additive_tile import (
    GROUP,
    KNOWN_NUMBERS,
    Exact,
    add_gradients,
    arithmetic,
    largest,
    nothing,
    scores_of,
    supports,
)
from regard.ops.triton.launching import cdiv, quick

__all__ = ["gradients", "panel", "supports"]

# Programs of a launch that keep a large device busy: a side with fewer blocks of tokens is cut into parts.
PROGRAMS = 512
# Tokens of either side in a tile.
BLOCK = 64


@quick
@triton.jit(do_not_specialize=("NQ", "N", "D"))
def panel_kernel(
    A, U, EA, EU, AMAX, UMAX, W, E, sal, sad, sam, sul, sud, sun, swl, slope, NQ, N, D,
    ACT: tl.constexpr, SHARE: tl.constexpr, PADDED: tl.constexpr, FAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of scores."""
    lead = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(N, BN)
    m = tl.program_id(0) // across * BM + tl.arange(0, BM)
    n = tl.program_id(0) % across * BN + tl.arange(0, BN)
    m_in, n_in = m < NQ, n < N
    reach = largest(AMAX + lead * NQ, m, m_in, SHARE) + largest(UMAX + lead * N, n, n_in, SHARE)
    s = tl.zeros((BM, BN), dtype=tl.float32)
    W += lead * swl
    # A chain of hundreds of additions would round too much.
    for d in range(0, D, GROUP):
        at_a, at_u = lead * sal + d * sad, lead * sul + d * sud
        s += scores_of(
            A + at_a, U + at_u, EA + at_a, EU + at_u, W + d, W + D + d, W + 2 * D + KNOWN_NUMBERS * (1 + d // GROUP), m, n, m_in, n_in, reach,
            sad, sam, sud, sun, slope, tl.minimum(D - d, GROUP), ACT, SHARE, FAST, PADDED, BM, BN,
        )  # fmt: skip
    tl.store(E + (lead * NQ + m[:, None]) * N + n[None, :], s, mask=m_in[:, None] & n_in[None, :])


@quick
@triton.jit(do_not_specialize=("NQ", "N", "D", "PARTS"))
def side_kernel(
    A, U, EA, EU, AMAX, UMAX, W, G, DX, DW, sal, sad, sam, sul, sud, sun, swl, sgl, sgm, sgn, slope, NQ, N, D, PARTS,
    ACT: tl.constexpr, SHARE: tl.constexpr, PADDED: tl.constexpr, FAST: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of some keys, or of some queries and their parts of w's, (D, tokens), from a part of the tokens of the other side."""
    block, part, lead = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    R, C, ER, EC, RMAX, CMAX, rows, columns = A, U, EA, EU, AMAX, UMAX, NQ, N
    srl, srd, srt, scl, scd, sct, sgr, sgc = sal, sad, sam, sul, sud, sun, sgm, sgn
    if KEYS:
        R, C, ER, EC, RMAX, CMAX, rows, columns = U, A, EU, EA, UMAX, AMAX, N, NQ
        srl, srd, srt, scl, scd, sct, sgr, sgc = sul, sud, sun, sal, sad, sam, sgn, sgm
    R += lead * srl
    ER += lead * srl
    C += lead * scl
    EC += lead * scl
    W += lead * swl
    G += lead * sgl
    # Of the same room as the tokens.
    DX += (lead * PARTS + part) * srl
    DW += (lead * PARTS + part) * srl
    r = block * BLOCK + tl.arange(0, BLOCK)
    r_in = r < rows
    r_top = largest(RMAX + lead * rows, r, r_in, SHARE)
    tiles = tl.cdiv(columns, BLOCK)
    each = tl.cdiv(tiles, PARTS)
    for k in range(part * each, tl.minimum(tiles, part * each + each)):
        c = k * BLOCK + tl.arange(0, BLOCK)
        c_in = c < columns
        at = r[:, None].to(tl.int64) * sgr + c[None, :].to(tl.int64) * sgc
        g = nothing(BLOCK, BLOCK) + tl.load(G + at, mask=r_in[:, None] & c_in[None, :], other=0.0).to(tl.float32)
        reach = r_top + largest(CMAX + lead * columns, c, c_in, SHARE)
        add_gradients(
            g, R, C, ER, EC, W, DX, DW, r, c, r_in, c_in, reach, srd, srt, scd, sct, srd, srt, slope, D,
            ACT, SHARE, FAST, PADDED, not KEYS,
        )  # fmt: skip


def panel(a: Tensor, u: Tensor, w: Tensor, act: str) -> Tensor:
    """Scores (L, Nq, N) in float32 of a (L, Nq, D), u (L, N, D) and w (L or 1, D)."""
    x = Exact(a, u, w, act, prepare=True)
    e = torch.empty(len(a), x.nq, x.n, dtype=torch.float32, device=a.device)
    panel_kernel[(cdiv(x.nq, BLOCK) * cdiv(x.n, BLOCK), len(a))](
        *x.operands(), e, *x.strides(), x.slope, x.nq, x.n, x.w.shape[-1],
        **x.flags(), FAST=arithmetic(e)["FAST"], BM=BLOCK, BN=BLOCK, num_warps=4,
    )  # fmt: skip
    return e


def gradients(g: Tensor, a: Tensor, u: Tensor, w: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (L, Nq, D), (L, N, D) and (L, D), in float32, from that of the scores (L, Nq, N), of any dtype and strides."""
    x = Exact(a, u, w, act, prepare=True)
    da, dw = _side(x, g, keys=False)
    du, _ = _side(x, g, keys=True)
    return da, du, dw


def _side(x: Exact, g: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
    """Gradients of the tokens of one side, and, beside those of the queries, of w."""
    length = len(x.a)
    own, other, like = (x.n, x.nq, x.u) if keys else (x.nq, x.n, x.a)
    blocks = cdiv(own, BLOCK)
    parts = max(1, min(cdiv(other, BLOCK), PROGRAMS // (blocks * length)))
    dx = torch.zeros(length, parts, *like.mT.shape[1:], device=g.device)
    dw = dx if keys else torch.zeros_like(dx)
    side_kernel[(blocks, parts, length)](
        *x.operands(), g, dx, dw, *x.strides(), *g.stride(), x.slope, x.nq, x.n, x.w.shape[-1], parts,
        **x.flags(), FAST=arithmetic(g)["FAST"], KEYS=keys, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return dx.sum(1).mT[:, :own, : x.width], dw.sum((1, 3))[:, : x.width]
