"""The examples of moving and of made pictures: each runs, learns, and attends."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import regard as rg

FOLDER = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_moving_shape_moves_one_pixel_a_frame():
    task = load("space_time").MovingShape()
    batch = task.draw(50, torch.Generator().manual_seed(0))
    path = batch.truth["path"]
    step = {0: -1, 1: 1, 2: -5, 3: 5}
    assert [int(p[1] - p[0]) for p in path] == [step[int(k)] for k in batch.target]
    assert bool((batch.inputs["video"].gather(2, path[..., None]) == 1).all())


def test_space_time_attention_divides():
    example = load("space_time")
    torch.manual_seed(0)
    model = example.SpaceTime(3, 25, 8, 4)
    with rg.record(model) as trace:
        model(torch.randn(2, 3, 25))
    shapes = {path: tuple(calls[0].weights.shape) for path, calls in trace.items()}
    assert shapes == {"space.attention": (2, 3, 25, 25), "time.attention": (2, 25, 3, 3)}


def test_space_time_learns_which_way():
    found = load("space_time").main(steps=250)
    assert found["accuracy"] > 0.75
    assert found["weight on the shape"] > 2 * found["chance"]


def test_attention_of_a_gan_starts_at_nothing():
    example = load("sagan")
    block, x = example.SelfAttended(8), torch.randn(2, 8, 4, 4)
    assert torch.equal(block(x), x)
    block(x).square().sum().backward()
    assert float(block.gamma.grad.abs()) > 0


def test_sagan_comes_nearer_to_the_digits():
    pytest.importorskip("sklearn")
    example = load("sagan")
    one = torch.rand(200, 1, 2, 2)
    assert example.distance(one, one) == pytest.approx(0, abs=1e-6)
    assert example.distance(one, one + 1) == pytest.approx(4, abs=1e-4)
    found = example.main(steps=100)
    assert found["distance after"] < 0.5 * found["distance before"]
    assert found["gamma of the generator"] != 0
    assert found["gamma of the discriminator"] != 0
