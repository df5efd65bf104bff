r"""Hashed attention by chunks, on a GPU: no sorted copies, no masks, no scores in memory.

Tokens of a row stand in `order` in each round, their buckets beside them, in chunks of m: just what sorting gives. A token sees
those of its bucket in its own chunk and in the one before (the one after, too, where it may look ahead). A pair belongs to the first
round that sees it; what earlier rounds see is told by `spots`, bucket and chunk of each token as one number, which differ by at most
one. A program takes one chunk of one round, finds its tokens through `order`, and reads the neighbouring chunks:

    forward     S = Q K^T,  P = exp(S - max),  o^r = P V / sum P,  L^r = max + log sum P
    merge       L = log sum_r exp L^r,  o = sum_r exp(L^r - L) o^r
    backward    P = exp(S - L),  D = do . o,  dS = P (do V^T - D),  dQ = dS K,  dK = dS^T Q,  dV = P^T do

with the L of all rounds together, so that no round need know of another. Every token stands once in every round: partial results
are written to places of their own and summed, the same way every time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.triton.launching import cdiv, power_of_2, quick

# Scores of what is not seen, and of the token itself.
HIDDEN = tl.constexpr(-3.0e38)
OWN = tl.constexpr(-1.0e30)
# The bucket of a token that takes no part.
HOLE = tl.constexpr(32767)
LONGEST_CHUNK, WIDEST = 128, 128


@triton.jit
def _near(apart, AHEAD: tl.constexpr):
    if AHEAD:
        return (apart >= -1) & (apart <= 1)
    return (apart == 0) | (apart == 1)


@triton.jit
def _places(order, buckets, chunk, m, N, BLOCK_M: tl.constexpr):
    """The tokens of a chunk, their buckets, and which of them there are."""
    slot = tl.arange(0, BLOCK_M)
    place = chunk * m + slot
    there = (slot < m) & (place >= 0) & (place < N)
    token = tl.load(order + place, mask=there, other=0).to(tl.int32)
    return token, tl.load(buckets + place, mask=there, other=HOLE).to(tl.int32), there


@triton.jit
def _rows(x, token, there, D, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    return tl.load(x + token[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _put(x, value, token, there, D, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    tl.store(x + token[:, None] * D + d[None, :], value.to(x.dtype.element_ty), mask=there[:, None] & (d < D)[None, :])


@triton.jit
def _seen(
    spots, r, N, ti, bi, here, tj, bj, there, low, high, AHEAD: tl.constexpr, ACROSS: tl.constexpr, ROUNDS: tl.constexpr
):  # fmt: skip
    """Which of the tokens j each of the tokens i sees in this round first."""
    distance = tj[None, :] - ti[:, None]
    seen = (bi < HOLE)[:, None] & (bj < HOLE)[None, :] & (distance >= low) & (distance <= high)
    if not ACROSS:
        seen = seen & (bi[:, None] == bj[None, :])
    if ROUNDS > 1:
        for s in range(0, r):
            si = tl.load(spots + s * N + ti, mask=here, other=0)
            sj = tl.load(spots + s * N + tj, mask=there, other=0)
            seen = seen & (_near(si[:, None] - sj[None, :], AHEAD) == 0)
    return seen


@triton.jit
def _scores(Q, K, ti, tj, PRECISION: tl.constexpr):
    """Products; that of a token with itself is far below all others, unless it is not finite and must be seen."""
    S = tl.dot(Q, tl.trans(K), input_precision=PRECISION)
    return tl.where(ti[:, None] == tj[None, :], OWN + (S - S), S)


@quick
@triton.jit
def _forward(
    q, k, v, order, buckets, spots, out, lse, m, N, rows, D, DV, low, high,
    AHEAD: tl.constexpr, ACROSS: tl.constexpr, ROUNDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    c, b, r = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    q, k, v, spots = q + b * N * D, k + b * N * D, v + b * N * DV, spots + b * ROUNDS * N
    order, buckets = order + (b * ROUNDS + r) * N, buckets + (b * ROUNDS + r) * N
    at = (r.to(tl.int64) * rows + b) * N
    out, lse = out + at * DV, lse + at
    ti, bi, here = _places(order, buckets, c, m, N, BLOCK_M)
    Q = _rows(q, ti, here, D, BLOCK_D)
    top = tl.full([BLOCK_M], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for w in tl.static_range(2 + AHEAD):
        tj, bj, there = _places(order, buckets, c - 1 + w, m, N, BLOCK_M)
        K, V = _rows(k, tj, there, D, BLOCK_D), _rows(v, tj, there, DV, BLOCK_V)
        seen = _seen(spots, r, N, ti, bi, here, tj, bj, there, low, high, AHEAD, ACROSS, ROUNDS)
        S = tl.where(seen, _scores(Q, K, ti, tj, PRECISION), HIDDEN)
        higher = tl.maximum(top, tl.max(S, 1))
        P = tl.where(seen, tl.exp(S - higher[:, None]), 0.0)
        scale = tl.exp(top - higher)
        total = total * scale + tl.sum(P, 1)
        acc = acc * scale[:, None] + tl.dot(P.to(V.dtype), V, input_precision=PRECISION)
        top = higher
    # What is not a number is not empty: it stays so, in whatever round it is seen.
    empty = total <= 0
    total = tl.where(empty, 1.0, total)
    L = top + tl.log(total)
    if ROUNDS > 1:
        L = tl.where(empty, HIDDEN, L)
    else:
        L = tl.where(empty, 0.0, L)
    _put(out, acc / total[:, None], ti, here, DV, BLOCK_V)
    tl.store(lse + ti, L, mask=here)


@quick
@triton.jit
def _merge(partial, lse, out, total, count, DV, ROUNDS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_V: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < count
    count = count.to(tl.int64)
    top = tl.full([BLOCK], HIDDEN, tl.float32)
    for r in tl.static_range(ROUNDS):
        top = tl.maximum(top, tl.load(lse + r * count + i, mask=here, other=HIDDEN))
    norm = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    for r in tl.static_range(ROUNDS):
        weight = tl.exp(tl.load(lse + r * count + i, mask=here, other=HIDDEN) - top)
        norm += weight
        acc += weight[:, None] * _rows(partial + r * count * DV, i, here, DV, BLOCK_V)
    # The largest of some numbers and of what is none may be a number; their sum is not.
    empty = (top <= HIDDEN / 2) & (norm == norm)
    _put(out, tl.where(empty[:, None], 0.0, acc / norm[:, None]), i, here, DV, BLOCK_V)
    tl.store(total + i, tl.where(empty, 0.0, top + tl.log(norm)), mask=here)


@triton.jit
def _pair(Q, K, V, G, L, delta, ti, tj, seen, PRECISION: tl.constexpr):
    """Weights and gradients of the scores of one pair of chunks."""
    own = ti[:, None] == tj[None, :]
    S = _scores(Q, K, ti, tj, PRECISION)
    P = tl.where(seen, tl.exp(tl.where(seen, S - L[:, None], HIDDEN)), 0.0)
    dP = tl.dot(G, tl.trans(V), input_precision=PRECISION)
    dS = tl.where(seen, P * (dP - delta[:, None]), 0.0)
    return P, tl.where(own, dS - dS, dS)


@quick
@triton.jit
def _of_queries(
    q, k, v, g, lse, delta, order, buckets, spots, out, dq, m, N, rows, D, DV, low, high,
    AHEAD: tl.constexpr, ACROSS: tl.constexpr, ROUNDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    c, b, r = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    q, k, v, g = q + b * N * D, k + b * N * D, v + b * N * DV, g + b * N * DV
    order, buckets, spots = order + (b * ROUNDS + r) * N, buckets + (b * ROUNDS + r) * N, spots + b * ROUNDS * N
    dq = dq + (r.to(tl.int64) * rows + b) * N * D
    ti, bi, here = _places(order, buckets, c, m, N, BLOCK_M)
    Q, G = _rows(q, ti, here, D, BLOCK_D), _rows(g, ti, here, DV, BLOCK_V)
    L = tl.load(lse + b * N + ti, mask=here, other=0.0)
    # Every round has every token: one of them leaves its delta for the kernel that follows.
    of = tl.sum(G.to(tl.float32) * _rows(out + b * N * DV, ti, here, DV, BLOCK_V).to(tl.float32), 1)
    tl.store(delta + b * N + ti, of, mask=here & (r == 0))
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for w in tl.static_range(2 + AHEAD):
        tj, bj, there = _places(order, buckets, c - 1 + w, m, N, BLOCK_M)
        K, V = _rows(k, tj, there, D, BLOCK_D), _rows(v, tj, there, DV, BLOCK_V)
        seen = _seen(spots, r, N, ti, bi, here, tj, bj, there, low, high, AHEAD, ACROSS, ROUNDS)
        P, dS = _pair(Q, K, V, G, L, of, ti, tj, seen, PRECISION)
        acc += tl.dot(dS.to(K.dtype), K, input_precision=PRECISION)
    _put(dq, acc, ti, here, D, BLOCK_D)


@quick
@triton.jit
def _of_keys(
    q, k, v, g, lse, delta, order, buckets, spots, dk, dv, m, N, rows, D, DV, low, high,
    AHEAD: tl.constexpr, ACROSS: tl.constexpr, ROUNDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    c, b, r = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    q, k, v, g = q + b * N * D, k + b * N * D, v + b * N * DV, g + b * N * DV
    order, buckets, spots = order + (b * ROUNDS + r) * N, buckets + (b * ROUNDS + r) * N, spots + b * ROUNDS * N
    at = (r.to(tl.int64) * rows + b) * N
    dk, dv = dk + at * D, dv + at * DV
    tj, bj, there = _places(order, buckets, c, m, N, BLOCK_M)
    K, V = _rows(k, tj, there, D, BLOCK_D), _rows(v, tj, there, DV, BLOCK_V)
    acc_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for w in tl.static_range(2 + AHEAD):
        ti, bi, here = _places(order, buckets, c + 1 - w, m, N, BLOCK_M)
        Q, G = _rows(q, ti, here, D, BLOCK_D), _rows(g, ti, here, DV, BLOCK_V)
        L = tl.load(lse + b * N + ti, mask=here, other=0.0)
        of = tl.load(delta + b * N + ti, mask=here, other=0.0)
        seen = _seen(spots, r, N, ti, bi, here, tj, bj, there, low, high, AHEAD, ACROSS, ROUNDS)
        P, dS = _pair(Q, K, V, G, L, of, ti, tj, seen, PRECISION)
        acc_v += tl.dot(tl.trans(P.to(G.dtype)), G, input_precision=PRECISION)
        acc_k += tl.dot(tl.trans(dS.to(Q.dtype)), Q, input_precision=PRECISION)
    _put(dk, acc_k, tj, there, D, BLOCK_D)
    _put(dv, acc_v, tj, there, DV, BLOCK_V)


def why_not(q: Tensor, v: Tensor, chunk: int) -> str | None:
    """The reason why the kernels do not take these operands, or None."""
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{q.dtype}"
    if chunk > LONGEST_CHUNK or max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"chunks of more than {LONGEST_CHUNK} tokens, or heads of more than {WIDEST} features"
    # Two operands of each product stand on the chip.
    if q.dtype == torch.float32 and _block(chunk) * max(_block(q.shape[-1]), _block(v.shape[-1])) > 64 * 64:
        return "chunks too wide for float32"
    return None


def _block(size: int) -> int:
    return max(16, int(power_of_2(size)))


def _precision(x: Tensor) -> str:
    """Three tf32 passes are exact in float32; without tensor cores a device has no registers for such products."""
    if x.dtype != torch.float32:
        return "tf32"
    return "tf32x3" if x.device.type == "cuda" else "ieee"


class Places(NamedTuple):
    """Where tokens stand, and whom they see."""

    order: Tensor  # (B, R, N), which token stands at each place
    buckets: Tensor  # (B, R, N), of the token at each place
    spots: Tensor | None  # (B, R, N) in int32, bucket and chunk of each token; None with one round
    chunk: int
    across: bool  # whether chunks are all that counts
    low: int  # distances from here ...
    high: int  # ... to here are seen


class Launch:
    """Sizes of a launch, and its grid: chunks, rows, rounds."""

    def __init__(self, q: Tensor, v: Tensor, places: Places) -> None:
        order, _, _, chunk, across, low, high = places
        self.rows, self.rounds, self.n = order.shape
        # With one round nobody asks for spots.
        self.where = (order, places.buckets, order if places.spots is None else places.spots)
        self.grid = (cdiv(self.n, chunk), self.rows, self.rounds)
        self.sizes = (chunk, self.n, self.rows, q.shape[-1], v.shape[-1], low, high)
        block = _block(chunk)
        self.blocks = {
            "AHEAD": int(high > 0),
            "ACROSS": across,
            "ROUNDS": self.rounds,
            "BLOCK_M": block,
            "BLOCK_D": _block(q.shape[-1]),
            "BLOCK_V": _block(v.shape[-1]),
            "PRECISION": _precision(q),
            "num_warps": 8 if block > 64 else 4,
        }

    def partial(self, like: Tensor) -> Tensor:
        """Room for a result of every round; wide, where several are to be summed."""
        dtype = like.dtype if self.rounds == 1 else torch.float32
        return torch.empty((self.rounds, *like.shape), dtype=dtype, device=like.device)


def forward(q: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Tensor]:
    """Contexts (B, N, d_v) in the dtype of v, and log-sum-exps (B, N) in float32, zero where nothing is seen.

    q and k (B, N, d), v (B, N, d_v); all contiguous.
    """
    launch = Launch(q, v, places)
    partial = launch.partial(v)
    lse = torch.empty((launch.rounds, *v.shape[:2]), dtype=torch.float32, device=q.device)
    _forward[launch.grid](q, k, v, *launch.where, partial, lse, *launch.sizes, **launch.blocks)
    if launch.rounds == 1:
        return partial[0], lse[0]
    out, total, count = torch.empty_like(v), torch.empty_like(lse[0]), launch.rows * launch.n
    _merge[(cdiv(count, 64),)](
        partial, lse, out, total, count, v.shape[-1], ROUNDS=launch.rounds, BLOCK=64, BLOCK_V=launch.blocks["BLOCK_V"]
    )
    return out, total


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, places: Places
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their dtypes."""
    launch = Launch(q, v, places)
    delta, grad = torch.empty_like(total), grad.to(v.dtype).contiguous()
    dq, dk, dv = launch.partial(q), launch.partial(k), launch.partial(v)
    given = (q, k, v, grad, total, delta, *launch.where)
    _of_queries[launch.grid](*given, out, dq, *launch.sizes, **launch.blocks)
    _of_keys[launch.grid](*given, dk, dv, *launch.sizes, **launch.blocks)
    if launch.rounds == 1:
        return dq[0], dk[0], dv[0]
    return tuple(x.sum(0).to(like.dtype) for x, like in ((dq, q), (dk, k), (dv, v)))  # type: ignore[return-value]
