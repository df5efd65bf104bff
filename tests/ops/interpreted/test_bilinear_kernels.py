"""Activated bilinear attention by the kernels against float64, within budgets that the same formula in the same dtype sets."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from regard.ops.activations import activation
from regard.ops.triton.activate import supports
from regard.ops.triton.align import Align
from regard.ops.triton.bilinear_attend import bilinear_attention
from tests.ops.autograd_cases import check_gradients

B, H = 2, 2
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
NAMES = ("q", "k", "v", "offset", "key_bias", "rate")


@dataclass
class Case:
    act: str = "tanh"
    dtype: torch.dtype = F32
    width: int = 5
    value_width: int = 7
    nq: int = 19
    n: int = 37
    causal: bool = False
    mask: str = ""
    offset: bool = True
    key_bias: bool = False
    learned: bool = False
    rate: float = 1.0
    spread: float = 1.0

    def inputs(self) -> dict[str, Tensor]:
        torch.manual_seed(self.n + 3 * self.width)
        shapes = ((self.nq, self.width), (self.n, self.width), (self.n, self.value_width))
        # Heads after tokens, as projections leave them.
        q, k, v = (torch.randn(B, size, H, wide).mul(self.spread).movedim(1, 2).to(self.dtype) for size, wide in shapes)
        found = {"q": q, "k": k, "v": v}
        if self.offset:
            found["offset"] = torch.randn(B, H)
        if self.key_bias:
            found["key_bias"] = torch.randn(B, H, self.n)
        if self.learned:
            found["rate"] = torch.tensor([self.rate])
        return found

    def allowed(self) -> Tensor | None:
        if not self.mask:
            return None
        shape = {"pairs": (B, H, self.nq, self.n), "keys": (B, 1, 1, self.n), "heads": (1, H, self.nq, 1)}[self.mask]
        mask = torch.rand(shape) > 0.3
        mask[..., 0, :] = mask[..., 0, :] & (self.mask != "pairs")
        return mask

    def numbers(self) -> tuple[bool, float, float, str]:
        return self.causal, 0.5, self.rate, self.act


def formula(case: Case, mask: Tensor | None, x: dict[str, Tensor]) -> Tensor:
    """The equation, in the dtype of its inputs."""
    z = 0.5 * (x["q"] @ x["k"].mT)
    z = z + x["offset"][..., None, None] if "offset" in x else z
    e = activation(case.act)(z)
    e = e + x["key_bias"][..., None, :] if "key_bias" in x else e
    e = e * x.get("rate", case.rate)
    allowed = torch.ones_like(e, dtype=torch.bool) if mask is None else mask.expand(e.shape)
    if case.causal:
        allowed = allowed & torch.ones(case.nq, case.n, dtype=torch.bool).tril(case.n - case.nq)
    alive = allowed.any(-1, keepdim=True)
    weights = torch.where(alive, e.masked_fill(~allowed, -torch.inf), 0.0).softmax(-1)
    return torch.where(allowed, weights, 0.0) @ x["v"]


def with_gradients(function, inputs: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    out = function(leaves)
    found = torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype))
    return {"context": out.detach(), **dict(zip(leaves, found, strict=True))}


def operands(case: Case, mask: Tensor | None, x: dict[str, Tensor]) -> tuple[object, ...]:
    seed, position, numbers, kinds = Align().flat()
    tensors = (*(x.get(name) for name in NAMES), position, None if mask is None else mask.to(torch.uint8), seed)
    return (*tensors, *case.numbers(), numbers, kinds)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written is NaN."""

    def filled(make):
        def poisoned(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        return poisoned

    monkeypatch.setattr(torch, "empty", filled(torch.empty))
    monkeypatch.setattr(Tensor, "new_empty", filled(Tensor.new_empty))


CASES = {
    "tanh": Case(),
    "one pair": Case(nq=1, n=1, width=1, value_width=1),
    "causal, keys before queries": Case(act="gelu", nq=11, n=67, causal=True, key_bias=True),
    "causal, queries without keys": Case(act="sigmoid", nq=41, n=34, causal=True),
    "mask of pairs, a row without any": Case(act="relu", mask="pairs", key_bias=True, learned=True, rate=1.7),
    "mask of keys": Case(act="leaky_relu:0.1", mask="keys", offset=False, rate=0.3),
    "mask of rows and heads, causal": Case(act="identity", mask="heads", causal=True),
    "whole tiles": Case(nq=32, n=64, width=16, value_width=16),
    "temperature so low that scores are not bounded": Case(rate=9.0),
    "soft cap": Case(act="tanh:3.0", rate=1.3, learned=True),
    "float16": Case(dtype=F16, mask="pairs"),
    "float16, causal": Case(act="leaky_relu:0.1", dtype=F16, causal=True, key_bias=True),
    "float16, gradients far below one": Case(act="gelu", dtype=F16, nq=7, n=131),
    "bfloat16": Case(dtype=BF16, causal=True),
    "saturated": Case(spread=6.0, dtype=F16),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_as_exact_as_the_formula_in_the_same_dtype(name: str) -> None:
    case = CASES[name]
    inputs, mask = case.inputs(), case.allowed()
    grad = torch.randn(B, H, case.nq, case.value_width).to(case.dtype)
    if "far below" in name:
        grad = grad * 2.0**-13
    exact = with_gradients(lambda x: formula(case, mask, x), {k: x.double() for k, x in inputs.items()}, grad)
    plain = with_gradients(lambda x: formula(case, mask, x), {k: x.float() for k, x in inputs.items()}, grad)
    eager, registered = (
        with_gradients(lambda x, run=run: run(*operands(case, mask, x))[0], inputs, grad)
        for run in (bilinear_attention, torch.ops.regard.bilinear_attention)
    )
    eps = torch.finfo(case.dtype).eps
    # Contexts are rounded before do · o; what is summed over all pairs has that error, whatever cancels in the sum.
    rows = (grad.double() * exact["context"]).abs().sum()
    noise = {"offset": rows * case.rate, "rate": 3 * rows}
    for what, x in eager.items():
        assert torch.equal(x, registered[what]), f"{what}: two runs differ"
        assert x.isfinite().all(), what
        reference, rival = exact[what], plain[what].to(x.dtype).double()
        natural = reference.norm() + noise.get(what, 0.0) / (B * H) ** 0.5
        if case.n == 1 and what in ("q", "k"):
            # One key alone teaches the scores nothing: what is left is the rounding of do · v.
            natural = (grad.double().norm() * inputs["v"].double().norm()) * inputs["q"].double().norm()
        budget = float(2 * ((rival - reference).norm() + eps * natural))
        assert float((x.double() - reference).norm()) <= budget, (
            f"{what}: distance {float((x.double() - reference).norm()):.2e}, budget {budget:.2e}"
        )
    if case.mask == "pairs":
        assert (eager["context"][:, :, 0] == 0).all()
        assert (eager["q"][:, :, 0] == 0).all()


@pytest.mark.parametrize("operator", [bilinear_attention, torch.ops.regard.bilinear_attention])
def test_log_sum_exp_and_its_gradient(operator) -> None:
    case = Case(nq=11, n=13, key_bias=True)
    x = {name: t.requires_grad_() for name, t in case.inputs().items()}
    lse = operator(*operands(case, None, x))[1]
    e = torch.tanh(0.5 * x["q"].double() @ x["k"].double().mT + x["offset"].double()[..., None, None])
    exact = (e + x["key_bias"].double()[..., None, :]).logsumexp(-1)
    assert (lse - exact).norm() <= 1e-6 * exact.norm()
    wanted = [x[name] for name in ("q", "k", "offset", "key_bias")]
    for ours, theirs in zip(
        torch.autograd.grad(lse.sum(), wanted), torch.autograd.grad(exact.sum(), wanted), strict=True
    ):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_what_is_shared_is_not_copied_and_nan_is_seen() -> None:
    case = Case(offset=False)
    x = case.inputs()
    shared = {"q": x["q"][:1, :1].expand(B, H, -1, -1), "k": x["k"], "v": x["v"][:, :1].expand(-1, H, -1, -1)}
    context = bilinear_attention(*operands(case, None, shared))[0]
    torch.testing.assert_close(context, formula(case, None, shared))
    shared["k"] = x["k"].clone()
    shared["k"][0, 1, 3] = torch.nan
    context = bilinear_attention(*operands(case, None, shared))[0]
    assert context[0, 1].isnan().all()
    assert context[1].isfinite().all()


def test_the_operator_is_registered_as_torch_asks() -> None:
    case = Case(nq=5, n=7, key_bias=True, learned=True)
    x = {name: t.requires_grad_() for name, t in case.inputs().items()}
    torch.library.opcheck(torch.ops.regard.bilinear_attention, operands(case, None, x))


@pytest.mark.parametrize("operator", [bilinear_attention, torch.ops.regard.bilinear_attention])
def test_second_derivatives_are_refused_by_name(operator) -> None:
    case = Case(nq=5, n=7)
    x = {name: t.requires_grad_() for name, t in case.inputs().items()}
    out = operator(*operands(case, None, x))[0]
    (dq,) = torch.autograd.grad(out.sum(), x["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives.*impl='dense'"):
        dq.sum().backward()


def test_several_gradients_at_once_and_none() -> None:
    case = Case(nq=5, n=7)
    x = {name: t.requires_grad_() for name, t in case.inputs().items()}
    check_gradients(bilinear_attention(*operands(case, None, x))[0], [x[name] for name in ("q", "k", "v")])


def test_known_activations() -> None:
    assert all(supports(name) for name in ("tanh", "tanh:5.0", "sigmoid", "relu", "leaky_relu:0.2", "gelu", "identity"))
    assert not any(supports(name) for name in ("elu:1.0", "sin"))
