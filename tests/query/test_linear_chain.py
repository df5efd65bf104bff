"""A linear chain of decisions, against the enumeration of all selections."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard as rg
from regard.query.linear_chain import Chain
from regard.recipes.planted import Batch, Classifier, NoisySegments, accuracy, cross_entropy, fit
from tests import oracles
from tests.cases import assert_same, scrambled
from tests.feature.common import holes, normal, weights_of


def enumerated(e: Tensor, mask: Tensor, T: Tensor) -> dict[tuple[int, ...], Tensor]:
    """The log-probability of every selection of the allowed keys of one row."""
    kept = [x for x, ok in zip(e, mask, strict=True) if ok]
    energies = {}
    for z in product((0, 1), repeat=len(kept)):
        pairs = sum((T[a, b] for a, b in pairwise(z)), oracles.zero())
        energies[z] = sum((x for x, taken in zip(kept, z, strict=True) if taken), oracles.zero()) + pairs
    total = sum((x.exp() for x in energies.values()), oracles.zero()).log()
    return {z: x - total for z, x in energies.items()}


def placed(z: tuple[int, ...], mask: Tensor) -> Tensor:
    selected = torch.zeros_like(mask)
    selected[mask] = torch.tensor(z, dtype=torch.bool)
    return selected


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 10])
def test_it_is_the_enumeration(n):
    e, T = normal(3, n).requires_grad_(), normal(2, 2, seed=1).requires_grad_()
    mask = holes(3, n, seed=n)
    mask[0] = True
    mask[2] = False
    chain = Chain(e, mask, T)
    for b in range(3):
        known = enumerated(e[b], mask[b], T)
        weights = torch.stack(oracles.structured(list(e[b]), mask[b].tolist(), T))
        assert_same(chain.marginals()[b], weights)
        spread = -sum((p.exp() * p for p in known.values()), oracles.zero())
        assert_same(chain.entropy()[b], spread)
        for z, p in list(known.items())[:: max(1, len(known) // 7)]:
            assert_same(chain.log_prob(placed(z, mask[b]).expand(3, n))[b], p)
        cotangent = normal(n, seed=3)
        for found, expected in ((chain.marginals()[b] @ cotangent, weights @ cotangent), (chain.entropy()[b], spread)):
            if expected.requires_grad:
                mine = torch.autograd.grad(found, (e, T), retain_graph=True)
                theirs = torch.autograd.grad(expected, (e, T), retain_graph=True, allow_unused=True)
                for x, y in zip(mine, theirs, strict=True):
                    assert_same(x, torch.zeros_like(x) if y is None else y)


def test_gradients():
    mask = holes(2, 5)
    leaves = normal(2, 5).requires_grad_(), normal(2, 2, seed=1).requires_grad_()
    for of in (Chain.marginals, Chain.entropy, Chain.log_partition):
        assert torch.autograd.gradcheck(lambda e, T, of=of: of(Chain(e, mask, T)), leaves)
        assert torch.autograd.gradgradcheck(lambda e, T, of=of: of(Chain(e, mask, T)), leaves)


def test_samples_are_those_of_the_distribution():
    mask = torch.tensor([True, True, False, True, True])
    e, T, count = normal(5), 2 * normal(2, 2, seed=1), 40000
    chain = Chain(e.expand(count, 5), mask, T)
    drawn = chain.sample(torch.Generator().manual_seed(0))
    assert drawn.dtype == torch.bool
    assert not drawn[:, 2].any()
    statistic = 0.0
    for z, p in enumerated(e, mask, T).items():
        expected = count * float(p.exp())
        observed = int((drawn == placed(z, mask)).all(-1).sum())
        statistic += (observed - expected) ** 2 / expected
    assert statistic < 37.7  # chi-square with 15 degrees of freedom, at 0.001
    assert torch.equal(drawn, chain.sample(torch.Generator().manual_seed(0)))


def test_long_chains_and_large_scores_stay_finite():
    e = (50 * torch.randn(3, 4099, generator=torch.Generator().manual_seed(0))).requires_grad_()
    T = torch.tensor([[30.0, -40.0], [-40.0, 30.0]], requires_grad=True)
    chain = Chain(e, None, T)
    for found in (chain.marginals(), chain.entropy(), chain.log_partition()):
        assert found.isfinite().all()
        gradients = torch.autograd.grad(found.sum(), (e, T), retain_graph=True)
        assert all(g.isfinite().all() for g in gradients)
    exact = Chain(e.detach().double(), None, T.detach().double()).marginals()
    assert (chain.marginals() - exact).abs().max() < 1e-5


def test_a_forbidden_key_is_not_in_the_chain_wherever_it_stands():
    e, T, mask = normal(2, 11), normal(2, 2, seed=1), holes(2, 11)
    found = Chain(e, mask, T).marginals()
    for b in range(2):
        alone = Chain(e[b][mask[b]], None, T).marginals()
        assert_same(found[b][mask[b]], alone)
        assert not found[b][~mask[b]].any()
    # A score of minus infinity forbids, too.
    assert_same(Chain(torch.where(mask, e, -math.inf), None, T).marginals(), found)


def test_the_order_of_keys_matters_but_for_reversal():
    e, T = normal(7), normal(2, 2, seed=1)
    forward = Chain(e, None, T).marginals()
    assert_same(Chain(e.flip(-1), None, T.mT).marginals().flip(-1), forward)
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    assert not torch.allclose(Chain(e[order], None, T).marginals(), forward[order])


def test_normalised_weights_sum_to_one_however_small():
    attend = rg.Attention("dot", rg.LinearChain(normalize=True))
    query, key = torch.full((1, 1, 1), 300.0), -torch.ones(1, 5, 1)
    weights = weights_of(attend, query, key).weights
    assert torch.allclose(weights, torch.full_like(weights, 0.2))
    assert not weights_of(rg.Attention("dot", rg.LinearChain()), query, key).weights.any()


def test_the_distribution_of_a_recorded_call():
    attend = scrambled(rg.Attention("general", "structured", query_dim=3, key_dim=5))
    mask = holes(2, 7)
    trace = weights_of(attend, normal(2, 3), normal(2, 7, 5), mask=mask)
    chain = attend.align.distribution(trace.call)
    assert_same(chain.marginals().squeeze(-2), trace.weights)
    assert chain.entropy().shape == (2, 1)
    selected = chain.sample(torch.Generator().manual_seed(0))
    assert selected.shape == (2, 1, 7)
    assert chain.log_prob(selected).shape == (2, 1)


def test_interventions():
    attend, mask = scrambled(rg.Attention("dot", rg.LinearChain())), holes(2, 7)
    x = normal(2, 3), normal(2, 7, 3)
    before = weights_of(attend, *x).weights
    with rg.intervene(attend, "erased", keys=[2]):
        erased = weights_of(attend, *x).weights
    assert not erased[:, 2].any()
    assert not torch.allclose(erased[:, 3], before[:, 3]), "its neighbours are neighbours now"
    with rg.intervene(attend, "uniform"):
        assert_same(weights_of(attend, *x, mask=mask).weights, mask / mask.sum(-1, keepdim=True).double())


def test_structured_is_neither_hierarchical_nor_binomial():
    """Binary variables that depend on each other: a row is no distribution over keys, nor are keys drawn by themselves."""
    assert rg.catalog.find("structured").cls is rg.LinearChain
    e, T = normal(4), torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    chain = Chain(e.expand(20000, 4), None, T)
    p = chain.marginals()[0]
    assert abs(float(p.sum()) - 1) > 0.1
    drawn = chain.sample(torch.Generator().manual_seed(0)).double()
    together = (drawn[:, 0] * drawn[:, 1]).mean()
    assert together > p[0] * p[1] + 0.05


def supervised(model: torch.nn.Module, batch: Batch) -> Tensor:
    """How far the weights are from the truth about which keys lie inside."""
    weights = weights_of(model, **batch.inputs)["attention"].weights
    return F.binary_cross_entropy(weights.clamp(1e-6, 1 - 1e-6), batch.truth["inside"].float())


def test_a_chain_beats_independent_sigmoids_on_segments():
    """Trained on the answer alone, and on where the segments are."""
    task, table = NoisySegments(), {}
    batch = task.draw(1024, torch.Generator().manual_seed(5))
    for name, align in (("chain", rg.LinearChain), ("sigmoids", rg.SigmoidGate), ("softmax", rg.Soft)):
        torch.manual_seed(0)
        model = Classifier(rg.Attention(rg.General(1, 2), align()), 1, task.classes, task.readout)
        fit(model, task, steps=200, lr=0.05, loss=cross_entropy)
        table[name] = [accuracy(model, task)]
        if name != "softmax":
            fit(model, task, steps=100, lr=0.05, loss=supervised)
            found = weights_of(model, **batch.inputs)["attention"].weights > 0.5
            table[name].append(float((found == batch.truth["inside"]).float().mean()))
    print("\nalignment", "accuracy", "keys decided right (supervised)", sep="\t")
    for name, row in table.items():
        print(name, *(f"{x:.3f}" for x in row), sep="\t")
    assert table["chain"][0] >= table["sigmoids"][0] + 0.04
    assert table["chain"][0] > table["softmax"][0]
    assert table["chain"][1] >= table["sigmoids"][1] + 0.06
