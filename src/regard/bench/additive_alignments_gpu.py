"""Additive attention under every alignment that has a kernel, on a GPU: ours beside the equation, eager and through torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from regard.bench.beside import measured
from regard.bench.measure import Row, relative_error
from regard.general.alignments import Alignment, Hard, Local, Soft
from regard.general.attention import Attention
from regard.ops.dispatch import execution

QUESTION = "additive-alignments-gpu"
WIDTH = 64

ALIGNMENTS: dict[str, tuple[Callable[[], Alignment], float]] = {
    "soft, dropout": (Soft, 0.1),
    "hard, straight-through": (Hard, 0.0),
    "hard, gumbel": (lambda: Hard("gumbel", 0.7), 0.0),
    "local, predictive": (lambda: Local(10, "predictive", query_dim=WIDTH), 0.0),
}


def attention(name: str, dtype: torch.dtype) -> Attention:
    """One attention in training mode, with the projections of its score."""
    align, dropout = ALIGNMENTS[name]
    made = Attention("additive", align(), query_dim=WIDTH, key_dim=WIDTH, hidden_dim=WIDTH, dropout=dropout)
    return made.to("cuda", dtype).train()


def inputs(batch: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    """Fresh normal queries, keys and values on the device."""
    return [torch.randn(batch, n, WIDTH, device="cuda").to(dtype).requires_grad_() for _ in range(3)]


def run(impl: str, attend: Callable[..., Tensor], xs: list[Tensor]) -> Tensor:
    """A call by one execution, with the same draws every time."""
    torch.manual_seed(3)
    with execution(impl):
        return attend(*xs)


def accuracy(name: str, dtype: torch.dtype, batch: int = 2, n: int = 384) -> Iterator[Row]:
    """Errors of the output and of the gradients of queries, keys and values, beside those of the equation in the same dtype."""
    torch.manual_seed(1)
    attend, xs = attention(name, dtype), inputs(batch, n, dtype)
    wide = attention(name, torch.float64)
    wide.load_state_dict({key: x.double() for key, x in attend.state_dict().items()})
    exact_inputs = [x.detach().double().requires_grad_() for x in xs]
    grad = torch.randn(batch, n, WIDTH, device="cuda").to(dtype)
    reference = run("dense", wide, exact_inputs)
    exact = [reference, *torch.autograd.grad(reference, exact_inputs, grad.double())]
    for what, impl in (("regard", "fused"), ("equation", "dense")):
        out = run(impl, attend, xs)
        found = [out, *torch.autograd.grad(out, xs, grad)]
        errors = [relative_error(x.detach(), y.detach()) for x, y in zip(found, exact, strict=True)]
        named = dict(zip(("o", "dq", "dk", "dv"), errors, strict=True))
        note = " ".join(f"{key} {x:.1e}" for key, x in named.items())
        case = f"{name} B{batch} N{n} {str(dtype).split('.')[1]}, errors"
        yield Row(QUESTION, case, what, error=errors[0], note=note, extra=named)


def speed(name: str, dtype: torch.dtype, batch: int, n: int, peers: bool = True) -> Iterator[Row]:
    """A training step, and its memory."""
    torch.compiler.reset()
    attend, xs = attention(name, dtype), inputs(batch, n, dtype)
    grad = torch.randn(batch, n, WIDTH, device="cuda").to(dtype)
    who: dict[str, tuple[str, Callable[..., Tensor]]] = {"regard": ("fused", attend)}
    if peers:
        who["equation"] = ("dense", attend)
        who["torch.compile (equation)"] = ("dense", torch.compile(attend, dynamic=False))
    wanted = [*xs, *attend.parameters()]
    for what, (impl, module) in who.items():

        def step(impl: str = impl, module: Callable[..., Tensor] = module) -> None:
            torch.autograd.grad(run(impl, module, xs), wanted, grad, allow_unused=True)

        case = f"{name} B{batch} N{n} D{WIDTH} {str(dtype).split('.')[1]}, training step"
        yield measured(QUESTION, case, what, step)
    torch.cuda.empty_cache()


def rows() -> Iterator[Row]:
    """All of it."""
    for name in ALIGNMENTS:
        for dtype in (torch.bfloat16, torch.float32):
            yield from accuracy(name, dtype)
        yield from speed(name, torch.bfloat16, 4, 2048)
        yield from speed(name, torch.bfloat16, 1, 16384, peers=False)
