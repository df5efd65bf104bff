"""What a run writes down while it trains: a table of its evaluations, and TensorBoard's files where that is installed."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regard._files import whole

TENSORBOARD = "tensorboard"


def write_curve(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A row an evaluation, whole or not at all."""
    names = list(dict.fromkeys(name for row in rows for name in row))

    def write(draft: Path) -> None:
        with draft.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, names)
            table.writeheader()
            table.writerows(rows)

    whole(path, write)


def read_curve(path: Path) -> list[dict[str, float]]:
    """What was written, as numbers."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {name: int(value) if name == "update" else float(value) for name, value in row.items() if value}
            for row in csv.DictReader(file)
        ]


class Events:
    """TensorBoard's files of a run; nothing happens where TensorBoard is not installed.

    Args:
        folder: of the run.
        first: the update after which it goes on; what an earlier process wrote of later ones is taken back.
    """

    def __init__(self, folder: Path, first: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.writer: Any = None
        else:
            self.writer = SummaryWriter(str(folder / TENSORBOARD), purge_step=first + 1)

    def write(self, update: int, values: Mapping[str, float]) -> None:
        """Numbers of an update."""
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, update)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
