"""Planted graphs: which edge holds the answer, and which attention finds it."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.recipes.planted import Classifier, NodeLookup, TypedNeighbours, accuracy, fit


def drawn(task, seed=0, count=512):
    return task.draw(count, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("task", [NodeLookup(), TypedNeighbours()], ids=lambda task: type(task).__name__)
def test_the_same_seed_draws_the_same_graphs(task):
    one, two, other = (drawn(task, seed) for seed in (3, 3, 4))
    assert all(torch.equal(one.inputs[name], two.inputs[name]) for name in one.inputs)
    assert torch.equal(one.target, two.target)
    assert not torch.equal(one.target, other.target)
    share = torch.bincount(one.target, minlength=task.classes) / len(one.target)
    assert ((share - 1 / task.classes).abs() < 0.06).all()


def test_the_edge_leads_to_the_code_of_the_node():
    task = NodeLookup()
    batch = drawn(task)
    source, target = batch.inputs["edge_index"][:, batch.truth["edge"]]
    assert torch.equal(target, torch.arange(len(batch.target)))
    answer = batch.inputs["source"][source]
    assert torch.equal(answer[:, : task.n], batch.inputs["nodes"])
    assert torch.equal(answer[:, task.n :].argmax(-1), batch.target)


def test_the_edge_has_a_type_of_its_own():
    task = TypedNeighbours()
    batch = drawn(task)
    kinds = batch.inputs["edge_type"]
    assert torch.equal(kinds.nonzero().flatten(), batch.truth["edge"])
    source, target = batch.inputs["edge_index"][:, batch.truth["edge"]]
    assert torch.equal(target, torch.arange(len(batch.target)))
    assert torch.equal((batch.inputs["source"][source, 1] > 0).long(), batch.target)


def looked_at(model, batch):
    """Share of the truth in the largest weight of each node, any head."""
    with rg.record(model) as trace:
        model(**batch.inputs)
    weights = trace["attention.attention"].weights.mean(0)
    n = len(weights) // len(batch.target)
    return (weights.view(-1, n).argmax(-1) == batch.truth["edge"] % n).float().mean()


def trained(task, steps, **options):
    torch.manual_seed(0)
    attention = rg.GraphAttention(task.dims, 1, head_dim=16, self_loops=False, **options)
    model = Classifier(attention, 16, task.classes)
    fit(model, task, steps=steps, lr=0.02)
    return model


def test_gatv2_looks_up_what_gat_cannot():
    """Static ranking: in GAT all nodes of a graph prefer the same neighbour."""
    task = NodeLookup()
    dynamic, static = trained(task, 400), trained(task, 400, score="gat")
    found = {name: accuracy(model, task) for name, model in (("gatv2", dynamic), ("gat", static))}
    print(found)
    assert found["gatv2"] >= 0.95
    assert found["gat"] <= 0.65
    batch = drawn(task, seed=9)
    assert looked_at(dynamic, batch) >= 0.95
    assert looked_at(static, batch) <= 0.4
    with rg.record(static) as trace:
        static(**batch.inputs)
    scores = trace["attention.attention"].scores[0].view(-1, task.n, task.n)
    assert (scores.argsort(-1) == scores[:, :1].argsort(-1)).all()


class Untyped(torch.nn.Module):
    """A graph attention that is not told the types."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, edge_type, **inputs):
        return self.attention(**inputs)


def test_a_heterogeneous_graph_needs_types():
    task = TypedNeighbours()
    typed = trained(task, 300, edge_types=task.types)
    found = accuracy(typed, task)
    torch.manual_seed(0)
    blind = Classifier(Untyped(rg.GraphAttention(task.dims, 1, head_dim=16, self_loops=False)), 16, task.classes)
    fit(blind, task, steps=300, lr=0.02)
    without = accuracy(blind, task)
    print(found, without)
    assert found >= 0.95
    assert abs(without - 0.5) < 0.06
    assert looked_at(typed, drawn(task, seed=9)) >= 0.95
