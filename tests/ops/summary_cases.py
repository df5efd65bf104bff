"""Summaries of additive attention by a kernel, under the interpreter or on a GPU, beside float64 and the panels of the same dtype.

They come from the pass that computes the contexts (`along`), which the fused execution has, or from one of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.observe import fields
from regard.ops import kernels

NAMES = ("entropy", "log_sum_exp", "expected_position", "mass_received")


@dataclass(frozen=True)
class Case:
    """One attention and its sizes."""

    act: str = "tanh"
    dtype: torch.dtype = torch.float32
    mask: str = "none"
    hidden: int = 7
    lead: tuple[int, ...] = (2,)
    nq: int = 19
    n: int = 71
    k: int = 3
    temperature: float = 1.0
    bias: bool = False
    scale: float = 1.0
    shared_region: bool = False

    def __str__(self) -> str:
        sizes = "x".join(str(size) for size in (*self.lead, self.nq, self.n, self.hidden))
        more = f"{'-bias' if self.bias else ''}-k{self.k}-t{self.temperature}-x{self.scale}"
        return f"{self.act}-{self.dtype}-{self.mask}-{sizes}".replace("torch.", "") + more


CASES = [
    Case(),
    Case(dtype=torch.float16, mask="pairs", k=1),
    Case(dtype=torch.bfloat16, mask="causal", k=5),
    Case("sigmoid", mask="padding", lead=(2, 3), nq=5, k=16),
    Case("relu", mask="pairs", bias=True, hidden=8),
    Case("gelu", mask="causal", nq=67, n=67, k=2),
    Case("leaky_relu", mask="pairs", lead=(), shared_region=True),
    Case("identity", nq=1, n=1, k=1),
    Case(temperature=0.5, mask="padding", bias=True),
    Case(scale=40.0, mask="pairs"),
    Case(nq=130, n=200, hidden=16, lead=(1, 2), k=8, shared_region=True),
    Case(dtype=torch.bfloat16, nq=70, n=140, hidden=40, k=5),
    Case(dtype=torch.float16, mask="padding", lead=(2, 2), nq=35, n=33, k=4, temperature=0.5),
    Case(dtype=torch.float16, mask="causal", nq=33, n=80, k=2),
    # Too wide for a sine basis.
    Case(dtype=torch.bfloat16, mask="pairs", scale=40.0),
]


def check(case: Case, device: str, monkeypatch: pytest.MonkeyPatch, along: bool = False) -> None:
    """Held to the error that panels of the same dtype have against float64."""
    torch.manual_seed(0)
    attention = rg.Attention(
        rg.Additive(6, 5, case.hidden, activation=case.act), rg.Soft(case.temperature), dropout=0.3
    ).to(device)
    query, key = case.scale * torch.randn(*case.lead, case.nq, 6), case.scale * torch.randn(*case.lead, case.n, 5)
    bias = torch.randn(case.nq, case.n).to(device) if case.bias else None
    mask: Tensor | rg.Mask | None = None
    if case.mask == "pairs":
        allowed = torch.rand(*case.lead, case.nq, case.n) > 0.4
        allowed[..., 0, :] = False
        mask = allowed.to(device)
    elif case.mask == "padding":
        mask = rg.Keys((torch.rand(*case.lead, case.n) > 0.4).to(device))
    elif case.mask == "causal":
        mask = rg.Causal()
    shape = (case.n,) if case.shared_region else (*case.lead, case.n)
    wanted = {"mass_on": (torch.rand(shape) > 0.5).to(device), "topk": case.k}
    names = tuple(name for name in NAMES if name != "log_sum_exp" or case.temperature == 1.0)
    ways: list[str] = []
    real = fields.summarised
    monkeypatch.setattr(fields, "summarised", lambda *a: ways.append("apart") or real(*a))
    left = kernels.answer
    monkeypatch.setattr(kernels, "answer", lambda *a: ways.append("along") or left(*a))

    def context(dtype: torch.dtype, impl: str) -> Tensor:
        extra = None if bias is None else bias.to(dtype)
        torch.manual_seed(1)
        with rg.execution(impl):
            return attention(query.to(device, dtype), key.to(device, dtype), mask=mask, bias=extra)

    def seen(dtype: torch.dtype, impl: str) -> rg.Trace:
        attention.to(dtype)
        unseen = context(dtype, impl)
        with rg.record(attention, *names, **wanted) as trace:
            assert torch.equal(context(dtype, impl).nan_to_num(), unseen.nan_to_num())
        return trace

    attention.to(case.dtype)
    query, key = query.to(case.dtype), key.to(case.dtype)  # so that float64 sees the same numbers
    bias = None if bias is None else bias.to(case.dtype)
    exact, plain = seen(torch.float64, "dense"), seen(case.dtype, "dense")
    assert ways == []
    found, again = (seen(case.dtype, "fused" if along else "blockwise") for _ in range(2))
    # Contexts of float16 come from a series that is not exact enough for its entropies.
    by_series = case.dtype == torch.float16 and case.act == "tanh" and not case.bias
    assert ways == ["along" if along and not by_series else "apart"] * 2
    scores = exact.log_sum_exp().double() if "log_sum_exp" in names else torch.zeros(1)
    scores = scores[scores.isfinite()]
    for name in (*names, "mass_on"):
        ours, theirs, truth = (getattr(trace, name)().double() for trace in (found, plain, exact))
        assert torch.equal(getattr(found, name)().nan_to_num(), getattr(again, name)().nan_to_num())
        assert ours.shape == truth.shape
        assert torch.equal(ours.isnan(), truth.isnan()), name
        real_ones = truth.isfinite()
        assert torch.equal(ours[~real_ones].nan_to_num(), truth[~real_ones].nan_to_num())
        error, budget = (_distance(x[real_ones], truth[real_ones]) for x in (ours, theirs))
        # Sums over keys are as exact as the scores, which are as large as their log-sum-exp.
        size = max([1.0, *(float(x.abs().max()) for x in (truth[real_ones], scores) if x.numel())])
        floor = 8 * torch.finfo(torch.float32).eps * size
        assert error <= 2 * budget + floor, f"{name}: {error:.3g}, budget {2 * budget + floor:.3g}"
    (values, keys), (truth, _), (rounded, _) = (trace.topk() for trace in (found, exact, plain))
    values, rounded = values.double(), rounded.double()
    error, budget = _distance(values, truth), _distance(rounded, truth)
    assert error <= 2 * budget + 8 * torch.finfo(torch.float32).eps, f"topk: {error:.3g}"
    assert bool((values.diff(dim=-1) <= 0).all())
    # Another key than in float64 only where its weight is as good as equal, or nothing is left to read.
    with rg.execution("dense"), rg.record(attention.double(), "weights") as trace:
        attention(
            query.to(device).double(), key.to(device).double(), mask=mask, bias=None if bias is None else bias.double()
        )
    chosen = torch.where(keys >= 0, trace.weights.gather(-1, keys.clamp(min=0)), 0.0)
    assert _distance(chosen, truth) <= 2 * max(error, budget) + 8 * torch.finfo(torch.float32).eps
    assert all(
        len(set(row)) == len(row) for row in ([k for k in row if k >= 0] for row in keys.flatten(0, -2).tolist())
    )


def _distance(x: Tensor, truth: Tensor) -> float:
    return float((x - truth).abs().max()) if x.numel() else 0.0
