"""Captions: the drawn scenes, the files, every attention, and a short training."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
import torch

from regard.model import collate
from regard.recipes import run
from regard.recipes.captions import Captions
from regard.recipes.captions.scenes import COLOURS, SHAPES, SIZE, Scene, Shape, scenes
from regard.recipes.recipe import configured

SMALL = {"hidden_dim": 16, "embedding_dim": 7, "heads": 2, "train_size": 13}


def test_a_caption_says_what_is_where() -> None:
    beside = Scene(Shape("red", "square", 2, 0), Shape("blue", "circle", 0, 1))
    assert " ".join(beside.words) == "a red square left of a blue circle"
    over = Scene(Shape("red", "square", 0, 1), Shape("blue", "circle", 2, 1))
    assert " ".join(over.words) == "a red square above a blue circle"
    for scene in (beside, over):
        assert len(scene.named()) == len(scene.words)
        for word, shape in zip(scene.words, scene.named(), strict=True):
            assert (shape is not None) == (word in COLOURS or word in SHAPES)
            assert shape is None or word in (shape.colour, shape.kind)


@pytest.mark.parametrize("kind", SHAPES)
def test_a_shape_is_drawn_in_its_place(kind: str) -> None:
    picture = Scene(Shape("red", kind, 0, 0), Shape("blue", "square", 2, 2)).drawn()
    cell = SIZE // 3
    red = (picture[0] > 0.5) & (picture[2] < 0.5)
    assert red[:cell, :cell].sum() >= 10
    assert not red[cell:].any()
    assert not red[:, cell:].any()
    blue = picture[2] > 0.9
    assert blue[2 * cell :, 2 * cell :].any()


def test_shapes_can_be_told_apart() -> None:
    drawn = {kind: Scene(Shape("red", kind, 0, 0), Shape("blue", "square", 2, 2)).drawn() for kind in SHAPES}
    for kind, picture in drawn.items():
        assert not any(torch.equal(picture, other) for name, other in drawn.items() if name != kind)


def test_splits_share_no_scene_and_repeat_themselves() -> None:
    found = {split: {repr(scene) for scene in some} for split, some in scenes(300, seed=1).items()}
    assert not found["train"] & found["test"]
    assert not found["train"] & found["validation"]
    assert scenes(5, seed=1) == scenes(5, seed=1)


@pytest.mark.parametrize("regions", ["convolution", "patches"])
def test_links_are_the_regions_of_the_shape(regions: str) -> None:
    task = configured("captions", {**SMALL, "regions": regions})
    assert isinstance(task, Captions)
    gold = task._links(Scene(Shape("red", "square", 0, 1), Shape("blue", "circle", 2, 1))).unflatten(1, (6, 6))
    named = [t for t in range(len(gold)) if gold[t].any()]
    assert named == [1, 2, 5, 6]
    for t, row in ((1, 0), (2, 0), (5, 4), (6, 4)):
        assert gold[t].nonzero().tolist() == [[row, 2], [row, 3], [row + 1, 2], [row + 1, 3]]


@pytest.mark.parametrize("regions", ["convolution", "patches"])
@pytest.mark.parametrize("attention", Captions.alternatives)
def test_any_attention_fits(attention: str, regions: str) -> None:
    task = configured("captions", {**SMALL, "attention": attention, "regions": regions, "beam": 2})
    model, examples = task.build(), task.examples("train")[:3]
    batch = collate(examples)
    loss = model.loss(model(batch), batch)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    judged = task.judge(model.eval(), examples)
    assert {"bleu", "bleu1", "perplexity", "aer"} <= set(judged.metrics)
    assert "tok:none" in judged.signatures["bleu"]


def jpeg(colour: tuple[int, int, int], size: tuple[int, int] = (96, 96)) -> bytes:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("RGB", size, colour).save(file, "JPEG")
    return file.getvalue()


def archive(folder: Path, rows: list[dict[str, object]], files: dict[str, bytes]) -> None:
    files = {**files, "captions.jsonl": "\n".join(json.dumps(row) for row in rows).encode()}
    with tarfile.open(folder / "flickr8k.tar.gz", "w:gz") as out:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            out.addfile(entry, io.BytesIO(content))


def test_real_files(tmp_path: Path) -> None:
    captions = ["A dog runs .", "The dog is red ."]
    rows: list[dict[str, object]] = [
        {"image": f"{split}{k}.jpg", "split": split, "captions": captions}
        for split, count in (("train", 2), ("dev", 1), ("test", 1))
        for k in range(count)
    ]
    archive(tmp_path, rows, {f"images/{row['image']}": jpeg((200, 10, 10)) for row in rows})
    task = configured("captions", {"data": str(tmp_path), "at_least": 1, "hidden_dim": 16})
    train, test = task.examples("train"), task.examples("test")
    assert len(train) == 4, "each caption for training"
    assert len(test) == 1
    assert list(test[0].words["captions"]) == ["a dog runs .", "the dog is red ."]
    assert train[0].inputs["picture"].shape == (5, 96, 96)
    assert train[0].gold is None
    model = task.build()
    assert model.encode(collate(train)).inputs["picture"].shape == (4, 36, 16)
    assert "aer" not in task.judge(model.eval(), test).metrics
    (tmp_path / "own.jpg").write_bytes(jpeg((0, 0, 200), (50, 70)))
    assert task.parse(str(tmp_path / "own.jpg")).inputs["picture"].shape == (5, 96, 96)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one captions.jsonl"):
        configured("captions", {"data": str(tmp_path)}).examples("test")
    archive(tmp_path, [{"image": "none.jpg", "split": "train", "captions": ["a"]}], {})
    with pytest.raises(ValueError, match=r"line 1: 'none.jpg', 'train'"):
        configured("captions", {"data": str(tmp_path)}).examples("test")
    archive(tmp_path, [{"image": "a.jpg", "split": "train", "captions": ["a"]}], {"images/a.jpg": b"no picture"})
    with pytest.raises(ValueError, match="a PNG or JPEG picture"):
        configured("captions", {"data": str(tmp_path)}).examples("test")
    archive(tmp_path, [{"image": "a.jpg", "split": "train", "captions": ["a"]}], {"images/a.jpg": jpeg((0, 0, 0))})
    with pytest.raises(ValueError, match="pictures of the validation and of the test"):
        configured("captions", {"data": str(tmp_path)}).examples("test")
    with pytest.raises(ValueError, match="regions: got 'pixels'"):
        configured("captions", {"regions": "pixels"})
    with pytest.raises(ValueError, match="the path of a PNG or JPEG picture"):
        configured("captions", SMALL).parse("none.png")


@pytest.mark.parametrize("attention", ["additive", pytest.param("hard", marks=pytest.mark.slow)])
def test_a_short_training_says_what_it_sees(attention: str, tmp_path: Path) -> None:
    settings = {"train_size": 1000, "steps": 150, "every": 150, "beam": 2}
    found = run("captions", out=tmp_path, progress=False, attention=attention, **settings)
    metrics = found.metrics()
    assert metrics is not None
    print(attention, metrics)
    assert metrics["bleu"] > 30
    assert metrics["aer"] < 0.7, "it looks at the shapes that it names"
    assert (found.folder / "attention.svg").is_file()
