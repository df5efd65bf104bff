"""Pointing at tokens of the input, inside a task."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import regard as rg
from regard.model import Example, PointerOutput, TaskModel, collate
from tests.model.outputs.common import gradients_flow, halves, losses_of_parts_average_to_that_of_the_whole

WIDTH = 3


def task(**options: object) -> TaskModel:
    output = PointerOutput(rg.PointerNetwork(WIDTH, 5, **options))
    model = TaskModel({}, None, rg.Attention("dot"), output).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def examples(*sizes: tuple[int, int]) -> list[Example]:
    return [Example({"points": torch.randn(n, WIDTH).double()}, torch.randperm(n)[:m]) for n, m in sizes]


def pointed(model: TaskModel, batch: object, **more: object) -> tuple[torch.Tensor, torch.Tensor]:
    found = model.encode(batch)
    return model.output.generate(model.reader(found), found, **more)


@pytest.mark.parametrize("stop", [False, True])
def test_it_points_among_what_was_read(stop: bool) -> None:
    model, drawn = task(stop=stop), examples((5, 3), (8, 2), (2, 2))
    batch = collate(drawn)
    found = model(batch)
    total, steps = torch.zeros(()).double(), 0
    for row, example in zip(found, drawn, strict=True):
        points, right = example.inputs["points"], example.target
        n = len(points)
        options = (points @ points.mT).softmax(-1) @ points
        asked = torch.cat([right, torch.tensor([n])]) if stop else right
        alone = model.output.network(options[None], asked[None])[0]
        torch.testing.assert_close(row[: len(asked), :n], alone[:, :n])
        if stop:
            torch.testing.assert_close(row[: len(asked), -1], alone[:, -1])
        for t, place in enumerate(asked.tolist()):
            total, steps = total - alone[t, place], steps + 1
    torch.testing.assert_close(model.loss(found, batch), total / steps)
    losses_of_parts_average_to_that_of_the_whole(model.output, (found, batch), halves(found, batch, 1))
    gradients_flow(model.output, model.loss(found, batch))


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("stop", [False, True])
def test_nothing_is_pointed_at_twice(stop: bool, beam: int) -> None:
    model, batch = task(stop=stop), collate(examples((5, 3), (8, 2), (2, 2)))
    positions, log_prob = pointed(model, batch, beam=beam)
    for row, real in zip(positions.tolist(), batch.masks["points"], strict=True):
        places = [place for place in row if place >= 0]
        assert len(set(places)) == len(places)
        assert all(real[place] for place in places)
        assert row == places + [-1] * (len(row) - len(places))
        assert stop or len(places) == int(real.sum())
    assert (log_prob <= 0).all()


def test_a_wide_beam_finds_the_best_of_all() -> None:
    model, drawn = task(), examples((4, 4))
    batch = collate(drawn)
    positions, log_prob = pointed(model, batch, beam=24)
    scores = {}
    for order in itertools.permutations(range(4)):
        told = collate([Example(drawn[0].inputs, torch.tensor(order))])
        scores[order] = -4 * model.loss(model(told), told).item()
    best = max(scores, key=scores.__getitem__)
    assert positions[0].tolist() == list(best)
    assert log_prob[0].item() == pytest.approx(scores[best])


def test_what_was_told_is_decided_step_by_step() -> None:
    model, batch = task(stop=True), collate(examples((5, 3), (8, 2)))
    found = model(batch)
    decided = model.output.decide(found)
    assert decided.shape == (2, 4)
    best = found.argmax(-1)
    assert torch.equal(decided == -1, best == 8)
    with rg.record(model) as trace:
        model(batch)
    assert {"attention", "output.network.pointer"} <= set(trace)


def test_bad_pointers_are_refused() -> None:
    with pytest.raises(TypeError, match="network: got Attention, expected a PointerNetwork"):
        PointerOutput(rg.Attention("dot"))
    pooling = rg.Attention("query-free", key_dim=WIDTH, hidden_dim=2)
    model = TaskModel({}, rg.LearnableQuery(WIDTH), pooling, PointerOutput(rg.PointerNetwork(WIDTH, 5)))
    with pytest.raises(ValueError, match="attention: got one that gives"):
        model.float()(collate([Example({"points": torch.randn(4, WIDTH)}, torch.tensor([1, 2]))]))
