"""Digits: idx files, shifts, capsules and glimpses."""

import gzip
import struct

import numpy as np
import pytest
import torch

from regard.recipes import run
from regard.recipes.digits import PrimaryCapsules, Shifts, Strokes
from regard.recipes.digits.data import mnist, small
from regard.recipes.engine import training_loss
from regard.recipes.recipe import configured, recipe

pytest.importorskip("sklearn")


def write_idx(path, array, packed=True):
    raw = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()
    if packed:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(raw))
    else:
        path.write_bytes(raw)


def write_mnist(folder, train=510, test=7, name="train-first4000"):
    draw = np.random.default_rng(0)
    made = {}
    for part, count in ((name, train), ("t10k", test)):
        images = draw.integers(256, size=(count, 28, 28), dtype=np.uint8)
        labels = draw.integers(10, size=count, dtype=np.uint8)
        write_idx(folder / f"{part}-images-idx3-ubyte", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte", labels, packed=False)
        made[part] = images, labels
    return made


@pytest.mark.parametrize("name", ["train-first4000", "train"])
def test_mnist_files_give_back_what_was_written(tmp_path, name):
    made = write_mnist(tmp_path, name=name)
    found = mnist(str(tmp_path), 505)
    assert {split: len(pictures.digit) for split, pictures in found.items()} == {
        "train": 5,
        "validation": 500,
        "test": 7,
    }
    images, labels = made[name]
    torch.testing.assert_close(found["train"].image[3, 0], torch.from_numpy(images[3]).float() / 255)
    assert found["validation"].digit.tolist() == labels[5:505].tolist()
    assert found["test"].digit.tolist() == made["t10k"][1].tolist()


def test_what_is_missing_or_wrong_is_said(tmp_path):
    with pytest.raises(ValueError, match="also has t10k-images-idx3-ubyte"):
        mnist(str(tmp_path), 4000)
    write_mnist(tmp_path, train=20)
    with pytest.raises(ValueError, match=r"train_size.*more than the 500"):
        mnist(str(tmp_path), 4000)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.full(7, 11, np.uint8), packed=False)
    write_mnist(tmp_path / ".", train=510)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.full(7, 11, np.uint8), packed=False)
    with pytest.raises(ValueError, match="a digit 11, expected 0 to 9"):
        mnist(str(tmp_path), 4000)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.zeros(6, np.uint8), packed=False)
    with pytest.raises(ValueError, match="a digit for each"):
        mnist(str(tmp_path), 4000)


def test_the_small_ones_are_split_once():
    found, again = small(), small()
    assert {split: len(pictures.digit) for split, pictures in found.items()} == {
        "train": 1237,
        "validation": 200,
        "test": 360,
    }
    assert torch.equal(found["validation"].image, again["validation"].image)
    seen = {tuple(image.flatten().tolist()) for image in found["train"].image}
    assert sum(tuple(image.flatten().tolist()) in seen for image in found["test"].image) < 5


def test_shifts_move_pictures_while_training_alone():
    image = torch.zeros(200, 1, 5, 7)
    image[:, :, 2, 3] = 1.0
    shifts = Shifts(1)
    torch.manual_seed(0)
    moved = shifts(image)
    assert (moved.flatten(1).sum(1) == 1).all()
    places = {tuple(divmod(int(k), 7)) for k in moved.flatten(1).argmax(1)}
    assert places == {(i, j) for i in (1, 2, 3) for j in (2, 3, 4)}
    edge = torch.ones(50, 1, 3, 3)
    assert set(shifts(edge).flatten(1).sum(1).tolist()) == {4.0, 6.0, 9.0}, "nothing comes back on the other side"
    assert shifts.eval()(image) is image
    with pytest.raises(ValueError, match="most"):
        Shifts(-1)


@pytest.mark.parametrize("size", [8, 28])
def test_places_and_primary_capsules(size):
    see, primary = Strokes(size, 5, 12), PrimaryCapsules(4)
    image = torch.rand(3, 1, size, size)
    places = see(image, torch.ones(3, 1).bool())
    assert places.shape == (3, see.grid**2, 12)
    assert see.mask_after(torch.ones(3, 1).bool()).shape == (3, 16)
    expected = see.second(see.first(image).relu())[2, :, 1, 3]
    torch.testing.assert_close(places[2, see.grid + 3], expected)
    capsules = primary(places)
    assert capsules.shape == (3, 48, 4)
    assert bool((capsules.norm(dim=-1) < 1).all())


@pytest.mark.parametrize("attention", recipe("digits").alternatives)
def test_every_attention_learns(attention):
    task = configured("digits", {"attention": attention})
    model = task.build()
    batch = task.batches(task.examples("train")[:5])[0]
    loss = model.loss(model(batch), batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_a_glimpse_learns_where_to_look_by_reward():
    task = configured("digits", {"attention": "hard", "attention.gradient": "reinforce"})
    model = task.build()
    batch = task.batches(task.examples("train")[:5])[0]
    training_loss(model, batch).backward()
    score = [p.grad for name, p in model.named_parameters() if name.startswith("attention.score")]
    assert any(float(g.abs().sum()) > 0 for g in score)


@pytest.mark.parametrize(("attention", "least"), [("dynamic-routing-capsules", 0.85), ("self-attention", 0.6)])
def test_digits_are_learnt_in_seconds(tmp_path, attention, least):
    steps = {"dynamic-routing-capsules": 80, "self-attention": 150}[attention]
    found = run("digits", attention=attention, steps=steps, every=50, place_dim=32, out=tmp_path, progress=False)
    assert found.metrics()["accuracy"] > least
    assert "</svg>" in (found.folder / "attention.svg").read_text()


def test_a_picture_of_ones_own(tmp_path):
    image = pytest.importorskip("PIL.Image")
    task = configured("digits", {})
    image.new("RGB", (40, 30), (255, 255, 255)).save(tmp_path / "white.png")
    example = task.parse(str(tmp_path / "white.png"))
    assert example.inputs["image"].shape == (1, 8, 8)
    assert float(example.inputs["image"].min()) == 1.0
    assert task.judge(task.build().eval(), [example]).answers[0] in task.classes
    with pytest.raises(ValueError, match="the path of a PNG or JPEG picture"):
        task.parse("nothing.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"broken\.png.*expected a PNG or JPEG picture"):
        task.parse(str(tmp_path / "broken.png"))
