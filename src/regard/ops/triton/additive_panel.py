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
    SHARED_RANGE,
    Exact,
    add_gradients,
    arithmetic,
    largest,
    scores,
    supports,
)

__all__ = ["gradients", "panel", "supports"]

# Programs of a launch that keep a large device busy: a side with fewer blocks of tokens is cut into parts.
PROGRAMS = 512
# Hidden units summed before the sum is added to the others, an even number: a chain of hundreds of additions would round too much.
GROUP = tl.constexpr(64)


@triton.jit(do_not_specialize=("NQ", "N", "D"))
def panel_kernel(
    A, U, EA, EU, AMAX, UMAX, W, E, sal, sad, sam, sul, sud, sun, swl, slope, NQ, N, D,
    ACT: tl.constexpr, SHARE: tl.constexpr, FAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of scores."""
    lead = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(N, BN)
    m = tl.program_id(0) // across * BM + tl.arange(0, BM)
    n = tl.program_id(0) % across * BN + tl.arange(0, BN)
    m_in, n_in = m < NQ, n < N
    # A comparison with NaN is false, so NaN takes the plain path and comes out as NaN.
    shared = largest(AMAX + lead * NQ, m, m_in, SHARE) + largest(UMAX + lead * N, n, n_in, SHARE) <= SHARED_RANGE
    s = tl.zeros((BM, BN), dtype=tl.float32)
    for d in range(0, D, GROUP):
        at_a, at_u = lead * sal + d * sad, lead * sul + d * sud
        s += scores(
            A + at_a, U + at_u, EA + at_a, EU + at_u, W + lead * swl + d, W, m, n, m_in, n_in, shared,
            sad, sam, sud, sun, 0, 0, slope, tl.minimum(D - d, GROUP), ACT, SHARE, False, FAST, BM, BN,
        )  # fmt: skip
    tl.store(E + (lead * NQ + m[:, None]) * N + n[None, :], s, mask=m_in[:, None] & n_in[None, :])


@triton.jit(do_not_specialize=("NQ", "N", "D", "PARTS"))
def side_kernel(
    A, U, EA, EU, AMAX, UMAX, W, G, DX, DW, sal, sad, sam, sul, sud, sun, swl, sgl, sgm, sgn, slope, NQ, N, D, PARTS,
    ACT: tl.constexpr, SHARE: tl.constexpr, FAST: tl.constexpr, KEYS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of some keys, or of some queries and w, (D, tokens) and (D), from a part of the tokens of the other side."""
    block, part, lead = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    A += lead * sal
    EA += lead * sal
    U += lead * sul
    EU += lead * sul
    W += lead * swl
    G += lead * sgl
    count, tiles = NQ, tl.cdiv(N, BN)
    if KEYS:
        count, tiles = N, tl.cdiv(NQ, BM)
    DX += (lead * PARTS + part) * D * count
    DW += ((lead * PARTS + part) * tl.num_programs(0) + block) * D
    each = tl.cdiv(tiles, PARTS)
    for k in range(part * each, tl.minimum(tiles, part * each + each)):
        m_block, n_block = block, k
        if KEYS:
            m_block, n_block = k, block
        m, n = m_block * BM + tl.arange(0, BM), n_block * BN + tl.arange(0, BN)
        m_in, n_in = m < NQ, n < N
        at = m[:, None].to(tl.int64) * sgm + n[None, :].to(tl.int64) * sgn
        g = tl.load(G + at, mask=m_in[:, None] & n_in[None, :], other=0.0).to(tl.float32)
        shared = largest(AMAX + lead * NQ, m, m_in, SHARE) + largest(UMAX + lead * N, n, n_in, SHARE) <= SHARED_RANGE
        add_gradients(
            g, A, U, EA, EU, W, DX, DW, m, n, m_in, n_in, shared, sad, sam, sud, sun, count, 1, slope, D,
            ACT, SHARE, FAST, 0 if KEYS else 1, not KEYS,
        )  # fmt: skip


def panel(a: Tensor, u: Tensor, w: Tensor, act: str) -> Tensor:
    """Scores (L, Nq, N) in float32 of a (L, Nq, D), u (L, N, D) and w (L or 1, D)."""
    x = Exact(a, u, w, act, prepare=True)
    e = torch.empty(len(a), x.nq, x.n, dtype=torch.float32, device=a.device)
    # With fewer warps a tile and its two sums do not fit into registers.
    block = {"BM": 64, "BN": 128, "num_warps": 8}
    panel_kernel[(triton.cdiv(x.nq, block["BM"]) * triton.cdiv(x.n, block["BN"]), len(a))](
        *x.operands(), e, *x.strides(), x.slope, x.nq, x.n, x.w.shape[-1], **_known(x), **block
    )
    return e


def gradients(g: Tensor, a: Tensor, u: Tensor, w: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (L, Nq, D), (L, N, D) and (L, D), in float32, from that of the scores (L, Nq, N), of any dtype and strides."""
    x = Exact(a, u, w, act, prepare=True)
    da, dw = _side(x, g, keys=False)
    du, _ = _side(x, g, keys=True)
    return da, du, dw


def _side(x: Exact, g: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
    """Gradients of the tokens of one side, and, beside those of the queries, of w."""
    block, length, width = 64, len(x.a), x.w.shape[-1]
    own, other = (x.n, x.nq) if keys else (x.nq, x.n)
    blocks = triton.cdiv(own, block)
    parts = max(1, min(triton.cdiv(other, block), PROGRAMS // (blocks * length)))
    dx = torch.zeros(length, parts, width, own, device=g.device)
    dw = torch.zeros(length, 1 if keys else parts * blocks, width, device=g.device)
    side_kernel[(blocks, parts, length)](
        *x.operands(), g, dx, dw, *x.strides(), *g.stride(), x.slope, x.nq, x.n, width, parts,
        # The queries' program also sums up w: with fewer warps its tile does not fit into registers.
        **_known(x), KEYS=keys, BM=block, BN=block, num_warps=4 if keys else 8,
    )  # fmt: skip
    return dx.sum(1).mT[..., : x.width], dw.sum(1)[:, : x.width]


def _known(x: Exact) -> dict[str, object]:
    return {"ACT": x.code, "SHARE": x.share, "FAST": arithmetic(x.w)["FAST"]}
