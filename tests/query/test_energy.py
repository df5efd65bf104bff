"""Energies of queries, and the choice among them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.recipes.planted import StoredPattern
from tests import oracles
from tests.cases import assert_same
from tests.feature.common import EXECUTIONS, holes, normal, weighted, weights_of


def energy(q: Tensor, keys: list[Tensor], beta: float) -> Tensor:
    total = sum(((beta * oracles.dot(q, k)).exp() for k in keys), oracles.zero())
    return -total.log() / beta + oracles.dot(q, q) / 2


def oracle(m: rg.EnergySelection, queries: list[Tensor], keys: list[Tensor], values: list[Tensor], T: float) -> Tensor:
    """One example."""
    for _ in range(m.steps):
        read = [weighted([m.beta * oracles.dot(q, k) for k in keys], keys) for q in queries]
        queries = [q - m.rate * (q - r) for q, r in zip(queries, read, strict=True)]
    contexts = [weighted([m.beta * oracles.dot(q, k) for k in keys], values) for q in queries]
    return weighted([-energy(q, keys, m.beta) / T for q in queries], contexts)


@pytest.mark.parametrize("execution", EXECUTIONS, ids=str)
@pytest.mark.parametrize("options", [{}, {"steps": 2, "rate": 0.6}, {"temperature": 0.3, "beta": 2.0}], ids=str)
def test_oracle(options, execution):
    m = rg.EnergySelection(3, **options)
    query, key, value = normal(2, 4, 3), normal(2, 6, 3, seed=1), normal(2, 6, 5, seed=2)
    mask, real = holes(2, 6), holes(2, 4, seed=1)
    clean = [x.clone().requires_grad_() for x in (query, key, value)]
    dirty = [torch.where(k[..., None], x, math.nan) for x, k in ((query, real), (key, mask), (value, mask))]
    dirty = [x.requires_grad_() for x in dirty]
    with rg.execution(execution[0], panel=execution[1]):
        found = m(*dirty, mask, query_mask=real)
        mine = torch.autograd.grad(found.square().sum(), dirty)
    kept = [real, mask, mask]
    expected = torch.stack(
        [
            oracle(m, *(list(x[b][k[b]]) for x, k in zip(clean, kept, strict=True)), options.get("temperature", 1.0))
            for b in range(2)
        ]
    )
    assert found.shape == (2, 5)
    assert_same(found, expected)
    for a, b in zip(mine, torch.autograd.grad(expected.square().sum(), clean), strict=True):
        assert_same(a, b)


def test_gradients():
    m, mask = rg.EnergySelection(3, steps=1, rate=0.5), holes(2, 4)
    leaves = [x.requires_grad_() for x in (normal(2, 3, 3), normal(2, 4, 3, seed=1), normal(2, 4, 5, seed=2))]
    assert torch.autograd.gradcheck(lambda q, k, v: m(q, k, v, mask), leaves)


def test_without_keys_the_energy_is_infinite():
    mask = torch.tensor([[True, False], [False, False]])
    found = rg.hopfield_energy(normal(2, 3, 5), normal(2, 2, 5), mask=mask)
    assert found[0].isfinite().all()
    assert (found[1] == math.inf).all()
    assert not rg.EnergySelection(5)(normal(2, 3, 5), normal(2, 2, 5), mask=mask)[1].any()


def test_paths():
    trace = weights_of(rg.EnergySelection(3, steps=2), normal(2, 4, 3), normal(2, 6, 3, seed=1))
    assert sorted(trace) == ["attention", "refine", "select"]
    assert len(trace["refine"]) == 2
    assert trace["attention"].weights.shape == (2, 4, 6)
    assert trace["select"].weights.shape == (2, 4)


def test_a_cold_choice_is_hard_and_a_hot_one_is_none():
    query, key = normal(2, 4, 3), normal(2, 6, 3, seed=1)
    lowest = rg.hopfield_energy(query, key, 3**-0.5).argmin(-1)
    for choose in (rg.EnergySelection(3, temperature=1e-4), rg.EnergySelection(3, align="hard").eval()):
        weights = weights_of(choose, query, key)["select"].weights
        assert torch.equal(weights.round().argmax(-1), lowest)
        assert torch.allclose(weights.amax(-1), torch.ones(2, dtype=torch.float64), atol=1e-6)
    weights = weights_of(rg.EnergySelection(3, temperature=1e9), query, key)["select"].weights
    assert torch.allclose(weights, torch.full_like(weights, 1 / 4))


def test_the_query_that_was_stored_is_chosen():
    task = StoredPattern()
    batch = task.draw(1024, torch.Generator().manual_seed(5))
    m = rg.EnergySelection(task.dim, beta=8.0, temperature=0.05)
    trace = weights_of(m, **batch.inputs)
    chosen = (trace["select"].weights.argmax(-1) == batch.truth["query"]).float().mean()
    right = ((m(**batch.inputs).squeeze(-1) > 0) == (batch.target == 1)).float().mean()
    with rg.intervene(m, "uniform", at="select"):
        mixed = ((m(**batch.inputs).squeeze(-1) > 0) == (batch.target == 1)).float().mean()
    print(f"\nchosen {chosen:.3f}, sign right {right:.3f}, all queries alike {mixed:.3f}")
    assert chosen >= 0.98
    assert right >= 0.98
    assert mixed <= 0.75


def test_refinement_takes_the_noise_away():
    task = StoredPattern()
    batch = task.draw(256, torch.Generator().manual_seed(5))
    rows = torch.arange(256)
    query = batch.inputs["query"][rows, batch.truth["query"]].unsqueeze(1)
    stored = batch.inputs["key"][rows, batch.truth["key"]]
    before = (query.squeeze(1) - stored).norm(dim=-1).mean()
    m = rg.EnergySelection(task.dim, beta=32.0, steps=1)
    with rg.record(m) as trace:
        m(query, batch.inputs["key"])
    after = (trace["attention"].call.query.squeeze(1) - stored).norm(dim=-1).mean()
    print(f"\ndistance to the stored pattern {before:.3f} before, {after:.3f} after a step")
    assert after <= 0.1 * before


def test_the_four_directions_are_not_the_surveys():
    """Their formulas are the library's own choice, after published work, and say so."""
    found = list(rg.catalog.entries("query/emerging"))
    names = {"dynamic-query-routing", "conditional-query-generation", "cross-modal-query-alignment"}
    assert names | {"energy-based-query-selection"} <= {entry.name for entry in found}
    for entry in found:
        assert "Survey" not in entry.paper
        assert entry.name == "routing-by-agreement" or entry.paper.startswith("after ")


def test_refusals():
    with pytest.raises(ValueError, match="beta: got 0"):
        rg.EnergySelection(3, beta=0)
    with pytest.raises(ValueError, match="steps: got -1"):
        rg.EnergySelection(3, steps=-1)
    with pytest.raises(ValueError, match="rate: got 2"):
        rg.EnergySelection(3, rate=2)
    with pytest.raises(ValueError, match="temperature: got 0.5, expected 1 beside an alignment that is given"):
        rg.EnergySelection(3, temperature=0.5, align="hard")


def test_other_widths_and_axes_are_refused():
    choose, key = rg.EnergySelection(5), torch.zeros(2, 11, 5)
    with pytest.raises(ValueError, match="key: got width 4, expected 5"):
        choose(key[..., :4], key[..., :4])
    with pytest.raises(ValueError, match="query: got width 4, expected 5"):
        choose(key[..., :4], key)
    with pytest.raises(ValueError, match=r"query: got shape \(2, 5\) beside a key of shape \(2, 11, 5\)"):
        choose(key[:, 0], key)
