"""Scores that the library's attention computes, on a GPU: ours beside the same projection and call written by hand, and the call alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.bench.beside import Formula, beside, first_queries
from regard.bench.measure import Row
from regard.general.attention import Attention
from regard.general.scores import BiasedGeneral, Cosine, Dot, General, LowRankGeneral, NegativeL2, ScaledDot, Score
from regard.ops.dispatch import execution

QUESTION = "library-gpu"
BATCH, HEADS, WIDTH, RANK, COLUMNS = 4, 16, 64, 32, 8
# The middle one first: what is left out for want of time are the others.
SIZES = (4096, 1024, 16384)
# Sequences up to here are measured as CUDA graphs too.
SHORT = 1024

sdpa = F.scaled_dot_product_attention


def _distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """2 q·k - k·k: the term of the key, and what rounding leaves of it, in two columns more.

    Others are zeros, and the values get as many: the library has quick kernels for one width that is a multiple of eight.
    """
    half = (
        -torch.linalg.vector_norm(k, dim=-1, keepdim=True, dtype=torch.promote_types(k.dtype, torch.float32)).square()
        / 2
    )
    term = half.to(k.dtype)
    columns = [k, term, (half - term).to(k.dtype), k.new_zeros(*k.shape[:-1], COLUMNS - 2)]
    ones = q.new_ones(*q.shape[:-1], COLUMNS)
    return sdpa(torch.cat([q, ones], -1), torch.cat(columns, -1), F.pad(v, (0, COLUMNS)), scale=2.0)[..., : v.shape[-1]]


# A score, and what one would write without the library, with its parameters.
KINDS: dict[str, tuple[Callable[[], Score], Callable[[Any, Tensor, Tensor, Tensor], Tensor]]] = {
    "dot": (Dot, lambda s, q, k, v: sdpa(q, k, v, scale=1.0)),
    "scaled dot": (ScaledDot, lambda s, q, k, v: sdpa(q, k, v)),
    "general": (lambda: General(WIDTH, WIDTH), lambda s, q, k, v: sdpa(q @ s.W.mT, k, v, scale=1.0)),
    "low-rank general": (
        lambda: LowRankGeneral(WIDTH, WIDTH, RANK),
        lambda s, q, k, v: sdpa(q @ s.V.mT, k @ s.U.mT, v, scale=1.0),
    ),
    "biased general": (
        lambda: BiasedGeneral(WIDTH, WIDTH),
        lambda s, q, k, v: sdpa(F.linear(q, s.W, s.b), k, v, scale=1.0),
    ),
    "cosine": (Cosine, lambda s, q, k, v: sdpa(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, scale=1.0)),
    "negative L2": (NegativeL2, lambda s, q, k, v: _distance(q, k, v)),
}


def compared(
    kind: str,
    n: int,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    lead: tuple[int, int] = (BATCH, HEADS),
    budget: float = 0.3,
) -> Iterator[Row]:
    """Forward and training step; the error is that of the first queries."""
    make, by_hand = KINDS[kind]
    attend = Attention(make()).to(device, dtype)
    xs = [torch.randn(*lead, n, WIDTH, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    wide = Attention(make()).to(device, torch.float64)
    wide.load_state_dict(attend.state_dict())
    with torch.no_grad(), execution("dense"):
        q, k, v = (x[0, 0].double() for x in xs)
        exact = wide(q[:64], k, v)
    who: dict[str, Formula] = {
        "regard": attend,
        "SDPA and the projection by hand": lambda q, k, v: by_hand(attend.score, q, k, v),
        "SDPA alone": lambda q, k, v: sdpa(q, k, v),
    }
    case = f"{kind} B{lead[0]} H{lead[1]} N{n} d{WIDTH} {str(dtype).split('.')[1]}"
    learned = list(attend.parameters())
    graphs = who if device == "cuda" and n <= SHORT else ()
    for row in beside(QUESTION, case, who, xs, learned, first_queries(exact), device, budget, graphs):
        # Alone it computes another function.
        row.error = None if row.what == "SDPA alone" and kind != "scaled dot" else row.error
        yield row


def rows(sizes: Sequence[int] = SIZES) -> Iterator[Row]:
    """All of it."""
    torch.manual_seed(0)
    for n in sizes:
        for kind in KINDS:
            yield from compared(kind, n)
            torch.cuda.empty_cache()
