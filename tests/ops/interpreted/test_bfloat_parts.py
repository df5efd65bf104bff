"""Products of float32 from bfloat16 parts: the parts, and additive attention over values of any magnitude."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard.ops.triton import attend
from regard.ops.triton.bfloat_parts import in_parts
from tests.ops.interpreted.test_additive_kernels import PLAIN, Case, with_gradients

LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("width", [1, 5, 16, 33])
def test_parts_add_up_to_the_number(width: int) -> None:
    torch.manual_seed(width)
    x = (2 * torch.rand(2, 37, width) - 1).sign() * 10.0 ** (torch.rand(2, 37, width) * 60 - 30)
    x[0, :4, 0] = torch.tensor([0.0, LARGEST, -LARGEST, 1.0 - 2.0**-24])
    parts = in_parts(x, 128)
    assert parts.dtype == torch.bfloat16
    assert torch.equal(parts.double().sum(0)[:, :37, :width], x.double())
    assert (parts[:, :, 37:] == 0).all()
    assert (parts[..., width:] == 0).all()


def test_parts_of_values_that_are_not_contiguous() -> None:
    x = torch.randn(3, 2, 21).mT
    assert torch.equal(in_parts(x, 32).double().sum(0)[:, :21, :2], x.double())


def formula(a: Tensor, u: Tensor, w: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = (torch.tanh(a[:, :, None] + u[:, None]) * w[:, None, None]).sum(-1) + bias
    return scores.softmax(-1) @ v


def norms(x: Tensor) -> Tensor:
    """Of each feature."""
    return x.double().flatten(0, -2).norm(dim=0)


def distance(x: Tensor, exact: Tensor) -> float:
    """As a share of each feature, of all of them."""
    return float((norms(x.double() - exact) / norms(exact)).norm())


# Of a feature of all keys, of all features of a key, of each number.
@pytest.mark.parametrize("axes", [(1, 1, 5), (1, 37, 1), (2, 37, 5)], ids=["features", "keys", "numbers"])
def test_values_of_any_magnitude(axes: tuple[int, ...]) -> None:
    a, u, w, v = Case(masked=False).inputs()
    magnitude = torch.rand(axes) * 60 - 30
    bias = torch.zeros(1, 1, 37)
    if axes == (1, 37, 1):
        # What is large weighs so little that others are seen beside it.
        magnitude = magnitude / 2
        bias = -2.302585 * magnitude.mT.contiguous()
    v = v * 10.0**magnitude
    grad = torch.randn(2, 19, 5) / norms(v).float()

    def kernels(a: Tensor, u: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return attend.additive(a, u, w, v, None, bias, *PLAIN[1:], False, "tanh")[0]

    inputs = a, u, w, v
    found = with_gradients(kernels, inputs, grad)
    plain = with_gradients(lambda *x: formula(*x, bias), inputs, grad)
    exact = with_gradients(lambda *x: formula(*x, bias.double()), [x.double() for x in inputs], grad.double())
    rounding = torch.finfo(torch.float32).eps
    # The gradients come by way of a log-sum-exp in float32, whose rounding shows where a bias is large.
    for k, what in ((0, "o"),) if bias.any() else ((0, "o"), (4, "dv")):
        budget = 2 * (distance(plain[k], exact[k]) + rounding * 5**0.5)
        assert distance(found[k], exact[k]) <= budget, what
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_in_its_feature(bad: float) -> None:
    a, u, w, v = Case(masked=False).inputs()
    v[0, 3, 1] = bad
    out = attend.additive(a, u, w, v, None, *PLAIN, False, "tanh")[0]
    assert not out[0, :, 1].isfinite().any()
    out[0, :, 1] = 0
    assert out.isfinite().all()
