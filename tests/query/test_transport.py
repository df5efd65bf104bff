"""Optimal transport: plans, and the alignment that reads by one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard as rg
from tests import oracles
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, normal, weights_of


def plan(scores: Tensor, mask: Tensor, epsilon: float, iterations: int) -> list[list[Tensor]]:
    """Columns and rows rescaled in turn, in plain numbers."""
    n, m = scores.shape
    P = [[(scores[i, j] / epsilon).exp() if mask[i, j] else oracles.zero() for j in range(m)] for i in range(n)]
    rows, columns = [i for i in range(n) if mask[i].any()], [j for j in range(m) if mask[:, j].any()]
    for _ in range(iterations):
        for j in columns:
            total = sum((P[i][j] for i in rows), oracles.zero())
            for i in rows:
                P[i][j] = P[i][j] / total / len(columns)
        for i in rows:
            total = sum(P[i], oracles.zero())
            P[i] = [p / total / len(rows) for p in P[i]]
    return P


def a_mask() -> Tensor:
    mask = torch.ones(2, 4, 5, dtype=torch.bool)
    mask[1, 2], mask[1, :, 3], mask[0, 0, 1] = False, False, False
    return mask


@pytest.mark.parametrize("epsilon", [0.3, 2.0])
def test_a_plan_is_rows_and_columns_rescaled_in_turn(epsilon):
    cost, mask = normal(2, 4, 5).requires_grad_(), a_mask()
    found = rg.sinkhorn(cost, epsilon, 6, mask)
    for b in range(2):
        expected = torch.stack([torch.stack(row) for row in plan(-cost[b], mask[b], epsilon, 6)])
        assert_same(found[b], expected)
        mine, theirs = (torch.autograd.grad(x.square().sum(), cost, retain_graph=True)[0] for x in (found[b], expected))
        assert_same(mine + 1, theirs + 1)


@pytest.mark.parametrize("execution", EXECUTIONS, ids=str)
def test_the_alignment_reads_by_the_plan(execution):
    m = scrambled(rg.Attention("general", rg.Sinkhorn(0.7, 6), query_dim=3, key_dim=3))
    query, key, mask = normal(2, 4, 3), normal(2, 5, 3, seed=1), a_mask()
    dirty = torch.where(mask.any(-2)[..., None], key, math.nan)
    with rg.execution(execution[0], panel=execution[1]):
        trace = weights_of(m, query, dirty, mask=mask)
    for b in range(2):
        count = int(mask[b].any(-1).sum())
        expected = torch.stack([torch.stack(row) for row in plan(trace.scores[b], mask[b], 0.7, 6)]) * count
        assert_same(trace.weights[b], expected)
    assert_same(trace.weights.sum(-1), mask.any(-1).double())


def test_gradients():
    mask = a_mask()
    cost = normal(2, 4, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda c: rg.sinkhorn(c, 0.5, 4, mask), cost)
    assert torch.autograd.gradgradcheck(lambda c: rg.sinkhorn(c, 0.5, 4, mask), cost, fast_mode=True)


def test_marginals_are_met():
    found = rg.sinkhorn(normal(3, 4, 7), 0.5, 200)
    assert_same(found.sum(-1), torch.full((3, 4), 1 / 4, dtype=torch.float64))
    assert (found.sum(-2) - 1 / 7).abs().max() < 1e-10


def test_a_permuted_copy_is_found_again():
    x, order = normal(7, 3), torch.tensor([3, 0, 6, 2, 5, 1, 4])
    cost = torch.cdist(x, x[order]).square()
    found = rg.sinkhorn(cost, 0.01, 100) * 7
    assert torch.allclose(found, torch.eye(7, dtype=torch.float64)[:, order], atol=1e-4)
    assert torch.equal(found.argmax(-1), order.argsort())


def test_large_scores_and_small_epsilon_stay_finite():
    scores = (1e3 * torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))).requires_grad_()
    found = rg.sinkhorn(-scores, 0.01, 20)
    assert found.isfinite().all()
    assert torch.autograd.grad(found.square().sum(), scores)[0].isfinite().all()


def test_one_query_reads_all_keys_alike():
    trace = weights_of(rg.Attention("dot", rg.Sinkhorn()), normal(2, 3), normal(2, 7, 3))
    assert_same(trace.weights, torch.full((2, 7), 1 / 7, dtype=torch.float64))


def test_refusals():
    with pytest.raises(ValueError, match="epsilon: got 0"):
        rg.Sinkhorn(0)
    with pytest.raises(ValueError, match="iterations: got 0"):
        rg.sinkhorn(torch.ones(2, 2), iterations=0)


@pytest.mark.parametrize("size", [1e2, 1e4, 1e8])
def test_rows_sum_to_one_however_large_the_scores(size):
    plan = rg.sinkhorn(size * normal(3, 5, 5).float(), epsilon=1.0, iterations=3)
    torch.testing.assert_close(5 * plan.sum(-1), torch.ones(3, 5), rtol=0, atol=1e-6)


def test_what_is_no_cost_or_mask_is_refused():
    with pytest.raises(ValueError, match=r"cost: got shape \(4,\), expected a tensor \(..., n, m\)"):
        rg.sinkhorn(torch.zeros(4))
    with pytest.raises(TypeError, match="mask: got a tensor of torch.float32"):
        rg.sinkhorn(torch.zeros(3, 4), mask=torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"mask: got shape \(5,\), expected a shape that broadcasts to \(3, 4\)"):
        rg.sinkhorn(torch.zeros(3, 4), mask=torch.ones(5).bool())
