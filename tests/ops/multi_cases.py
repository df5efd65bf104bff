"""Multi-dimensional calls by a kernel beside the dense execution, with budgets computed from float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.ops.activations import activation
from regard.ops.call import Call
from regard.ops.dense import dense
from regard.ops.forms import AdditiveForm

Execution = Callable[[Call], Tensor]
NAMES = ("o", "da", "du", "dv", "dw")


def straight_through() -> rg.Alignment:
    return rg.Hard()


def reinforced_choice() -> rg.Alignment:
    return rg.Hard("reinforce")


def relaxed() -> rg.Alignment:
    return rg.Hard("gumbel", temperature=0.7)


def relaxed_choice() -> rg.Alignment:
    return rg.Hard("gumbel-straight-through", temperature=0.7)


def monotonic() -> rg.Alignment:
    return rg.Local(2.0)


def flat_window() -> rg.Alignment:
    return rg.Local(3, gaussian=False)


def predictive() -> rg.Alignment:
    """Of queries that are seven wide; positions between keys, so that a window of 0.3 is empty for some."""
    return rg.Local(0.3, "predictive", query_dim=7)


def predictive_normal() -> rg.Alignment:
    return rg.Local(4.5, "predictive", renormalize=True, query_dim=7)


def tempered() -> rg.Alignment:
    return rg.Soft(0.6, learnable=True)


class Given(rg.Score):
    """Queries and keys that are already projected."""

    def __init__(self, weight: Tensor | None, act: str, features: int) -> None:
        super().__init__()
        self.weight, self.activation, self.features = weight, activation(act), features

    def reduce(self, query: Tensor | None, key: Tensor) -> AdditiveForm:
        assert query is not None
        return AdditiveForm(query, key, self.weight, self.activation, multi=True)


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call; `hidden` 0 where the hidden units are the features."""

    act: str = "tanh"
    dtype: torch.dtype = torch.float32
    hidden: int = 7
    features: int = 5
    nq: int = 11
    n: int = 17
    mask: str = "none"
    align: Callable[[], rg.Alignment] = rg.Soft
    dropout: float = 0.0
    heads: bool = False  # one matrix for each leading entry
    training: bool = True

    def __str__(self) -> str:
        kind = f"{self.hidden}x{self.features}" if self.hidden else f"{self.features} units"
        dtype, sizes = str(self.dtype).removeprefix("torch."), f"{self.nq}x{self.n}"
        return f"{self.act}-{kind}-{dtype}-{sizes}-{self.mask}-{self.align.__name__}-{self.dropout}"

    def operands(self, device: str) -> list[Tensor]:
        """a, u, v, and the matrix if there is one."""
        torch.manual_seed(self.n + 3 * self.nq + 7 * self.features + 11 * self.hidden)
        width = self.hidden or self.features
        sizes = [(2, self.nq, width), (2, self.n, width), (2, self.n, self.features)]
        drawn = [torch.randn(size, device=device) for size in sizes]
        if self.hidden:
            lead = (2,) if self.heads else ()
            drawn.append(torch.randn(*lead, width, self.features, device=device) / width**0.5)
        return [x.to(self.dtype) for x in drawn]

    def bound_mask(self, device: str) -> object:
        nq, n = self.nq, self.n
        if self.mask == "pairs":
            pairs = torch.rand(2, nq, n, device=device) > 0.3
            pairs[0, nq // 2] = False
            return pairs
        padding = rg.Padding(torch.tensor([max(1, n // 2), n], device=device))
        known = {"causal": rg.Causal(), "padding": padding, "causal and padding": rg.Causal() & padding}
        return {**known, "window": rg.Window(9)}.get(self.mask)


def launches(monkeypatch: pytest.MonkeyPatch, module: Any, kernel: str) -> list[dict[str, Any]]:
    """What a kernel of a module is launched with from now on, by name."""
    function, seen = getattr(module, kernel), []

    class Recorded:
        def __getitem__(self, grid: object) -> Callable[..., object]:
            def launch(*args: object, **kwargs: object) -> object:
                seen.append(dict(zip(function.kernel.arg_names, args, strict=False)) | kwargs)
                return function[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(module, kernel, Recorded())
    return seen


def found(case: Case, operands: list[Tensor], mask: object, do: Tensor, execute: Execution) -> dict[str, Tensor]:
    """Context and gradients of everything that has one."""
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    align = case.align().to(leaves[0].device)
    torch.manual_seed(5)
    for p in align.parameters():
        p.data.copy_(torch.randn(p.shape).to(case.dtype))
    align = align.to(leaves[0].dtype)
    score = Given(leaves[3] if case.hidden else None, case.act, case.features)
    attend = rg.Attention(score, align, dropout=case.dropout).train(case.training)
    call = attend.call(*leaves[:3], mask=mask)
    if call.seed is not None:
        call = call.with_(seed=torch.tensor([7], device=call.device))
    context = execute(call).to(call.value.dtype)
    named = dict(zip(NAMES[1:], leaves, strict=False)) | dict(align.named_parameters())
    grads = torch.autograd.grad(context, list(named.values()), do.to(context.dtype), allow_unused=True)
    zeros = {name: torch.zeros_like(x) for name, x in named.items()}
    return {"o": context.detach()} | {
        name: zeros[name] if g is None else g for name, g in zip(named, grads, strict=True)
    }


def scales(operands: list[Tensor], act: str, do: Tensor) -> dict[str, float]:
    """What each quantity would measure without cancellation: the scale of the rounding within it."""
    a, u, v, *rest = (x.double() for x in operands)
    z = a[:, :, None] + u[:, None]
    h, w = activation(act)(z).abs(), rest[0].abs() if rest else None
    largest = (do.double().abs()[:, :, None] * v.abs()[:, None]).expand(*z.shape[:3], -1) / u.shape[1]
    back = largest if w is None else largest @ w.mT if w.dim() == 2 else largest @ w.mT[:, None]
    sums = {
        "o": v.abs().mean(1, keepdim=True).expand_as(do),
        "da": back.sum(2),
        "du": back.sum(1),
        "dv": largest.sum(1),
    }
    if w is not None:
        sums["dw"] = torch.einsum("bijd,bijf->bdf" if w.dim() == 3 else "bijd,bijf->df", h, largest)
    e = h if w is None else h @ w if w.dim() == 2 else h @ w[:, None]
    sums["log_temperature"] = (e * largest).sum()
    return {name: float(x.norm()) for name, x in sums.items()}


def check(case: Case, execute: Execution, device: str = "cpu") -> dict[str, Tensor]:
    """Two equal runs, finite, no further from float64 than the dense execution in the same dtype, rounding aside."""
    operands = case.operands(device)
    mask = case.bound_mask(device)
    do = torch.randn(2, case.nq, case.features, device=device).to(case.dtype)
    exact = found(case, [x.double() for x in operands], mask, do, dense)
    rival = found(case, operands, mask, do, dense)
    ours, again = (found(case, operands, mask, do, execute) for _ in range(2))
    rounding, natural = torch.finfo(case.dtype).eps, scales(operands, case.act, do)
    wrong = []
    for name, reference in exact.items():
        x = ours[name]
        assert x.dtype == rival[name].dtype, f"{name}: {x.dtype}, not {rival[name].dtype}"
        assert torch.equal(x, again[name]), f"{name}: two runs differ"
        distance, dense_distance = (float((y.double() - reference).norm()) for y in (x, rival[name]))
        floor = rounding * float(reference.norm()) + 4 * torch.finfo(torch.float32).eps * natural.get(name, 0.0)
        budget = 2 * (dense_distance + floor)
        if not distance <= budget:
            wrong.append(
                f"{name}: distance {distance:.2e} beyond {budget:.2e} (dense {dense_distance:.2e}, floor {floor:.2e})"
            )
    assert not wrong, "; ".join(wrong)
    return ours
