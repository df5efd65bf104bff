"""Recurrent encoders: each sequence as if it were alone."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from tests.cases import assert_same, scrambled
from tests.feature.common import holes, normal


@pytest.mark.parametrize("kind", ["gru", "lstm"])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(kind, bidirectional, lead):
    m = rg.RecurrentEncoder(5, 3, kind, bidirectional)
    assert m.out_dim == (6 if bidirectional else 3)
    assert m(torch.randn(*lead, 7, 5)).shape == (*lead, 7, m.out_dim)
    assert m(torch.randn(*lead, 0, 5)).shape == (*lead, 0, m.out_dim)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_every_sequence_is_as_if_it_were_alone(kind, layers):
    m, mask = scrambled(rg.RecurrentEncoder(3, 2, kind, layers=layers)), holes(3, 7, empty=[1])
    x = torch.where(mask[..., None], normal(3, 7, 3), math.nan).requires_grad_()
    found = m(x, mask)
    assert not found[~mask].any()
    for b in (0, 2):
        assert_same(found[b, mask[b]], m.network(x.detach()[b, mask[b]])[0])
    (grad,) = torch.autograd.grad(found.square().sum(), x)
    assert grad.isfinite().all()
    assert not grad[~mask].any()


def test_gradients():
    m, mask = scrambled(rg.RecurrentEncoder(3, 2)), holes(2, 5, empty=[1])
    assert torch.autograd.gradcheck(lambda x: m(x, mask), [normal(2, 5, 3).requires_grad_()], fast_mode=True)


def test_the_kind_is_checked():
    with pytest.raises(ValueError, match="kind: got 'rnn'"):
        rg.RecurrentEncoder(3, kind="rnn")


def test_tokens_are_checked():
    encode = rg.RecurrentEncoder(3)
    with pytest.raises(ValueError, match="tokens: got width 4, expected 3"):
        encode(torch.randn(2, 5, 4))
    with pytest.raises(TypeError, match=r"tokens: got a tensor of torch\.float64, expected the module's dtype"):
        encode(torch.randn(2, 5, 3).double())
    with torch.autocast("cpu"):
        assert encode(torch.randn(2, 5, 3)).shape == (2, 5, 4)


def test_dropout_is_between_layers():
    x = torch.randn(2, 7, 5)
    m = rg.RecurrentEncoder(5, 3, layers=2, dropout=0.5)
    assert not torch.equal(m(x), m(x))
    assert torch.equal(m.eval()(x), m(x))
    single = rg.RecurrentEncoder(5, 3, dropout=0.5)
    assert torch.equal(single(x), single(x))
    with pytest.raises(ValueError, match="dropout: got 2, expected a probability"):
        rg.RecurrentEncoder(5, dropout=2)
    with pytest.raises(ValueError, match="layers: got 0"):
        rg.RecurrentEncoder(5, layers=0)
