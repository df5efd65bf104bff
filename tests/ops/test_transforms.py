"""Transforms of functions, and derivatives that are no single backward: forward ones, several at once, second ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.ops.squares import squares


def jacobian(function, x: Tensor, **how: object) -> Tensor:
    found: Tensor = torch.autograd.functional.jacobian(function, x, **how)
    return found


WAYS = {
    "backward": lambda f, x: jacobian(f, x, vectorize=True),
    "forward": lambda f, x: jacobian(f, x, vectorize=True, strategy="forward-mode"),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
}
every_way = pytest.mark.parametrize("way", WAYS)


def tangent(function, x: Tensor, direction: Tensor) -> Tensor:
    with forward_ad.dual_level():
        found: Tensor = forward_ad.unpack_dual(function(forward_ad.make_dual(x, direction))).tangent
    return found


@every_way
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_squares_of_half_precision_have_jacobians(dtype, way):
    x = torch.randn(3, 4).to(dtype)
    expected = torch.eye(3)[..., None] * 2 * x.float()  # which half precision holds exactly
    assert torch.equal(WAYS[way](squares, x).float(), expected)


def test_squares_of_half_precision_have_tangents():
    x, direction = torch.randn(2, 3, 4).bfloat16()
    torch.testing.assert_close(tangent(squares, x, direction), 2 * (x.float() * direction.float()).sum(-1))
