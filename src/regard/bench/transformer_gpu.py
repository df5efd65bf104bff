"""A Transformer encoder on a GPU: ours beside torch's own, each eager and compiled, in training and in inference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.bench.measure import Row, cuda_peak_mib, relative_error, seconds
from regard.transformer import TransformerEncoder

QUESTION = "transformer-gpu"


@dataclass(frozen=True)
class Size:
    """Of an encoder and its input."""

    batch: int = 16
    n: int = 1024
    layers: int = 8
    dim: int = 512
    heads: int = 8

    def __str__(self) -> str:
        return f"B{self.batch} N{self.n} L{self.layers} d{self.dim} bfloat16"


def pair(size: Size, norm: str, device: str, dtype: torch.dtype) -> tuple[TransformerEncoder, nn.TransformerEncoder]:
    """Ours and torch's, with the same weights; no dropout, since torch's fused kernel and ours draw differently."""
    layer = nn.TransformerEncoderLayer(
        size.dim, size.heads, 4 * size.dim, dropout=0.0, batch_first=True, norm_first=norm == "pre"
    )
    final = nn.LayerNorm(size.dim) if norm == "pre" else None
    theirs = nn.TransformerEncoder(layer, size.layers, final, enable_nested_tensor=False)
    ours = TransformerEncoder.from_torch(theirs)
    return ours.to(device, dtype), theirs.to(device, dtype)


Run = Callable[[Tensor], Tensor]


def called(ours: nn.Module, theirs: nn.Module, mask: Tensor | None) -> dict[str, tuple[nn.Module, Run]]:
    """Everybody who is measured, as functions of the tokens; True means real for ours, ignored for torch's."""
    ignored = None if mask is None else ~mask

    def us(x: Tensor) -> Tensor:
        result: Tensor = ours(x, mask)
        return result

    def them(x: Tensor) -> Tensor:
        result: Tensor = theirs(x, src_key_padding_mask=ignored)
        return result

    return {"regard": (ours, us), "nn.TransformerEncoder": (theirs, them)}


def step(module: nn.Module, run: Run, x: Tensor, gradient: Tensor) -> None:
    """Forward and backward to every parameter."""
    for p in module.parameters():
        p.grad = None
    run(x).backward(gradient)


def measure(
    size: Size, norm: str, masked: bool, device: str = "cuda", compiled: bool = True, budget: float = 3.0
) -> Iterator[Row]:
    """A training step and a forward pass of each, taken in turns."""
    torch.manual_seed(0)
    ours, theirs = pair(size, norm, device, torch.bfloat16)
    x = torch.randn(size.batch, size.n, size.dim, device=device, dtype=torch.bfloat16)
    gradient = torch.randn_like(x)
    lengths = torch.randint(size.n // 2, size.n + 1, (size.batch, 1), device=device)
    mask = torch.arange(size.n, device=device) < lengths if masked else None
    if mask is not None:
        # Torch writes something at padding, and ours writes zeros.
        gradient = gradient * mask.unsqueeze(-1)
    case = f"{size}, {norm}-norm{', padded' if masked else ''}"
    who = called(ours, theirs, mask)
    if compiled:
        torch.compiler.reset()
        who |= {f"{name}, compiled": (module, torch.compile(run, dynamic=False)) for name, (module, run) in who.items()}
    exact = _exact(size, norm, x, mask, device)
    errors = {name: relative_error(_real(run(x), mask).detach(), exact) for name, (_, run) in who.items()}
    steps: dict[str, Callable[[], None]] = {
        name: lambda module=module, run=run: step(module, run, x, gradient)  # type: ignore[misc]
        for name, (module, run) in who.items()
    }
    for name, (best, spread) in in_turns(steps, device, budget).items():
        peak = cuda_peak_mib(steps[name]) if device == "cuda" else None
        yield Row(QUESTION, f"{case}, training step", name, best, peak, errors[name], extra={"spread": spread})
    with torch.no_grad():
        # Compiled once more for inference they would only take longer to measure.
        for name, (module, run) in called(ours, theirs, mask).items():
            module.eval()
            best = seconds(lambda run=run: run(x), device, budget / 4, least=2)  # type: ignore[misc]
            yield Row(QUESTION, f"{case}, forward", name, best)


def in_turns(
    runs: dict[str, Callable[[], None]], device: str, budget: float, rounds: int = 5
) -> dict[str, tuple[float, float]]:
    """Median time of each over several rounds, and how far its rounds lie apart, relative; each round measures all of them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(_seconds(run, device, budget / rounds))
    middle = {name: sorted(each)[rounds // 2] for name, each in times.items()}
    return {name: (middle[name], (max(each) - min(each)) / middle[name]) for name, each in times.items()}


def _seconds(run: Callable[[], None], device: str, budget: float) -> float:
    """Time of one run when many follow each other, as in training: the host may be ahead of the device."""
    synchronize: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(2):
        run()
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    repeats = int(min(100, max(2, budget / max(time.perf_counter() - start, 1e-6))))
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize()
    return (time.perf_counter() - start) / repeats


def _real(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x[mask]


def _exact(size: Size, norm: str, x: Tensor, mask: Tensor | None, device: str) -> Tensor:
    """The result in float64, from the same weights as rounded."""
    torch.manual_seed(0)
    ours, _ = pair(size, norm, device, torch.bfloat16)
    ours.double().eval()
    with torch.no_grad():
        rows = [ours(x[b : b + 1].double(), None if mask is None else mask[b : b + 1]) for b in range(len(x))]
    return _real(torch.cat(rows), mask)


def rows() -> Iterator[Row]:
    """All of it."""
    yield from measure(Size(), "post", masked=False)
    yield from measure(Size(), "pre", masked=False)
    yield from measure(Size(), "pre", masked=True, compiled=False)
    yield from measure(Size(batch=64, n=128), "pre", masked=False, compiled=False)
    yield from measure(Size(batch=2, n=8192, layers=4), "pre", masked=False, compiled=False)
