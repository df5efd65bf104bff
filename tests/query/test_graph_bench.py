"""The questions about graph attention, asked of small graphs."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.bench import QUESTIONS, oversmoothing


def test_oversmoothing_is_measured_and_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = list(oversmoothing.rows(n=40, width=8, seeds=1))
    assert len(rows) == len(oversmoothing.KINDS) * len(oversmoothing.DEPTHS)
    of = {(row.what, row.extra["depth"]): row.extra["spread"] for row in rows}
    for kind in oversmoothing.KINDS:
        assert (of[kind, 32] > 0.1) == (kind == "GATv2, residual")
    assert oversmoothing.draw(rows, tmp_path).stat().st_size > 1000


def test_the_spread_is_zero_only_where_all_nodes_are_the_same():
    assert oversmoothing.spread(torch.ones(5, 3)) == 0
    assert abs(oversmoothing.spread(torch.tensor([[1.0], [-1.0]])) - 1) < 1e-6


@pytest.mark.slow
def test_speed_is_measured_beside_torch_geometric():
    pytest.importorskip("torch_geometric")
    from regard.bench import graph_cpu, graphs

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = list(graph_cpu.measured_on(graphs.drawn(97, 400, 2, 4), budget=0.1))
    finally:
        torch.set_num_threads(threads)
    assert [row.what for row in rows] == ["regard", graphs.PEER] * 2
    assert all(row.seconds > 0 and row.error < 1e-5 for row in rows)
    assert {"graph-cpu", "oversmoothing"} <= set(QUESTIONS)


def test_the_graph_is_that_of_the_data_one_has(monkeypatch, tmp_path):
    from regard.bench import graphs

    monkeypatch.delenv("REGARD_DATA", raising=False)
    assert graphs.cora().name == "random graph of Cora's size"
    assert graphs.cora().edges.shape == (2, graphs.CORA[1])
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    with pytest.raises((ValueError, FileNotFoundError), match="cora"):
        graphs.cora()


def test_errors_on_large_graphs_are_those_of_the_first_nodes(monkeypatch):
    from regard.bench import graphs

    torch.manual_seed(0)
    graph = graphs.drawn(50, 300, 2, 3)
    layer = rg.GraphAttention(6, 2, self_loops=False, bias=False)
    x = torch.randn(50, 6, requires_grad=True)
    monkeypatch.setattr(graphs, "MOST_EXACT", 70)
    exact = graphs.Exact(layer, x, graph.edges)
    assert 1 < exact.rows < 20
    for run in (layer, graphs.scattered(layer)):
        assert exact.of_result(run) < 1e-6
        assert exact.of_gradient(run) < 1e-6
    assert exact.of_result(lambda x, edges: layer(x, edges) * 1.1) > 0.09
    assert exact.of_gradient(lambda x, edges: layer(x, edges) * 1.1) > 0.09
