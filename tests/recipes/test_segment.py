"""Segment: archives of pictures, gates and a bottom that attends, and intersection over union."""

import io
import tarfile

import numpy as np
import pytest
import torch

import regard as rg
from regard.recipes import run
from regard.recipes.recipe import configured, recipe
from regard.recipes.segment import UNet
from regard.recipes.segment.data import CAMVID, camvid, drawn, membrane

image = pytest.importorskip("PIL.Image")


def packed(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, (array, kind) in files.items():
            image.fromarray(array).save(content := io.BytesIO(), kind)
            member = tarfile.TarInfo(name)
            member.size = len(content.getvalue())
            archive.addfile(member, io.BytesIO(content.getvalue()))


def write_camvid(folder, change=None):
    draw, files = np.random.default_rng(0), {}
    for part, count in (("train", 3), ("val", 2), ("test", 1)):
        for k in range(count):
            files[f"{part}/{k}.jpg"] = draw.integers(256, size=(16, 24, 3), dtype=np.uint8), "JPEG"
            files[f"{part}annot/{k}.png"] = draw.integers(12, size=(16, 24), dtype=np.uint8), "PNG"
    files |= change or {}
    packed(folder / "camvid_160x120.tar.gz", {name: x for name, x in files.items() if x is not None})
    return files


def test_camvid_gives_back_what_was_written(tmp_path):
    files = write_camvid(tmp_path)
    found = camvid(str(tmp_path))
    assert found.classes == CAMVID
    assert len(CAMVID) == 11
    assert {split: len(pairs) for split, pairs in found.split.items()} == {"train": 3, "validation": 2, "test": 1}
    picture, classes = found.split["validation"][1]
    assert picture.shape == (3, 16, 24)
    assert picture.dtype == torch.uint8
    written = torch.from_numpy(files["valannot/1.png"][0]).long()
    assert torch.equal(classes, torch.where(written == 11, -1, written)), "what is void has no class"


def test_membranes_give_back_what_was_written(tmp_path):
    draw, files = np.random.default_rng(0), {}
    for k in range(30):
        files[f"image/{k}.png"] = draw.integers(256, size=(16, 16), dtype=np.uint8), "PNG"
        files[f"label/{k}.png"] = (255 * draw.integers(2, size=(16, 16))).astype(np.uint8), "PNG"
    packed(tmp_path / "membrane_30_crop256.tar.gz", files)
    found = membrane(str(tmp_path)).split
    assert {split: len(pairs) for split, pairs in found.items()} == {"train": 20, "validation": 4, "test": 6}
    picture, classes = found["test"][0]
    assert torch.equal(picture[0], torch.from_numpy(files["image/24.png"][0]))
    assert torch.equal(classes, torch.from_numpy(files["label/24.png"][0] // 255).long())


def test_what_is_missing_or_wrong_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"also has camvid_160x120\.tar\.gz"):
        camvid(str(tmp_path))
    write_camvid(tmp_path, {"trainannot/1.png": None})
    with pytest.raises(ValueError, match=r"train/1\.jpg alone, expected also trainannot/1\.png"):
        camvid(str(tmp_path))
    write_camvid(tmp_path, {"valannot/0.png": (np.full((16, 24), 12, np.uint8), "PNG")})
    with pytest.raises(ValueError, match="class 12, expected 0 to 11"):
        camvid(str(tmp_path))
    write_camvid(tmp_path, {"valannot/0.png": (np.zeros((8, 8), np.uint8), "PNG")})
    with pytest.raises(ValueError, match=r"a class for each pixel \(16, 24\)"):
        camvid(str(tmp_path))
    (tmp_path / "camvid_160x120.tar.gz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="expected a whole file"):
        camvid(str(tmp_path))
    with pytest.raises(ValueError, match="one of camvid, membrane"):
        configured("segment", {"set": "cityscapes"})


def test_drawn_shapes_are_what_they_say():
    found, again = drawn(5, seed=1), drawn(5, seed=1)
    for (picture, classes), (same, _) in zip(found.split["train"], again.split["train"], strict=True):
        assert torch.equal(picture, same)
        counts = classes.flatten().bincount(minlength=3).tolist()
        assert 0 < counts[2] <= 17**2
        assert counts[0] > 400
        checked, plain = (picture[0].double()[classes == kind].std() for kind in (2, 1))
        assert counts[1] < 8 or checked > plain
    assert not torch.equal(found.split["train"][0][0], found.split["test"][0][0])


def test_pictures_are_turned_with_their_classes():
    task = configured("segment", {"train_size": 2})
    every = task.examples("train")
    assert len(every) == 16
    picture, classes = task.pictures.split["train"][0]
    torch.testing.assert_close(
        every[5].inputs["image"], task._normalised(picture.flip(-1).rot90(1, (-2, -1)).float() / 255)
    )
    assert torch.equal(every[5].target, classes.flip(-1).rot90(1, (-2, -1)))
    assert len(configured("segment", {"train_size": 2, "turned": "false"}).examples("train")) == 2


def test_gates_stand_at_every_skip_connection():
    torch.manual_seed(0)
    net = UNet(3, (4, 8, 16), gate=rg.AttentionGate)
    pictures = torch.rand(2, 3, 16, 24)
    with rg.record(net) as trace:
        found = net(pictures)
    assert found.shape == (2, 96, 4)
    assert {path: calls[0].weights.shape for path, calls in trace.items()} == {
        "gates.0.attention": (2, 96, 1, 1),
        "gates.1.attention": (2, 24, 1, 1),
    }
    # An open gate is a plain skip connection.
    plain = UNet(3, (4, 8, 16))
    plain.load_state_dict({k: v for k, v in net.state_dict().items() if not k.startswith("gates")})
    with rg.intervene(net, "uniform"):
        torch.testing.assert_close(net(pictures), plain(pictures))
    with pytest.raises(ValueError, match="multiples of 8"):
        net(torch.rand(1, 3, 12, 16))


@pytest.mark.parametrize("attention", recipe("segment").alternatives)
def test_every_attention_learns(attention):
    task = configured("segment", {"attention": attention, "train_size": 3, "base_dim": 4})
    model = task.build()
    batch = task.batches(task.examples("train")[:2])[0]
    loss = model.loss(model(batch), batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    unknown = task.judge(model.eval(), [type(e)(e.inputs) for e in task.examples("test")])
    assert unknown.metrics == {}
    assert sum(unknown.answers[0].values()) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("attention", ["attention-gate", "self-attention"])
def test_shapes_are_found_in_seconds(tmp_path, attention):
    found = run(
        "segment",
        attention=attention,
        train_size=40,
        steps=60,
        every=30,
        lr=5e-3,
        warmup=5,
        out=tmp_path,
        progress=False,
    )
    assert found.metrics()["iou"] > 0.6
    assert {"iou_disc", "iou_square", "dice", "accuracy"} <= set(found.metrics())
    assert "</svg>" in (found.folder / "attention.svg").read_text()
    task = found.recipe()
    image.new("L", (50, 40), 128).save(tmp_path / "grey.png")
    answer = task.judge(found.model(), [task.parse(str(tmp_path / "grey.png"))]).answers[0]
    assert set(answer) == {"ground", "disc", "square"}
