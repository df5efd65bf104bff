"""Multi-grained co-attention: a coarse and a fine one side by side."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from tests.cases import scrambled
from tests.feature import test_co_interactive, test_co_parallel
from tests.feature.common import EXECUTIONS, Tokens, assert_finds_the_pair, check, holes, normal, weights_of


def oracle(m: rg.MultiGrainedCoAttention, inputs: list[Tokens]) -> torch.Tensor:
    return torch.cat([test_co_interactive.oracle(m.coarse, inputs), test_co_parallel.oracle(m.fine, inputs)])


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(lead):
    m = rg.MultiGrainedCoAttention((5, 3))
    assert m(torch.randn(*lead, 11, 5), torch.randn(*lead, 7, 3)).shape == (*lead, 16)


@pytest.mark.parametrize("execution", EXECUTIONS, ids=str)
def test_oracle(execution):
    m = rg.MultiGrainedCoAttention((5, 3))
    check(m, oracle, [normal(2, 4, 5), normal(2, 3, 3, seed=1)], [holes(2, 4), holes(2, 3, seed=1)], execution)


def test_gradients():
    m = scrambled(rg.MultiGrainedCoAttention((5, 3)))
    masks = (holes(2, 4), holes(2, 3, seed=1))
    leaves = [normal(2, 4, 5).requires_grad_(), normal(2, 3, 3).requires_grad_()]
    assert torch.autograd.gradcheck(lambda *x: m(*x, masks), leaves, fast_mode=True)


def test_a_branch_does_not_notice_the_other():
    m = scrambled(rg.MultiGrainedCoAttention((5, 3), coarse=rg.AlternatingCoAttention((5, 3))))
    inputs = normal(2, 4, 5), normal(2, 3, 3)
    before = m(*inputs)
    with torch.no_grad():
        for parameter in m.coarse.parameters():
            parameter.zero_()
    after = m(*inputs)
    assert (before[:, :8] - after[:, :8]).abs().max() > 1e-3
    assert torch.equal(before[:, 8:], after[:, 8:])


def test_paths():
    trace = weights_of(rg.MultiGrainedCoAttention(3), torch.randn(2, 4, 3), torch.randn(2, 5, 3))
    assert list(trace) == ["coarse.first", "coarse.second", "fine.affinity", "fine.first", "fine.second"]


def test_finds_the_matching_pair():
    assert_finds_the_pair(lambda task: rg.MultiGrainedCoAttention(task.dim), at="attention.fine")


@pytest.mark.parametrize("part", ["coarse", "fine"])
def test_parts_are_co_attentions(part):
    for wrong in ("alternating", rg.Attention("dot")):
        with pytest.raises(TypeError, match=f"{part}: got {type(wrong).__name__}, expected a co-attention"):
            rg.MultiGrainedCoAttention(3, **{part: wrong})


def test_grains_that_are_exchanged_are_refused():
    fine, coarse = rg.ParallelCoAttention(3), rg.AlternatingCoAttention(3)
    with pytest.raises(TypeError, match=r"coarse: got ParallelCoAttention, expected an alternating .* fine=…"):
        rg.MultiGrainedCoAttention(3, coarse=fine, fine=coarse)
    with pytest.raises(TypeError, match=r"fine: got InteractiveCoAttention, expected a parallel .* coarse=…"):
        rg.MultiGrainedCoAttention(3, fine=rg.InteractiveCoAttention(3))
