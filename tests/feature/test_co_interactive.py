"""Interactive co-attention: each input by the mean of the other."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from tests.cases import assert_same, scrambled
from tests.feature.common import (
    EXECUTIONS,
    Tokens,
    assert_finds_the_pair,
    attend,
    check,
    holes,
    mean,
    normal,
)

OPTIONS = {
    "activated general": {},
    "additive": {"score": "additive", "hidden_dim": 7},
    "two scores": {"score": ("general", "additive")},
    "multi-dimensional": {"score": "additive", "features": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def oracle(m: rg.InteractiveCoAttention, inputs: list[Tokens]) -> torch.Tensor:
    first, second = inputs
    return torch.cat([attend(m.first, mean(second), first), attend(m.second, mean(first), second)])


@every_option
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(options, lead):
    m = rg.InteractiveCoAttention((5, 3), **options)
    assert m(torch.randn(*lead, 11, 5), torch.randn(*lead, 7, 3)).shape == (*lead, 8)


@pytest.mark.parametrize("execution", EXECUTIONS, ids=str)
@every_option
def test_oracle(options, execution):
    m = rg.InteractiveCoAttention((5, 3), **options)
    check(m, oracle, [normal(3, 4, 5), normal(3, 3, 3, seed=1)], [holes(3, 4), holes(3, 3, seed=1)], execution)


@every_option
def test_gradients(options):
    m = scrambled(rg.InteractiveCoAttention((5, 3), **options))
    masks = (holes(2, 4), holes(2, 3, seed=1))
    leaves = [normal(2, 4, 5).requires_grad_(), normal(2, 3, 3).requires_grad_()]
    assert torch.autograd.gradcheck(lambda *x: m(*x, masks), leaves, fast_mode=True)


def test_the_mean_of_an_empty_input_is_zero():
    m = scrambled(rg.InteractiveCoAttention((5, 3)))
    first, second = normal(2, 4, 5), normal(2, 3, 3)
    out = m(first, second, (None, torch.zeros(2, 3, dtype=torch.bool)))
    assert not out[:, 5:].any()
    assert_same(out[:, :5], m.first(torch.zeros(2, 3, dtype=torch.float64), first))
    assert_same(m(first, second[:, :0]), out)


def test_equal_features_are_read_as_they_are():
    m = scrambled(rg.InteractiveCoAttention((5, 3)))
    row = normal(2, 1, 3)
    assert_same(m(normal(2, 4, 5), row.expand(2, 7, 3))[:, 5:], row[:, 0])


def test_other_alignments():
    x, y = normal(2, 4, 5), normal(2, 3, 3)
    for align in ("sparsemax", rg.Hard, lambda: rg.Local(1), ("soft", "entmax"), "reinforced"):
        m = rg.InteractiveCoAttention((5, 3), align=align).double().eval()
        assert m(x, y).shape == (2, 8)
    assert isinstance(m.first.align, rg.Reinforced)
    assert m.first.align is not m.second.align


def test_finds_the_matching_pair():
    assert_finds_the_pair(lambda task: rg.InteractiveCoAttention(task.dim, score="general"), steps=500)
