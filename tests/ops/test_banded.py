"""Attention under a band by blocks: the same function as the dense one, in time linear in the length."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from regard import explain_dispatch
from regard.ops.banded import why_not_banded
from tests.cases import assert_same
from tests.feature.common import normal

N = 1009  # several blocks, the last of which is not full
BANDS = [(-5, 5), (-70, 3), (-41, 0), (2, 9), (-9, -2), (-1, 1)]


@pytest.mark.parametrize("real", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("score", ["scaled-dot", "negative-l2", "additive"])
def test_it_is_the_dense_execution(score, band, real):
    torch.manual_seed(0)
    options = {"query_dim": 3, "key_dim": 3, "hidden_dim": 2} if score == "additive" else {}
    attend = rg.Attention(score, **options).double()
    query, key, value = (normal(2, N, 3, seed=k).requires_grad_() for k in range(3))
    mask = rg.Band(*band)
    if real:
        kept = torch.rand(2, N, generator=torch.Generator().manual_seed(4)) < 0.7
        kept[1, 300:] = False
        mask = mask & rg.Keys(kept)
    assert explain_dispatch(attend, query, key, value, mask=mask).path == "banded"
    outcomes = []
    for impl in ("auto", "dense"):
        with rg.execution(impl):
            context = attend(query, key, value, mask=mask)
        gradients = torch.autograd.grad(context.square().sum(), (query, key, value, *attend.parameters()))
        outcomes.append((context, *gradients))
    for found, expected in zip(*outcomes, strict=True):
        assert_same(found, expected)


def test_heads_share_what_they_share():
    """Leading axes of query, key and value that only broadcast together."""
    query, key, value = normal(2, 3, N, 4), normal(3, N, 4, seed=1), normal(1, N, 5, seed=2)
    key, value = key.expand(1, 3, N, 4), value.expand(1, 1, N, 5)
    attend, mask = rg.Attention("dot"), rg.Window(6)
    assert explain_dispatch(attend, query, key, value, mask=mask).path == "banded"
    with rg.execution("dense"):
        expected = attend(query, key, value, mask=mask)
    assert_same(attend(query, key, value, mask=mask), expected)


def test_one_weight_a_feature():
    torch.manual_seed(0)
    attend = rg.Attention("general", query_dim=3, key_dim=3, features=2).double()
    query, value = normal(2, N, 3), normal(2, N, 2, seed=1)
    mask = rg.Window(6)
    assert explain_dispatch(attend, query, query, value, mask=mask).path == "banded"
    with rg.execution("dense"):
        expected = attend(query, query, value, mask=mask)
    assert_same(attend(query, query, value, mask=mask), expected)


def test_garbage_outside_the_band_of_everybody_never_matters():
    x = normal(1, N, 3)
    x[:, -1] = math.nan
    kept = torch.arange(N) < N - 1
    found = rg.Attention("dot")(x, x, mask=rg.Window(3) & rg.Keys(kept))
    assert found[:, : N - 1].isfinite().all()


def test_pairs_that_are_computed_grow_with_the_length(monkeypatch):
    from regard.ops import dispatch

    counted = []
    run = dispatch._run
    monkeypatch.setattr(
        dispatch,
        "_run",
        lambda call, path: counted.append((path, math.prod(call.lead) * call.pairs)) or run(call, path),
    )
    for n in (1024, 2048, 4096):
        x = torch.randn(1, n, 4)
        rg.Attention("dot")(x, x, mask=rg.Window(16))
    parts = [pairs for path, pairs in counted if path != "banded"]
    assert parts == [n * 3 * 64 for n in (1024, 2048, 4096)]


def test_a_trace_shows_all_pairs():
    attend, x = rg.Attention("dot"), torch.randn(1, N, 4)
    with rg.record(attend) as trace:
        attend(x, x, mask=rg.Window(2))
    assert trace[""].weights.shape == (1, N, N)


def test_reasons():
    attend, x = rg.Attention("dot"), torch.randn(1, N, 4)

    def why(mask, module=attend, query=x, **more):
        return why_not_banded(module.call(query, x, mask=mask, **more))

    assert why(rg.Window(3)) is None
    assert why(rg.Causal()) == "no band of keys around each query"
    assert why(rg.Window(3) | rg.Causal()) == "no band of keys around each query"
    assert why(rg.Window(3), query=x[:, 1:]) == "no band of keys around each query"
    assert why(rg.Window(200)) == "a band as wide as a good part of the keys"
    assert why(rg.Window(3), rg.Attention("dot", "entmax")) == "not a plain softmax"
    assert why(rg.Window(3), rg.Attention("dot", dropout=0.5)) == "dropout is drawn by position"
    assert why(rg.Window(3), bias=torch.zeros(N)) == "a bias of pairs"
