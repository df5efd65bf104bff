"""The questions about kernels, asked of the interpreter with a few tokens: peers compute the same, and rows are complete."""

from __future__ import annotations

import pytest
import torch

from regard.bench import QUESTIONS, local_gpu, sparse_gpu, summaries_gpu
from regard.ops import additive, fused
from regard.ops import summaries as summaries_of

# Exactness has tests of its own; here the question is whether all compute one function.
N, SAME = 9, 0.01


@pytest.fixture(autouse=True)
def _kernels_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    real = additive.why_not_by_kernel
    monkeypatch.setattr(additive, "why_not_by_kernel", lambda device, *rest: real("cuda", *rest))
    monkeypatch.setattr(fused, "why_not_kernel", lambda call: None)
    # A few runs suffice.
    monkeypatch.setattr("regard.bench.beside.seconds", lambda run, *_: (run(), 1.0)[1])


@pytest.mark.parametrize("name", local_gpu.POSITIONS)
def test_windows(name: str) -> None:
    rows = list(local_gpu.compared(name, N, 1, 2, "cpu", torch.float32, compiled=False))
    assert [row.what for row in rows[::2]] == ["regard", "SDPA, all keys", "eager"]
    errors = {row.what: row.error for row in rows[::2]}
    assert errors["SDPA, all keys"] is None
    assert max(errors["regard"], errors["eager"]) < SAME


@pytest.mark.parametrize("name", sparse_gpu.ALIGNMENTS)
def test_sparse(name: str) -> None:
    rows = list(sparse_gpu.compared(name, N, 2, "cpu", torch.float32, compiled=False))
    assert [row.what for row in rows] == ["regard"] * 2 + ["equation"] * 2
    assert all(row.error < SAME for row in rows[::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_summaries(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summaries_of, "why_not_fused", lambda call: None)
    rows = list(summaries_gpu.compared(N, dtype, 2, "cpu"))
    exact = ["regard, exact kernel"] * 2 if dtype != torch.float32 else []
    expected = (
        ["regard"] * 2 + exact + ["regard, Gumbel-max"] * 2 + ["regard, entropy and top-k", "regard, mass received"]
    )
    assert [row.what for row in rows] == expected
    assert {row.case for row in rows} == {
        f"B2 N9 D64 {str(dtype)[6:]}, {kind}" for kind in ("forward", "training step")
    }
    assert all(row.error < SAME for row in rows[-2:])


def test_they_are_known_to_the_command_line() -> None:
    for module in (local_gpu, sparse_gpu, summaries_gpu):
        assert QUESTIONS[module.QUESTION] == (module.__name__, "cuda")
