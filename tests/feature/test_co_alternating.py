"""Alternating co-attention: summary of the first input, the second by it, the first again."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, Tokens, assert_finds_the_pair, attend, check, holes, normal, weights_of

OPTIONS = {
    "separate": {},
    "tied": {"tie_first_last": True, "hidden_dim": 3},
    "bilinear": {"score": "general"},
    "three scores": {"score": ("query-free", "activated-general", "additive"), "hidden_dim": 7},
    "multi-dimensional": {"features": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def oracle(m: rg.AlternatingCoAttention, inputs: list[Tokens]) -> torch.Tensor:
    first, second = inputs
    if m.summary is not None:
        c0 = attend(m.summary, None, first)
    else:
        c0 = attend(m.first, torch.zeros(len(second[0]), dtype=torch.float64), first)
    c2 = attend(m.second, c0, second)
    return torch.cat([attend(m.first, c2, first), c2])


@every_option
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(options, lead):
    m = rg.AlternatingCoAttention((5, 3), **options)
    assert m(torch.randn(*lead, 11, 5), torch.randn(*lead, 7, 3)).shape == (*lead, 8)


@pytest.mark.parametrize("execution", EXECUTIONS, ids=str)
@every_option
def test_oracle(options, execution):
    m = rg.AlternatingCoAttention((5, 3), **options)
    check(m, oracle, [normal(2, 4, 5), normal(2, 3, 3, seed=1)], [holes(2, 4), holes(2, 3, seed=1)], execution)


@every_option
def test_gradients(options):
    m = scrambled(rg.AlternatingCoAttention((5, 3), **options))
    masks = (holes(2, 4), holes(2, 3, seed=1))
    leaves = [normal(2, 4, 5).requires_grad_(), normal(2, 3, 3).requires_grad_()]
    assert torch.autograd.gradcheck(lambda *x: m(*x, masks), leaves, fast_mode=True)


def test_an_empty_second_input_leaves_the_first_without_a_query():
    m = scrambled(rg.AlternatingCoAttention((5, 3)))
    first, second = normal(2, 4, 5), normal(2, 3, 3)
    masks = (torch.ones(2, 4, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.bool))
    out = m(first, second, masks)
    assert not out[:, 5:].any()
    assert_same(out[:, :5], m.first(torch.zeros(2, 3, dtype=torch.float64), first))
    assert_same(m(first, second[:, :0]), out)


def test_a_score_is_that_of_both_steps_with_a_query():
    m = rg.AlternatingCoAttention(5, score="activated-general")
    assert [type(s.score) for s in (m.summary, m.second, m.first)] == [
        rg.QueryFree,
        rg.ActivatedGeneral,
        rg.ActivatedGeneral,
    ]


def test_order_of_the_inputs_matters():
    m = scrambled(rg.AlternatingCoAttention(5))
    x, y = normal(2, 4, 5), normal(2, 3, 5, seed=1)
    swapped = m(y, x).roll(5, -1)
    assert (m(x, y) - swapped).abs().max() > 1e-3


def test_paths_of_the_steps():
    x, y = torch.randn(2, 4, 5), torch.randn(2, 3, 5)
    assert list(weights_of(rg.AlternatingCoAttention(5), x, y)) == ["summary", "second", "first"]
    trace = weights_of(rg.AlternatingCoAttention(5, tie_first_last=True), x, y)
    assert {path: len(calls) for path, calls in trace.items()} == {"first": 2, "second": 1}
    assert trace["first"][1].weights.shape == (2, 4)


def test_finds_the_matching_pair():
    assert_finds_the_pair(lambda task: rg.AlternatingCoAttention(task.dim, score="general"), steps=800)
