"""Benchmarks: one question a file, every figure beside its peers in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

from regard._errors import nearest, refusal

if TYPE_CHECKING:
    from regard.bench.measure import Row

# Name of the question, the file that answers it, the device it needs; "data" for those that need data of one's own: they
# run by name alone, on either device; "tune" for what changes what kernels do from then on, by name alone as well.
QUESTIONS = {
    "additive-cpu": ("regard.bench.additive_cpu", "cpu"),
    "additive-gpu": ("regard.bench.additive_gpu", "cuda"),
    "additive-alignments-gpu": ("regard.bench.additive_alignments_gpu", "cuda"),
    "sparse-cpu": ("regard.bench.sparse_cpu", "cpu"),
    "sparse-gpu": ("regard.bench.sparse_gpu", "cuda"),
    "near-cpu": ("regard.bench.near_cpu", "cpu"),
    "summaries-gpu": ("regard.bench.summaries_gpu", "cuda"),
    "multi-gpu": ("regard.bench.multi_gpu", "cuda"),
    "bilinear-gpu": ("regard.bench.bilinear_gpu", "cuda"),
    "local-gpu": ("regard.bench.local_gpu", "cuda"),
    "library-gpu": ("regard.bench.library_gpu", "cuda"),
    "softmax-gradient": ("regard.bench.softmax_gradient", "cpu"),
    "hop-gradients": ("regard.bench.hop_gradients", "cpu"),
    "convex-hull": ("regard.bench.convex_hull", "cuda"),
    "overhead": ("regard.bench.overhead", "cpu"),
    "recipe-throughput": ("regard.bench.recipe_throughput", "cpu"),
    "feature-cpu": ("regard.bench.feature_cpu", "cpu"),
    "graph-cpu": ("regard.bench.graph_cpu", "cpu"),
    "graph-gpu": ("regard.bench.graph_gpu", "cuda"),
    "packed": ("regard.bench.packed", "cpu"),
    "parallel-cpu": ("regard.bench.parallel_cpu", "cpu"),
    "oversmoothing": ("regard.bench.oversmoothing", "cpu"),
    "capsules": ("regard.bench.capsules", "cpu"),
    "capsules-cost": ("regard.bench.capsules_cost", "cpu"),
    "linear-chain": ("regard.bench.linear_chain", "cpu"),
    "transformer-gpu": ("regard.bench.transformer_gpu", "cuda"),
    "reformer-memory": ("regard.bench.reformer_memory", "cpu"),
    "reformer-gpu": ("regard.bench.reformer_gpu", "cuda"),
    "duplication": ("regard.bench.duplication", "cuda"),
    "shakespeare": ("regard.bench.shakespeare", "data"),
    "alignment-error": ("regard.bench.alignment_error", "data"),
    "cost-curves": ("regard.bench.cost_curves", "cpu"),
    "linformer-table": ("regard.bench.linformer_table", "cuda"),
    "tune": ("regard.bench.tune", "tune"),
}


def run(
    name: str,
    results: Path | None,
    command: str,
    say: Callable[[str], None] = print,
    seconds: float | None = None,
) -> None:
    """Answer a question: measure, append each row to a stored file as soon as it is there, and print the table.

    Args:
        name: of the question.
        results: folder of the stored results; None to store nothing.
        command: what was typed, kept beside the figures.
        say: what prints.
        seconds: time to train, for those questions that train; for the others, time that all of it may take.
    """
    if name not in QUESTIONS:
        raise ValueError(refusal("name", repr(name), "a benchmark", nearest(name, QUESTIONS)))
    import torch

    from regard.bench.measure import machine, store, table

    rows: list[Row] = []
    module, device = QUESTIONS[name]
    if device in ("cuda", "tune") and not torch.cuda.is_available():
        raise ValueError(
            refusal("name", repr(name), "a benchmark that this machine can run", "It needs a CUDA device.")
        )
    ask = import_module(module).rows
    trains = "seconds" in signature(ask).parameters
    here = machine()
    for row in ask(seconds=seconds) if trains and seconds is not None else _in_time(ask(), seconds, say):
        rows.append(row)
        say(f"  {row.case}: {row.what}{f' ({row.note})' if row.note else ''}")
        if results is not None:
            # At once: a run that is cut off keeps what it had.
            store([row], results / f"{name}.jsonl", command, here)
    say(table(rows))
    if results is not None:
        say(f"stored: {results / f'{name}.jsonl'}")
    draw = getattr(import_module(module), "draw", None)
    # A figure shows all of a question.
    if draw is not None and results is not None and (trains or seconds is None):
        say(f"figure: {draw(rows, results)}")


def _in_time(rows: Iterable[Row], seconds: float | None, say: Callable[[str], None]) -> Iterator[Row]:
    """Rows while there is time for one more, if it takes no longer than the longest so far."""
    begin = last = time.perf_counter()
    longest = 0.0
    for row in rows:
        yield row
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
        if seconds is not None and now - begin + longest > seconds:
            say(f"  no time for more lines in {seconds:g} s")
            return
