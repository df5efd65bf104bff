"""Queries that a condition shapes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from regard.recipes.planted import AttributeLookup, Classifier, accuracy, fit
from tests import oracles
from tests.cases import assert_same, scrambled
from tests.feature.common import normal

MODELS = {
    "film": (lambda: rg.FiLMQuery(3, 5), 3, 3),
    "hyper": (lambda: rg.HyperQuery(3, 5, 7, rank=2), 3, 7),
}
every_model = pytest.mark.parametrize(("make", "dx", "dq"), MODELS.values(), ids=MODELS)


def film(m: rg.FiLMQuery, q: Tensor, z: Tensor) -> Tensor:
    gamma, beta = oracles.times(m.W_gamma, z) + m.b_gamma, oracles.times(m.W_beta, z) + m.b_beta
    return torch.stack([(1 + g) * x + b for g, x, b in zip(gamma, q, beta, strict=True)])


def hyper(m: rg.HyperQuery, x: Tensor, z: Tensor) -> Tensor:
    W = m.W_0 + m.U @ torch.diag(oracles.times(m.W_s, z) + m.b_s) @ m.V.mT
    return oracles.times(W, x)


@every_model
def test_oracle(make, dx, dq):
    m, oracle = scrambled(make()), film if isinstance(make(), rg.FiLMQuery) else hyper
    x, z = normal(2, 4, dx), normal(2, 5, seed=1)
    shared, single = m(x, z), m(x[:, 0], z)
    assert shared.shape == (2, 4, dq)
    assert single.shape == (2, dq)
    for b in range(2):
        for i in range(4):
            assert_same(shared[b, i], oracle(m, x[b, i], z[b]))
    assert_same(single, shared[:, 0])


def test_latent_oracle():
    m, z = scrambled(rg.LatentQueries(3, 4, 5, hidden_dim=7)), normal(2, 5)
    found = m(z)
    assert found.shape == (2, 4, 3)
    for b in range(2):
        hidden = oracles.each(oracles.ACTIVATIONS["tanh"], oracles.times(m.W1, z[b]) + m.b1)
        moved = oracles.times(m.W2, hidden) + m.b2
        for k in range(4):
            assert_same(found[b, k], m.Q_0[k] + moved[3 * k : 3 * k + 3])


@every_model
def test_gradients(make, dx, dq):
    m = scrambled(make())
    assert torch.autograd.gradcheck(m, (normal(2, 4, dx).requires_grad_(), normal(2, 5, seed=1).requires_grad_()))


@every_model
def test_what_is_missing_never_matters(make, dx, dq):
    m, x, z, mask = scrambled(make()), normal(2, 4, dx), normal(2, 5, seed=1), torch.tensor([True, False])
    for asked in (x, x[:, 0]):
        dirty = [t.masked_fill(~mask.reshape(2, *(1,) * (t.dim() - 1)), math.nan).requires_grad_() for t in (asked, z)]
        found = m(*dirty, mask)
        assert_same(found[0], m(asked, z)[0])
        gradients = torch.autograd.grad(found.sum(), [*dirty, *m.parameters()])
        assert all(g.isfinite().all() for g in gradients)
        assert found.isfinite().all()


def test_every_condition_counts_from_the_start():
    """What starts at zero still learns at once."""
    z, features = torch.randn(2, 5), torch.randn(2, 7, 3)
    for query in (rg.FiLMQuery(3, 5), rg.HyperQuery(3, 5, rank=2)):
        found = rg.Attention("dot")(query(torch.randn(2, 3), z), features)
        name = "W_gamma" if isinstance(query, rg.FiLMQuery) else "W_s"
        assert torch.autograd.grad(found.square().sum(), getattr(query, name))[0].any()
    latent = rg.LatentQueries(3, 2, 5)
    assert torch.autograd.grad(rg.Attention("dot")(latent(z), features).square().sum(), latent.W2)[0].any()


class Conditioned(nn.Module):
    """A model of queries under a condition, and the attention that it asks."""

    def __init__(self, query: nn.Module | None, attention: rg.Attention) -> None:
        super().__init__()
        self.query, self.attention = query, attention

    def forward(self, query: Tensor, condition: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if isinstance(self.query, rg.LatentQueries):
            return self.attention(self.query(torch.cat([query, condition], -1)), key, value).squeeze(-2)
        return self.attention(query if self.query is None else self.query(query, condition), key, value)


def test_a_condition_tells_which_attribute_to_look_for():
    task, table = AttributeLookup(), {}
    d = task.dim
    for name, query in {
        "without": lambda: None,
        "FiLM": lambda: rg.FiLMQuery(d, 2),
        "hyper-network": lambda: rg.HyperQuery(d, 2, rank=8),
        "latent": lambda: rg.LatentQueries(d, 1, d + 2, hidden_dim=32),
    }.items():
        torch.manual_seed(0)
        attend = rg.Attention("general", query_dim=d, key_dim=d) if name == "without" else rg.Attention("dot")
        model = Classifier(Conditioned(query(), attend), 1, task.classes, task.readout)
        fit(model, task, steps=300, lr=0.03)
        table[name] = accuracy(model, task)
    print("\n" + ", ".join(f"{name} {found:.3f}" for name, found in table.items()))
    assert table.pop("without") <= 0.8
    assert min(table.values()) >= 0.97


def test_refusals():
    with pytest.raises(ValueError, match="condition: got shape"):
        rg.FiLMQuery(3, 5)(torch.randn(3), torch.randn(2, 5))
    with pytest.raises(ValueError, match="rank: got 0"):
        rg.HyperQuery(3, 5, rank=0)
    with pytest.raises(ValueError, match="count: got 0"):
        rg.LatentQueries(3, 0, 5)


@pytest.mark.parametrize("make", [lambda: rg.FiLMQuery(5, 3), lambda: rg.HyperQuery(5, 3)])
def test_a_condition_that_does_not_fit_is_refused(make):
    shape, query = make(), torch.zeros(2, 7, 5)
    with pytest.raises(ValueError, match=r"condition: got shape \(2, 4\), expected width 3"):
        shape(query, torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"(query|x): got shape \(2, 7, 4\), expected width 5"):
        shape(query[..., :4], torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"condition: got shape \(3, 3\) beside queries of shape \(2, 7, 5\)"):
        shape(query, torch.zeros(3, 3))
    with pytest.raises(TypeError, match="mask: got a tensor of torch.float32, expected booleans"):
        shape(query, torch.zeros(2, 3), torch.ones(2))
    assert shape(query[:1], torch.zeros(2, 3)).shape == (2, 7, 5)  # one query under two conditions


def test_latent_queries_refuse_what_does_not_fit():
    ask = rg.LatentQueries(5, count=2, condition_dim=3)
    with pytest.raises(ValueError, match=r"condition: got shape \(2, 4\), expected width 3"):
        ask(torch.zeros(2, 4))
    with pytest.raises(TypeError, match="mask: got list, expected booleans"):
        ask(torch.zeros(2, 3), [True, False])
