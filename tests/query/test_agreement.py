"""Heads that are joined by routing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from regard.recipes.planted import Classifier, Lookup, accuracy, fit
from tests import oracles
from tests.cases import assert_same, scrambled
from tests.feature.common import holes, normal, weighted, weights_of


def squashed(s: Tensor) -> Tensor:
    length = oracles.norm(s)
    return s * length / (1 + length**2)


def oracle(m: rg.AgreementAttention, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One query: heads one by one, then rounds of routing, from the equations."""
    H, J = m.agreement.W.shape[:2]
    contexts = []
    for h in range(H):
        query = oracles.times(m.W_Q[h], q)
        scores = [oracles.dot(query, oracles.times(m.W_K[h], k)) / len(query) ** 0.5 for k in keys]
        contexts.append(weighted(scores, [oracles.times(m.W_V[h], v) for v in values]))
    votes = [[oracles.times(m.agreement.W[h, j].mT, contexts[h]) for j in range(J)] for h in range(H)]
    b = [[oracles.zero() for _ in range(J)] for _ in range(H)]
    for _ in range(m.agreement.iterations):
        c = [oracles.soft(row, [True] * J) for row in b]
        v = [squashed(sum(c[h][j] * votes[h][j] for h in range(H))) for j in range(J)]
        b = [[b[h][j] + oracles.dot(votes[h][j], v[j]) for j in range(J)] for h in range(H)]
    return torch.cat(v)


@pytest.mark.parametrize("capsules", [None, 2, 1])
def test_shapes_and_oracle(capsules):
    m = scrambled(rg.AgreementAttention((6, 5, 7), 3, head_dim=(2, 4), capsules=capsules))
    query, key, value, mask = normal(2, 3, 6), normal(2, 5, 5, seed=1), normal(2, 5, 7, seed=2), holes(2, 5)
    found = m(query, key, value, mask=mask.unsqueeze(-2))
    assert found.shape == (2, 3, 6)
    expected = [
        torch.stack([oracle(m, query[b, i], list(key[b][mask[b]]), list(value[b][mask[b]])) for i in range(3)])
        for b in range(2)
    ]
    assert_same(found, torch.stack(expected))
    assert_same(m(query[:, 0], key, value, mask=mask), found[:, 0])


def test_gradients():
    m = scrambled(rg.AgreementAttention((4, 5, 7), 2, head_dim=2))
    leaves = [x.requires_grad_() for x in (normal(2, 3, 4), normal(2, 4, 5, seed=1), normal(2, 4, 7, seed=2))]
    assert torch.autograd.gradcheck(m, leaves, fast_mode=True)


def test_there_is_no_linear_map_of_heads():
    names = {name.split(".")[0] for name, _ in rg.AgreementAttention(6, 3, bias=True).named_parameters()}
    assert names == {"W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V", "agreement"}


def test_couplings_are_recorded_and_every_head_distributes_itself():
    m = scrambled(rg.AgreementAttention(6, 3, capsules=2, iterations=2))
    trace = weights_of(m, normal(2, 5, 6))
    assert sorted(trace) == ["agreement.routing", "attention"]
    assert len(trace["agreement.routing"]) == 2
    couplings = trace["agreement.routing"][1].weights
    assert couplings.shape == (2, 5, 3, 2)
    assert_same(couplings.sum(-1), torch.ones(2, 5, 3, dtype=torch.float64))


def test_one_output_hears_all_heads_alike():
    m, x = scrambled(rg.AgreementAttention(6, 3, capsules=1)), normal(2, 5, 6)
    more = scrambled(rg.AgreementAttention(6, 3, capsules=1, iterations=1))
    more.load_state_dict(m.state_dict())
    assert_same(m(x), more(x))


def test_it_looks_up():
    task = Lookup()
    torch.manual_seed(0)
    m = rg.AgreementAttention((task.codes, task.dim, task.dim), 2, head_dim=task.dim, capsules=2)
    model = Classifier(m, task.codes, task.classes)
    fit(model, task, steps=300, lr=0.02)
    print(f"\naccuracy {accuracy(model, task):.3f}")
    assert accuracy(model, task) >= 0.95


def test_refusals():
    with pytest.raises(ValueError, match="capsules: got 4, expected a divisor of the width 6"):
        rg.AgreementAttention(6, 3, capsules=4)
    with pytest.raises(TypeError, match="module: got MultiheadAttention"):
        rg.AgreementAttention.from_torch(nn.MultiheadAttention(6, 3))
