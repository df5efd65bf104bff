"""Meta-embeddings: several representations of each token, weighed against each other."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from regard.recipes.planted import Classifier, InformativeSource, accuracy, fit
from tests import oracles
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, NAMES, holes, normal, weighted, weights_of

WIDTHS = (2, 5, 3)
OPTIONS = {
    "dot": {},
    "sigmoid": {"align": "sigmoid"},
    "query-free": {"score": "query-free", "hidden_dim": 7},
    "additive": {"score": "additive"},
    "multi-dimensional": {"score": "query-free", "features": True},
    "contextual": {"contextual": 2},
    "contextual, sigmoid": {"contextual": 2, "align": "sigmoid"},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def oracle(m: rg.MetaEmbedding, sources: list[torch.Tensor], known: torch.Tensor) -> torch.Tensor:
    """One sequence: sources (N, d_i), known (N, E)."""
    n, count = known.shape
    mapped = {
        (t, i): oracles.times(m.maps[i].weight, sources[i][t]) + m.maps[i].bias
        for t in range(n)
        for i in range(count)
        if known[t, i]
    }
    keys = dict(mapped)
    if m.encoder is not None:
        for i in range(count):
            places = [t for t in range(n) if known[t, i]]
            if places:
                states = m.encoder.network(torch.stack([mapped[t, i] for t in places]))[0]
                keys.update({(t, i): state for t, state in zip(places, states, strict=True)})
    out = []
    for t in range(n):
        some = [i for i in range(count) if known[t, i]]
        e = [oracles.SCORES[NAMES[type(m.attention.score)]](m.attention.score, m.u, keys[t, i]) for i in some]
        values = [mapped[t, i] for i in some]
        if not some:
            out.append(torch.zeros(m.maps[0].out_features, dtype=torch.float64))
        elif isinstance(m.attention.align, rg.SigmoidGate):
            gates = [1 / (1 + (-(x + m.attention.align.c[0])).exp()) for x in e]
            out.append(sum((a * v for a, v in zip(gates, values, strict=True)), torch.zeros_like(values[0])))
        else:
            out.append(weighted(e, values))
    return torch.stack(out)


@every_option
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(options, lead):
    m = rg.MetaEmbedding(WIDTHS, 7, **options)
    assert m([torch.randn(*lead, 11, d) for d in WIDTHS]).shape == (*lead, 11, 7)


@pytest.mark.parametrize("execution", EXECUTIONS, ids=str)
@every_option
def test_oracle_with_missing_sources(options, execution):
    m = scrambled(rg.MetaEmbedding(WIDTHS, 4, **options))
    masks = [holes(2, 5, seed=k) for k in range(3)]
    for mask in masks:
        mask[1, 2] = False  # a token that no source knows
    x = [
        torch.where(k[..., None], normal(2, 5, d), math.nan).requires_grad_()
        for d, k in zip(WIDTHS, masks, strict=True)
    ]
    y = [s.detach().nan_to_num(0.0).requires_grad_() for s in x]
    with rg.execution(execution[0], panel=execution[1]):
        found = m(x, masks)
    known = torch.stack(masks, -1)
    expected = torch.stack([oracle(m, [s[b] for s in y], known[b]) for b in range(2)])
    assert_same(found, expected)
    assert not found[1, 2].any()
    cotangent = normal(2, 5, 4, seed=5)
    ours = torch.autograd.grad(found, [*x, *m.parameters()], cotangent)
    theirs = torch.autograd.grad(expected, [*y, *m.parameters()], cotangent)
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b)


@every_option
def test_gradients(options):
    m, masks = scrambled(rg.MetaEmbedding(WIDTHS, 4, **options)), [holes(2, 3, seed=k) for k in range(3)]
    leaves = [normal(2, 3, d).requires_grad_() for d in WIDTHS]
    assert torch.autograd.gradcheck(lambda *x: m(list(x), masks), leaves, fast_mode=True)


def test_a_constant_score_is_the_mean():
    m = scrambled(rg.MetaEmbedding(WIDTHS, 4))
    with torch.no_grad():
        m.u.zero_()
    sources = [normal(2, 3, d) for d in WIDTHS]
    mapped = [embed(x) for embed, x in zip(m.maps, sources, strict=True)]
    assert_same(m(sources), sum(mapped[1:], mapped[0]) / 3)


def test_every_map_learns():
    m = rg.MetaEmbedding(WIDTHS, 4)
    m([torch.randn(2, 3, d) for d in WIDTHS]).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in m.parameters())


def test_a_mask_may_be_left_out_for_a_source():
    m = scrambled(rg.MetaEmbedding((2, 5), 4))
    sources, mask = [normal(2, 3, 2), normal(2, 3, 5)], holes(2, 3)
    everywhere = torch.ones(2, 3, dtype=torch.bool)
    assert_same(m(sources, [mask, None]), m(sources, [mask, everywhere]))


def test_weights_are_over_sources():
    trace = weights_of(rg.MetaEmbedding(WIDTHS, 4), [torch.randn(2, 7, d) for d in WIDTHS])
    assert trace["attention"].weights.shape == (2, 7, 3)
    assert torch.allclose(trace["attention"].weights.sum(-1), torch.ones(2, 7))


@pytest.mark.parametrize("align", ["soft", "sigmoid"])
def test_a_source_that_lacks_a_token_weighs_nothing(align):
    masks = [holes(2, 5, seed=k) for k in range(3)]
    trace = weights_of(rg.MetaEmbedding(WIDTHS, 4, align=align), [torch.randn(2, 5, d) for d in WIDTHS], masks)
    weights = trace["attention"].weights
    assert not weights[~torch.stack(masks, -1)].any()
    assert weights[torch.stack(masks, -1)].all()


def test_refusals():
    with pytest.raises(ValueError, match="dims: got \\(\\)"):
        rg.MetaEmbedding((), 4)
    with pytest.raises(ValueError, match="dims: got 5, expected the width of each source"):
        rg.MetaEmbedding(5, 4)
    with pytest.raises(ValueError, match="source 1: got width 3, expected 5"):
        rg.MetaEmbedding((2, 5), 4)([torch.randn(2, 3, 2), torch.randn(2, 3, 3)])
    with pytest.raises(ValueError, match="sources: got one tensor, expected 2"):
        rg.MetaEmbedding((2, 2), 4)(torch.randn(2, 3, 2))
    with pytest.raises(TypeError, match="source 0: got str"):
        rg.MetaEmbedding((2,), 4)(["a"])
    with pytest.raises(TypeError, match=r"source 0: got a tensor of torch\.int64"):
        rg.MetaEmbedding((2,), 4)([torch.ones(2, 3, 2, dtype=torch.long)])
    with pytest.raises(ValueError, match="sources: got 2 of them, expected 3"):
        rg.MetaEmbedding(WIDTHS, 4)([torch.randn(2, 3, 2), torch.randn(2, 3, 5)])
    with pytest.raises(ValueError, match="source 1: got shape \\(2, 4, 5\\)"):
        rg.MetaEmbedding((2, 5), 4)([torch.randn(2, 3, 2), torch.randn(2, 4, 5)])
    with pytest.raises(TypeError, match=r"mask of source 1: got a tensor of torch\.float32"):
        rg.MetaEmbedding((2, 5), 4)([torch.randn(2, 3, 2), torch.randn(2, 3, 5)], [None, torch.ones(2, 3)])


@pytest.mark.parametrize("align", ["soft", "sigmoid"])
def test_the_gate_prefers_the_informative_source(align):
    task = InformativeSource()
    torch.manual_seed(0)
    model = Classifier(rg.MetaEmbedding(task.widths, 6, align=align), 6, task.classes)
    fit(model, task, lr=0.03)
    assert accuracy(model, task) >= 0.95
    batch = task.draw(256, torch.Generator().manual_seed(2))
    weights = weights_of(model, **batch.inputs)["attention.attention"].weights
    share = weights.gather(-1, batch.truth["source"][..., None]).squeeze(-1) / weights.sum(-1)
    print(f"{align}: share of the informative source {share.mean():.3f}")
    assert share.mean() >= 0.8


def test_a_plain_mean_of_sources_does_not_know_whom_to_believe():
    task = InformativeSource()
    torch.manual_seed(0)
    model = Classifier(rg.MetaEmbedding(task.widths, 6), 6, task.classes)
    with rg.intervene(model, "uniform"):
        fit(model, task, lr=0.03)
        assert accuracy(model, task) < 0.75
