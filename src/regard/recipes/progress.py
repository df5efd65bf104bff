"""The bar of a training: updates, time left, the loss and the metrics of the last evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any


class Progress:
    """A bar over updates.

    Args:
        name: what is trained.
        total: updates at most.
        shown: whether there is anything to see.
    """

    def __init__(self, name: str, total: int, *, shown: bool = True) -> None:
        self.bar: Any = None
        if not shown:
            return
        from rich import progress

        self.bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[seen]}"),
        )
        self.task = self.bar.add_task(name, total=total, seen="")

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, update: int, seen: Mapping[str, float]) -> None:
        """Where training is, and how well it goes."""
        if self.bar is not None:
            said = "  ".join(f"{name} {value:.4g}" for name, value in seen.items())
            self.bar.update(self.task, completed=update, seen=said)
