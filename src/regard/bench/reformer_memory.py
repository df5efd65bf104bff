"""What a layer more costs in memory: reversible layers beside the same layers under ordinary differentiation.

A training step of a Reformer on one sequence, in processes of their own, from 2 to 32 layers. What remains of a reversible layer are
its hashes, its parameters and their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from regard.bench.measure import Row, cpu_peak_mib

QUESTION = "reformer-memory"
DEPTHS = (2, 4, 8, 16, 32)
KINDS = {"regard": "reversible", "regard, ordinary differentiation": "ordinary"}

_STEP = """
import torch
import regard.transformer.reformer as reformer
from regard.ops.heap import return_freed_memory
torch.set_num_threads(1)
kind, layers, n = argv[0], int(argv[1]), int(argv[2])
if kind == "ordinary":
    def one_by_one(layers, x1, x2, mask):
        for layer in layers:
            return_freed_memory()
            x1, x2 = layer(x1, x2, mask)
        return x1, x2
    reformer.reversible = one_by_one
torch.manual_seed(0)
model = reformer.Reformer(64, heads=2, layers=layers, causal=True, rounds=2, chunk=64, feedforward_dim=256)
tokens = torch.randn(1, n, 64)
model(tokens[:, :128]).sum().backward()
ready()
model(tokens).square().sum().backward()
"""


def measure(layers: int, kind: str, n: int = 4096) -> float:
    """Peak memory of a training step in MiB, beyond the model and its gradients."""
    return cpu_peak_mib(_STEP, kind, layers, n)


def rows() -> Iterator[Row]:
    """All depths, and how much each layer more costs."""
    for name, kind in KINDS.items():
        peaks: list[float] = []
        for layers in DEPTHS:
            peaks.append(measure(layers, kind))
            yield _row(f"{layers} layers, N 4096, d 64, float32", name, layers, peaks[-1])
        slope = (peaks[-1] - peaks[0]) / (DEPTHS[-1] - DEPTHS[0])
        yield Row(QUESTION, "a layer more", name, peak_mib=slope, note="slope from the fewest to the most layers")


def _row(case: str, name: str, layers: int, peak: float) -> Row:
    return Row(QUESTION, case, name, peak_mib=peak, extra={"layers": layers})


def draw(found: Sequence[Row], folder: Path) -> Path:
    """Memory against depth."""
    from matplotlib.figure import Figure

    from regard.report.figures import save

    figure = Figure(figsize=(4.6, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, kind in KINDS.items():
        points = [(row.extra["layers"], row.peak_mib) for row in found if row.what == name and "layers" in row.extra]
        axes.plot(*zip(*points, strict=True), "o-", label=kind, markersize=3)
    axes.set_xlabel("layers")
    axes.set_ylabel("peak memory of a step, MiB")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    path = folder / "reformer-memory.svg"
    save(figure, path)
    return path
