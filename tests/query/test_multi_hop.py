"""Multi-hop attention: what was read decides what is asked next."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from regard.query.multi_hop import TRANSFORMS
from regard.recipes.planted import Classifier, FactChain, accuracy, fit
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, attend, holes, mean, normal, weights_of

OPTIONS = {
    "residual": {},
    "identity": {"transform": "identity"},
    "own, GRU": {"transform": "gru", "share": False},
    "query side": {"transform": "attention", "score": "general"},
    "stacked": {"transform": "residual", "start": "zeros", "see_context": False, "share": False},
    "multi-dimensional": {"features": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
every_execution = pytest.mark.parametrize("execution", EXECUTIONS, ids=str)


def gru(cell, x, h):
    """One step, gate by gate."""
    (rx, zx, nx), (rh, zh, nh) = (
        (W @ v + b).chunk(3) for W, v, b in ((cell.weight_ih, x, cell.bias_ih), (cell.weight_hh, h, cell.bias_hh))
    )
    r, z = torch.sigmoid(rx + rh), torch.sigmoid(zx + zh)
    n = torch.tanh(nx + r * nh)
    return (1 - z) * n + z * h


def oracle(m: rg.MultiHopAttention, q, keys, values, side) -> torch.Tensor:
    """All contexts of one example, hop by hop."""
    c = mean(values) if m.start == "mean" else values[0] * 0
    found = []
    for s in range(m.count):
        k = s if len(m.hops) > 1 else 0
        t = m.transforms[k]
        if type(t) is TRANSFORMS["residual"]:
            q = q + t.W @ c
        elif type(t) is TRANSFORMS["gru"]:
            q = gru(t.cell, c, q)
        elif type(t) is TRANSFORMS["attention"]:
            q = attend(t.attention, torch.cat([q, c]), side)
        c = attend(m.hops[k], torch.cat([q, c]) if m.see_context else q, keys, values)
        found.append(c)
    return torch.stack(found)


@every_option
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(options, lead):
    m = rg.MultiHopAttention((3, 5, 7), 2, **options)
    key, value, side = torch.randn(*lead, 11, 5), torch.randn(*lead, 11, 7), torch.randn(*lead, 13, 3)
    assert m(torch.randn(*lead, 3), key, value, side=side).shape == (*lead, 7)
    assert m.contexts(torch.randn(*lead, 3), key, value, side=side).shape == (*lead, 2, 7)
    if lead:
        assert m(torch.randn(*lead, 17, 3), key, value, side=side).shape == (*lead, 17, 7)


@every_execution
@every_option
def test_oracle(options, execution):
    m = scrambled(rg.MultiHopAttention((3, 4, 2), 3, **options))
    query, key, value, side = normal(2, 3), normal(2, 5, 4), normal(2, 5, 2), normal(2, 6, 3)
    mask, side_mask = holes(2, 5), holes(2, 6, seed=1)
    clean = [x.clone().requires_grad_() for x in (query, key, value, side)]
    dirty = [
        query.clone(),
        *(torch.where(k[..., None], x, math.nan) for x, k in ((key, mask), (value, mask), (side, side_mask))),
    ]
    dirty = [x.requires_grad_() for x in dirty]
    with rg.execution(execution[0], panel=execution[1]):
        found = m.contexts(*dirty[:3], mask, side=dirty[3], side_mask=side_mask)
        mine = torch.autograd.grad(found.square().sum(), [*dirty, *m.parameters()], allow_unused=True)
    expected = torch.stack(
        [
            oracle(m, clean[0][b], *(list(x[b][k[b]]) for x, k in zip(clean[1:], (mask, mask, side_mask), strict=True)))
            for b in range(2)
        ]
    )
    theirs = torch.autograd.grad(expected.square().sum(), [*clean, *m.parameters()], allow_unused=True)
    assert_same(found, expected)
    for a, b in zip(mine, theirs, strict=True):
        like = next((x for x in (a, b) if x is not None), query)
        a, b = (torch.zeros_like(like) if x is None else x for x in (a, b))
        assert_same(a + 1, b + 1)


@every_option
def test_gradients(options):
    m = scrambled(rg.MultiHopAttention((3, 4, 2), 2, **options))
    leaves = [normal(2, 3), normal(2, 4, 4), normal(2, 4, 2), normal(2, 4, 3)]
    mask = holes(2, 4)
    assert torch.autograd.gradcheck(
        lambda q, k, v, s: m(q, k, v, mask, side=s, side_mask=mask),
        [x.requires_grad_() for x in leaves],
        fast_mode=True,
    )


@every_option
def test_many_queries_go_their_own_ways(options):
    m = scrambled(rg.MultiHopAttention((3, 5, 7), 2, **options))
    query, key, value, side, mask = normal(2, 4, 3), normal(2, 6, 5), normal(2, 6, 7), normal(2, 3, 3), holes(2, 6)
    found = m(query, key, value, mask, side=side)
    for i in range(4):
        assert_same(found[:, i], m(query[:, i], key, value, mask, side=side))


def test_equal_scores_read_the_mean_at_every_hop():
    m, value, mask = scrambled(rg.MultiHopAttention(5, 3)), normal(2, 7, 5), holes(2, 7)
    with torch.no_grad():
        m.hops[0].score.w.zero_()
    found = m.contexts(normal(2, 5), value, mask=mask)
    for b in range(2):
        assert_same(found[b], mean(list(value[b][mask[b]])).expand(3, 5))


def test_a_fixed_point_stays():
    """When the query does not change and one context repeats, all later ones do."""
    m = scrambled(rg.MultiHopAttention(5, 6, transform="identity", see_context=False))
    found = m.contexts(normal(2, 5), normal(2, 7, 5))
    for s in range(1, 6):
        assert_same(found[:, s], found[:, 0])


def test_sum_is_a_residual_with_the_identity():
    a, b = (scrambled(rg.MultiHopAttention(5, 3, transform=t)) for t in ("sum", "residual"))
    with torch.no_grad():
        for p, q in zip(a.hops.parameters(), b.hops.parameters(), strict=True):
            p.copy_(q)
        b.transforms[0].W.copy_(torch.eye(5))
    query, key = normal(2, 5), normal(2, 7, 5)
    assert_same(a(query, key), b(query, key))


def test_paths():
    x = torch.randn(2, 3), torch.randn(2, 7, 5), torch.randn(2, 7, 2)
    trace = weights_of(rg.MultiHopAttention((3, 5, 2), 3), *x)
    assert list(trace) == ["hops.0"]
    assert len(trace["hops.0"]) == 3
    m = rg.MultiHopAttention((3, 5, 2), 2, share=False, transform="attention")
    trace = weights_of(m, *x, side=torch.randn(2, 4, 3))
    assert sorted(trace) == ["hops.0", "hops.1", "transforms.0.attention", "transforms.1.attention"]


def test_chains_of_facts_need_as_many_hops():
    """Accuracy by hops: as many as there are facts follow the chain, fewer guess among three."""
    table = {}
    for facts in (1, 2, 3):
        task = FactChain(facts)
        for hops in (1, 2, 3):
            torch.manual_seed(0)
            m = rg.MultiHopAttention(task.codes, hops, score="general", share=False, start="zeros")
            model = Classifier(m, task.codes, task.classes)
            fit(model, task, steps=300, lr=0.03)
            table[facts, hops] = accuracy(model, task)
            if hops == facts:
                batch = task.draw(256, torch.Generator().manual_seed(2))
                trace = weights_of(model, **batch.inputs)
                for s in range(hops):
                    looked = trace[f"attention.hops.{s}"].weights.argmax(-1)
                    assert (looked == batch.truth[f"fact {s + 1}"]).float().mean() >= 0.95
    print("\nfacts", *(f"{h} hops" for h in (1, 2, 3)), sep="\t")
    for facts in (1, 2, 3):
        print(facts, *(f"{table[facts, hops]:.3f}" for hops in (1, 2, 3)), sep="\t")
    for (facts, hops), found in table.items():
        assert (found >= 0.95) == (hops >= facts), (facts, hops)
        assert hops >= facts or found <= 0.4


def test_refusals():
    with pytest.raises(ValueError, match="hops: got 0"):
        rg.MultiHopAttention(5, 0)
    with pytest.raises(ValueError, match="transform: got 'lstm', expected one of identity, residual"):
        rg.MultiHopAttention(5, transform="lstm")
    with pytest.raises(ValueError, match="transform: got 'sum', expected equal widths, not 3 and 7"):
        rg.MultiHopAttention((3, 5, 7), transform="sum")
    with pytest.raises(ValueError, match="side: got None"):
        rg.MultiHopAttention(5, transform="attention")(torch.randn(2, 5), torch.randn(2, 3, 5))
    with pytest.raises(ValueError, match="score: got one Additive, expected parameters for 2 steps"):
        rg.MultiHopAttention(5, 2, share=False, score=rg.Additive(10, 5, 3))
    with pytest.raises(TypeError, match="transform: got int"):
        rg.MultiHopAttention(5, transform=3)


@pytest.mark.parametrize("shape", [(2, 3), (2, 5, 3)])
def test_a_query_of_another_batch_is_refused(shape):
    with pytest.raises(ValueError, match=r"query: got shape .* beside a key of shape \(7, 11, 3\)"):
        rg.MultiHopAttention(3)(torch.zeros(shape), torch.zeros(7, 11, 3))
