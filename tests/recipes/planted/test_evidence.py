"""Evidence and digits: what they promise."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.recipes.planted import Batch, CapsuleNetwork, Digits, Evidence


def drawn(task, count=2048, seed=0) -> Batch:
    return task.draw(count, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("several", [True, False])
def test_the_token_of_a_class_decides_it(several):
    task = Evidence(several=several)
    batch = drawn(task)
    features, C = batch.inputs["features"], task.classes
    assert features.shape == (2048, C + 3, task.dim)
    target = batch.target if several else torch.nn.functional.one_hot(batch.target, C).bool()
    for c in range(C):
        token = features[torch.arange(2048), batch.truth["token"][:, c]]
        assert (token[:, c] == 1).all()
        assert torch.equal(token[:, C + 1 + c] > 0, target[:, c])
        assert batch.inputs["mask"][torch.arange(2048), batch.truth["token"][:, c]].all()
    assert ((target.float().mean(0) - (0.5 if several else 0.2)).abs() < 0.04).all()
    fillers = batch.inputs["mask"].sum(-1) - C
    assert torch.bincount(fillers, minlength=4).min() > 400


def test_the_same_seed_draws_the_same_batch():
    for task in (Evidence(), Digits()):
        one, two, other = (drawn(task, 64, seed) for seed in (3, 3, 4))
        for name, x in one.inputs.items():
            assert torch.equal(x, two.inputs[name])
        assert torch.equal(one.target, two.target)
        assert not torch.equal(one.target, other.target)


def test_digits_are_all_there_once_and_test_images_are_apart():
    train, test = Digits(), Digits(test=True)
    assert len(train) + len(test) == 1797
    images = [{tuple(x.flatten().tolist()) for x in drawn(task, len(task)).inputs["image"]} for task in (train, test)]
    assert len(images[0]) == len(train)
    assert len(images[1]) == len(test)
    assert not images[0] & images[1]
    batch = drawn(train, 3000)
    assert batch.inputs["image"].shape == (3000, 8, 8)
    assert batch.inputs["image"].min() == 0
    assert batch.inputs["image"].max() == 1
    assert torch.bincount(batch.target, minlength=10).min() > 200


def test_primary_capsules_are_kinds_at_places():
    model = CapsuleNetwork(channels=3, kinds=2, dim=(5, 7))
    image = torch.rand(2, 8, 8)
    u = model.parts(image)
    assert u.shape == (2, 32, 5)
    seen = model.primary(model.conv(image[:, None]).relu())
    assert torch.allclose(u[1, 16 + 4 * 2 + 3], rg.squash(seen[1, 5:10, 2, 3]))
