"""What is seen of additive attention on a GPU, and what a choice costs: entropy and top-k, mass received, Gumbel-max, beside soft alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from regard.bench.beside import Formula, beside, first_queries, measured
from regard.bench.measure import Row, relative_error
from regard.general.alignments import Alignment, Hard, Soft
from regard.general.attention import Attention
from regard.observe import record
from regard.ops.dispatch import execution

QUESTION = "summaries-gpu"
WIDTH = 64
RECORDED: dict[str, Mapping[str, Any]] = {
    "entropy and top-k": {"entropy": None, "topk": 5},
    "mass received": {"mass_received": None},
}


def attention(align: Alignment, device: str, dtype: torch.dtype) -> Attention:
    """In training mode, where a choice is sampled."""
    torch.manual_seed(0)
    made = Attention("additive", align, query_dim=WIDTH, key_dim=WIDTH, hidden_dim=WIDTH)
    return made.to(device, dtype).train()


def seen(attend: Attention, xs: list[Tensor], fields: Mapping[str, Any]) -> Tensor:
    """A call that is recorded, and the first of what was asked for."""
    with record(attend, **fields) as trace:
        attend(*xs)
    found: Tensor = getattr(trace, next(iter(fields)))()
    return found


def compared(
    n: int, dtype: torch.dtype, batch: int = 16, device: str = "cuda", impl: str = "fused", budget: float = 0.3
) -> Iterator[Row]:
    """Soft and hard, forward and in a training step; the forward once more with what is recorded, errors of that against float64."""
    soft, wide = attention(Soft(), device, dtype), attention(Soft(), device, torch.float64)
    wide.load_state_dict(soft.state_dict())
    xs = [torch.randn(batch, n, WIDTH, device=device).to(dtype).requires_grad_() for _ in range(3)]
    zero = torch.zeros(1, 1, device=device)
    case = f"B{batch} N{n} D{WIDTH} {str(dtype).split('.')[1]}"
    first = [x.detach()[:1].double() for x in xs]

    def by(attend: Attention, **more: Any) -> Formula:
        def run(*xs: Tensor) -> Tensor:
            with execution(impl):
                found: Tensor = attend(*xs, **more)
            return found

        return run

    with torch.no_grad(), execution("dense"):
        exact = wide(first[0][:, :64], *first[1:])[0]
    who = {"regard": by(soft)}
    if dtype != torch.float32:
        # A bias has no sine basis.
        who["regard, exact kernel"] = by(soft, bias=zero)
    yield from beside(QUESTION, case, who, xs, list(soft.parameters()), first_queries(exact), device, budget)
    hard = attention(Hard(), device, dtype)
    choice = {"regard, Gumbel-max": by(hard)}
    yield from beside(QUESTION, case, choice, xs, list(hard.parameters()), None, device, budget)
    with torch.no_grad():
        told = [_recorded(name, soft, wide, xs, first, impl) for name in RECORDED]
        found = [
            measured(QUESTION, f"{case}, forward", f"regard, {name}", run, device, budget, error)
            for name, (run, error) in zip(RECORDED, told, strict=True)
        ]
    yield from found


def _recorded(
    name: str, soft: Attention, wide: Attention, xs: list[Tensor], first: list[Tensor], impl: str
) -> tuple[Callable[[], Tensor], Callable[[], float]]:
    def run() -> Tensor:
        with execution(impl):
            return seen(soft, xs, RECORDED[name])

    def error() -> float:
        with execution("blockwise"):
            exact = seen(wide, first, RECORDED[name])
        return relative_error(run()[:1], exact)

    return run, error


def rows() -> Iterator[Row]:
    """All of it."""
    for n in (2048, 4096):
        for dtype in (torch.float32, torch.bfloat16):
            yield from compared(n, dtype)
            torch.cuda.empty_cache()
