"""Maps: regions to points."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.model import Batch, Convolution2d, DenseMap, Example, TaskModel, collate
from regard.model.naming import Available
from tests.model.outputs.common import NOTHING, gradients_flow, halves, losses_of_parts_average_to_that_of_the_whole

ROWS, COLUMNS, SCALE, CHANNELS, WIDTH = 2, 5, 3, 4, 7


def output(kind: str = "classes") -> DenseMap:
    return DenseMap(WIDTH, CHANNELS, (ROWS, COLUMNS), SCALE, kind)


def test_a_region_becomes_its_points() -> None:
    module, context = output(), torch.randn(2, ROWS * COLUMNS, WIDTH)
    found = module(context, NOTHING)
    assert found.shape == (2, CHANNELS, ROWS * SCALE, COLUMNS * SCALE)
    for b in range(2):
        for h in range(ROWS * SCALE):
            for w in range(COLUMNS * SCALE):
                region = (h // SCALE) * COLUMNS + w // SCALE
                points = module.linear(context[b, region]).view(CHANNELS, SCALE, SCALE)
                torch.testing.assert_close(found[b, :, h, w], points[:, h % SCALE, w % SCALE])


def test_points_without_a_class_cost_nothing() -> None:
    module, found = output(), torch.randn(3, CHANNELS, ROWS * SCALE, COLUMNS * SCALE)
    target = torch.randint(-1, CHANNELS, (3, ROWS * SCALE, COLUMNS * SCALE))
    batch = Batch({"x": torch.zeros(3, 1)}, target=target)
    each = []
    for b, h, w in (target >= 0).nonzero().tolist():
        each.append(-found[b, :, h, w].log_softmax(0)[target[b, h, w]])
    torch.testing.assert_close(module.loss(found, batch), torch.stack(each).mean())
    losses_of_parts_average_to_that_of_the_whole(module, (found, batch), halves(found, batch, 1))
    assert torch.equal(module.decide(found), found.argmax(1))


def test_values_are_compared_by_squares() -> None:
    module, found = output("values"), torch.randn(3, CHANNELS, ROWS * SCALE, COLUMNS * SCALE)
    batch = Batch({"x": torch.zeros(3, 1)}, target=torch.randn_like(found))
    torch.testing.assert_close(module.loss(found, batch), (found - batch.target).square().mean())
    losses_of_parts_average_to_that_of_the_whole(module, (found, batch), halves(found, batch, 2))
    assert module.decide(found) is found


def test_regions_that_are_not_real_never_matter() -> None:
    module, context = output(), torch.randn(1, ROWS * COLUMNS, WIDTH)
    mask = torch.arange(ROWS * COLUMNS) < 7
    holes = context.masked_fill(~mask[None, :, None], float("nan"))
    found = module(holes, Available({}, {"x": mask[None]}, {}))
    assert found.isfinite().all()
    torch.testing.assert_close(found[:, :, :SCALE], module(context, NOTHING)[:, :, :SCALE])


def test_a_picture_goes_in_and_a_map_comes_out() -> None:
    see = Convolution2d(3, (8, WIDTH), size=(8, 20))
    model = TaskModel(see, None, rg.SelfAttention(WIDTH), DenseMap(WIDTH, CHANNELS, see.grid, scale=4))
    drawn = [Example({"image": torch.randn(3, 8, 20)}, torch.randint(CHANNELS, (8, 20))) for _ in range(2)]
    batch = collate(drawn)
    found = model(batch)
    assert found.shape == (2, CHANNELS, 8, 20)
    gradients_flow(model, model.loss(found, batch))


def test_bad_maps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"context: got shape \(1, 9, 7\), expected one for each region, \(B, 10, 7\)"):
        output()(torch.zeros(1, 9, WIDTH), NOTHING)
    with pytest.raises(ValueError, match=r"batch: got target of shape \(1, 2, 5\), expected \(1, 6, 15\)"):
        output().loss(torch.zeros(1, CHANNELS, 6, 15), Batch({"x": torch.zeros(1)}, target=torch.zeros(1, 2, 5)))
    with pytest.raises(ValueError, match="kind: got 'depth', expected one of classes, values"):
        output("depth")
    with pytest.raises(ValueError, match="grid"):
        DenseMap(WIDTH, CHANNELS, (1, 2, 3))
