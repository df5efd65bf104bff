"""What a model that restores pictures is made of beside its attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.general.scores.base import width
from regard.model import Batch, Output
from regard.model.features.pictures import pixels, regions_after
from regard.model.naming import Available
from regard.model.outputs.base import target_of


class Textures(nn.Module):
    r"""Places of 2 x 2 pixels, by three convolutions with a ReLU between them, and learned positions $P$.

    Args:
        size: rows and columns of a picture, even numbers.
        dim: width of a place.

    Example:
        >>> see = Textures((8, 12), 16)
        >>> see(torch.rand(2, 1, 8, 12)).shape, see.grid
        (torch.Size([2, 24, 16]), (4, 6))
    """

    def __init__(self, size: tuple[int, int], dim: int) -> None:
        super().__init__()
        self.size, self.grid, self.out_dim = size, (size[0] // 2, size[1] // 2), width("dim", dim)
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, dim, 3, 2, 1), nn.ReLU(), nn.Conv2d(dim, dim, 3, 1, 1), nn.ReLU()),
            nn.Conv2d(dim, dim, 3, 1, 1),
        )
        self.P = nn.Parameter(0.02 * torch.randn(self.grid[0] * self.grid[1], dim))

    def forward(self, image: Float[Tensor, "b 1 h w"], mask: Tensor | None = None) -> Float[Tensor, "b n d"]:
        image, _ = pixels(image, mask, 1, self.size)
        seen: Tensor = self.layers(image)
        return seen.flatten(2).mT + self.P

    def mask_after(self, mask: Tensor | None) -> Tensor | None:
        """Every place is real."""
        return regions_after(mask, self.grid, lambda real: real[:, ::2, ::2])


class Restored(Output):
    r"""A picture again: what is learnt is the noise (Zhang et al. 2017, https://arxiv.org/abs/1608.03981).

    $$\hat x = x + \mathrm{pixels}\big(W_2\, \mathrm{relu}(W_1 [c; f; x])\big)$$

    $f$ are the places themselves, $c$ what each read of the others, $x$ its pixels. The loss is the mean squared difference to the
    picture without noise.

    Args:
        dim: width of what was read.
        place_dim: width of a place.
        grid: rows and columns of places, of 2 x 2 pixels each.

    Example:
        >>> found = Available({"image": torch.randn(1, 6, 5)}, {}, {"noisy": torch.rand(1, 1, 4, 6)})
        >>> Restored(3, 5, (2, 3))(torch.randn(1, 6, 3), found).shape
        torch.Size([1, 1, 4, 6])
    """

    def __init__(self, dim: int, place_dim: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid
        self.hidden = nn.Linear(dim + place_dim + 4, place_dim)
        self.linear = nn.Linear(place_dim, 4)

    def forward(self, context: Float[Tensor, "b n d"], found: Available) -> Float[Tensor, "b 1 h w"]:
        noisy: Tensor = found.values["noisy"]
        own = F.pixel_unshuffle(noisy, 2).flatten(2).mT
        places = self.linear(self.hidden(torch.cat([context, found.inputs["image"], own], -1)).relu())
        change = F.pixel_shuffle(places.mT.unflatten(-1, self.grid), 2)
        return noisy + change

    def loss(self, prediction: Float[Tensor, "b 1 h w"], batch: Batch) -> Tensor:
        return F.mse_loss(prediction, target_of(batch))

    def decide(self, prediction: Float[Tensor, "b 1 h w"]) -> Float[Tensor, "b 1 h w"]:
        return prediction.clamp(0.0, 1.0)
