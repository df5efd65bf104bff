"""Dynamic query routing: tokens that choose who asks for them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.query.query_routing import TopK
from regard.recipes.planted import Batch, Classifier, Dialects, accuracy, cross_entropy, fit
from tests import oracles
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, attend, normal, weights_of

every_execution = pytest.mark.parametrize("execution", EXECUTIONS, ids=str)
every_mix = pytest.mark.parametrize("mix", ["query", "context"])


def gates(m: rg.QueryRouting, x: Tensor) -> list[Tensor]:
    """The largest of a softmax, renormalised, by loops."""
    g = oracles.soft([oracles.dot(w, x) for w in m.W_r], [True] * len(m.W_r))
    kept = sorted(range(len(g)), key=lambda e: -g[e].item())[: m.router.align.k]
    total = sum((g[e] for e in kept), oracles.zero())
    return [g[e] / total if e in kept else oracles.zero() for e in range(len(g))]


def oracle(m: rg.QueryRouting, x: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One token."""
    if not keys:
        return torch.zeros(7, dtype=torch.float64)
    g, asked = gates(m, x), [oracles.times(W, x) for W in m.W_Q]
    if m.mix == "query":
        query = sum((a * q for a, q in zip(g, asked, strict=True)), 0 * asked[0])
        return attend(m.attention, query, keys, values)
    return sum(a * attend(m.attention, q, keys, values) for a, q in zip(g, asked, strict=True))


@every_mix
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(mix, lead):
    m = rg.QueryRouting((3, 5, 7), 4, top_k=2, mix=mix)
    key, value = torch.randn(*lead, 11, 5), torch.randn(*lead, 11, 7)
    assert m(torch.randn(*lead, 13, 3), key, value).shape == (*lead, 13, 7)
    assert m(torch.randn(*lead, 3), key, value).shape == (*lead, 7)
    trace = weights_of(m, torch.randn(*lead, 13, 3), key, value)
    assert trace["router"].weights.shape == (*lead, 13, 4)
    assert trace["attention"].weights.shape == ((*lead, 4, 13, 11) if mix == "context" else (*lead, 13, 11))


@every_execution
@every_mix
@pytest.mark.parametrize("score", ["scaled-dot", "additive"])
def test_oracle(mix, score, execution):
    m = scrambled(rg.QueryRouting((3, 5, 7), 4, top_k=2, mix=mix, score=score))
    query, key, value = normal(2, 3, 3), normal(2, 6, 5, seed=1), normal(2, 6, 7, seed=2)
    mask = torch.rand(2, 3, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[0, 1] = False
    mask[1, :, 2] = False
    clean = [x.clone().requires_grad_() for x in (query, key, value)]
    seen, heard = mask.any(-1), mask.any(-2)
    dirty = [torch.where(k[..., None], x, math.nan) for x, k in ((query, seen), (key, heard), (value, heard))]
    dirty = [x.requires_grad_() for x in dirty]
    with rg.execution(execution[0], panel=execution[1]):
        found = m(*dirty, mask=mask)
        mine = torch.autograd.grad(found.square().sum(), [*dirty, *m.parameters()])
    expected = torch.stack(
        [
            torch.stack([oracle(m, clean[0][b, i], *(list(x[b][mask[b, i]]) for x in clean[1:])) for i in range(3)])
            for b in range(2)
        ]
    )
    assert_same(found, expected)
    theirs = torch.autograd.grad(expected.square().sum(), [*clean, *m.parameters()])
    for a, b in zip(mine, theirs, strict=True):
        assert_same(a, b)


@every_mix
def test_gradients(mix):
    m = scrambled(rg.QueryRouting((3, 5, 7), 4, top_k=2, mix=mix))
    leaves = [x.requires_grad_() for x in (normal(2, 3, 3), normal(2, 4, 5, seed=1), normal(2, 4, 7, seed=2))]
    assert torch.autograd.gradcheck(m, leaves, fast_mode=True)


def test_gates_are_the_largest_of_a_softmax_renormalised():
    m, x = scrambled(rg.QueryRouting((3, 5, 7), 4, top_k=2)), normal(2, 6, 3)
    trace = weights_of(m, x, normal(2, 4, 5), normal(2, 4, 7))
    found = trace["router"].weights
    assert ((found > 0).sum(-1) == 2).all()
    assert_same(found.sum(-1), torch.ones(2, 6, dtype=torch.float64))
    for b in range(2):
        for i in range(6):
            assert_same(found[b, i], torch.stack(gates(m, x[b, i])))


def test_noise_is_for_training_alone_and_lets_every_expert_be_tried():
    m = rg.QueryRouting(3, 4, top_k=1, noise=5.0)
    x = torch.randn(1, 1, 3).expand(1, 500, 3)
    torch.manual_seed(0)
    assert (weights_of(m, x, x)["router"].weights[0] > 0).any(0).all()
    m.eval()
    assert ((weights_of(m, x, x)["router"].weights[0] > 0).any(0)).sum() == 1


def test_interventions_on_the_router():
    m, x, key = scrambled(rg.QueryRouting(3, 2)), normal(2, 5, 3), normal(2, 7, 3, seed=1)
    with rg.intervene(m, "uniform", at="router"):
        mixed = m(x, key)
    plain = rg.Attention("scaled-dot")
    assert_same(mixed, plain(x @ m.W_Q.mean(0).mT, key))
    with rg.intervene(m, "erased", at="router", keys=[0]):
        assert_same(m(x, key), plain(x @ m.W_Q[1].mT, key))


def test_load_balance_counts_real_tokens():
    m = scrambled(rg.QueryRouting(3, 4, top_k=2))
    x, mask = normal(2, 5, 3), torch.tensor([[True] * 5, [True, True, False, False, False]])
    trace = weights_of(m, x, x, mask=mask.unsqueeze(-1).expand(2, 5, 5))
    found = rg.load_balance(trace["router"].call)
    tokens = x[mask]
    g = (tokens @ m.W_r.mT).softmax(-1)
    routed = torch.stack([torch.stack(gates(m, t)) > 0 for t in tokens]).double() / 2
    assert_same(found, 4 * (routed.mean(0) * g.mean(0)).sum())
    assert torch.autograd.grad(found, m.W_r)[0].any()


def balanced(model: torch.nn.Module, batch: Batch) -> Tensor:
    with rg.record(model) as trace:
        loss = cross_entropy(model, batch)
    return loss + 0.1 * rg.load_balance(trace["attention.router"].call)


def test_dialects_need_as_many_experts():
    task, table = Dialects(), {}
    for mix in ("query", "context"):
        for experts in (1, 2):
            torch.manual_seed(0)
            m = rg.QueryRouting((task.token_dim, task.codes, 1), experts, mix=mix)
            model = Classifier(m, 1, task.classes, task.readout)
            fit(model, task, steps=300, lr=0.05)
            table[mix, experts] = accuracy(model, task)
    torch.manual_seed(0)
    m = rg.QueryRouting((task.token_dim, task.codes, 1), 4, top_k=2)
    model = Classifier(m, 1, task.classes, task.readout)
    fit(model, task, steps=300, lr=0.05, loss=balanced)
    table["query, two of four, balanced", 4] = accuracy(model, task)
    print("\nmixed", "experts", "accuracy", sep="\t")
    for (mix, experts), found in table.items():
        print(mix, experts, f"{found:.3f}", sep="\t")
        assert (found >= 0.95) == (experts > 1)
        assert experts > 1 or found <= 0.8


def test_refusals():
    with pytest.raises(ValueError, match="top_k: got 5, expected at most experts=4"):
        rg.QueryRouting(3, 4, top_k=5)
    with pytest.raises(ValueError, match="mix: got 'keys', expected one of query, context"):
        rg.QueryRouting(3, 4, mix="keys")
    with pytest.raises(ValueError, match="noise: got -1"):
        TopK(2, noise=-1)
    with pytest.raises(ValueError, match="query: got shape"):
        rg.QueryRouting(3, 4)(torch.randn(3), torch.randn(2, 5, 3))
    with pytest.raises(ValueError, match=r"value: got shape \(3,\), expected a row for each key"):
        rg.QueryRouting(3, 4)(torch.randn(2, 3), torch.randn(2, 5, 3), torch.randn(3))
    with pytest.raises(ValueError, match="value: got list, expected a row for each key"):
        rg.QueryRouting(3, 4)(torch.randn(2, 3), torch.randn(2, 5, 3), [1.0])


def test_the_balance_is_that_of_a_call():
    attend, x = rg.QueryRouting(3, experts=2), torch.zeros(2, 5, 3)
    with rg.record(attend) as trace:
        attend(x, x)
    with pytest.raises(TypeError, match=r"call: got Calls, expected the call of a router"):
        rg.load_balance(trace["router"])
