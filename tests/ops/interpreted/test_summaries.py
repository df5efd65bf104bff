"""Summaries from one pass of a kernel."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.observe import fields
from regard.ops import dispatch, fused, summaries
from regard.ops.triton import summaries as kernels
from tests.ops.summary_cases import CASES, Case, check


@pytest.fixture(autouse=True)
def _kernels_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summaries, "why_not_fused", lambda call: None)
    monkeypatch.setattr(fused, "why_not_kernel", lambda call: None)


@pytest.mark.parametrize("along", [True, False], ids=["along", "apart"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_exact_as_panels(case: Case, along: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, "cpu", monkeypatch, along)


@pytest.mark.parametrize("along", [True, False], ids=["along", "apart"])
@pytest.mark.parametrize(("scale", "by_sines"), [(1.0, True), (40.0, False)])
def test_half_precision_takes_the_sine_basis_where_it_covers_the_range(
    scale: float, by_sines: bool, along: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    skips: list[bool] = []
    real = kernels._received
    monkeypatch.setattr(kernels, "_received", lambda *a: skips.append(bool(a[-1])) or real(*a))
    check(Case(dtype=torch.bfloat16, scale=scale), "cpu", monkeypatch, along)
    assert skips == [by_sines] * 2


def test_rows_are_summed_up_where_contexts_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rows_kernel", "keys_kernel"):
        monkeypatch.setattr(kernels, name, None)
    attention, x = rg.Attention("additive", query_dim=3, key_dim=3, hidden_dim=4, impl="fused"), torch.randn(2, 5, 3)
    region = torch.tensor([True, False, False, True, False])
    with rg.record(attention, "entropy", "log_sum_exp", "expected_position", topk=2, mass_on=region) as trace:
        attention(x, x).sum().backward()
    assert attention.score.w.grad.isfinite().all()
    with rg.execution("dense"), rg.record(attention) as exact:
        attention(x, x)
    for name in ("entropy", "log_sum_exp", "expected_position"):
        torch.testing.assert_close(getattr(trace, name)(), getattr(exact, name)().detach())
    torch.testing.assert_close(trace.mass_on(), exact.mass_on(region).detach())
    for mine, theirs in zip(trace.topk(), exact.topk(2), strict=True):
        torch.testing.assert_close(mine, theirs.detach())


def test_who_asks_second_for_something_else_has_a_pass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, x = rg.Attention("additive", query_dim=3, key_dim=3, hidden_dim=4, impl="fused"), torch.randn(2, 5, 3)
    ways: list[str] = []
    real = fields.summarised
    monkeypatch.setattr(fields, "summarised", lambda call, wanted: ways.append(*wanted) or real(call, wanted))
    with rg.record(attention, "entropy") as first, rg.record(attention, topk=2) as second:
        with rg.record(attention, "entropy") as third:
            attention(x, x)
    assert ways == ["topk"]
    assert torch.equal(first.entropy(), third.entropy())
    with rg.execution("dense"), rg.record(attention) as exact:
        attention(x, x)
    torch.testing.assert_close(second.topk()[0], exact.topk(2)[0].detach())


def test_parts_of_a_call_do_not_answer_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_is_small", lambda call: False)
    attention, x = rg.Attention("additive", query_dim=3, key_dim=3, hidden_dim=4), torch.randn(70, 3)
    mask = rg.Packed([35, 35])
    assert rg.explain_dispatch(attention, x, x, mask=mask).path == "packed"
    with rg.record(attention, "entropy") as trace:
        attention(x, x, mask=mask)
    with rg.execution("dense"), rg.record(attention) as exact:
        attention(x, x, mask=mask)
    torch.testing.assert_close(trace.entropy(), exact.entropy().detach())


def test_what_is_to_be_differentiated_takes_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "summarised", lambda *_: pytest.fail("a kernel"))
    attention, x = rg.Attention("additive", query_dim=3, key_dim=3, hidden_dim=4), torch.randn(1, 5, 3)
    with rg.record(attention) as trace:
        attention(x, x)
    trace.entropy().sum().backward()
    assert attention.score.w.grad.isfinite().all()
    with rg.record(attention, "entropy", "weights"):
        attention(x, x)


def test_nan_is_seen_and_is_not_a_row_with_nothing_to_read() -> None:
    attention, x = rg.Attention("additive", query_dim=3, key_dim=3, hidden_dim=4, impl="fused"), torch.randn(1, 5, 3)
    broken = x.clone()
    broken[0, 1] = float("nan")
    region = torch.tensor([True, False, False, True, False])
    for execution in ("fused", "blockwise", "dense"):
        with rg.execution(execution), rg.record(attention, "entropy", topk=2, mass_on=region) as trace:
            attention(broken, x)
        for found in (trace.entropy(), trace.mass_on(), trace.topk()[0].sum(-1)):
            assert found.isnan().tolist() == [[False, True, False, False, False]], execution


def test_what_was_recorded_may_be_changed_before_the_backward() -> None:
    attention, x = rg.Attention("additive", query_dim=3, key_dim=3, hidden_dim=4, impl="fused"), torch.randn(1, 5, 3)
    with rg.record(attention, "log_sum_exp") as trace:
        context = attention(x, x)
    trace.log_sum_exp().zero_()
    context.sum().backward()
    assert attention.score.w.grad.isfinite().all()
