"""Everybody who answers a question on the same inputs, forward and in a training step; who runs out of memory has a row that says so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from regard.bench.measure import Row, cuda_peak_mib, relative_error, seconds

Formula = Callable[..., Tensor]


def measured(
    question: str,
    case: str,
    what: str,
    run: Callable[[], object],
    device: str = "cuda",
    budget: float = 0.3,
    error: Callable[[], float] | None = None,
) -> Row:
    """Time, peak memory and error of a run."""
    try:
        found = None if error is None else error()
        time = seconds(run, device, budget)
        return Row(question, case, what, time, cuda_peak_mib(run) if device == "cuda" else None, found)
    except torch.OutOfMemoryError:
        pass
    # Here, where the exception no longer holds what was allocated.
    torch.cuda.empty_cache()
    return Row(question, case, what, note="out of memory")


def beside(
    question: str,
    case: str,
    who: Mapping[str, Formula],
    xs: Sequence[Tensor],
    learned: Sequence[Tensor] = (),
    error: Callable[[Tensor], float] | None = None,
    device: str = "cuda",
    budget: float = 0.3,
    graphs: Collection[str] = (),
) -> Iterator[Row]:
    """Rows of all: forward, with an error of its result, and a training step down to the inputs and what is learned.

    Those who are named in `graphs` are measured as CUDA graphs, too.
    """
    wanted = [*(x for x in xs if x.requires_grad), *learned]
    grad = None
    for what, run in who.items():

        def forward(run: Formula = run) -> Tensor:
            return run(*xs)

        def off(forward: Callable[[], Tensor] = forward) -> float:
            assert error is not None
            return error(forward())

        with torch.no_grad():
            row = measured(question, f"{case}, forward", what, forward, device, budget, None if error is None else off)
            if grad is None and row.seconds is not None:
                grad = torch.randn_like(forward())
        yield row

        def step(forward: Callable[[], Tensor] = forward, grad: Tensor | None = grad) -> None:
            torch.autograd.grad(forward(), wanted, grad, allow_unused=True)

        if row.seconds is None:
            yield Row(question, f"{case}, training step", what, note="out of memory")
        else:
            yield measured(question, f"{case}, training step", what, step, device, budget)
        if what in graphs and row.seconds is not None:
            yield from as_graphs(question, case, what, forward, step, device, budget)


def as_graphs(
    question: str,
    case: str,
    what: str,
    forward: Callable[[], object],
    step: Callable[[], object],
    device: str = "cuda",
    budget: float = 0.3,
) -> Iterator[Row]:
    """Forward and training step as CUDA graphs: of short sequences launching takes longer than computing."""
    with torch.no_grad():
        row = _as_graph(question, f"{case}, forward, CUDA graph", what, forward, device, budget)
    yield row
    yield _as_graph(question, f"{case}, training step, CUDA graph", what, step, device, budget)


def _as_graph(question: str, case: str, what: str, run: Callable[[], object], device: str, budget: float) -> Row:
    try:
        replay = as_graph(run)
    except RuntimeError as error:
        # Who waits for the device, or has no room, cannot be recorded.
        note = f"no CUDA graph: {str(error).splitlines()[0]}"
    else:
        return measured(question, case, what, replay, device, budget)
    torch.cuda.empty_cache()
    return Row(question, case, what, note=note)


def as_graph(run: Callable[[], object]) -> Callable[[], object]:
    """A run that is recorded as a CUDA graph, which launches all of it at once: what is left is the time of the kernels."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def first_queries(exact: Tensor) -> Callable[[Tensor], float]:
    """Error of the first entry's first queries, (n, d) in float64: all would take longer than what is measured."""

    def error(found: Tensor) -> float:
        while found.dim() > 2:
            found = found[0]
        return relative_error(found[: len(exact)], exact)

    return error
