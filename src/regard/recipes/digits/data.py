"""Pictures of digits, by split."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from regard._errors import refusal
from regard.recipes.data import Folder
from regard.recipes.planted import Digits


class Pictures(NamedTuple):
    """Pictures (B, 1, H, W) from 0 to 1, and their digits (B,)."""

    image: Tensor
    digit: Tensor


def small(validation: int = 200) -> dict[str, Pictures]:
    """Those of 8 x 8 that come with scikit-learn; 360 are for testing."""
    found = {}
    for name, task in (("train", Digits()), ("test", Digits(test=True))):
        drawn = task.draw(len(task), Generator().manual_seed(0))
        found[name] = Pictures(drawn.inputs["image"][:, None], drawn.target)
    return _parted(found["train"], found["test"], validation)


def mnist(data: str, count: int, validation: int = 500) -> dict[str, Pictures]:
    """The first pictures of MNIST's training files, the last of which are for validation, and all of its test files."""
    folder = Folder(data, "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    names = [f"train{part}" for part in ("", "-first4000") if folder.has(f"train{part}-images-idx3-ubyte")]
    train = _pictures(folder, names[0] if names else "train", count)
    if len(train.digit) <= validation:
        raise ValueError(refusal("train_size", count, f"more than the {validation} that are for validation"))
    return _parted(train, _pictures(folder, "t10k"), validation)


def _pictures(folder: Folder, name: str, count: int | None = None) -> Pictures:
    images, labels = folder.idx(f"{name}-images-idx3-ubyte"), folder.idx(f"{name}-labels-idx1-ubyte")
    if images.ndim != 3 or images.shape[1] != images.shape[2] or labels.shape != images.shape[:1]:
        got = f"{folder.path / name}: pictures {images.shape} and digits {labels.shape}"
        raise ValueError(refusal("data", got, "square pictures, and a digit for each"))
    if labels.size and labels.max() > 9:
        raise ValueError(refusal("data", f"{folder.path / name}: a digit {labels.max()}", "0 to 9"))
    images, labels = images[:count], labels[:count]
    return Pictures(torch.from_numpy(images.copy()).float()[:, None] / 255, torch.from_numpy(labels.copy()).long())


def _parted(train: Pictures, test: Pictures, validation: int) -> dict[str, Pictures]:
    first = len(train.digit) - validation
    return {
        "train": Pictures(*(x[:first] for x in train)),
        "validation": Pictures(*(x[first:] for x in train)),
        "test": test,
    }
