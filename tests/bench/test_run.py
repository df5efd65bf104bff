"""A run keeps every row as soon as it has it, ends in time, and goes on where a peer runs out of memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import regard.bench as bench
from regard.bench.beside import beside, measured
from regard.bench.measure import Row


def asked(monkeypatch: pytest.MonkeyPatch, rows, **more: object) -> None:
    monkeypatch.setitem(bench.QUESTIONS, "asked", ("nowhere", "cpu"))
    monkeypatch.setattr(bench, "import_module", lambda name: SimpleNamespace(rows=rows, **more))


def stored(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "asked.jsonl").read_text().splitlines()]


def test_a_run_that_is_cut_off_keeps_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[Row]:
        yield Row("asked", "first", "regard", 1.0)
        assert [row["case"] for row in stored(tmp_path)] == ["first"], "stored before the next is measured"
        yield Row("asked", "second", "regard", 2.0, note="as noted")
        raise KeyboardInterrupt

    asked(monkeypatch, rows)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        bench.run("asked", tmp_path, "regard bench asked", said.append)
    first, second = stored(tmp_path)
    assert (first["case"], second["case"]) == ("first", "second")
    # Writing the first row must not make the commit of the second look changed.
    assert first["commit"] == second["commit"]
    assert said == ["  first: regard", "  second: regard (as noted)"]


def test_a_run_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])

    def rows() -> Iterator[Row]:
        for k, cost in enumerate((2.0, 5.0, 3.0, 1.0, 1.0)):
            clock[0] += cost
            yield Row("asked", str(k), "regard", cost)

    drawn: list[int] = []
    asked(monkeypatch, rows, draw=lambda found, folder: drawn.append(len(found)))
    # After 10 seconds another row may take 5, as one did.
    for limit, expected in ((14.0, 3), (None, 5), (1.0, 1)):
        path = tmp_path / str(limit)
        bench.run("asked", path, "", lambda text: None, limit)
        assert len(stored(path)) == expected
    assert drawn == [5], "a figure shows all of a question"


def test_time_to_train_is_handed_to_who_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def rows(seconds: float = 100.0) -> Iterator[Row]:
        given.append(seconds)
        yield from (Row("asked", str(k), "regard", 1.0) for k in range(3))

    asked(monkeypatch, rows)
    bench.run("asked", tmp_path, "", lambda text: None, 0.001)
    assert given == [0.001]
    assert len(stored(tmp_path)) == 3


def test_who_runs_out_of_memory_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("not enough")

    def too_large_to_learn(x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("not enough")
        return 2 * x

    x = torch.randn(3, requires_grad=True)
    who = {"eager": too_large, "compiled": too_large_to_learn, "regard": lambda x: 2 * x}
    rows = list(beside("asked", "case", who, [x], (), lambda found: 0.5, "cpu", 0.0))
    found = [(row.case, row.what, row.seconds is None, row.error, row.note) for row in rows]
    assert found == [
        ("case, forward", "eager", True, None, "out of memory"),
        ("case, training step", "eager", True, None, "out of memory"),
        ("case, forward", "compiled", False, 0.5, ""),
        ("case, training step", "compiled", True, None, "out of memory"),
        ("case, forward", "regard", False, 0.5, ""),
        ("case, training step", "regard", False, None, ""),
    ]
    assert torch.is_grad_enabled()


def test_other_errors_are_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        measured("asked", "case", "regard", lambda: 1 / 0, "cpu", 0.0)
