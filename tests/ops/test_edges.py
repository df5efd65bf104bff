"""Edges sorted by their target, in slots and back."""

from __future__ import annotations

import torch

import regard as rg
from regard.ops.dispatch import choose
from regard.ops.edges import EdgeMask, Edges
from tests.cases import scrambled
from tests.feature.common import normal

SOURCE, TARGET = torch.tensor([5, 4, 3, 2, 1, 0]), torch.tensor([2, 0, 2, 3, 0, 2])
EDGES = Edges.of(SOURCE, TARGET, 4)


def test_edges_of_a_target_stand_side_by_side_as_they_came():
    assert EDGES.order.tolist() == [1, 4, 0, 2, 5, 3]
    assert EDGES.bounds.tolist() == [0, 2, 2, 5, 6]
    assert EDGES.degrees == [2, 0, 3, 1]
    assert torch.equal(EDGES.order[EDGES.places], torch.arange(6))


def test_slots_are_as_many_as_the_longest_row_needs():
    ids, filled = EDGES.slots(range(4))
    assert filled.tolist() == [[True, True, False], [False] * 3, [True] * 3, [True, False, False]]
    assert ids[filled].tolist() == EDGES.order.tolist()
    assert EDGES.slots(range(2))[0].shape == (2, 2)
    assert EDGES.slots(range(1, 2))[0].shape == (1, 0)


def test_masked_edges_belong_to_nobody():
    allowed = torch.tensor([True, False, True, True, False, False])
    kept = EDGES.only(allowed)
    assert kept.degrees == [0, 0, 2, 1]
    assert kept.order[: int(kept.bounds[-1])].tolist() == [0, 2, 3]
    mask = EdgeMask(allowed, EDGES)
    assert mask.rows(torch.device("cpu")).tolist() == [False, False, True, True]
    assert mask.kept() is mask.kept()


def test_types_are_rows_of_their_source():
    typed = Edges.of(SOURCE * 3 + 1, TARGET, 4, types=3)
    assert torch.equal(typed.edge_index, torch.stack([SOURCE, TARGET]))


def recorded(m, x, edges):
    with rg.record(m) as trace:
        m(x, edges)
    return trace["attention"].call


def test_panels_hold_more_of_shorter_rows():
    target = torch.cat([torch.zeros(40, dtype=torch.long), torch.arange(1, 50)])
    call = recorded(rg.GraphAttention(4, 2, self_loops=False), torch.randn(50, 4), torch.stack([target, target]))
    panels = call.panels(1)
    assert panels[0] == range(1)
    assert max(len(i) for i in panels) == 40
    assert [i for panel in panels for i in panel] == list(range(50))


def test_which_execution_and_why():
    def dispatch(**options):
        m = scrambled(rg.GraphAttention(8, 4, **options))
        edges = torch.randint(300, (2, 30000), generator=torch.Generator().manual_seed(0))
        return str(choose(recorded(m, normal(300, 8), edges), "auto"))

    assert dispatch().startswith("blockwise: additive scores under a softmax along edges: one operator")
    assert dispatch(align="sparsemax").startswith("blockwise: alignment Sparsemax is not a plain softmax; panels of")
    assert dispatch(score="scaled-dot").startswith("blockwise: the scores are not additive; panels of")
    assert dispatch(dropout=0.5).startswith("blockwise: dropout")
    call = recorded(rg.GraphAttention(4, 2), torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]]))
    assert str(choose(call, "auto")) == "dense: small enough for the equation itself"
