"""Activated bilinear attention by the kernels under every alignment: the weights, draws and gradients of the dense execution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.ops.activated import activated_kernel
from regard.ops.dense import dense
from regard.ops.ready import kernel_problem

F16, F32 = torch.float16, torch.float32
B, D, DV = 2, 5, 7


@dataclass
class Case:
    align: Callable[[], rg.Alignment]
    dtype: torch.dtype = F32
    nq: int = 19
    n: int = 37
    mask: Any = None
    dropout: float = 0.0
    training: bool = True
    heads: tuple[int, ...] = ()
    act: str = "gelu"
    score: Callable[[], rg.Score] | None = None  # activated general when not given

    def module(self, dtype: torch.dtype) -> rg.Attention:
        torch.manual_seed(1)
        activated = rg.ActivatedGeneral(D, D, activation=self.act, heads=self.heads)
        with torch.no_grad():
            activated.b.fill_(0.3)
        attend = rg.Attention(activated if self.score is None else self.score(), self.align(), dropout=self.dropout)
        attend.load_state_dict({name: p.to(self.dtype) for name, p in attend.state_dict().items()})
        return attend.to(self.dtype).to(dtype).train(self.training)

    def inputs(self) -> list[Tensor]:
        torch.manual_seed(2)
        shapes = ((self.nq, D), (self.n, D), (self.n, DV))
        return [torch.randn(B, *self.heads, *shape).to(self.dtype) for shape in shapes]

    def results(self, run: Callable[..., Tensor], dtype: torch.dtype, grad: Tensor) -> dict[str, Tensor]:
        """Context and gradients by name; every run draws the same numbers."""
        attend = self.module(dtype)
        leaves = [x.to(dtype).requires_grad_() for x in self.inputs()]
        torch.manual_seed(3)
        context = run(attend.call(*leaves, mask=self.mask))
        wanted = {**dict(zip(("query", "key", "value"), leaves, strict=True)), **dict(attend.named_parameters())}
        found = torch.autograd.grad(context, list(wanted.values()), grad.to(context.dtype), allow_unused=True)
        return {"context": context.detach(), **dict(zip(wanted, found, strict=True))}


def pairs() -> Tensor:
    torch.manual_seed(0)
    mask = torch.rand(B, 19, 37) > 0.4
    mask[:, 2] = False
    mask[:, 3, :30] = False
    return mask


CASES = {
    "dropout": Case(rg.Soft, dropout=0.3, mask=pairs()),
    "dropout, causal, two leading axes": Case(rg.Soft, dropout=0.5, mask=rg.Causal(), heads=(2,), n=21),
    "dropout, learned temperature": Case(lambda: rg.Soft(0.5, learnable=True), dropout=0.2),
    "hard": Case(rg.Hard, mask=pairs(), dropout=0.4),
    "hard, evaluation": Case(rg.Hard, training=False, mask=rg.Causal()),
    "hard, reinforce": Case(lambda: rg.Hard("reinforce"), dropout=0.3),
    "hard, gumbel": Case(lambda: rg.Hard("gumbel", temperature=0.7)),
    "hard, gumbel straight through": Case(lambda: rg.Hard("gumbel-straight-through", temperature=0.7), mask=pairs()),
    "local": Case(lambda: rg.Local(3), mask=pairs()),
    "local, renormalised, dropout": Case(lambda: rg.Local(4, renormalize=True), dropout=0.3),
    "local, no Gaussian, causal": Case(lambda: rg.Local(2.5, gaussian=False), mask=rg.Causal(), n=11),
    "local, predicted": Case(lambda: rg.Local(3, "predictive", query_dim=D), mask=pairs(), dropout=0.2, heads=()),
    "local, predicted, windows that hold nothing": Case(
        lambda: rg.Local(2, "predictive", query_dim=D), mask=rg.Where(lambda i, j: j % 7 < 2), dropout=0.2
    ),
    "local, predicted, renormalised": Case(
        lambda: rg.Local(2, "predictive", renormalize=True, query_dim=D), heads=(2,)
    ),
    "local, predicted, several blocks": Case(
        lambda: rg.Local(3, "predictive", query_dim=D), nq=75, n=101, dropout=0.2, heads=(2,)
    ),
    "local, predicted, several blocks, causal": Case(
        lambda: rg.Local(2, "predictive", query_dim=D), nq=80, n=80, mask=rg.Causal()
    ),
    "local, predicted, several blocks, most windows hold nothing": Case(
        lambda: rg.Local(2, "predictive", query_dim=D), nq=75, n=101, mask=rg.Where(lambda i, j: (i + j) % 31 < 2)
    ),
    "local, predicted, the nearest key alone": Case(
        lambda: rg.Local(0, "predictive", query_dim=D), nq=75, n=101, mask=rg.Causal(), dropout=0.2
    ),
    "local, several blocks": Case(lambda: rg.Local(4), nq=101, n=75),
    "local, positions that go back": Case(
        lambda: rg.Local(2, renormalize=True), nq=75, n=75, mask=rg.Packed([30, 5, 40], queries=[10, 50, 15])
    ),
    "float16, local, predicted, several blocks": Case(
        lambda: rg.Local(3, "predictive", query_dim=D), dtype=F16, nq=75, n=101
    ),
    "dot, dropout": Case(rg.Soft, dropout=0.3, mask=rg.Causal(), score=rg.ScaledDot),
    "dot, hard": Case(rg.Hard, score=rg.ScaledDot, mask=pairs()),
    "distance, local": Case(lambda: rg.Local(4), score=lambda: rg.NegativeL2(2.0)),
    "distance in float16": Case(rg.Soft, score=lambda: rg.NegativeL2(2.0), dtype=F16),
    "float16, hard": Case(rg.Hard, dtype=F16),
    "float16, local": Case(lambda: rg.Local(3), dtype=F16, dropout=0.2),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_as_exact_as_the_dense_execution(name: str) -> None:
    case = CASES[name]
    assert kernel_problem("bilinear_attend", case.act) == ""
    torch.manual_seed(4)
    grad = torch.randn(B, *case.heads, case.nq, DV).to(case.dtype)
    exact, plain = (case.results(dense, dtype, grad) for dtype in (torch.double, case.dtype))
    ours, again = (case.results(activated_kernel, case.dtype, grad) for _ in range(2))
    eps = torch.finfo(case.dtype).eps
    rows = (grad.double() * exact["context"]).abs().sum()
    for what, x in ours.items():
        reference = exact[what]
        if reference is None or x is None:
            # What learns nothing gets no gradient, or zeros.
            other = x if reference is None else reference
            assert other is None or not other.any(), what
            continue
        assert torch.equal(x, again[what]), f"{what}: two runs differ"
        assert x.isfinite().all(), what
        noise = rows if what in ("score.b", "align.log_temperature") else 0.0
        distance = float((x.double() - reference).norm())
        rival = plain[what].to(case.dtype).double()
        budget = float(2 * ((rival - reference).norm() + eps * (reference.norm() + noise)))
        assert distance <= budget, f"{what}: distance {distance:.2e}, budget {budget:.2e}, norm {reference.norm():.2e}"


def test_nan_is_seen_by_a_choice() -> None:
    assert kernel_problem("bilinear_attend", "gelu") == ""
    for gradient in ("straight-through", "reinforce"):
        attend = rg.Attention(rg.ActivatedGeneral(D, D), rg.Hard(gradient))
        x = [torch.randn(1, 3, D), torch.randn(1, 5, D), torch.randn(1, 5, DV)]
        x[1][0, 2] = torch.nan
        torch.manual_seed(0)
        expected = dense(attend.call(*x))
        torch.manual_seed(0)
        got = activated_kernel(attend.call(*x))
        assert torch.equal(got.isnan(), expected.isnan()), gradient


def test_the_operator_is_registered_as_torch_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    assert kernel_problem("bilinear_attend", "gelu") == ""
    operator = torch.ops.regard.bilinear_attention
    monkeypatch.setattr(
        "regard.ops.triton.bilinear_attend.bilinear_attention", lambda *x: seen.append(x) or operator(*x)
    )
    for align in (rg.Hard, lambda: rg.Local(3, "predictive", query_dim=D)):
        case = Case(align, nq=5, n=7)
        case.results(activated_kernel, F32, torch.ones(B, case.nq, DV))
    for operands in seen:
        leaves = [x.detach().requires_grad_() if isinstance(x, Tensor) and k < 7 else x for k, x in enumerate(operands)]
        torch.library.opcheck(operator, tuple(leaves))
