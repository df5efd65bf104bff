"""Edges sorted by their target, in slots and back."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.ops import edges as edges_module
from regard.ops.dispatch import choose
from regard.ops.edges import EdgeMask, Edges
from tests.cases import assert_same, scrambled
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


def hub(n: int, edges: int) -> torch.Tensor:
    """Edges of which every third goes to one node, in no order."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(n, (2, edges), generator=generator)
    found[1, ::3] = n // 2
    return found


def test_panels_of_queries_in_the_order_of_their_degrees_have_few_empty_slots(monkeypatch):
    monkeypatch.setattr(edges_module, "FEW_SLOTS", 50)
    call = recorded(rg.GraphAttention(4, 2, self_loops=False, align="sparsemax"), torch.randn(90, 4), hub(90, 600))
    turned, places = call.by_degree()
    assert torch.equal(turned.rows[places], torch.arange(90))
    degrees, given = turned.edges.degrees, call.edges.degrees
    assert [given[row] for row in turned.rows.tolist()] == degrees == sorted(given)
    panels = turned.panels(5)
    assert [i for panel in panels for i in panel] == list(range(90))
    slots = sum(len(i) * max(degrees[i.start : i.stop]) for i in panels)
    assert slots < 600 * 4 / 3 + 50
    assert sum(len(i) * max(given[i.start : i.stop]) for i in call.panels(5)) > 2 * slots


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score": "scaled-dot"},
        {"score": "general", "align": "sparsemax"},
        {"score": "negative-l2"},
        {"score": "additive", "features": 3},
        {"edge_dim": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True])
def test_executions_drop_the_same_edges(options, masked, monkeypatch):
    monkeypatch.setattr(edges_module, "FEW_SLOTS", 20)
    m, x, edges = (
        scrambled(rg.GraphAttention(6, 2, dropout=0.4, **options)),
        normal(30, 6).requires_grad_(),
        hub(30, 150),
    )
    more = {"edge_attr": normal(150, 5, seed=2)} if "edge_dim" in options else {}
    more |= {"mask": torch.arange(150) % 7 != 0} if masked else {}
    found = []
    for impl, panel in (("dense", None), ("blockwise", None), ("blockwise", 1), ("blockwise", 4)):
        torch.manual_seed(8)
        with rg.execution(impl, panel=panel):
            result = m(x, edges, **more)
        found.append((result, *torch.autograd.grad(result.square().sum(), [x, *m.parameters()])))
    # Biases of keys that all keys of a row share have no gradient but rounding: that is measured by the others.
    largest = max(float(x.detach().abs().max()) for x in found[0])
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            assert float((a - b).abs().max()) <= 1e-12 * largest


@pytest.mark.parametrize("how", ["permuted", "random", "uniform"])
def test_interventions_do_not_depend_on_the_order_of_queries(how, monkeypatch):
    monkeypatch.setattr(edges_module, "FEW_SLOTS", 20)
    m, x, edges = scrambled(rg.GraphAttention(6, 2, score="negative-l2")), normal(30, 6), hub(30, 150)
    found = []
    for impl, panel in (("dense", None), ("blockwise", 2)):
        torch.manual_seed(8)
        with rg.execution(impl, panel=panel), rg.intervene(m, how):
            found.append(m(x, edges))
    assert_same(found[1], found[0])


def test_which_execution_and_why():
    def dispatch(**options):
        m = scrambled(rg.GraphAttention(8, 4, **options))
        edges = torch.randint(300, (2, 30000), generator=torch.Generator().manual_seed(0))
        return str(choose(recorded(m, normal(300, 8), edges), "auto"))

    assert dispatch().startswith("blockwise: additive scores under a softmax along edges: one operator")
    assert dispatch(align="sparsemax").startswith("blockwise: alignment Sparsemax is not a plain softmax; panels of")
    assert dispatch(score="scaled-dot").startswith("blockwise: dot products under a softmax along edges: one operator")
    assert dispatch(dropout=0.5).startswith("blockwise: additive scores under a softmax along edges: one operator")
    l2 = "blockwise: the scores along edges are neither additive nor dot products; panels of"
    assert dispatch(score="negative-l2").startswith(l2)
    call = recorded(rg.GraphAttention(4, 2), torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]]))
    assert str(choose(call, "auto")) == "dense: small enough for the equation itself"
