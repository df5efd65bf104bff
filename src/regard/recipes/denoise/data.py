"""Clean pictures by split, and the noise that is added to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from regard._errors import refusal
from regard.model import Example
from regard.recipes.data import Folder

SIZE = 16


@dataclass(frozen=True)
class Noisy(Sequence[Example]):
    """Pictures with Gaussian noise, which is a function of the seed and of the number of the picture alone.

    Args:
        clean: (B, 1, H, W), from 0 to 1.
        sigma: standard deviation of the noise.
        seed: of the noise.

    Example:
        >>> pictures = Noisy(torch.zeros(2, 1, 4, 4), 0.5, seed=0)
        >>> torch.equal(pictures[1].inputs["image"], pictures[1].inputs["image"])
        True
    """

    clean: Tensor
    sigma: float
    seed: int

    def __len__(self) -> int:
        return len(self.clean)

    def __getitem__(self, k: int) -> Example:  # type: ignore[override]
        if not 0 <= k < len(self):
            raise IndexError(k)
        noise = torch.randn(self.clean.shape[1:], generator=Generator().manual_seed(self.seed * 1_000_003 + k))
        noisy = self.clean[k] + self.sigma * noise
        return Example({"image": noisy}, self.clean[k], {"noisy": noisy})


def fashion(data: str) -> dict[str, Tensor]:
    """Pictures of clothes; every tenth one of the training file is for validation."""
    folder = Folder(data, "train-images-idx3-ubyte", "test-images-idx3-ubyte")
    found = {}
    for name in ("train", "test"):
        images = folder.idx(f"{name}-images-idx3-ubyte")
        if images.ndim != 3 or images.shape[1] % 2 or images.shape[2] % 2 or len(images) < 10:
            got = f"{folder.path / name}: {images.shape}"
            raise ValueError(refusal("data", got, "at least ten pictures, with even sides"))
        found[name] = torch.from_numpy(images.copy()).float()[:, None] / 255
    # Files may be sorted by class, so that the last ones would be of one.
    tenth = torch.arange(len(found["train"])) % 10 == 9
    return {"train": found["train"][~tenth], "validation": found["train"][tenth], "test": found["test"]}


def drawn(count: int, seed: int) -> dict[str, Tensor]:
    """Discs and bars that grow lighter one way, on a ground that grows lighter another way.

    Example:
        >>> {split: pictures.shape for split, pictures in drawn(10, seed=0).items()}["train"]
        torch.Size([10, 1, 16, 16])
    """
    sizes = {"train": count, "validation": max(1, count // 5), "test": max(1, count // 5)}
    return {
        name: torch.stack([_drawn(Generator().manual_seed((seed * 3 + part) * 1_000_003 + k)) for k in range(size)])
        for part, (name, size) in enumerate(sizes.items())
    }


def _drawn(generator: Generator) -> Tensor:
    a = torch.rand(9, generator=generator)
    y, x = torch.meshgrid(torch.linspace(-1, 1, SIZE), torch.linspace(-1, 1, SIZE), indexing="ij")

    def slope(turn: Tensor) -> Tensor:
        angle = 2 * math.pi * turn
        return (x * angle.cos() + y * angle.sin()) / 2

    disc = (x - a[0] + 0.5).square() + (y - a[1] + 0.5).square() < (0.25 + 0.35 * a[2]) ** 2
    bar = (slope(a[3]) - 0.3 * a[4]).abs() < 0.08 + 0.08 * a[5]
    picture = 0.3 + 0.2 * slope(a[6])
    picture = torch.where(bar, 0.65 + 0.2 * slope(a[7]), picture)
    return torch.where(disc, 0.8 + 0.2 * slope(a[8]), picture).clamp(0, 1)[None]
