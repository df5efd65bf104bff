"""The questions about graph attention, asked of small graphs."""

from __future__ import annotations

import pytest
import torch

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
    from regard.bench import graph_cpu

    threads = torch.get_num_threads()
    try:
        rows = list(graph_cpu.rows(n=97, edges=400, heads=2, width=4))
    finally:
        torch.set_num_threads(threads)
    assert [row.what for row in rows] == ["regard", graph_cpu.PEER] * 2
    assert all(row.seconds > 0 and row.error < 1e-5 for row in rows)
    assert {"graph-cpu", "oversmoothing"} <= set(QUESTIONS)
