"""Additive soft attention by the kernels against float64, within budgets that the same formula in the same dtype sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from regard.ops.activations import activation
from regard.ops.triton import attend
from regard.ops.triton.additive_sine import Sine, plan_size
from regard.ops.triton.align import Align
from regard.ops.triton.sine_fits import FLOAT16
from tests.ops.autograd_cases import check_gradients

# Neither bias nor anything beside a softmax.
PLAIN = (None, *Align().flat())


# Weights stand in the denominators of fractions that share a reciprocal.
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda w: w,
    "none": torch.zeros_like,
    "some zero": lambda w: torch.where(torch.arange(w.shape[-1]) % 3 == 0, 0.0, w),
    "one of many": lambda w: torch.where(torch.arange(w.shape[-1]) == 5, w, 0.0),
    "of very different sizes": lambda w: w * 10.0 ** -(torch.arange(w.shape[-1]) % 12),
    "tiny": lambda w: w * 1e-30,
    "large": lambda w: w * 5,
}


@dataclass
class Case:
    act: str = "tanh"
    dtype: torch.dtype = torch.float32
    width: int = 7
    value_width: int = 5
    nq: int = 19
    n: int = 37
    heads: int = 1  # 1: one w for all; 2: one for each leading entry
    causal: bool = False
    masked: bool = True
    scale: float = 1.0
    weights: str = "normal"

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        torch.manual_seed(self.n + 3 * self.width)
        a = torch.randn(2, self.nq, self.width) * self.scale
        u = torch.randn(2, self.n, self.width) * self.scale
        w = WEIGHTS[self.weights](torch.randn(self.heads, self.width) / self.width**0.5)
        v = torch.randn(2, self.n, self.value_width)
        return a.to(self.dtype), u.to(self.dtype), w, v.to(self.dtype)

    def mask(self) -> Tensor | None:
        if not self.masked:
            return None
        mask = torch.rand(2, self.nq, self.n) > 0.3
        mask[0, 3] = False
        return mask


def formula(case: Case, mask: Tensor | None, a: Tensor, u: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """The equation, in the dtype of its inputs."""
    scores = (activation(case.act)(a[:, :, None] + u[:, None]) * w[:, None, None]).sum(-1)
    allowed = torch.ones(2, case.nq, case.n, dtype=torch.bool) if mask is None else mask
    if case.causal:
        allowed = allowed & torch.ones(case.nq, case.n, dtype=torch.bool).tril(case.n - case.nq)
    alive = allowed.any(-1, keepdim=True)
    safe = torch.where(alive, scores.masked_fill(~allowed, -torch.inf), 0.0)
    return torch.where(allowed, safe.softmax(-1), 0.0) @ v


def with_gradients(function, inputs, grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def distance(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm().clamp(min=1e-12))


F16, F32 = torch.float16, torch.float32
CASES = {
    "exact": Case(),
    "exact, every unit its own pair": Case(width=6, nq=33, n=33, causal=True),
    "exact, one w a head": Case(heads=2, masked=False),
    "exact, far out of the shared range": Case(scale=1e4, causal=True),
    "exact, tiles on both sides of the shared range": Case(width=3, nq=130, n=150, scale=8.0),
    "sigmoid": Case(act="sigmoid", width=8),
    **{
        f"exact, weights {name}": Case(width=width, weights=name, masked=False)
        for name, width in zip(WEIGHTS, (1, 2, 9, 7, 13, 6, 11), strict=True)
    },
    "exact, weights of very different sizes, wide range": Case(width=13, weights="of very different sizes", scale=4.0),
    "sigmoid, some weights zero": Case(act="sigmoid", width=10, weights="some zero"),
    "relu": Case(act="relu", width=5),
    "leaky relu": Case(act="leaky_relu:0.1", width=5, nq=17, n=20, causal=True),
    "gelu": Case(act="gelu", width=5),
    "sines": Case(dtype=F16),
    "sines, one w a head": Case(dtype=F16, heads=2, masked=False),
    "sines, wide range": Case(dtype=F16, width=32, value_width=16, nq=33, n=33, causal=True, scale=1.5),
    "sines, several tiles": Case(dtype=F16, width=40, value_width=20, nq=50, n=70),
    "out of range": Case(dtype=F16, width=32, scale=1e3),
    "half precision without a series": Case(act="relu", dtype=F16),
    "one key": Case(n=1, masked=False),
    "one query, half precision": Case(nq=1, dtype=F16, masked=False),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_as_exact_as_the_formula_in_the_same_dtype(name: str) -> None:
    case = CASES[name]
    inputs, mask = case.inputs(), case.mask()
    grad = torch.randn(2, case.nq, case.value_width).to(case.dtype)
    # One number may by chance be very near: the error of the formula is the largest of a few with a sign drawn for each query.
    signs = torch.randint(0, 2, (4, 2, case.nq, 1)).to(case.dtype) * 2 - 1
    signs[0] = 1
    exact, plain = (
        [
            with_gradients(lambda *x: formula(case, mask, *x), [x.to(dtype) for x in inputs], grad * sign)
            for sign in signs
        ]
        for dtype in (torch.float64, case.dtype)
    )
    bytes_ = None if mask is None else mask.to(torch.uint8)

    def eager(a: Tensor, u: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return attend.additive(a, u, w, v, bytes_, *PLAIN, case.causal, case.act)[0]

    def registered(a: Tensor, u: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return torch.ops.regard.additive(a, u, w, v, bytes_, *PLAIN, case.causal, case.act)[0]

    first, second = (with_gradients(ours, inputs, grad) for ours in (eager, registered))
    rounding = torch.finfo(case.dtype).eps
    for k, what in enumerate(("o", "da", "du", "dw", "dv")):
        x, again, reference = first[k], second[k], exact[0][k]
        assert torch.equal(x, again), f"{what}: two runs differ"
        assert x.isfinite().all(), what
        if reference.abs().max() < 1e-12 and case.n == 1:
            # One key alone teaches the scores nothing: what is left is the rounding of do · v, summed over the queries.
            noise = grad.float().norm(dim=-1).max() * inputs[3].float().norm(dim=-1).max() * case.nq
            assert x.abs().max() <= rounding * noise
            continue
        natural = max(float(one[k].norm()) for one in exact)
        error = max(float((low[k].double() - one[k]).norm()) for low, one in zip(plain, exact, strict=True))
        found, budget = float((x.double() - reference).norm()), 2 * (error + rounding * natural)
        assert found <= budget, f"{what}: distance {found:.2e}, budget {budget:.2e}"
    if mask is not None:
        assert (first[0][0, 3] == 0).all()
        assert (first[1][0, 3] == 0).all()


def test_small_weights_beside_a_large_one_do_not_hide_it() -> None:
    """The denominators of three saturated units with little weight would leave the fourth no room in a float32."""
    a, u = torch.full((1, 3, 4), 5.2), torch.full((1, 5, 4), 5.2)
    a[..., 2], u[..., 2] = 0.3, torch.linspace(-1, 1, 5)
    w = torch.tensor([[2.0**-13, -(2.0**-13), 1.0, 2.0**-13]])
    lse = attend.additive(a, u, w, torch.ones(1, 5, 1), None, *PLAIN, False, "tanh")[1]
    scores = (torch.tanh(a.double()[:, :, None] + u.double()[:, None]) * w.double()[:, None, None]).sum(-1)
    assert distance(lse, scores.logsumexp(-1)) < 1e-6


@pytest.mark.parametrize("operator", [attend.additive, torch.ops.regard.additive])
def test_log_sum_exp(operator) -> None:
    a, u, w, v = Case(nq=11, n=13, masked=False).inputs()
    lse = operator(a, u, w, v, None, *PLAIN, False, "tanh")[1]
    scores = (torch.tanh(a.double()[:, :, None] + u.double()[:, None]) * w.double()[:, None, None]).sum(-1)
    assert distance(lse, scores.logsumexp(-1)) < 1e-6


def terms(a: Tensor, u: Tensor) -> int:
    """Length of the series that the device picks for these."""
    return int(Sine(a, u, torch.ones(1, 3), torch.empty(plan_size(a.dtype)), fresh=True).terms.item())


@pytest.mark.parametrize(
    ("reach", "expected"), [(0.9 * FLOAT16[0].limit, len(FLOAT16[0].c)), (0.99 * FLOAT16[-1].limit, len(FLOAT16[-1].c))]
)
def test_the_device_picks_the_shortest_series_that_covers_the_range(reach: float, expected: int) -> None:
    a, u = torch.zeros(1, 4, 3, dtype=F16), torch.zeros(1, 5, 3, dtype=F16)
    a[0, 1, 2], u[0, 0, 2] = -reach / 2, reach / 2
    assert terms(a, u) == expected


@pytest.mark.parametrize("bad", [FLOAT16[-1].limit * 1.01, float("inf"), float("nan")])
def test_out_of_range_takes_the_exact_path(bad: float) -> None:
    a, u = torch.zeros(1, 4, 3, dtype=F16), torch.zeros(1, 5, 3, dtype=F16)
    a[0, 1, 2] = bad
    assert terms(a, u) == 0


def test_a_range_spread_over_units_is_not_added_up() -> None:
    a, u = torch.zeros(1, 4, 3, dtype=F16), torch.zeros(1, 5, 3, dtype=F16)
    a[0, 1, 0], u[0, 0, 1] = 5.0, 5.0
    assert terms(a, u) == len(FLOAT16[0].c)


def test_the_operator_is_registered_as_torch_asks() -> None:
    a, u, w, v = (x.requires_grad_() for x in Case(nq=5, n=7).inputs())
    torch.library.opcheck(torch.ops.regard.additive, (a, u, w, v, None, *PLAIN, True, "tanh"))


@pytest.mark.parametrize("operator", [attend.additive, torch.ops.regard.additive])
def test_second_derivatives_are_refused_by_name(operator) -> None:
    a, u, w, v = (x.requires_grad_() for x in Case(nq=5, n=7).inputs())
    out = operator(a, u, w, v, None, *PLAIN, False, "tanh")[0]
    (da,) = torch.autograd.grad(out.sum(), a, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives.*impl='dense'"):
        da.sum().backward()


def test_several_gradients_at_once_and_none() -> None:
    a, u, w, v = (x.requires_grad_() for x in Case(nq=5, n=7).inputs())
    out = attend.additive(a, u, w, v, None, *PLAIN, False, "tanh")[0]
    check_gradients(out, (a, u, w, v))


def test_known_activations() -> None:
    assert all(attend.supports(name) for name in ("tanh", "sigmoid", "relu", "leaky_relu:0.2", "gelu", "identity"))
    assert not any(attend.supports(name) for name in ("tanh:5.0", "elu:1.0", "sin"))
