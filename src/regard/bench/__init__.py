"""Benchmarks: one question a file, every figure beside its peers in the same run."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from regard._errors import nearest, refusal

# Name of the question, the file that answers it, the device it needs.
QUESTIONS = {
    "additive-cpu": ("regard.bench.additive_cpu", "cpu"),
    "additive-gpu": ("regard.bench.additive_gpu", "cuda"),
    "softmax-gradient": ("regard.bench.softmax_gradient", "cpu"),
    "overhead": ("regard.bench.overhead", "cpu"),
    "feature-cpu": ("regard.bench.feature_cpu", "cpu"),
}


def run(name: str, results: Path | None, command: str, say: Callable[[str], None] = print) -> None:
    """Answer a question: measure, print its table, append the rows to a stored file."""
    if name not in QUESTIONS:
        raise ValueError(refusal("name", repr(name), "a benchmark", nearest(name, QUESTIONS)))
    import torch

    from regard.bench.measure import Row, store, table

    rows: list[Row] = []
    module, device = QUESTIONS[name]
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            refusal("name", repr(name), "a benchmark that this machine can run", "It needs a CUDA device.")
        )
    try:
        for row in import_module(module).rows():
            rows.append(row)
            say(f"  {row.case}: {row.what}")
    finally:
        # What was measured before an interruption is kept.
        if rows and results is not None:
            store(rows, results / f"{name}.jsonl", command)
    say(table(rows))
    draw = getattr(import_module(module), "draw", None)
    if draw is not None and results is not None:
        say(f"figure: {draw(rows, results)}")
