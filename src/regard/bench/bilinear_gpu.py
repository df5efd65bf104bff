"""Attention with activated scores on a GPU, projections done: ours beside eager, torch.compile, FlexAttention, and SDPA without tanh."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.bench.beside import as_graphs, measured
from regard.bench.measure import Row, cuda_peak_mib, exponent, relative_error, seconds

QUESTION = "bilinear-gpu"
HEADS, WIDTH = 16, 64
SCALE = WIDTH**-0.5
# Beyond this many scores neither eager nor torch.compile, which keeps them for the backward, is asked.
MOST_SCORES = 4 * HEADS * 4096 * 4096
# Sequences up to here are measured as CUDA graphs too.
SHORT = 1024

Formula = Callable[[Tensor, Tensor, Tensor], Tensor]


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The equation, in the dtype of its inputs."""
    return torch.tanh(q @ k.mT * SCALE).softmax(-1) @ v


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What `Attention` calls, outside of compiled graphs."""
    return _ours(q, k, v)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Without the activation: the time to compare with."""
    return F.scaled_dot_product_attention(q, k, v, scale=SCALE)


def flex() -> Formula:
    """FlexAttention with the activation for a score_mod."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = compiled(q, k, v, score_mod=lambda score, b, h, i, j: torch.tanh(score), scale=SCALE)
        return result

    return run


def _ours(q: Tensor, k: Tensor, v: Tensor, **align: object) -> Tensor:
    from regard.ops.triton.align import Align
    from regard.ops.triton.bilinear_attend import bilinear_attention

    seed, position, numbers, kinds = Align(**align).flat()  # type: ignore[arg-type]
    tensors = (q, k, v, None, None, None, position, None, seed)
    return bilinear_attention(*tensors, False, SCALE, 1.0, "tanh", numbers, kinds)[0]


def inputs(batch: int, n: int, dtype: torch.dtype, heads: int = HEADS) -> list[Tensor]:
    """Fresh normal q, k, v on the device."""
    return [torch.randn(batch, heads, n, WIDTH, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]


def accuracy(dtype: torch.dtype) -> Iterator[Row]:
    """Errors of the output and of every gradient, beside those of eager and FlexAttention in the same dtype."""
    torch.compiler.reset()
    torch.manual_seed(1)
    xs = inputs(1, 1024, dtype)
    grad = torch.randn_like(xs[0])
    exact = [x.detach().double().requires_grad_() for x in xs]
    reference = eager(*exact)
    wanted = [reference, *torch.autograd.grad(reference, exact, grad.double())]
    who: dict[str, Formula] = {"regard": ours, "eager": eager}
    # Its compilation takes longer than all else here.
    if dtype == torch.bfloat16:
        who["FlexAttention"] = flex()
    for what, run in who.items():
        out = run(*xs)
        got = [out, *torch.autograd.grad(out, xs, grad)]
        found = [relative_error(x.detach(), y.detach()) for x, y in zip(got, wanted, strict=True)]
        names = ("o", "dq", "dk", "dv")
        note = " ".join(f"{name} {x:.1e}" for name, x in zip(names, found, strict=True))
        case = f"B1 H{HEADS} N1024 d{WIDTH} {str(dtype).split('.')[1]}, errors"
        yield Row(QUESTION, case, what, error=found[0], note=note, extra=dict(zip(names, found, strict=True)))


def timed(case: str, what: str, run: Formula, xs: list[Tensor]) -> Iterator[Row]:
    """Forward, and forward with backward."""
    with torch.no_grad():
        row = measured(QUESTION, f"{case}, forward", what, lambda: run(*xs))
    yield row
    grad = torch.randn_like(xs[0])

    def step() -> None:
        torch.autograd.grad(run(*xs), xs, grad)

    yield measured(QUESTION, f"{case}, training step", what, step)
    if xs[0].shape[-2] <= SHORT:
        yield from as_graphs(QUESTION, case, what, lambda: run(*xs), step)


def speed(dtype: torch.dtype, sizes: tuple[int, ...]) -> Iterator[Row]:
    """Every size, beside all that can."""
    for n in sizes:
        # Anew for every shape: past its limit of recompilations torch.compile silently runs eagerly.
        torch.compiler.reset()
        who: dict[str, Formula] = {"regard": ours, "SDPA without tanh": sdpa}
        if dtype == torch.bfloat16 and n > 1024:
            who["FlexAttention"] = flex()
        if 4 * HEADS * n * n <= MOST_SCORES:
            who |= {"eager": eager, "torch.compile": torch.compile(eager, dynamic=False)}
        xs = inputs(4, n, dtype)
        for what, run in who.items():
            yield from timed(f"B4 H{HEADS} N{n} d{WIDTH} {str(dtype).split('.')[1]}", what, run, xs)
        torch.cuda.empty_cache()


def alignments(n: int = 4096, window: float = 10.0) -> Iterator[Row]:
    """What dropout, a choice and a window cost beside the softmax alone, and windows beside the whole of SDPA."""
    xs = inputs(2, n, torch.bfloat16, heads=8)
    lead, device = 2 * 8, "cuda"
    seed = torch.tensor([7], device=device)
    monotonic = torch.arange(n, device=device, dtype=torch.float32)[None]
    anywhere = torch.rand(lead, n, device=device) * n
    local = {"window": window, "gaussian": 2}
    kinds: dict[str, dict[str, object]] = {
        "regard": {},
        "regard, dropout": {"seed": seed, "dropout": 0.1},
        "regard, hard": {"seed": seed, "choice": 2},
        "regard, local, monotonic": {"position": monotonic, **local},
        "regard, local, arbitrary positions": {"position": anywhere, "scattered": True, **local},
    }
    case = f"B2 H8 N{n} d{WIDTH} bfloat16"
    for what, align in kinds.items():
        yield from timed(case, what, lambda q, k, v, align=align: _ours(q, k, v, **align), xs)  # type: ignore[misc]
    yield from timed(case, "SDPA without tanh", sdpa, xs)


def memory(sizes: tuple[int, ...] = (8192, 16384, 32768)) -> Iterator[Row]:
    """Peak memory of a training step against N, one sequence."""
    peaks: list[float] = []
    for n in sizes:
        xs = inputs(1, n, torch.bfloat16, heads=1)

        def step(xs: list[Tensor] = xs) -> None:
            torch.autograd.grad(ours(*xs).sum(), xs)

        peaks.append(cuda_peak_mib(step))
        slope = exponent(sizes[: len(peaks)], peaks) if len(peaks) > 1 else None
        case = f"B1 H1 N{n} d{WIDTH} bfloat16, training step"
        yield Row(QUESTION, case, "regard", seconds(step, "cuda", budget=0.2), peaks[-1], extra={"exponent": slope})


def rows() -> Iterator[Row]:
    """All of it."""
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield from accuracy(dtype)
    yield from speed(torch.bfloat16, (1024, 4096, 16384))
    yield from speed(torch.float32, (2048,))
    yield from alignments()
    yield from alignments(16384)
    yield from memory()
