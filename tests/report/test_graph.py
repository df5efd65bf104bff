"""The graph whose edges are drawn by weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import regard as rg

pytest.importorskip("matplotlib")

from matplotlib.patches import FancyArrowPatch

from regard.report.figures import graph, save

EDGES = torch.tensor([[0, 1, 2, 3, 2], [1, 2, 0, 3, 1]])


def arrows(axes):
    return {p.get_gid(): p for p in axes.patches if isinstance(p, FancyArrowPatch)}


def test_an_edge_is_an_arrow_a_loop_a_ring_and_heavier_is_thicker():
    figure = graph([0.1, 0.9, 0.5, 1.0, 0.0], EDGES, labels=["a", "$b$", "c", "d"], title="five edges")
    axes = figure.axes[0]
    found = arrows(axes)
    assert set(found) == {"edge 0", "edge 1", "edge 2", "edge 4"}
    widths = [found[f"edge {e}"].get_linewidth() for e in (4, 0, 2, 1)]
    assert widths == sorted(widths)
    assert len(set(widths)) == 4
    assert {text.get_text() for text in axes.texts} == {"a", "$b$", "c", "d"}
    rings = [c for c in axes.collections if len(c.get_facecolors()) == 0]
    assert len(rings) == 1


def test_a_trace_is_drawn_head_by_head(tmp_path):
    m = rg.GraphAttention(4, heads=2)
    with rg.record(m) as trace:
        m(torch.randn(4, 4), EDGES)
    call = trace["attention"].call
    figure = graph(trace["attention"].weights, call.edges.edge_index, gold=[1])
    assert [axes.get_title() for axes in figure.axes[:2]] == ["head 0", "head 1"]
    found = arrows(figure.axes[0])
    assert found["gold 1"].get_linewidth() > found["edge 1"].get_linewidth()
    assert "gold 0" not in found
    assert save(figure, tmp_path / "graph.svg").stat().st_size > 1000
    assert save(figure, tmp_path / "graph.svg").read_bytes() == save(figure, tmp_path / "again.svg").read_bytes()


def test_nodes_stand_apart_and_neighbours_near():
    two = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 0, 4, 5, 3]])
    axes = graph(np.ones(6), two).axes[0]
    places = np.array([text.get_position() for text in axes.texts])
    distance = np.linalg.norm(places[:, None] - places[None], axis=-1)
    together = np.kron(np.eye(2), np.ones((3, 3))).astype(bool)
    assert distance[together & ~np.eye(6, dtype=bool)].max() < distance[~together].min()
    assert distance[~np.eye(6, dtype=bool)].min() > 0.05


def test_nodes_stand_where_they_are_put():
    places = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])
    axes = graph(torch.ones(5), EDGES, positions=places).axes[0]
    assert [text.get_position() for text in axes.texts] == [tuple(place) for place in places.tolist()]


def test_nothing_to_draw_is_drawn():
    assert len(graph(torch.zeros(0), torch.zeros(2, 0).long(), labels=["alone"]).axes) == 2


@pytest.mark.parametrize(
    ("args", "more", "message"),
    [
        ((torch.ones(2, 2, 5), EDGES), {}, r"weights: got \(2, 2, 5\), expected shape \(E,\) or \(H, E\)"),
        ((-torch.ones(5), EDGES), {}, "weights: .* non-negative"),
        ((torch.ones(4), EDGES), {}, r"edge_index: .* expected integers of shape \(2, 4\)"),
        ((torch.ones(5), EDGES.float()), {}, "edge_index: got an array of float32"),
        ((torch.ones(5), EDGES - 1), {}, "edge_index: got -1"),
        ((torch.ones(5), EDGES), {"labels": ["a", "b"]}, "labels: got 2 of them, expected one for each of 4 nodes"),
        ((torch.ones(5), EDGES), {"gold": [7]}, "gold: got 7, expected indices of 5 edges"),
        ((torch.ones(5), EDGES), {"positions": torch.zeros(3, 2)}, r"positions: got shape \(3, 2\)"),
    ],
)
def test_what_cannot_be_drawn_is_refused(args, more, message):
    with pytest.raises(ValueError, match=message):
        graph(*args, **more)
