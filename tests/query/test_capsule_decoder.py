"""The decoder: an input from the capsule of its class."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from tests.cases import assert_same, scrambled
from tests.feature.common import normal


def oracle(m: rg.CapsuleDecoder, v, kept: set[int]) -> torch.Tensor:
    """One example: everything but the kept capsules is zero."""
    x = torch.cat([row if j in kept else row * 0 for j, row in enumerate(v)])
    maps = [layer for layer in m.layers if isinstance(layer, torch.nn.Linear)]
    for k, layer in enumerate(maps):
        x = layer.weight @ x + layer.bias
        x = 1 / (1 + (-x).exp()) if k == len(maps) - 1 else x.clamp(min=0)
    return x


def test_oracle():
    m, v = scrambled(rg.CapsuleDecoder(3, 5, 7, hidden=(11, 13))), normal(2, 3, 5)
    found = m(v, torch.tensor([2, 0]))
    assert_same(found, torch.stack([oracle(m, v[0], {2}), oracle(m, v[1], {0})]))
    several = torch.tensor([[True, True, False], [False, False, True]])
    assert_same(m(v, several), torch.stack([oracle(m, v[0], {0, 1}), oracle(m, v[1], {2})]))
    longest = v.norm(dim=-1).argmax(-1)
    assert_same(m(v), m(v, longest))


def test_squares_are_summed_not_averaged():
    m, v, x = scrambled(rg.CapsuleDecoder(3, 5, 784)), normal(2, 3, 5), torch.rand(2, 784, dtype=torch.float64)
    target = torch.tensor([2, 0])
    assert_same(m.loss(v, target, x), 0.392 * (m(v, target) - x).square().mean())


def test_only_the_target_is_taught():
    m, v = scrambled(rg.CapsuleDecoder(3, 5, 7, hidden=())), normal(2, 3, 5).requires_grad_()
    m.loss(v, torch.tensor([2, 0]), torch.zeros(2, 7).double()).backward()
    assert v.grad[0, 2].any()
    assert v.grad[1, 0].any()
    assert not v.grad[0, :2].any()
    assert not v.grad[1, 1:].any()


def test_gradients():
    m, target = scrambled(rg.CapsuleDecoder(3, 2, 4, hidden=(5,))), torch.tensor([2, 0])
    x = torch.rand(2, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: m.loss(v, target, x, 1.0), [normal(2, 3, 2).requires_grad_()])


def test_refusals():
    with pytest.raises(ValueError, match="hidden: got 0"):
        rg.CapsuleDecoder(3, 5, 7, hidden=(0,))
    with pytest.raises(ValueError, match="target: got a tensor of"):
        rg.CapsuleDecoder(3, 5, 7)(torch.randn(2, 3, 5), torch.zeros(3, dtype=torch.long))


def test_other_capsules_are_refused():
    decode = rg.CapsuleDecoder(3, 4, 5, hidden=(2,))
    with pytest.raises(ValueError, match=r"v: got shape \(2, 4, 3\), expected capsules \(..., 3, 4\)"):
        decode(torch.zeros(2, 4, 3))
    with pytest.raises(IndexError, match="target: got indices from 0 to 3, expected classes of 3"):
        decode(torch.zeros(2, 3, 4), torch.tensor([0, 3]))
    with pytest.raises(
        TypeError, match=r"hidden: got 6, expected the width of each layer in between. Fix: hidden=\(6,\)"
    ):
        rg.CapsuleDecoder(3, 4, 5, hidden=6)
