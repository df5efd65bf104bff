"""Transforms of functions, and derivatives that are no single backward: forward ones, several at once, second ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import regard as rg
from regard.ops.squares import squares
from tests.cases import assert_same, scrambled
from tests.feature.common import normal


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


ATTENTIONS = {"dot": {}, "negative-l2": {}, "general": {"query_dim": 4, "key_dim": 4}}
every_attention = pytest.mark.parametrize("score", ATTENTIONS)


def attention(score: str) -> rg.Attention:
    return scrambled(rg.Attention(score, **ATTENTIONS[score]))


@every_way
@every_attention
@pytest.mark.parametrize("n", [3, 300])
def test_jacobians_of_attention_are_those_of_the_equation(n, score, way):
    attend, x, key = attention(score), normal(2, 4), normal(n, 4, seed=1)
    with rg.execution("dense"):
        expected = torch.func.jacrev(lambda x: attend(x, key))(x)
    assert_same(WAYS[way](lambda x: attend(x, key), x), expected)


@every_attention
def test_tangents_of_attention_are_those_of_the_equation(score):
    attend, x, key, direction = attention(score), normal(2, 4), normal(5, 4, seed=1), normal(2, 4, seed=2)
    with rg.execution("dense"):
        expected = torch.func.jvp(lambda x: attend(x, key), (x,), (direction,))[1]
    assert_same(tangent(lambda x: attend(x, key), x, direction), expected)
    assert_same(torch.func.jvp(lambda x: attend(x, key), (x,), (direction,))[1], expected)


@every_attention
@pytest.mark.parametrize("nested", [torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f))])
def test_derivatives_of_derivatives_are_those_of_the_equation(nested, score):
    attend, x, key = attention(score), normal(2, 4), normal(5, 4, seed=1)
    loss = lambda x: attend(x, key).square().sum()  # noqa: E731
    with rg.execution("dense"):
        expected = torch.autograd.functional.hessian(loss, x)
    assert_same(nested(loss)(x), expected)


@pytest.mark.parametrize("shared", [False, True])
def test_a_bias_with_a_gradient_may_be_mapped(shared):
    attend, x = rg.Attention("dot"), normal(3, 5, 4)
    bias = (normal(5, 5, seed=1) if shared else normal(3, 5, 5, seed=1)).requires_grad_()
    found = torch.func.vmap(lambda x, b: attend(x, x, bias=b), in_dims=(0, None if shared else 0))(x, bias)
    expected = attend(x, x, bias=bias)
    assert_same(found, expected)
    assert_same(*(torch.autograd.grad(y.square().sum(), bias)[0] for y in (found, expected)))


@every_attention
def test_second_derivatives_of_the_library_are_refused_by_name(score):
    attend, x, key = attention(score), normal(2, 4).requires_grad_(), normal(5, 4, seed=1).requires_grad_()
    once = torch.autograd.grad(attend(x, key).square().sum(), (x, key))
    grads = torch.autograd.grad(attend(x, key).square().sum(), (x, key), create_graph=True)
    for found, expected in zip(grads, once, strict=True):
        assert torch.equal(found, expected)
        with pytest.raises(NotImplementedError, match="second derivatives of plain bilinear .* Fix: use impl='dense'"):
            torch.autograd.grad(found.sum(), x, retain_graph=True)
    with rg.execution("dense"):
        assert torch.autograd.gradgradcheck(attend, (x, key))


@pytest.mark.parametrize("way", ["jacrev", "jacfwd"])
def test_additive_scores_by_tiles_are_not_differentiated_by_transforms_and_say_so(way):
    attend, x = (
        scrambled(rg.Attention("additive", query_dim=4, key_dim=4, hidden_dim=3, impl="blockwise")),
        normal(5, 4),
    )
    with pytest.raises(
        NotImplementedError, match="'blockwise' is not available .* no gradients of operators.* Fix: use"
    ):
        WAYS[way](lambda x: attend(x, x), x)
    with rg.execution("auto"):
        found = WAYS[way](lambda x: attend(x, x), x)
    with rg.execution("dense"):
        assert_same(found, WAYS[way](lambda x: attend(x, x), x))


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.vmap])
def test_panels_are_neither_mapped_nor_differentiated_by_transforms_and_say_so(transform):
    attend, x = attention("dot"), normal(5, 5, 4)
    with rg.execution("blockwise"):
        assert transform(lambda x: attend(x, x))(x).shape[:2] == (5, 5)
    with (
        rg.execution("blockwise", panel=2),
        pytest.raises(NotImplementedError, match="'blockwise' is not available .* no recomputation.* Fix: use impl="),
    ):
        transform(lambda x: attend(x, x))(x)


@pytest.mark.parametrize("way", ["jacrev", "jacfwd"])
def test_attention_along_edges_by_an_operator_is_not_differentiated_by_transforms_and_says_so(way):
    read, edges = rg.GraphAttention(4, 2, impl="blockwise").double(), torch.tensor([[0, 1, 2], [1, 2, 0]])
    with pytest.raises(NotImplementedError, match="'blockwise' is not available .* gradients of operators. Fix: use"):
        WAYS[way](lambda x: read(x, edges), normal(3, 4))
