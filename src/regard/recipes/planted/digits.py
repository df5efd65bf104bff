"""Handwritten digits, and the capsule network of the paper, made small enough for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from regard._errors import missing_extra
from regard.query import CapsuleDecoder, CapsuleLoss, DynamicRouting, squash
from regard.recipes.planted.task import Batch, permutations

_TEST = 360


@cache
def _images() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing_extra("scikit-learn", "train", "digits")) from error
    found = load_digits()
    order = torch.randperm(len(found.target), generator=Generator().manual_seed(0))
    return torch.tensor(found.images / 16.0, dtype=torch.float32)[order], torch.tensor(found.target).long()[order]


@dataclass(frozen=True)
class Digits:
    """Say which digit an image of 8 x 8 grey values shows (Alpaydin & Kaynak 1998, as scikit-learn holds them).

    Of 1797 images 360, drawn once and for all, are for testing. Nothing is downloaded.
    """

    test: bool = False

    @property
    def classes(self) -> int:
        """The digits."""
        return 10

    def __len__(self) -> int:
        return _TEST if self.test else len(_images()[1]) - _TEST

    def draw(self, count: int, generator: Generator) -> Batch:
        """Input `image` (count, 8, 8), from 0 to 1. Each is there once, as long as there are enough of them."""
        start = len(_images()[1]) - _TEST if self.test else 0
        rounds = -(-count // len(self))
        index = start + permutations(rounds, len(self), generator).flatten()[:count]
        images, digits = _images()
        return Batch({"image": images[index]}, digits[index])


class CapsuleNetwork(nn.Module):
    r"""Convolution, primary capsules, routing to a capsule for each digit (Sabour et al. 2017, https://arxiv.org/abs/1710.09829).

    $$u = \mathrm{squash}(\mathrm{conv}(\mathrm{relu}(\mathrm{conv}(x)))), \qquad v = \mathrm{routing}(u), \qquad p_j = \lVert v_j \rVert$$

    Args:
        channels: of the first convolution.
        kinds: of primary capsules, each at 4 x 4 places.
        dim: widths of primary and digit capsules.
        iterations: of the routing.

    Example:
        >>> CapsuleNetwork()(torch.rand(2, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, channels: int = 32, kinds: int = 4, dim: tuple[int, int] = (8, 16), iterations: int = 3) -> None:
        super().__init__()
        self.kinds = kinds
        self.conv = nn.Conv2d(1, channels, 3)
        self.primary = nn.Conv2d(channels, kinds * dim[0], 3)
        self.digits = DynamicRouting(dim, 10, kinds * 16, iterations=iterations)
        self.decode = CapsuleDecoder(10, dim[1], 64, hidden=(64, 128))

    def forward(self, image: Float[Tensor, "b 8 8"]) -> Float[Tensor, "b 10"]:
        """The lengths of the digit capsules."""
        return self.digits.capsules(self.parts(image)).probability

    def parts(self, image: Float[Tensor, "b 8 8"]) -> Float[Tensor, "b i d"]:
        """Primary capsules, kind by kind, place by place."""
        seen = self.primary(self.conv(image.unsqueeze(1)).relu())
        return squash(seen.unflatten(1, (self.kinds, -1)).movedim(2, -1).flatten(1, 3))

    @staticmethod
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        """Margin loss, and reconstruction of the image from the capsule of its digit."""
        assert isinstance(model, CapsuleNetwork)
        found = model.digits.capsules(model.parts(batch.inputs["image"]))
        drawn = model.decode.loss(found.reconstruction, batch.target, batch.inputs["image"].flatten(1))
        total: Tensor = CapsuleLoss("margin", weight=0.0)(found, batch.target) + drawn
        return total
