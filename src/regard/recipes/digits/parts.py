"""Feature models of small pictures: places with what is drawn there, and capsules of them."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.general.scores.base import width
from regard.model.features.pictures import pixels
from regard.query import squash


class Shifts(nn.Module):
    """Pictures, moved a little while training: each by a whole number of pixels down and to the right, drawn from torch's generator.

    Args:
        most: pixels, either way.

    Example:
        >>> Shifts(2)(torch.rand(3, 1, 8, 8)).shape
        torch.Size([3, 1, 8, 8])
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        if isinstance(most, bool) or not isinstance(most, int) or most < 0:
            raise ValueError(refusal("most", repr(most), "a whole number >= 0"))
        self.most = most

    def forward(self, image: Float[Tensor, "b c h w"], mask: Tensor | None = None) -> Float[Tensor, "b c h w"]:
        if not self.training or self.most == 0:
            return image
        b, _, h, w = image.shape
        by = torch.randint(-self.most, self.most + 1, (2, b, 1), device=image.device)
        rows, columns = torch.arange(h, device=image.device) - by[0], torch.arange(w, device=image.device) - by[1]
        inside = ((rows >= 0) & (rows < h))[:, :, None] & ((columns >= 0) & (columns < w))[:, None]
        each = torch.arange(b, device=image.device)[:, None, None]
        moved = image.movedim(1, -1)[each, rows.clamp(0, h - 1)[:, :, None], columns.clamp(0, w - 1)[:, None]]
        return moved.movedim(-1, 1).where(inside[:, None], 0.0)


class Strokes(nn.Module):
    r"""Places of a picture by two convolutions, $f = \mathrm{conv}(\mathrm{relu}(\mathrm{conv}(x)))$, row by row.

    A picture of 8 x 8 gives 4 x 4 places, one of 28 x 28 as many: there filters are larger, and go two pixels at a time.

    Args:
        size: rows and columns of a picture.
        hidden: channels in between.
        dim: width of a place.

    Example:
        >>> see = Strokes(28, 8, 16)
        >>> see(torch.rand(2, 1, 28, 28)).shape, see.grid
        (torch.Size([2, 16, 16]), 4)
    """

    def __init__(self, size: int, hidden: int, dim: int) -> None:
        super().__init__()
        self.size, self.out_dim = width("size", size), width("dim", dim)
        kernel, stride = (3, 1) if size < 16 else (5, 2)
        self.first = nn.Conv2d(1, width("hidden", hidden), kernel, stride)
        self.second = nn.Conv2d(hidden, dim, kernel, stride)
        self.grid = size
        for _ in range(2):
            self.grid = (self.grid - kernel) // stride + 1
        if self.grid < 1:
            raise ValueError(refusal("size", size, "a picture of at least 5 x 5"))

    def forward(self, image: Float[Tensor, "b 1 h w"], mask: Tensor | None = None) -> Float[Tensor, "b n d"]:
        image, _ = pixels(image, mask, 1, (self.size, self.size))
        seen: Tensor = self.second(self.first(image).relu())
        return seen.flatten(2).mT

    def mask_after(self, mask: Tensor | None) -> Bool[Tensor, "b n"] | None:
        """Every place is real: pictures are of one size."""
        return None if mask is None else torch.ones(len(mask), self.grid**2, dtype=torch.bool, device=mask.device)


class Places(nn.Module):
    r"""What is at a place, and where it is: $\mathrm{relu}(f_n) + P_n$.

    Args:
        count: of places.
        dim: their width.

    Example:
        >>> Places(16, 8)(torch.randn(2, 16, 8)).shape
        torch.Size([2, 16, 8])
    """

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.P = nn.Parameter(0.1 * torch.randn(width("count", count), width("dim", dim)))
        self.out_dim = dim

    def forward(self, x: Float[Tensor, "b n d"], mask: Tensor | None = None) -> Float[Tensor, "b n d"]:
        return x.relu() + self.P


class PrimaryCapsules(nn.Module):
    r"""Each place as several capsules, $u = \mathrm{squash}(f)$ (Sabour et al. 2017, https://arxiv.org/abs/1710.09829).

    Args:
        dim: width of a capsule, a divisor of that of a place.

    Example:
        >>> PrimaryCapsules(8)(torch.randn(2, 16, 32)).shape
        torch.Size([2, 64, 8])
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.out_dim = width("dim", dim)

    def forward(self, x: Float[Tensor, "b n d"], mask: Tensor | None = None) -> Float[Tensor, "b i dc"]:
        return squash(x.unflatten(-1, (-1, self.out_dim)).flatten(1, 2))

    def mask_after(self, mask: Tensor | None) -> None:
        """Every capsule is real, and nothing need say so."""
        return None
