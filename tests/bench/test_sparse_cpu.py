"""The benchmark of sparse alignments measures one function in several ways."""

from __future__ import annotations

import pytest

from regard.bench import QUESTIONS, sparse_cpu
from regard.ops import sparse_rows
from tests.ops.sparse_cases import TORCH, watched

# Exactness has tests of its own; here the question is whether all compute one function.
SAME = 1e-5


@pytest.fixture(autouse=True)
def _a_few_runs_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.bench.beside.seconds", lambda run, *_: (run(), 1.0)[1])


@pytest.mark.parametrize("reach", sparse_cpu.REACHES)
@pytest.mark.parametrize("name", sparse_cpu.ALPHAS)
def test_all_align_the_same(name: str, reach: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = watched(monkeypatch, TORCH)
    rows = list(sparse_cpu.aligned(name, reach, 5, 67, compiled=False))
    assert [row.what for row in rows] == ["regard"] * 2 + ["equation"] * 2 + ["entmax package"] * 2
    assert {row.case.rsplit(", ", 1)[1] for row in rows} == {"forward", "training step"}
    assert all(row.error < SAME for row in rows[::2])
    assert taken.count("gradients") == 1


@pytest.mark.parametrize("name", sparse_cpu.ALPHAS)
def test_attentions_take_the_rows_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = watched(monkeypatch, TORCH)
    rows = list(sparse_cpu.attended(name, 2, 7))
    assert [row.what for row in rows[::2]] == ["regard", "equation", "soft, blockwise"]
    assert taken.count("gradients") == 1


def test_it_is_known_to_the_command_line() -> None:
    assert QUESTIONS[sparse_cpu.QUESTION] == (sparse_cpu.__name__, "cpu")
    assert sparse_rows.__name__ == TORCH
