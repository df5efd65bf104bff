"""Unit vectors by the kernel, run by Triton's interpreter, and squares with a gradient by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from regard.ops.squares import squares, unit_equation
from regard.ops.triton.unit_rows import UnitRows

EPSILON = 1e-8
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def both(function: object, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """A result and the gradient of the vectors."""
    x = x.detach().clone().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y, x, grad.to(y.dtype))[0]


def as_exact(found: tuple[Tensor, ...], same: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    """No more than twice the error of the equation in the same dtype, and a rounding."""
    for f, s, e in zip(found, same, exact, strict=True):
        rounding = torch.finfo(f.dtype).eps * e.abs().max()
        assert (f.double() - e).abs().max() <= 2 * (s.double() - e).abs().max() + rounding


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 37, 64), (70, 100), (3, 1000)], ids=str)
def test_as_exact_as_the_equation(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    found = both(lambda x: UnitRows.apply(x, EPSILON), x, grad)
    same = both(lambda x: unit_equation(x, EPSILON), x, grad)
    assert found[0].dtype == found[1].dtype == dtype
    as_exact(found, same, both(lambda x: unit_equation(x, EPSILON), x.double(), grad))


def test_short_vectors_and_nan() -> None:
    x = torch.randn(6, 5)
    x[1], x[2], x[3, 2], x[4, 0] = 0.0, x[2] * 1e-10, math.nan, math.inf
    grad = torch.randn(6, 5)
    found = both(lambda x: UnitRows.apply(x, EPSILON), x, grad)
    same = both(lambda x: unit_equation(x, EPSILON), x, grad)
    for f, s in zip(found, same, strict=True):
        torch.testing.assert_close(f, s, equal_nan=True)
    assert (found[0][1] == 0).all()


@pytest.mark.parametrize("layout", ["transposed", "expanded", "heads"])
def test_any_strides(layout: str) -> None:
    x = {
        "transposed": torch.randn(5, 7).T,
        "expanded": torch.randn(1, 5).expand(7, 5),
        "heads": torch.randn(2, 7, 3, 5).transpose(1, 2),
    }[layout]
    grad = torch.randn(x.shape[:-1]).unsqueeze(-1).expand(x.shape)
    found = both(lambda x: UnitRows.apply(x, EPSILON), x, grad)
    torch.testing.assert_close(found, both(lambda x: unit_equation(x, EPSILON), x, grad))


def test_second_derivatives_are_those_of_the_equation() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    twice = []
    for function in (lambda x: UnitRows.apply(x, EPSILON), lambda x: unit_equation(x, EPSILON)):
        (first,) = torch.autograd.grad(function(x).pow(3).sum(), x, create_graph=True)
        twice.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*twice)


def test_several_gradients_at_once_are_those_of_the_equation() -> None:
    x, grads = torch.randn(3, 4, requires_grad=True), torch.randn(5, 3, 4)
    found, expected = (
        torch.autograd.grad(function(x), x, grads, is_grads_batched=True)[0]
        for function in (lambda x: UnitRows.apply(x, EPSILON), lambda x: unit_equation(x, EPSILON))
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_squares(dtype: torch.dtype) -> None:
    x, grad = torch.randn(2, 7, 33).to(dtype), torch.randn(2, 7)
    x[0, 1] = 0.0

    def plain(x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32)).square().sum(-1)

    found, same = both(squares, x, grad), both(plain, x, grad)
    assert found[0].dtype == torch.float32
    as_exact(found, same, both(plain, x.double(), grad.double()))
    x.requires_grad_()
    (first,) = torch.autograd.grad(squares(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert (second == 2).all()
