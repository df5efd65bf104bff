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
}


def run(name: str, results: Path | None, command: str, say: Callable[[str], None] = print) -> None:
    """Answer a question: measure, print its table, append the rows to a stored file."""
    if name not in QUESTIONS:
        raise ValueError(refusal("name", repr(name), "a benchmark", nearest(name, QUESTIONS)))
    from regard.bench.measure import Row, store, table

    rows: list[Row] = []
    try:
        for row in import_module(QUESTIONS[name][0]).rows():
            rows.append(row)
            say(f"  {row.case}: {row.what}")
    finally:
        # What was measured before an interruption is kept.
        if rows and results is not None:
            store(rows, results / f"{name}.jsonl", command)
    say(table(rows))
