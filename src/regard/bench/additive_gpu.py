"""Additive attention on a GPU, projections done: ours beside eager and torch.compile, with errors against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from regard.bench.beside import as_graphs, measured
from regard.bench.measure import Row, cuda_peak_mib, exponent, relative_error, seconds

QUESTION = "additive-gpu"
# Sequences up to here are measured as CUDA graphs too.
SHORT = 1024
SHAPES = ((16, 512, 64), (16, 1024, 64), (16, 2048, 64), (16, 4096, 64), (4, 8192, 64), (16, 2048, 128))


def eager(a: Tensor, u: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """The usual formula, in the dtype of its inputs."""
    return (torch.tanh(a[:, :, None] + u[:, None]) @ w).softmax(-1) @ v


def by_sum(a: Tensor, u: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """The other formula, which torch.compile fuses without writing the hidden layer."""
    return (torch.tanh(a[:, :, None] + u[:, None]) * w).sum(-1).softmax(-1) @ v


def ours(a: Tensor, u: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """What `Attention` calls, outside of compiled graphs."""
    from regard.ops.triton.align import Align
    from regard.ops.triton.attend import additive

    return additive(a, u, w[None].float(), v, None, None, *Align().flat(), False, "tanh")[0]


def inputs(batch: int, n: int, width: int, dtype: torch.dtype, reach: float | None = None) -> list[Tensor]:
    """Fresh normal inputs on the device; `reach` clamps |a| and |u| to half of it."""
    a, u, v = (torch.randn(batch, n, width if k < 2 else 64, device="cuda") for k in range(3))
    if reach is not None:
        a, u = a.clamp(-reach / 2, reach / 2), u.clamp(-reach / 2, reach / 2)
    w = torch.randn(width, device="cuda") / width**0.5
    return [x.to(dtype).requires_grad_() for x in (a, u, w, v)]


def errors(
    run: Callable[..., Tensor], batch: int, n: int, width: int, dtype: torch.dtype, reach: float | None
) -> list[float]:
    """Relative errors of the output and of da, du, dw, dv, on one leading entry at a time in float64."""
    torch.manual_seed(1)
    xs = inputs(batch, n, width, dtype, reach)
    out = run(*xs)
    grad = torch.randn_like(out)
    got = [out, *torch.autograd.grad(out, xs, grad)]
    parts = []
    for b in range(batch):
        exact = [x.detach()[b : b + 1].double() if x.dim() == 3 else x.detach().double() for x in xs]
        exact = [x.requires_grad_() for x in exact]
        reference = eager(*exact)
        parts.append([reference.detach(), *torch.autograd.grad(reference, exact, grad[b : b + 1].double())])
    columns = list(zip(*parts, strict=True))
    exact_all = [torch.stack(c).sum(0) if k == 3 else torch.cat(c) for k, c in enumerate(columns)]
    return [relative_error(x.detach(), y) for x, y in zip(got, exact_all, strict=True)]


def speed(
    dtype: torch.dtype, shapes: tuple[tuple[int, int, int], ...] = SHAPES, reach: float | None = None
) -> Iterator[Row]:
    """Forward and training step of every shape."""
    for batch, n, width in shapes:
        # Anew for every shape: past its limit of recompilations torch.compile silently runs eagerly.
        torch.compiler.reset()
        compiled = {"torch.compile (@ w)": torch.compile(eager, dynamic=False)}
        compiled["torch.compile (* w).sum"] = torch.compile(by_sum, dynamic=False)
        hidden = batch * n * n * width
        case = f"B{batch} N{n} D{width} {str(dtype).split('.')[1]}" + (f" |a|+|u|<={reach:g}" if reach else "")
        xs = inputs(batch, n, width, dtype, reach)
        who: dict[str, Callable[..., Tensor]] = {"regard": ours, **compiled}
        if hidden <= 16 * 2048 * 2048 * 64:
            who["eager"] = eager
        for what, run in who.items():
            with torch.no_grad():
                row = measured(QUESTION, f"{case}, forward", what, lambda run=run, xs=xs: run(*xs))  # type: ignore[misc]
            yield row
            if what != "regard" and hidden > 16 * 2048 * 2048 * 64:
                continue
            grad = torch.randn(batch, n, 64, device="cuda", dtype=dtype)

            def step(run: Callable[..., Tensor] = run, xs: list[Tensor] = xs, grad: Tensor = grad) -> None:
                torch.autograd.grad(run(*xs), xs, grad)

            yield measured(QUESTION, f"{case}, training step", what, step)
            if n <= SHORT and what != "eager":
                yield from as_graphs(QUESTION, case, what, lambda run=run, xs=xs: run(*xs), step)  # type: ignore[misc]
        torch.cuda.empty_cache()


def accuracy(dtype: torch.dtype, reach: float | None = None) -> Iterator[Row]:
    """Errors of the output and of every gradient, beside those of eager in the same dtype."""
    for what, run in (("regard", ours), ("eager", eager)):
        found = errors(run, 4, 1024, 64, dtype, reach)
        names = ("o", "da", "du", "dw", "dv")
        case = f"B4 N1024 D64 {str(dtype).split('.')[1]}, errors" + (f" |a|+|u|<={reach:g}" if reach else "")
        note = " ".join(f"{name} {x:.1e}" for name, x in zip(names, found, strict=True))
        yield Row(QUESTION, case, what, error=found[0], note=note, extra=dict(zip(names, found, strict=True)))


def memory(sizes: tuple[int, ...] = (8192, 16384, 32768, 65536)) -> Iterator[Row]:
    """Peak memory of a training step against N, one sequence."""
    peaks = []
    for n in sizes:
        xs = inputs(1, n, 64, torch.bfloat16)

        def step(xs: list[Tensor] = xs) -> None:
            torch.autograd.grad(ours(*xs).sum(), xs)

        peak, time = cuda_peak_mib(step), seconds(step, "cuda", budget=0.5)
        peaks.append(peak)
        slope = exponent(sizes[: len(peaks)], peaks) if len(peaks) > 1 else None
        yield Row(QUESTION, f"B1 N{n} D64 bfloat16, training step", "regard", time, peak, extra={"exponent": slope})
        torch.cuda.empty_cache()


def rows() -> Iterator[Row]:
    """All of it."""
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield from accuracy(dtype)
    yield from speed(torch.bfloat16)
    yield from speed(torch.bfloat16, ((16, 4096, 64),), reach=6.0)
    yield from speed(torch.float32, ((16, 1024, 64), (16, 2048, 64)))
    yield from memory()
