"""What is written by hand is what the library computes, and every row is measured."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.bench import QUESTIONS, library_gpu
from tests.cases import assert_same, scrambled


@pytest.mark.parametrize("kind", library_gpu.KINDS)
def test_by_hand_is_the_score(kind: str) -> None:
    make, by_hand = library_gpu.KINDS[kind]
    attend = scrambled(rg.Attention(make()))
    q, k, v = (torch.randn(2, 3, n, library_gpu.WIDTH, dtype=torch.float64) / 8 for n in (5, 7, 7))
    with rg.execution("dense"):
        assert_same(by_hand(attend.score, q, k, v), attend(q, k, v))


@pytest.mark.parametrize("kind", ["scaled dot", "biased general"])
def test_rows(kind: str) -> None:
    rows = list(library_gpu.compared(kind, 11, "cpu", torch.float32, (1, 2), 0.0))
    assert [row.what for row in rows[::2]] == ["regard", "SDPA and the projection by hand", "SDPA alone"]
    assert [row.case.rsplit(", ", 1)[1] for row in rows] == ["forward", "training step"] * 3
    assert all(row.seconds is not None and row.seconds > 0 for row in rows)
    assert max(row.error for row in rows[:3:2] if row.error is not None) < 0.01
    assert (rows[4].error is None) == (kind != "scaled dot")
    assert QUESTIONS[library_gpu.QUESTION] == ("regard.bench.library_gpu", "cuda")
