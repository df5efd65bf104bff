"""Edges are sorted once, and again when they change."""

from __future__ import annotations

import gc

import pytest
import torch

import regard as rg
from regard.query import graph_parts
from tests.cases import scrambled
from tests.feature.common import normal
from tests.query.test_graph import HEAD, D, E, H, N, drawn, recorded


def test_edges_are_sorted_once_and_again_when_they_change(monkeypatch):
    made = []
    original = graph_parts._built
    monkeypatch.setattr(graph_parts, "_built", lambda *args: made.append(1) or original(*args))
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD))
    other = scrambled(rg.GraphAttention(D, H, head_dim=HEAD, score="gat"))
    x, edges = normal(N, D), drawn()
    first = m(x, edges)
    m(x, edges), other(x, edges)
    assert len(made) == 1
    edges[0, 5] = (edges[0, 5] + 1) % N
    assert not torch.equal(m(x, edges), first)
    assert len(made) == 2
    mask = torch.ones(E).bool()
    m(x, edges, mask=mask)
    m(x, edges, mask=mask)
    assert len(made) == 3
    mask[4] = False
    assert not torch.equal(m(x, edges, mask=mask), m(x, edges))
    assert torch.equal(m(x, edges.clone()), m(x, edges))


@pytest.mark.parametrize("self_loops", [False, True])
def test_remembered_edges_are_not_kept_alive(self_loops):
    m = rg.GraphAttention(D, H, head_dim=HEAD, self_loops=self_loops)
    gc.collect()
    before = len(graph_parts._known)
    edges, mask = drawn(), torch.ones(E).bool()
    m(torch.randn(N, D), edges, mask=mask)
    assert len(graph_parts._known) == before + 1
    del edges, mask
    gc.collect()
    assert len(graph_parts._known) == before


def test_a_record_does_not_change_with_the_edges():
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD, self_loops=False))
    edges, mask = drawn(), torch.ones(E).bool()
    found = recorded(m, normal(N, D), edges, mask=mask)
    before = found.weights
    edges.zero_()
    mask.zero_()
    assert torch.equal(found.weights, before)
