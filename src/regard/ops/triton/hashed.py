r"""Hashed attention by chunks, on a GPU: no sorted copies, no masks, no scores in memory.

Tokens of a row stand in `order` in each round, in chunks of m; `spots` holds bucket and chunk of each token as one number, so that
a token sees those whose spots are equal or one less (one more, too, where it may look ahead). A pair belongs to the first round
that sees it. A program takes one chunk of one round, finds its tokens through `order`, and reads the neighbouring chunks:

    forward     S = Q K^T,  P = exp(S - max),  o^r = P V / sum P,  L^r = max + log sum P
    merge       L = log sum_r exp L^r,  o = sum_r exp(L^r - L) o^r
    backward    P = exp(S - L),  D = do . o,  dS = P (do V^T - D),  dQ = dS K,  dK = dS^T Q,  dV = P^T do

with the L of all rounds together, so that no round need know of another. Every token stands once in every round: partial results
are written to places of their own and summed, the same way every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Scores of what is not seen, and of the token itself.
HIDDEN = tl.constexpr(-3.0e38)
OWN = tl.constexpr(-1.0e30)
LONGEST_CHUNK, WIDEST = 128, 128


@triton.jit
def _near(apart, AHEAD: tl.constexpr):
    if AHEAD:
        return (apart >= -1) & (apart <= 1)
    return (apart == 0) | (apart == 1)


@triton.jit
def _places(order, chunk, m, N, BLOCK_M: tl.constexpr):
    """The tokens of a chunk, and which of them there are."""
    slot = tl.arange(0, BLOCK_M)
    place = chunk * m + slot
    there = (slot < m) & (place >= 0) & (place < N)
    return tl.load(order + place, mask=there, other=0), there


@triton.jit
def _rows(x, token, there, D, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    return tl.load(x + token[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _put(x, value, token, there, D, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    tl.store(x + token[:, None] * D + d[None, :], value.to(x.dtype.element_ty), mask=there[:, None] & (d < D)[None, :])


@triton.jit
def _seen(spots, r, all_rows, ti, here, tj, there, low, high, AHEAD: tl.constexpr):
    """Which of the tokens j each of the tokens i sees in this round first."""
    si = tl.load(spots + r * all_rows + ti, mask=here, other=-100)
    sj = tl.load(spots + r * all_rows + tj, mask=there, other=-100)
    distance = tj[None, :] - ti[:, None]
    seen = _near(si[:, None] - sj[None, :], AHEAD) & (si >= 0)[:, None] & (sj >= 0)[None, :]
    seen = seen & (distance >= low) & (distance <= high)
    for s in range(0, r):
        si = tl.load(spots + s * all_rows + ti, mask=here, other=-100)
        sj = tl.load(spots + s * all_rows + tj, mask=there, other=-100)
        seen = seen & (_near(si[:, None] - sj[None, :], AHEAD) == 0)
    return seen


@triton.jit
def _forward(
    q, k, v, order, spots, out, lse, m, N, rows, D, DV, low, high,
    AHEAD: tl.constexpr, FINAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    c, b, r = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    all_rows = rows.to(tl.int64) * N
    q, k, v, spots = q + b * N * D, k + b * N * D, v + b * N * DV, spots + b * N
    at = r * all_rows + b * N
    order, out, lse = order + at, out + at * DV, lse + at
    ti, here = _places(order, c, m, N, BLOCK_M)
    Q = _rows(q, ti, here, D, BLOCK_D)
    top = tl.full([BLOCK_M], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for w in tl.static_range(2 + AHEAD):
        tj, there = _places(order, c - 1 + w, m, N, BLOCK_M)
        K, V = _rows(k, tj, there, D, BLOCK_D), _rows(v, tj, there, DV, BLOCK_V)
        seen = _seen(spots, r, all_rows, ti, here, tj, there, low, high, AHEAD)
        S = tl.dot(Q, tl.trans(K), input_precision=PRECISION)
        S = tl.where(ti[:, None] == tj[None, :], OWN, S)
        S = tl.where(seen, S, HIDDEN)
        higher = tl.maximum(top, tl.max(S, 1))
        P = tl.where(seen, tl.exp(S - higher[:, None]), 0.0)
        scale = tl.exp(top - higher)
        total = total * scale + tl.sum(P, 1)
        acc = acc * scale[:, None] + tl.dot(P.to(V.dtype), V, input_precision=PRECISION)
        top = higher
    alive = total > 0
    total = tl.where(alive, total, 1.0)
    L = top + tl.log(total)
    if FINAL:
        L = tl.where(alive, L, 0.0)
    else:
        L = tl.where(alive, L, HIDDEN)
    _put(out, acc / total[:, None], ti, here, DV, BLOCK_V)
    tl.store(lse + ti, L, mask=here)


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
    alive = top > HIDDEN / 2
    _put(out, tl.where(alive[:, None], acc / norm[:, None], 0.0), i, here, DV, BLOCK_V)
    tl.store(total + i, tl.where(alive, top + tl.log(norm), 0.0), mask=here)


@triton.jit
def _pair(Q, K, V, G, L, delta, ti, tj, seen, PRECISION: tl.constexpr):
    """Weights and gradients of the scores of one pair of chunks."""
    own = ti[:, None] == tj[None, :]
    S = tl.where(own, OWN, tl.dot(Q, tl.trans(K), input_precision=PRECISION))
    P = tl.where(seen, tl.exp(tl.where(seen, S - L[:, None], HIDDEN)), 0.0)
    dP = tl.dot(G, tl.trans(V), input_precision=PRECISION)
    return P, tl.where(own, 0.0, P * (dP - delta[:, None]))


@triton.jit
def _of_queries(
    q, k, v, g, lse, delta, order, spots, dq, m, N, rows, D, DV, low, high,
    AHEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    c, b, r = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    all_rows = rows.to(tl.int64) * N
    q, k, v, g, spots = q + b * N * D, k + b * N * D, v + b * N * DV, g + b * N * DV, spots + b * N
    at = r * all_rows + b * N
    order, dq = order + at, dq + at * D
    ti, here = _places(order, c, m, N, BLOCK_M)
    Q, G = _rows(q, ti, here, D, BLOCK_D), _rows(g, ti, here, DV, BLOCK_V)
    L = tl.load(lse + b * N + ti, mask=here, other=0.0)
    of = tl.load(delta + b * N + ti, mask=here, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for w in tl.static_range(2 + AHEAD):
        tj, there = _places(order, c - 1 + w, m, N, BLOCK_M)
        K, V = _rows(k, tj, there, D, BLOCK_D), _rows(v, tj, there, DV, BLOCK_V)
        seen = _seen(spots, r, all_rows, ti, here, tj, there, low, high, AHEAD)
        P, dS = _pair(Q, K, V, G, L, of, ti, tj, seen, PRECISION)
        acc += tl.dot(dS.to(K.dtype), K, input_precision=PRECISION)
    _put(dq, acc, ti, here, D, BLOCK_D)


@triton.jit
def _of_keys(
    q, k, v, g, lse, delta, order, spots, dk, dv, m, N, rows, D, DV, low, high,
    AHEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    c, b, r = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    all_rows = rows.to(tl.int64) * N
    q, k, v, g, spots = q + b * N * D, k + b * N * D, v + b * N * DV, g + b * N * DV, spots + b * N
    at = r * all_rows + b * N
    order, dk, dv = order + at, dk + at * D, dv + at * DV
    tj, there = _places(order, c, m, N, BLOCK_M)
    K, V = _rows(k, tj, there, D, BLOCK_D), _rows(v, tj, there, DV, BLOCK_V)
    acc_k = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for w in tl.static_range(2 + AHEAD):
        ti, here = _places(order, c + 1 - w, m, N, BLOCK_M)
        Q, G = _rows(q, ti, here, D, BLOCK_D), _rows(g, ti, here, DV, BLOCK_V)
        L = tl.load(lse + b * N + ti, mask=here, other=0.0)
        of = tl.load(delta + b * N + ti, mask=here, other=0.0)
        seen = _seen(spots, r, all_rows, ti, here, tj, there, low, high, AHEAD)
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
    return max(16, int(triton.next_power_of_2(size)))


class Launch:
    """Sizes of a launch, and its grid: chunks, rows, rounds."""

    def __init__(self, q: Tensor, v: Tensor, order: Tensor, chunk: int, low: int, high: int) -> None:
        self.rounds, self.rows, self.n = order.shape
        self.grid = (triton.cdiv(self.n, chunk), self.rows, self.rounds)
        self.sizes = (chunk, self.n, self.rows, q.shape[-1], v.shape[-1], low, high)
        block = _block(chunk)
        self.blocks = {
            "AHEAD": int(high > 0),
            "BLOCK_M": block,
            "BLOCK_D": _block(q.shape[-1]),
            "BLOCK_V": _block(v.shape[-1]),
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
            "num_warps": 8 if block > 64 else 4,
        }

    def partial(self, like: Tensor) -> Tensor:
        """Room for a result of every round; wide, where several are to be summed."""
        dtype = like.dtype if self.rounds == 1 else torch.float32
        return torch.empty((self.rounds, *like.shape), dtype=dtype, device=like.device)


def forward(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, spots: Tensor, chunk: int, low: int, high: int
) -> tuple[Tensor, Tensor]:
    """Contexts (B, N, d_v) in the dtype of v, and log-sum-exps (B, N) in float32, zero where nothing is seen.

    q and k (B, N, d), v (B, N, d_v), order and spots (R, B, N) in int32, all contiguous; distances from low to high are seen.
    """
    launch = Launch(q, v, order, chunk, low, high)
    partial = launch.partial(v)
    lse = torch.empty(order.shape, dtype=torch.float32, device=q.device)
    final = launch.rounds == 1
    _forward[launch.grid](q, k, v, order, spots, partial, lse, *launch.sizes, FINAL=final, **launch.blocks)
    if final:
        return partial[0], lse[0]
    out, total, count = torch.empty_like(v), torch.empty_like(lse[0]), launch.rows * launch.n
    _merge[(triton.cdiv(count, 64),)](
        partial, lse, out, total, count, v.shape[-1], ROUNDS=launch.rounds, BLOCK=64, BLOCK_V=launch.blocks["BLOCK_V"]
    )
    return out, total


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, order: Tensor, spots: Tensor, chunk: int, low: int, high: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, in their dtypes."""
    launch = Launch(q, v, order, chunk, low, high)
    delta = (grad.float() * out.float()).sum(-1)
    grad = grad.to(v.dtype).contiguous()
    dq, dk, dv = launch.partial(q), launch.partial(k), launch.partial(v)
    given = (q, k, v, grad, total, delta, order, spots)
    _of_queries[launch.grid](*given, dq, *launch.sizes, **launch.blocks)
    _of_keys[launch.grid](*given, dk, dv, *launch.sizes, **launch.blocks)
    if launch.rounds == 1:
        return dq[0], dk[0], dv[0]
    return tuple(x.sum(0).to(like.dtype) for x, like in ((dq, q), (dk, k), (dv, v)))  # type: ignore[return-value]
