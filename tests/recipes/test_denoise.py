"""Denoise: noise that repeats itself, and places that look at each other."""

import numpy as np
import pytest
import torch

from regard.recipes import run
from regard.recipes.denoise.data import Noisy, drawn, fashion
from regard.recipes.recipe import configured, recipe
from tests.recipes.test_digits import write_idx

pytest.importorskip("torchmetrics")


def test_noise_is_a_function_of_seed_and_number():
    clean = torch.rand(30, 1, 16, 16)
    noisy, again, other = Noisy(clean, 0.3, 7), Noisy(clean[:5], 0.3, 7), Noisy(clean, 0.3, 8)
    for k in (0, 4):
        assert torch.equal(noisy[k].inputs["image"], again[k].inputs["image"])
        assert not torch.equal(noisy[k].inputs["image"], other[k].inputs["image"])
        assert torch.equal(noisy[k].target, clean[k])
    added = torch.stack([noisy[k].inputs["image"] - clean[k] for k in range(30)])
    assert abs(float(added.std()) - 0.3) < 0.01
    assert abs(float(added.mean())) < 0.01
    assert not torch.equal(added[0], added[1])
    with pytest.raises(IndexError):
        noisy[30]


def test_the_noise_of_test_pictures_is_that_of_every_run(tmp_path):
    write_idx(
        tmp_path / "train-images-idx3-ubyte", np.random.default_rng(0).integers(256, size=(20, 16, 16), dtype=np.uint8)
    )
    write_idx(tmp_path / "test-images-idx3-ubyte", np.zeros((10, 16, 16), np.uint8), packed=False)
    one, two = (configured("denoise", {"data": str(tmp_path), "seed": seed}) for seed in (0, 1))
    assert torch.equal(one.examples("test")[3].inputs["image"], two.examples("test")[3].inputs["image"])
    assert not torch.equal(one.examples("train")[3].inputs["image"], two.examples("train")[3].inputs["image"])


def test_fashion_files_give_back_what_was_written(tmp_path):
    with pytest.raises(ValueError, match="also has train-images-idx3-ubyte, test-images-idx3-ubyte"):
        fashion(str(tmp_path))
    images = np.random.default_rng(0).integers(256, size=(40, 28, 28), dtype=np.uint8)
    write_idx(tmp_path / "train-images-idx3-ubyte", images)
    write_idx(tmp_path / "test-images-idx3-ubyte", images[:10], packed=False)
    found = fashion(str(tmp_path))
    assert [len(found[split]) for split in ("train", "validation", "test")] == [36, 4, 10]
    torch.testing.assert_close(found["validation"][1, 0], torch.from_numpy(images[19]).float() / 255)
    write_idx(tmp_path / "test-images-idx3-ubyte", images[:10, :27], packed=False)
    with pytest.raises(ValueError, match="with even sides"):
        fashion(str(tmp_path))


def test_drawn_pictures_repeat_themselves():
    found, again = drawn(6, seed=2), drawn(6, seed=2)
    assert all(torch.equal(found[split], again[split]) for split in found)
    assert float(found["train"].min()) >= 0
    assert float(found["train"].max()) <= 1
    assert not torch.equal(found["train"][0], found["test"][0])


@pytest.mark.parametrize("attention", recipe("denoise").alternatives)
def test_every_attention_learns(attention):
    task = configured("denoise", {"attention": attention, "train_size": 5, "hidden_dim": 8})
    model = task.build()
    batch = task.batches(task.examples("train"))[0]
    loss = model.loss(model(batch), batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_no_change_is_the_noisy_picture():
    task = configured("denoise", {"train_size": 5, "hidden_dim": 8})
    model = task.build()
    torch.nn.init.zeros_(model.output.linear.weight)
    torch.nn.init.zeros_(model.output.linear.bias)
    found = task.judge(model.eval(), task.examples("test")).metrics
    assert found["psnr"] == found["psnr_noisy"]
    assert found["ssim"] == found["ssim_noisy"]
    with pytest.raises(ValueError, match="sigma"):
        configured("denoise", {"sigma": "0"})


@pytest.mark.parametrize("attention", ["self-attention", "multi-head"])
def test_noise_is_taken_away_in_seconds(tmp_path, attention):
    found = run(
        "denoise",
        attention=attention,
        train_size=100,
        steps=160,
        every=80,
        hidden_dim=16,
        lr=5e-3,
        warmup=5,
        out=tmp_path,
        progress=False,
    )
    metrics = found.metrics()
    assert metrics["psnr"] > metrics["psnr_noisy"] + 2
    assert "</svg>" in (found.folder / "attention.svg").read_text()
    image = pytest.importorskip("PIL.Image")
    image.new("L", (20, 20), 100).save(tmp_path / "grey.png")
    task = found.recipe()
    assert "noise" in task.judge(found.model(), [task.parse(str(tmp_path / "grey.png"))]).answers[0]
