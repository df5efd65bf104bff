"""Convolutions: each feature from a neighbourhood, of a sequence or of a picture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.feature.parts import masked_input
from regard.general.scores.base import width
from regard.model.features.pictures import pixels, regions_after, sides
from regard.ops.activations import activation as resolve
from regard.ops.fill import kept_rows


class Convolution1d(nn.Module):
    r"""Filters of one or several lengths over a sequence, side by side (Kim 2014, https://arxiv.org/abs/1408.5882).

    $$y_i = \Big[\mathrm{act}\Big(b^{(k)} + \sum_{r=0}^{k-1} W^{(k)}_r\, x_{s i + r - \lfloor (k-1)/2 \rfloor}\Big)\Big]_{k}$$

    with zeros before the first and after the last token and wherever there is padding, so that a sequence of N tokens gives
    $\lceil N / s \rceil$ features, and each sequence what it would give alone.

    Args:
        dim: width of the tokens.
        filters: number of filters of each length; `out_dim` is this times the number of lengths.
        kernels: their lengths.
        stride: $s$; above 1 the result is shorter, and `mask_after` says what of it is real.
        activation: `"relu"` or another name, or a function.
        dropout: of the result, while training.

    Example:
        >>> convolve = Convolution1d(6, 4, kernels=(2, 3), stride=2)
        >>> convolve(torch.randn(2, 7, 6)).shape, convolve.mask_after(torch.ones(2, 7).bool()).shape
        (torch.Size([2, 4, 8]), torch.Size([2, 4]))
    """

    def __init__(
        self,
        dim: int,
        filters: int,
        kernels: int | Sequence[int] = 3,
        stride: int = 1,
        activation: str = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.kernels = (kernels,) if isinstance(kernels, int) else tuple(kernels)
        if not self.kernels:
            raise ValueError(refusal("kernels", "none", "at least one length"))
        self.dim, self.stride = width("dim", dim), width("stride", stride)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(dim, width("filters", filters), width("kernels", k), stride) for k in self.kernels
        )
        self.activation, self.dropout = resolve(activation), nn.Dropout(dropout)
        self.out_dim = filters * len(self.kernels)

    def forward(self, x: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None = None) -> Float[Tensor, "b m df"]:
        """Features (B, ceil(N / stride), out_dim); zero where the mask after is False."""
        x, mask = masked_input(x, mask, "x", self.dim)
        if x.dim() != 3:
            raise ValueError(refusal("x", f"shape {tuple(x.shape)}", "(B, N, d)"))
        if x.shape[1] == 0:
            return x.new_zeros(len(x), 0, self.out_dim)
        found = []
        for k, convolve in zip(self.kernels, self.convolutions, strict=True):
            found.append(convolve(F.pad(x.mT, ((k - 1) // 2, k // 2))))
        features: Tensor = self.dropout(self.activation(torch.cat(found, 1).mT))
        return kept_rows(features, self.mask_after(mask))

    def mask_after(self, mask: Bool[Tensor, "b n"] | None) -> Bool[Tensor, "b m"] | None:
        """A feature is real where the token is that it stands at."""
        return None if mask is None else mask[..., :: self.stride]


class Convolution2d(nn.Module):
    r"""A picture as a grid of regions, by a stack of convolutions.

    $$x \leftarrow \mathrm{ReLU}\big(\mathrm{LN}(W * x + b)\big), \qquad L \text{ times}, \qquad f_{h W' + w} = x_{:, h, w}$$

    with zeros around the picture, and the normalisation over the channels of each point. Pictures of different sizes, padded below and
    on the right, come with a mask (B, H, W) of real pixels; each gives what it would give alone.

    Args:
        channels: of the picture.
        widths: channels after each layer; the last one is `out_dim`.
        size: rows and columns of the picture; one number for a square.
        kernel: size of the filters, an odd number.
        stride: of every layer.

    Example:
        >>> convolve = Convolution2d(3, (8, 16), size=(9, 12))
        >>> convolve(torch.randn(2, 3, 9, 12)).shape, convolve.grid
        (torch.Size([2, 9, 16]), (3, 3))
    """

    def __init__(
        self,
        channels: int,
        widths: Sequence[int],
        size: int | tuple[int, int],
        kernel: int = 3,
        stride: int = 2,
    ) -> None:
        super().__init__()
        if isinstance(widths, int) or not widths:
            raise ValueError(refusal("widths", repr(widths), "the channels after each layer, of at least one"))
        if width("kernel", kernel) % 2 == 0:
            raise ValueError(refusal("kernel", kernel, "an odd number, so that filters have a middle"))
        self.size, self.stride = sides("size", size), width("stride", stride)
        self.channels = width("channels", channels)
        every = [channels, *(width("widths", d) for d in widths)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, kernel, stride, kernel // 2) for before, after in pairwise(every)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(d) for d in every[1:])
        self.reduction = stride ** len(self.norms)
        rows, columns = (-(-side // self.reduction) for side in self.size)
        self.grid, self.out_dim = (rows, columns), every[-1]

    def forward(self, x: Float[Tensor, "b c h w"], mask: Bool[Tensor, "..."] | None = None) -> Float[Tensor, "b n df"]:
        """Regions (B, H' W', out_dim), row by row."""
        x, real = pixels(x, mask, self.channels, self.size)
        for convolve, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(convolve(x).movedim(1, -1)).relu().movedim(-1, 1)
            if real is not None:
                # What filters have written into the padding must not come back.
                real = real[:, :: self.stride, :: self.stride]
                x = x.where(real.unsqueeze(1), 0.0)
        return x.flatten(2).mT

    def mask_after(self, mask: Bool[Tensor, "..."] | None) -> Bool[Tensor, "b n"] | None:
        """A region is real where the pixel is that it stands at."""
        return regions_after(mask, self.grid, lambda real: real[:, :: self.reduction, :: self.reduction])
