"""A picture as a sequence of patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.general.scores.base import width
from regard.model.features.pictures import pixels, regions_after, sides
from regard.ops.fill import kept_rows


class Patches(nn.Module):
    r"""Patches of a picture, each mapped by itself, with learned positions (Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929).

    $$f_n = W\, \mathrm{vec}(\text{patch}_n) + b + P_n$$

    Patches go row by row. A mask (B, H, W) is of real pixels: others are zero, and a patch without a real one is not real.

    Args:
        channels: of the picture.
        dim: width of a feature.
        size: rows and columns of the picture, divisible by those of a patch; one number for a square.
        patch: rows and columns of a patch.
        dropout: of the features, while training.

    Example:
        >>> cut = Patches(3, 16, size=(8, 12), patch=4)
        >>> cut(torch.randn(2, 3, 8, 12)).shape, cut.grid
        (torch.Size([2, 6, 16]), (2, 3))
    """

    def __init__(
        self,
        channels: int,
        dim: int,
        size: int | tuple[int, int],
        patch: int | tuple[int, int],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.channels, self.out_dim = width("channels", channels), width("dim", dim)
        self.size, self.patch = sides("size", size), sides("patch", patch)
        if any(side % part for side, part in zip(self.size, self.patch, strict=True)):
            raise ValueError(refusal("size", self.size, f"a multiple of the patch, {self.patch}"))
        self.grid = (self.size[0] // self.patch[0], self.size[1] // self.patch[1])
        self.linear = nn.Linear(channels * self.patch[0] * self.patch[1], dim)
        self.P = nn.Parameter(0.02 * torch.randn(self.grid[0] * self.grid[1], dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "b c h w"], mask: Bool[Tensor, "..."] | None = None) -> Float[Tensor, "b n df"]:
        """Features (B, N, dim)."""
        x, _ = pixels(x, mask, self.channels, self.size)
        patches = F.unfold(x, self.patch, stride=self.patch).mT
        features: Tensor = self.dropout(self.linear(patches) + self.P)
        return kept_rows(features, self.mask_after(mask))

    def mask_after(self, mask: Bool[Tensor, "..."] | None) -> Bool[Tensor, "b n"] | None:
        """A patch is real where any of its pixels is."""
        (rows, columns), (h, w) = self.grid, self.patch
        return regions_after(
            mask, self.grid, lambda real: real.unflatten(2, (columns, w)).unflatten(1, (rows, h)).any(4).any(2)
        )
