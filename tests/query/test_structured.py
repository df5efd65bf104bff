"""What structured alignments share: distributions of no keys, and selections that are judged."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from tests.cases import assert_same
from tests.feature.common import normal

ALIGNMENTS = [rg.LinearChain(), rg.Budget(2), rg.Budget(2, exact=True)]


def distribution(align, n):
    attend = rg.Attention(rg.Dot(), align)
    with rg.record(attend) as trace:
        attend(normal(2, 3, 5), normal(2, n, 5, seed=1))
    return attend.align.distribution(trace.call)


@pytest.mark.parametrize("align", ALIGNMENTS, ids=str)
def test_without_keys_nothing_is_selected_for_certain(align):
    found = distribution(align, 0)
    nothing = found.sample()
    assert nothing.shape == found.marginals().shape == (2, 3, 0)
    for zero in (found.entropy(), found.log_partition(), found.log_prob(nothing)):
        assert_same(zero, torch.zeros(2, 3, dtype=zero.dtype))


@pytest.mark.parametrize("align", ALIGNMENTS, ids=str)
def test_many_selections_are_judged_at_once(align):
    found = distribution(align, 7)
    each = [found.sample(torch.Generator().manual_seed(seed)) for seed in range(11)]
    assert_same(found.log_prob(torch.stack(each)), torch.stack([found.log_prob(z) for z in each]))


@pytest.mark.parametrize("align", ALIGNMENTS, ids=str)
@pytest.mark.parametrize("n", [0, 7])
def test_a_selection_that_does_not_fit_is_refused(align, n):
    found = distribution(align, n)
    with pytest.raises(TypeError, match="selected: got a tensor of torch.float32, expected booleans"):
        found.log_prob(torch.ones(2, 3, n))
    with pytest.raises(ValueError, match=r"selected: got shape \(5,\), expected a shape that broadcasts with"):
        found.log_prob(torch.ones(5).bool())


@pytest.mark.parametrize("align", [*ALIGNMENTS, rg.DependencyTree()], ids=str)
def test_a_distribution_is_that_of_a_call(align):
    attend, x = rg.Attention(rg.Dot(), align), normal(2, 3, 5)
    with rg.record(attend) as trace:
        attend(x, x)
    with pytest.raises(TypeError, match=r"call: got Trace, expected the call of a trace. Fix: trace.call"):
        align.distribution(trace)


@pytest.mark.parametrize(
    ("name", "options", "cls"),
    [
        ("structured", {"normalize": True}, rg.LinearChain),
        ("budget", {"k": 2}, rg.Budget),
        ("dependency-tree", {"single_root": True}, rg.DependencyTree),
        ("sinkhorn", {"epsilon": 0.5, "iterations": 7}, rg.Sinkhorn),
    ],
)
def test_alignments_are_made_by_name(name, options, cls):
    x = normal(2, 5, 4)
    expected = rg.Attention("dot", cls(**options))(x, x)
    for given in (name, rg.catalog.find(name).zh, cls.__name__):
        assert_same(rg.Attention("dot", given, **options)(x, x), expected)
    made = rg.SelfAttention(4, align=name, **options).attention.align
    assert repr(made) == repr(cls(**options))
