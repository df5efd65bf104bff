"""A budget of keys, against the enumeration of all subsets."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.query.budget import Subset
from tests import oracles
from tests.cases import assert_same, scrambled
from tests.feature.common import holes, normal, weights_of

every_constraint = pytest.mark.parametrize(("k", "exact"), [(1, False), (2, False), (1, True), (3, True), (9, False)])


def enumerated(e: Tensor, mask: Tensor, k: int, exact: bool) -> dict[tuple[int, ...], Tensor]:
    """The log-probability of every subset of the allowed keys of one row that the constraint lets in."""
    members = [j for j, ok in enumerate(mask) if ok]
    largest = min(k, len(members))
    sizes = [largest] if exact else range(largest + 1)
    energies = {s: sum((e[j] for j in s), oracles.zero()) for size in sizes for s in combinations(members, size)}
    total = sum((x.exp() for x in energies.values()), oracles.zero()).log()
    return {s: x - total for s, x in energies.items()}


def selected(s: tuple[int, ...], n: int) -> Tensor:
    return torch.tensor([j in s for j in range(n)])


@every_constraint
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_it_is_the_enumeration(n, k, exact):
    e, mask = normal(3, n).requires_grad_(), holes(3, n, seed=n)
    mask[0] = True
    mask[2] = False
    subset = Subset(e, mask, k, exact)
    for b in range(3):
        known = enumerated(e[b], mask[b], k, exact)
        weights = torch.stack(oracles.budget(list(e[b]), mask[b].tolist(), k, exact))
        assert_same(subset.marginals()[b], weights)
        spread = -sum((p.exp() * p for p in known.values()), oracles.zero())
        assert_same(subset.entropy()[b] + 1, spread + 1)
        for s, p in list(known.items())[:: max(1, len(known) // 7)]:
            assert_same(subset.log_prob(selected(s, n).expand(3, n))[b] - 1, p - 1)
        cotangent = normal(n, seed=3)
        for found, expected in (
            (subset.marginals()[b] @ cotangent, weights @ cotangent),
            (subset.entropy()[b], spread),
        ):
            if expected.requires_grad:
                mine, theirs = (torch.autograd.grad(x, e, retain_graph=True)[0] for x in (found, expected))
                assert_same(mine + 1, theirs + 1)


@every_constraint
def test_gradients(k, exact):
    e, mask = normal(2, 5).requires_grad_(), holes(2, 5)
    for of in (Subset.marginals, Subset.entropy, Subset.log_partition):
        assert torch.autograd.gradcheck(lambda e, of=of: of(Subset(e, mask, k, exact)), e)
        assert torch.autograd.gradgradcheck(lambda e, of=of: of(Subset(e, mask, k, exact)), e)


@pytest.mark.parametrize(("k", "exact"), [(2, False), (3, True)])
def test_samples_are_those_of_the_distribution(k, exact):
    e, mask, count = normal(6), torch.tensor([True, True, False, True, True, True]), 40000
    drawn = Subset(e.expand(count, 6), mask, k, exact).sample(torch.Generator().manual_seed(0))
    known, statistic = enumerated(e, mask, k, exact), 0.0
    for s, p in known.items():
        expected = count * float(p.exp())
        observed = int((drawn == selected(s, 6)).all(-1).sum())
        statistic += (observed - expected) ** 2 / expected
    limit = {16: 37.7, 10: 27.9}[len(known)]  # chi-square at 0.001, with one degree of freedom fewer
    assert statistic < limit


def test_a_subset_that_is_too_large_is_impossible():
    e = normal(2, 5)
    three = torch.tensor([True, True, True, False, False]).expand(2, 5)
    assert Subset(e, None, 2, False).log_prob(three).tolist() == [-math.inf] * 2
    assert Subset(e, None, 4, True).log_prob(three).tolist() == [-math.inf] * 2


def test_at_most_one_is_softmax_beside_a_key_that_holds_nothing():
    e = normal(2, 5)
    beside = torch.cat([e, torch.zeros(2, 1, dtype=torch.float64)], -1).softmax(-1)
    assert_same(Subset(e, None, 1, False).marginals(), beside[:, :-1])


def test_as_many_as_there_are_keys_are_sigmoids():
    e = normal(2, 5)
    for k in (5, 50):
        assert_same(Subset(e, None, k, False).marginals(), e.sigmoid())
    assert_same(Subset(e, None, 5, True).marginals(), torch.ones_like(e))


def test_an_exact_budget_is_spent():
    mask = holes(2, 7)
    attend = scrambled(rg.Attention("general", "budget", query_dim=3, key_dim=5, k=3, exact=True))
    weights = weights_of(attend, normal(2, 4, 3), normal(2, 7, 5), mask=mask.unsqueeze(1)).weights
    assert_same(weights.sum(-1), mask.sum(-1, keepdim=True).clamp(max=3).double().expand(2, 4))
    attend.align.normalize = True
    weights = weights_of(attend, normal(2, 4, 3), normal(2, 7, 5), mask=mask.unsqueeze(1)).weights
    assert_same(weights.sum(-1), torch.ones(2, 4, dtype=torch.float64))


def test_fewer_than_the_budget_are_all_read():
    e, mask = normal(2, 5).requires_grad_(), torch.tensor([True, False, True, False, False])
    for exact in (True, False):
        subset = Subset(e, mask, 3, exact)
        expected = mask.double().expand(2, 5) if exact else e.sigmoid() * mask
        assert_same(subset.marginals(), expected)
        gradient = torch.autograd.grad(subset.marginals().sum() + subset.log_partition().sum(), e)[0]
        assert gradient.isfinite().all()
        drawn = subset.sample(torch.Generator().manual_seed(0))
        assert not (drawn & ~mask).any()
        assert not exact or torch.equal(drawn, mask.expand(2, 5))


def test_large_scores_stay_finite():
    e = torch.tensor([[1e4, -1e4, 9e3, 0.0, 9e3]], requires_grad=True)
    for k, exact in ((2, False), (2, True), (4, True)):
        found = Subset(e, None, k, exact).marginals()
        assert found.isfinite().all()
        assert torch.autograd.grad(found.sum(), e)[0].isfinite().all()


def test_keys_may_come_in_any_order():
    e, order = normal(7), torch.tensor([3, 0, 6, 2, 5, 1, 4])
    assert_same(Subset(e[order], None, 3, False).marginals(), Subset(e, None, 3, False).marginals()[order])


def test_refusals():
    with pytest.raises(ValueError, match="k: got 0, expected a whole number >= 1"):
        rg.Budget(0)
