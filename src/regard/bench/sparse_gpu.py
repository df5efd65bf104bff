"""Additive attention under sparsemax and entmax on a GPU: panels of our kernel beside the equation, eager and through torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from regard.bench.beside import Formula, beside, first_queries
from regard.bench.measure import Row
from regard.general.alignments import Alignment, Entmax, Sparsemax
from regard.general.attention import Attention
from regard.ops.dispatch import execution

QUESTION = "sparse-gpu"
WIDTH = 64
ALIGNMENTS: dict[str, Callable[[], Alignment]] = {"sparsemax": Sparsemax, "entmax": Entmax}


def attention(name: str) -> Attention:
    """One attention, with the projections of its score."""
    return Attention("additive", ALIGNMENTS[name](), query_dim=WIDTH, key_dim=WIDTH, hidden_dim=WIDTH)


def by(impl: str, attend: Callable[..., Tensor]) -> Formula:
    """A call in one execution."""

    def run(*xs: Tensor) -> Tensor:
        with execution(impl):
            return attend(*xs)

    return run


def compared(
    name: str,
    n: int,
    batch: int = 4,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    compiled: bool = True,
    budget: float = 0.3,
) -> Iterator[Row]:
    """Forward and training step with its memory; the error is that of the first queries."""
    attend = attention(name).to(device, dtype)
    xs = [torch.randn(batch, n, WIDTH, device=device).to(dtype).requires_grad_() for _ in range(3)]
    wide = attention(name).to(device, torch.float64)
    wide.load_state_dict(attend.state_dict())
    with torch.no_grad():
        q, k, v = (x[0].double() for x in xs)
        exact = by("dense", wide)(q[:64], k, v)
    who = {"regard": by("fused", attend)}
    if compiled:
        # Anew for every shape: past its limit of recompilations torch.compile silently runs eagerly.
        torch.compiler.reset()
        who["torch.compile (equation)"] = by("dense", torch.compile(attend, dynamic=False))
    who["equation"] = by("dense", attend)
    case = f"{name} B{batch} N{n} D{WIDTH} {str(dtype).split('.')[1]}"
    yield from beside(QUESTION, case, who, xs, list(attend.parameters()), first_queries(exact), device, budget)


def rows() -> Iterator[Row]:
    """All of it."""
    torch.manual_seed(0)
    for n in (2048, 8192):
        for dtype in (torch.bfloat16, torch.float32):
            for name in ALIGNMENTS:
                yield from compared(name, n, dtype=dtype)
                torch.cuda.empty_cache()
