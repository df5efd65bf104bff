"""Pictures with a class for every pixel, by split: read, or drawn."""

from __future__ import annotations

import math
from pathlib import PurePosixPath
from typing import NamedTuple

import torch
from torch import Tensor

from regard._errors import refusal
from regard.recipes.data import Folder
from regard.recipes.pictures import decoded

CAMVID = (*("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist"),)
_VOID = 11
MEMBRANE = ("membrane", "cell")
SHAPES = ("ground", "disc", "square")
SIZE = 32

Labelled = tuple[Tensor, Tensor]  # a picture (C, H, W) of bytes, and the classes (H, W) of its pixels, -1 for none


class Pictures(NamedTuple):
    """All that is read of a data set."""

    classes: tuple[str, ...]
    split: dict[str, list[Labelled]]


def camvid(data: str) -> Pictures:
    """Road scenes, as SegNet has them: `train`, `val` and `test` with pictures, and beside them folders of annotations."""
    files = Folder(data, "camvid_160x120.tar.gz").members("camvid_160x120.tar.gz", (".jpg", ".png"))
    split: dict[str, list[Labelled]] = {}
    for name, folder in (("train", "train"), ("validation", "val"), ("test", "test")):
        pictures = sorted(path for path in files if PurePosixPath(path).parts[-2] == folder)
        split[name] = [_pair(files, path, _beside(path, f"{folder}annot"), "RGB") for path in pictures]
        if not pictures:
            raise ValueError(refusal("data", f"{data}: no pictures in {folder}", "train, val and test"))
        for path, (_, classes) in zip(pictures, split[name], strict=True):
            if int(classes.max()) > _VOID:
                raise ValueError(refusal("data", f"{path}: class {int(classes.max())}", f"0 to {_VOID}, which is void"))
            classes[classes == _VOID] = -1
    return Pictures(CAMVID, split)


def membrane(data: str) -> Pictures:
    """Slices of tissue under an electron microscope: of thirty, twenty for training, four for validation, six for testing."""
    files = Folder(data, "membrane_30_crop256.tar.gz").members("membrane_30_crop256.tar.gz", (".png",))
    found = []
    for k in range(30):
        path = next((p for p in files if p.endswith(f"image/{k}.png")), None)
        if path is None:
            raise ValueError(refusal("data", f"{data}: no image/{k}.png", "image and label of 0 to 29"))
        picture, label = _pair(files, path, path.replace("image/", "label/"), "L")
        found.append((picture, (label > 127).long()))
    return Pictures(MEMBRANE, {"train": found[:20], "validation": found[20:24], "test": found[24:]})


def _beside(path: str, folder: str) -> str:
    parts = PurePosixPath(path)
    return str(parts.parent.with_name(folder) / parts.with_suffix(".png").name)


def _pair(files: dict[str, bytes], path: str, annotation: str, mode: str) -> Labelled:
    if annotation not in files:
        raise ValueError(refusal("data", f"{path} alone", f"also {annotation}"))
    picture = decoded(files[path], path, mode)
    classes = decoded(files[annotation], annotation, "P")[0].long()
    if classes.shape != picture.shape[1:]:
        got = f"{annotation}: {tuple(classes.shape)}"
        raise ValueError(refusal("data", got, f"a class for each pixel {tuple(picture.shape[1:])}"))
    return picture, classes


def drawn(count: int, seed: int) -> Pictures:
    """Bright discs and checked squares on a ground of waves and noise: a bright pixel may be of either.

    Example:
        >>> picture, classes = drawn(1, seed=0).split["train"][0]
        >>> picture.shape, classes.shape
        (torch.Size([1, 32, 32]), torch.Size([32, 32]))
    """
    sizes = {"train": count, "validation": max(1, count // 5), "test": max(1, count // 5)}
    split = {}
    for part, (name, size) in enumerate(sizes.items()):
        generator = torch.Generator().manual_seed(seed * 3 + part)
        split[name] = [_drawn(generator) for _ in range(size)]
    return Pictures(SHAPES, split)


def _drawn(generator: torch.Generator) -> Labelled:
    def any_of(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    angle, period = any_of(0, math.pi), any_of(4, 8)
    waves = torch.sin((x * math.cos(angle) + y * math.sin(angle)) * 2 * math.pi / period)
    picture = 0.5 + 0.12 * waves + 0.06 * torch.randn(SIZE, SIZE, generator=generator)
    classes = torch.zeros(SIZE, SIZE, dtype=torch.long)
    for kind in (1, 2):
        radius, row, column = any_of(6, 9), any_of(7, SIZE - 8), any_of(7, SIZE - 8)
        away = torch.stack([y - row, x - column])
        inside = away.square().sum(0) < radius**2 if kind == 1 else away.abs().amax(0) < radius * 0.9
        plain = any_of(0.8, 1.0)
        checks = 0.5 + any_of(0.25, 0.4) * ((x // 2 + y // 2) % 2 * 2 - 1)
        noise = 0.06 * torch.randn(SIZE, SIZE, generator=generator)
        picture = torch.where(inside, noise + (plain if kind == 1 else checks), picture)
        classes[inside] = kind
    return (picture.clamp(0, 1) * 255).to(torch.uint8)[None], classes
