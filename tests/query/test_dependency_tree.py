"""Projective dependency trees, against the enumeration of all of them."""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.query.dependency_tree import Trees
from tests import oracles
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, normal, weights_of

every_kind = pytest.mark.parametrize("single_root", [False, True])


@cache
def trees(n: int, single_root: bool) -> list[tuple[int, ...]]:
    """The heads of the words of every tree whose arcs do not cross, also not those from a root left of all; a root is its own head."""
    found = []
    for heads in product(range(n), repeat=n):
        roots = sum(heads[i] == i for i in range(n))
        if roots and (roots == 1 or not single_root) and all(_reaches_a_root(heads, i) for i in range(n)):
            arcs = [(min(i, h), max(i, h)) if h != i else (-1, i) for i, h in enumerate(heads)]
            if not any(a < c < b < d for a, b in arcs for c, d in arcs):
                found.append(heads)
    return found


def _reaches_a_root(heads: tuple[int, ...], word: int) -> bool:
    for _ in heads:
        word = heads[word]
    return heads[word] == word


def enumerated(e: Tensor, mask: Tensor, single_root: bool) -> dict[tuple[int, ...], Tensor]:
    """The log-probability of every tree of one sentence that has no forbidden arc, by the heads of its words."""
    n = len(e)
    words = [i for i in range(n) if mask[i].any() and mask[:, i].any()]
    energies = {}
    for tree in trees(len(words), single_root) if words else []:
        heads = tuple(words[tree[words.index(i)]] if i in words else -1 for i in range(n))
        if all(mask[i, heads[i]] for i in words):
            energies[heads] = sum((e[i, heads[i]] for i in words), oracles.zero())
    total = sum((x.exp() for x in energies.values()), oracles.zero()).log()
    return {t: x - total for t, x in energies.items()}


def arcs_of(heads: tuple[int, ...]) -> Tensor:
    return torch.tensor([[h == j for j in range(len(heads))] for h in heads])


def masks(n: int) -> Tensor:
    """Everything; a word that is padding; some pairs forbidden; nothing; no tree."""
    mask = torch.ones(5, n, n, dtype=torch.bool)
    mask[1, :, n // 2] = False
    mask[1, n // 2] = False
    mask[2] = torch.rand(n, n, generator=torch.Generator().manual_seed(n)) < 0.7
    mask[2].fill_diagonal_(True)
    mask[3] = False
    mask[4].fill_diagonal_(False)
    return mask


@every_kind
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_it_is_the_enumeration(n, single_root):
    e, mask = normal(5, n, n).requires_grad_(), masks(n)
    found = Trees(e, mask, single_root)
    marginals, spread, total = found.marginals(), found.entropy(), found.log_partition()
    for b in range(5):
        known = enumerated(e[b], mask[b], single_root)
        weights = sum((p.exp() * arcs_of(t) for t, p in known.items()), torch.zeros(n, n, dtype=torch.float64))
        assert_same(marginals[b], weights)
        if known:
            expected = -sum((p.exp() * p for p in known.values()), oracles.zero())
            assert_same(spread[b] + 1, expected + 1)
            t, p = next(iter(known.items()))
            assert_same(found.log_prob(arcs_of(t).expand(5, n, n))[b] - 1, p - 1)
            cotangent = normal(n, n, seed=3)
            mine, theirs = (
                torch.autograd.grad((x * cotangent).sum(), e, retain_graph=True)[0] for x in (marginals[b], weights)
            )
            assert_same(mine + 1, theirs + 1)
    # A single word that may not be its own root is no word.
    assert total[4].item() == (-math.inf if n > 1 else 0.0)
    assert not marginals[3:].any()


@every_kind
def test_gradients(single_root):
    mask = masks(3)[:3]
    e = normal(3, 3, 3).requires_grad_()
    for of in (Trees.marginals, Trees.entropy, Trees.log_partition):
        assert torch.autograd.gradcheck(lambda e, of=of: of(Trees(e, mask, single_root)), e)
        assert torch.autograd.gradgradcheck(lambda e, of=of: of(Trees(e, mask, single_root)), e, fast_mode=True)


@every_kind
def test_samples_are_those_of_the_distribution(single_root):
    e, count = normal(4, 4), 40000
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1], mask[:, 1] = False, False
    drawn = Trees(e.expand(count, 4, 4), mask, single_root).sample(torch.Generator().manual_seed(0))
    known, statistic = enumerated(e, mask, single_root), 0.0
    for t, p in known.items():
        expected = count * float(p.exp())
        observed = int((drawn == arcs_of(t)).flatten(1).all(-1).sum())
        statistic += (observed - expected) ** 2 / expected
    limit = {12: 31.3, 7: 22.5}[len(known)]  # chi-square at 0.001, with one degree of freedom fewer
    assert statistic < limit


@every_kind
def test_rows_are_heads_and_a_longer_sentence_is_still_one(single_root):
    e = (30 * normal(2, 29, 29)).float().requires_grad_()
    trees = Trees(e, None, single_root)
    marginals = trees.marginals()
    assert torch.allclose(marginals.sum(-1), torch.ones(2, 29), atol=1e-4)
    roots = marginals.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert torch.allclose(roots, torch.ones(2), atol=1e-4) if single_root else (roots > 0.999).all()
    assert torch.autograd.grad(marginals.square().sum(), e)[0].isfinite().all()
    drawn = trees.sample(torch.Generator().manual_seed(0))
    heads = tuple(drawn[0].long().argmax(-1).tolist())
    assert (drawn.sum(-1) == 1).all()
    assert all(_reaches_a_root(heads, i) for i in range(29))


def test_marginals_are_the_gradient_of_the_normaliser():
    e, mask = normal(3, 7, 7).requires_grad_(), masks(7)[:3]
    trees = Trees(e, mask, False)
    (slope,) = torch.autograd.grad(trees.log_partition().sum(), e)
    assert_same(slope, trees.marginals())


@pytest.mark.parametrize("execution", EXECUTIONS, ids=str)
def test_it_is_an_alignment_of_any_score(execution):
    tokens = normal(2, 5, 3)
    mask = torch.tensor([[True] * 5, [True, False, True, True, False]])
    for options in ({"score": "additive"}, {"score": "general", "features": True}):
        m = scrambled(rg.SelfAttention(3, align=rg.DependencyTree(), **options))
        with rg.execution(execution[0], panel=execution[1]):
            trace = weights_of(m, torch.where(mask[..., None], tokens, math.nan), mask)
        weights, scores = trace["attention"].weights, trace["attention"].scores
        for b in range(2):
            pairs = mask[b] & mask[b][:, None]
            for f in range(3) if weights.dim() == 4 else [...]:
                known = enumerated(scores[b, ..., f], pairs, False)
                assert_same(weights[b, ..., f], sum(p.exp() * arcs_of(t) for t, p in known.items()))
        assert_same(m(tokens, mask).nan_to_num(7.0), m(torch.where(mask[..., None], tokens, math.inf), mask))


def test_the_distribution_of_a_recorded_call():
    m = scrambled(rg.SelfAttention(3, align=rg.DependencyTree()))
    trace = weights_of(m, normal(2, 5, 3))
    trees = m.attention.align.distribution(trace["attention"].call)
    assert_same(trees.marginals(), trace["attention"].weights)
    assert trees.entropy().shape == (2,)
    assert trees.sample(torch.Generator().manual_seed(0)).shape == (2, 5, 5)


def test_erasing_a_word_takes_it_out_of_the_tree():
    m, tokens = scrambled(rg.SelfAttention(3, align=rg.DependencyTree())), normal(2, 5, 3)
    with rg.intervene(m, "erased", keys=[2]):
        erased = weights_of(m, tokens)["attention"].weights
    kept = [0, 1, 3, 4]
    assert_same(erased[:, kept][..., kept], weights_of(m, tokens[:, kept])["attention"].weights)
    assert not erased[:, 2].any()
    assert not erased[..., 2].any()


def test_refusals():
    attend = rg.Attention("dot", rg.DependencyTree())
    with pytest.raises(ValueError, match="query: got 5 queries beside 7 keys, expected as many as there are keys"):
        attend(torch.randn(2, 5, 3), torch.randn(2, 7, 3))
    with pytest.raises(ValueError, match="query: got 1 queries beside 1 keys"):
        attend(torch.randn(2, 3), torch.randn(2, 1, 3))


@pytest.mark.parametrize("single_root", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_only_trees_have_a_probability(single_root, masked):
    n, allowed = 4, None
    if masked:
        allowed = torch.ones(n, n).bool()
        allowed[2], allowed[:, 2], allowed[0, 1] = False, False, False
    found = Trees(normal(n, n), allowed, single_root)
    # Every choice of one head or none for each word, all at once.
    heads = torch.tensor(list(product(range(n + 1), repeat=n)))
    selected = torch.nn.functional.one_hot(heads, n + 1)[..., :n].bool()
    chances = found.log_prob(selected).exp()
    assert_same(chances.sum(), torch.ones((), dtype=chances.dtype))
    assert_same((chances[:, None, None] * selected).sum(0), found.marginals())
    several = selected[chances > 0].any(0, keepdim=True)
    assert found.log_prob(several).tolist() == [-math.inf]


def test_a_selection_that_does_not_fit_is_refused():
    found = Trees(normal(2, 3, 3), None, False)
    with pytest.raises(TypeError, match="selected: got a tensor of torch.float32, expected booleans"):
        found.log_prob(torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"selected: got shape \(4, 4\), expected a shape that broadcasts with"):
        found.log_prob(torch.ones(4, 4).bool())
