"""Summaries from one pass of a kernel."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.observe import fields
from regard.ops import summaries
from regard.ops.triton import summaries as kernels
from tests.ops.summary_cases import CASES, Case, check


@pytest.fixture(autouse=True)
def _kernels_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summaries, "why_not_fused", lambda call: None)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_exact_as_panels(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, "cpu", monkeypatch)


@pytest.mark.parametrize(("scale", "by_sines"), [(1.0, True), (40.0, False)])
def test_half_precision_takes_the_sine_basis_where_it_covers_the_range(
    scale: float, by_sines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    skips: list[bool] = []
    real = kernels._write
    monkeypatch.setattr(kernels, "_write", lambda *a: skips.append(bool(a[-1])) or real(*a))
    check(Case(dtype=torch.bfloat16, scale=scale), "cpu", monkeypatch)
    assert skips == [by_sines] * 2


def test_what_is_to_be_differentiated_takes_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "summarised", lambda *_: pytest.fail("a kernel"))
    attention, x = rg.Attention("additive", query_dim=3, key_dim=3, hidden_dim=4), torch.randn(1, 5, 3)
    with rg.record(attention) as trace:
        attention(x, x)
    trace.entropy().sum().backward()
    assert attention.score.w.grad.isfinite().all()
    with rg.record(attention, "entropy", "weights"):
        attention(x, x)
