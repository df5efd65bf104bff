"""Multi-dimensional attention on a GPU, projections done: ours beside eager and torch.compile, with errors against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from regard.bench.beside import as_graphs, measured
from regard.bench.measure import Row, cuda_peak_mib, exponent, relative_error, seconds

QUESTION = "multi-gpu"
WIDTH = 64
BOUND = 5.0
# Sequences up to here are measured as CUDA graphs too.
SHORT = 1024

Formula = Callable[..., Tensor]


def eager(a: Tensor, u: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """A matrix behind the hidden layer, in the dtype of its inputs."""
    scores = torch.tanh(a[:, :, None] + u[:, None]) @ w
    return (scores.softmax(2) * v[:, None]).sum(2)


def eager_units(a: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Hidden units that are the features, as DiSAN has them."""
    scores = BOUND * torch.tanh((a[:, :, None] + u[:, None]) / BOUND)
    return (scores.softmax(2) * v[:, None]).sum(2)


def ours(a: Tensor, u: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """What `Attention` calls, outside of compiled graphs."""
    return _attend(a, u, w[None].float(), v, "tanh")


def ours_units(a: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """The same without a matrix."""
    return _attend(a, u, a.new_full((1, WIDTH), BOUND, dtype=torch.float32), v, f"tanh:{BOUND}")


def _attend(a: Tensor, u: Tensor, w: Tensor, v: Tensor, act: str) -> Tensor:
    from regard.ops.triton.align import Align
    from regard.ops.triton.multi import multi_attend

    return multi_attend(a, u, w, v, None, False, act, *Align().flat())[0]


KINDS: dict[str, tuple[Formula, Formula]] = {"matrix": (ours, eager), "units": (ours_units, eager_units)}


def inputs(kind: str, batch: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    """Fresh normal a, u, [w], v on the device."""
    a, u, v = (torch.randn(batch, n, WIDTH, device="cuda") for _ in range(3))
    w = [torch.randn(WIDTH, WIDTH, device="cuda") / WIDTH**0.5] if kind == "matrix" else []
    return [x.to(dtype).requires_grad_() for x in (a, u, *w, v)]


def errors(run: Formula, exact: Formula, kind: str, dtype: torch.dtype, n: int = 512) -> list[float]:
    """Relative errors of the output and of every gradient."""
    torch.manual_seed(1)
    xs = inputs(kind, 2, n, dtype)
    out = run(*xs)
    grad = torch.randn_like(out)
    got = [out, *torch.autograd.grad(out, xs, grad)]
    wide = [x.detach().double().requires_grad_() for x in xs]
    reference = exact(*wide)
    true = [reference, *torch.autograd.grad(reference, wide, grad.double())]
    return [relative_error(x.detach(), y.detach()) for x, y in zip(got, true, strict=True)]


def accuracy(kind: str, dtype: torch.dtype) -> Iterator[Row]:
    """Errors beside those of eager in the same dtype."""
    mine, formula = KINDS[kind]
    names = ("o", "da", "du", "dw", "dv") if kind == "matrix" else ("o", "da", "du", "dv")
    for what, run in (("regard", mine), ("eager", formula)):
        found = errors(run, formula, kind, dtype)
        note = " ".join(f"{name} {x:.1e}" for name, x in zip(names, found, strict=True))
        case = f"{kind} B2 N512 D64 {str(dtype).split('.')[1]}, errors"
        yield Row(QUESTION, case, what, error=found[0], note=note, extra=dict(zip(names, found, strict=True)))


def speed(kind: str, batch: int, n: int, dtype: torch.dtype) -> Iterator[Row]:
    """Forward and training step."""
    # Anew for every shape: past its limit of recompilations torch.compile silently runs eagerly.
    torch.compiler.reset()
    mine, formula = KINDS[kind]
    case = f"{kind} B{batch} N{n} D{WIDTH} {str(dtype).split('.')[1]}"
    xs = inputs(kind, batch, n, dtype)
    grad = torch.randn(batch, n, WIDTH, device="cuda", dtype=dtype)
    for what, run in (("regard", mine), ("torch.compile", torch.compile(formula, dynamic=False)), ("eager", formula)):

        def step(run: Formula = run) -> None:
            torch.autograd.grad(run(*xs), xs, grad)

        with torch.no_grad():
            row = measured(QUESTION, f"{case}, forward", what, lambda run=run: run(*xs))  # type: ignore[misc]
        yield row
        yield measured(QUESTION, f"{case}, training step", what, step)
        if n <= SHORT and what != "eager":
            yield from as_graphs(QUESTION, case, what, lambda run=run: run(*xs), step)  # type: ignore[misc]
    torch.cuda.empty_cache()


def memory(sizes: tuple[int, ...] = (4096, 8192, 16384, 32768)) -> Iterator[Row]:
    """Peak memory of a training step against N, one sequence."""
    peaks = []
    for n in sizes:
        xs = inputs("matrix", 1, n, torch.bfloat16)

        def step(xs: list[Tensor] = xs) -> None:
            torch.autograd.grad(ours(*xs).sum(), xs)

        peak, time = cuda_peak_mib(step), seconds(step, "cuda", budget=0.3)
        peaks.append(peak)
        slope = exponent(sizes[: len(peaks)], peaks) if len(peaks) > 1 else None
        yield Row(
            QUESTION, f"matrix B1 N{n} D64 bfloat16, training step", "regard", time, peak, extra={"exponent": slope}
        )


def rows() -> Iterator[Row]:
    """All of it."""
    torch.manual_seed(0)
    for kind in KINDS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            yield from accuracy(kind, dtype)
    for kind, n, dtype in (
        ("matrix", 1024, torch.bfloat16),
        ("matrix", 2048, torch.bfloat16),
        ("units", 2048, torch.bfloat16),
        ("matrix", 1024, torch.float32),
    ):
        yield from speed(kind, 4, n, dtype)
    yield from memory()
