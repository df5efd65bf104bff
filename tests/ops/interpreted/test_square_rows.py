"""Squared lengths by the kernel, run by Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from regard.ops.forms import wide
from regard.ops.triton.square_rows import SquareRows

FACTOR = -1 / 3
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def equation(x: Tensor) -> Tensor:
    return wide(x).square().sum(-1) * FACTOR


def kernel(x: Tensor) -> Tensor:
    return SquareRows.apply(x, FACTOR)


def both(function: object, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """A result and the gradient of the vectors."""
    x = x.detach().clone().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y, x, grad.to(y.dtype))[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 37, 64), (70, 100), (3, 1000)], ids=str)
def test_as_exact_as_the_equation(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(shape).to(dtype), torch.randn(shape[:-1])
    found, same, exact = both(kernel, x, grad), both(equation, x, grad), both(equation, x.double(), grad)
    assert (found[0].dtype, found[1].dtype) == (torch.float32, dtype)
    for f, s, e in zip(found, same, exact, strict=True):
        rounding = torch.finfo(f.dtype).eps * e.abs().max()
        assert (f.double() - e).abs().max() <= 2 * (s.double() - e).abs().max() + rounding


def test_nan_is_seen_where_it_is() -> None:
    x = torch.randn(6, 5)
    x[1], x[3, 2], x[4, 0] = 0.0, math.nan, math.inf
    grad = torch.randn(6)
    for f, s in zip(both(kernel, x, grad), both(equation, x, grad), strict=True):
        torch.testing.assert_close(f, s, equal_nan=True)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "heads"])
def test_any_strides(layout: str) -> None:
    x = {
        "transposed": torch.randn(5, 7).T,
        "expanded": torch.randn(1, 5).expand(7, 5),
        "heads": torch.randn(2, 7, 3, 5).transpose(1, 2),
    }[layout]
    for grad in (torch.randn(x.shape[:-1]), torch.randn(x.shape[-2]).expand(x.shape[:-1])):
        torch.testing.assert_close(both(kernel, x, grad), both(equation, x, grad))


def test_second_derivatives_are_those_of_the_equation() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    twice = []
    for function in (kernel, equation):
        (first,) = torch.autograd.grad(function(x).pow(3).sum(), x, create_graph=True)
        twice.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*twice)


def test_several_gradients_at_once_are_those_of_the_equation() -> None:
    x, grads = torch.randn(3, 4, requires_grad=True), torch.randn(5, 3)
    found, expected = (
        torch.autograd.grad(function(x), x, grads, is_grads_batched=True)[0] for function in (kernel, equation)
    )
    torch.testing.assert_close(found, expected)
