"""How do time and memory grow with the length? One layer of each kind, from 512 tokens to 65,536.

A training step (forward and backward) of one layer, attention and feed-forward map, on one sequence: full attention; Transformer-XL,
segment after segment; Reformer's hashed attention; Linformer; Synthesizer; and full attention under a window. Exponents are
fitted over the largest lengths, and told of the last two alone, since constant costs make a fit too kind; by both, Linformer, the
window and Transformer-XL should stay below 1.1, hashing below 1.25.

On a CPU the time is that of the processor, on one thread: runs of minutes are disturbed by whatever else the machine does, and a
curve of disturbed times has no exponent. It is the sum of two: what the program takes, from which the exponents are judged, and what
the system takes. Beyond 32 MiB the allocator asks the system for every tensor anew, whose pages then fault one by one; the
curves of all kinds have a step there, which a fit over few lengths takes for growth. Its exponent is told beside.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.bench.measure import Row, cpu_peak_mib, cuda_peak_mib, exponent, seconds
from regard.general.masks import Window
from regard.transformer import LinformerAttention, SynthesizerAttention, TransformerEncoder, TransformerXL

QUESTION = "cost-curves"
LENGTHS = tuple(512 << k for k in range(8))
LONGEST_RUN = {"cpu": 8.0, "cuda": 2.5}  # seconds; a length whose run would take longer is left out
# Exponents are fitted over the largest lengths that were measured, up to so many times apart.
FITTED = 8
EXPECTED = {"Linformer": 1.1, "window": 1.1, "Transformer-XL": 1.1, "Reformer": 1.25}


@dataclass(frozen=True)
class Config:
    """Of the layers."""

    device: str
    dtype: torch.dtype
    dim: int
    heads: int
    rank: int  # of Linformer
    window: int  # half-width
    segment: int  # of Transformer-XL, and of its memory
    chunk: int  # of Reformer

    def __str__(self) -> str:
        return f"d{self.dim} H{self.heads} {str(self.dtype).removeprefix('torch.')}"


CONFIGS = {
    "cpu": Config("cpu", torch.float32, dim=64, heads=2, rank=64, window=64, segment=256, chunk=64),
    "cuda": Config("cuda", torch.bfloat16, dim=512, heads=8, rank=256, window=256, segment=512, chunk=64),
}

Step = Callable[[], None]


def _encoder(config: Config, attention: Callable[[int, int], nn.Module] | None = None) -> nn.Module:
    return TransformerEncoder(config.dim, config.heads, 1, attention=attention)


def layers(config: Config, n: int) -> dict[str, Callable[[], nn.Module]]:
    """Every kind of layer, for sequences of n tokens."""
    made: dict[str, Callable[[], nn.Module]] = {
        "full": lambda: _encoder(config),
        "Transformer-XL": lambda: TransformerXL(config.dim, config.heads, 1, memory=config.segment),
        "Linformer": lambda: _encoder(config, lambda d, h: LinformerAttention(d, h, n, config.rank)),
        "Synthesizer, dense": lambda: _encoder(config, lambda d, h: SynthesizerAttention(d, h, n)),
        "Synthesizer, factorised random": lambda: _encoder(
            config, lambda d, h: SynthesizerAttention(d, h, n, "factorized-random")
        ),
        "window": lambda: _encoder(config),
    }
    try:
        from regard.transformer import LSHAttention
    except ImportError:
        return made
    return made | {"Reformer": lambda: _encoder(config, lambda d, h: LSHAttention(d, h, chunk=config.chunk))}


def step(name: str, n: int, device: str) -> Step:
    """A training step of one kind on n tokens."""
    config = CONFIGS[device]
    torch.manual_seed(0)
    module = layers(config, n)[name]().to(config.device, config.dtype)
    x = torch.randn(1, n, config.dim, device=config.device, dtype=config.dtype)
    gradient = torch.randn_like(x)

    def whole() -> None:
        for p in module.parameters():
            p.grad = None
        if isinstance(module, TransformerXL):
            memory = None
            for part, g in zip(x.split(config.segment, 1), gradient.split(config.segment, 1), strict=True):
                output, memory = module(part, memory)
                output.backward(g)
            return
        result: Tensor = module(x, pairs=Window(config.window)) if name == "window" else module(x)
        result.backward(gradient)

    return whole


_SCRIPT = """
from regard.bench.cost_curves import step
run = step(argv[0], int(argv[1]), "cpu")
step(argv[0], 64, "cpu")()
ready()
run()
"""


def peak_mib(name: str, n: int, device: str, run: Step) -> float:
    """Most memory that a step holds beyond its module and inputs."""
    return cuda_peak_mib(run) if device == "cuda" else cpu_peak_mib(_SCRIPT, name, n)


class Taken(NamedTuple):
    """Seconds of a run: what the program took, and the system for it."""

    program: float
    system: float = 0.0


def processor_seconds(run: Step, budget: float = 1.0) -> Taken:
    """Least processor time of a run, of five at least."""
    import resource  # not everywhere

    taken: list[Taken] = []
    while len(taken) < 5 or (sum(map(sum, taken)) < budget and len(taken) < 50):
        before = resource.getrusage(resource.RUSAGE_SELF)
        run()
        after = resource.getrusage(resource.RUSAGE_SELF)
        taken.append(Taken(after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime))
    return min(taken, key=sum)


def curve(name: str, device: str, lengths: Sequence[int] = LENGTHS, memory: bool = True) -> Iterator[Row]:
    """Time and memory of one kind, until a run would take too long or does not fit."""
    config, times = CONFIGS[device], list[float]()
    for n in lengths:
        grew = times[-1] / times[-2] if len(times) > 1 else 2.0
        if times and times[-1] * grew > LONGEST_RUN[device]:
            return
        try:
            run = step(name, n, device)
            best = Taken(seconds(run, device, budget=1.0)) if device == "cuda" else processor_seconds(run)
            peak = peak_mib(name, n, device, run) if memory else None
        except torch.OutOfMemoryError:
            yield Row(QUESTION, f"{config}, N {n}", name, note="does not fit", extra={"n": n})
            return
        finally:
            run = None  # type: ignore[assignment]
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
        times.append(sum(best))
        yield Row(QUESTION, f"{config}, N {n}", name, sum(best), peak, extra={"n": n, **best._asdict()})


def growth(name: str, found: Sequence[Row], config: Config) -> Row | None:
    """The exponents at the large end, and whether they are what they should be."""
    measured = [row for row in found if row.what == name and row.seconds is not None]
    measured = [row for row in measured if row.extra["n"] * FITTED >= measured[-1].extra["n"]]
    if len(measured) < 2:
        return None
    sizes = [row.extra["n"] for row in measured]
    of_time = exponent(sizes, [row.extra["program"] for row in measured])
    extra: dict[str, Any] = {"from": sizes[0], "to": sizes[-1], "time": of_time}
    note = f"time N^{of_time:.2f}"
    # Where constant costs still show, the fit is too kind: the last two lengths tell more.
    extra["last"] = exponent(sizes[-2:], [row.extra["program"] for row in measured[-2:]])
    note += f", at the end N^{extra['last']:.2f}"
    if any(row.extra["system"] for row in measured):
        extra["with system"] = exponent(sizes, [row.extra["program"] + row.extra["system"] for row in measured])
        note += f" (fitted {extra['with system']:.2f} with the system's)"
    peaks = [row.peak_mib for row in measured]
    if all(peak is not None and peak > 0 for peak in peaks):
        extra["memory"] = exponent(sizes, peaks)  # type: ignore[arg-type]
        note += f", memory N^{extra['memory']:.2f}"
    if name in EXPECTED:
        extra |= {"expected": EXPECTED[name], "holds": max(of_time, extra["last"]) <= EXPECTED[name]}
        note += f" ({'holds' if extra['holds'] else 'does not hold'}: time at most N^{EXPECTED[name]})"
    return Row(QUESTION, f"{config}, N {sizes[0]} to {sizes[-1]}", name, note=note, extra=extra)


def rows(lengths: Sequence[int] = LENGTHS, device: str | None = None, memory: bool = True) -> Iterator[Row]:
    """Every kind, on a GPU where there is one."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield from _all(lengths, device, memory)
    finally:
        torch.set_num_threads(threads)


def _all(lengths: Sequence[int], device: str, memory: bool) -> Iterator[Row]:
    for name in layers(CONFIGS[device], 64):
        found: list[Row] = []
        for row in curve(name, device, lengths, memory):
            found.append(row)
            yield row
        fitted = growth(name, found, CONFIGS[device])
        if fitted is not None:
            yield fitted


def draw(found: Sequence[Row], folder: Path) -> Path:
    """Time and memory against the length, both logarithmic."""
    from matplotlib.figure import Figure

    from regard.report.figures import save

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(row.what for row in found))
    for name, marker in zip(names, "osv^DPX*", strict=False):
        points = [row for row in found if row.what == name and row.seconds is not None]
        n = [row.extra["n"] for row in points]
        left.plot(n, [1e3 * (row.seconds or 0.0) for row in points], f"{marker}-", label=name, markersize=4)
        held = [(row.extra["n"], row.peak_mib) for row in points if row.peak_mib]
        if held:
            right.plot(*zip(*held, strict=True), f"{marker}-", markersize=4)
    for axes, what in ((left, "training step, ms"), (right, "memory of a training step, MiB")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens, $N$")
        axes.set_ylabel(what)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    path = folder / f"{QUESTION}-{'cuda' if 'bfloat16' in found[0].case else 'cpu'}.svg"
    save(figure, path)
    return path
