"""Edges are sorted once, and again when they change."""

from __future__ import annotations

import gc

import numpy as np
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


@pytest.mark.parametrize("more", [{"self_loops": False}, {"self_loops": True}, {"edge_types": 3}], ids=str)
@pytest.mark.parametrize("dtype", [torch.long, torch.int32], ids=str)
@pytest.mark.parametrize("part", ["source", "target", "mask", "edge_type"])
@pytest.mark.parametrize("how", ["numpy", "data"])
def test_edges_that_change_behind_the_back_of_torch_are_sorted_again(how, part, dtype, more, monkeypatch):
    m, x = scrambled(rg.GraphAttention(D, H, head_dim=HEAD, **more)), normal(N, D)
    if part == "edge_type" and m.edge_types is None:
        pytest.skip("edges of one type")
    made = []
    original = graph_parts._built
    monkeypatch.setattr(graph_parts, "_built", lambda *args: made.append(1) or original(*args))
    buffers = {"edge_index": drawn().to(dtype).numpy().copy(), "mask": np.ones(E, bool)}
    if m.edge_types is not None:
        buffers["edge_type"] = (np.arange(E) % 3).astype(buffers["edge_index"].dtype)
    given = {name: torch.from_numpy(buffer) for name, buffer in buffers.items()}
    first = m(x, **given)
    assert torch.equal(m(x, **given), first)
    assert len(made) == 1
    name, place = ("edge_index", (int(part == "target"), 5)) if part in ("source", "target") else (part, 5)
    value = False if part == "mask" else (buffers[name][place] + 1) % (3 if part == "edge_type" else N)
    if how == "numpy":
        buffers[name][place] = value
    else:
        given[name].data[place] = value
    assert given[name]._version == 0
    found = m(x, **given)
    assert len(made) == 2
    assert not torch.equal(found, first)
    assert torch.equal(found, m(x, **{key: value.clone() for key, value in given.items()}))


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
