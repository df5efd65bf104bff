"""What does a capsule for every class cost, from 2 to 200 classes?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Generator, nn

from regard.bench.capsules import CLASSES, Loss, Topics, lines, readers
from regard.bench.measure import Row
from regard.recipes.planted import Batch

QUESTION = "capsules-cost"


def rows(classes: Sequence[int] = CLASSES, budget: float = 1.0) -> Iterator[Row]:
    """Forward and backward of a batch of 64 texts of twelve words of width 32, on one thread."""
    torch.set_num_threads(1)
    for count in classes:
        task = Topics(count)
        batch = task.draw(64, Generator().manual_seed(0))
        torch.manual_seed(0)
        for name, (model, loss) in readers(task).items():
            cost = _seconds(model, loss, batch, budget)
            size = sum(p.numel() for p in model.parameters())
            extra = {"classes": count, "parameters": size}
            case = f"{count} classes, a training step of 64 texts"
            yield Row(QUESTION, case, name, seconds=cost, note=f"{size} parameters", extra=extra)


def _seconds(model: nn.Module, loss: Loss, batch: Batch, budget: float) -> float:
    """Best processor time, to which waiting for a core does not count."""
    times: list[float] = []
    loss(model, batch).backward()
    begin = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - begin < budget:
        start = time.process_time()
        loss(model, batch).backward()
        times.append(time.process_time() - start)
    return min(times)


def draw(found: Sequence[Row], folder: Path) -> Path:
    """Time against the number of classes."""
    from matplotlib.figure import Figure

    from regard.report.figures import save

    figure = Figure(figsize=(5.0, 3.2), layout="constrained")
    axes = figure.subplots()
    lines(axes, found, lambda row: (row.extra["classes"], 1e3 * (row.seconds or 0.0)), "classes", "ms a training step")
    axes.set_xscale("log")
    axes.set_yscale("log")
    path = folder / "capsules-cost.svg"
    save(figure, path)
    return path
