"""What feature models of pictures are given: pixels, and a mask of those that are real."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard._errors import refusal
from regard.query.parts import widths


def sides(name: str, given: int | tuple[int, int]) -> tuple[int, int]:
    """Rows and columns, from one number for a square or from both."""
    rows, columns = widths(name, given, 2)
    return rows, columns


def pixels(x: Tensor, mask: Tensor | None, channels: int, size: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    """A picture (B, C, H, W) with zeros where a pixel is not real, and which are (B, H, W).

    A mask (B, C), which is what padding to one length makes of pictures of one size, says nothing of pixels.
    """
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        got = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(refusal("x", got, "a floating-point tensor (B, C, H, W)"))
    if x.dim() != 4 or tuple(x.shape[1:]) != (channels, *size):
        raise ValueError(refusal("x", f"shape {tuple(x.shape)}", f"pictures (B, {channels}, {size[0]}, {size[1]})"))
    if mask is None or mask.dim() == 2:
        return x, None
    if mask.dtype != torch.bool or mask.shape != (len(x), *size):
        got = f"{mask.dtype}, shape {tuple(mask.shape)}"
        raise ValueError(refusal("mask", got, f"booleans of the pixels ({len(x)}, {size[0]}, {size[1]})"))
    return x.where(mask.unsqueeze(1), 0.0), mask


def regions_after(mask: Tensor | None, grid: tuple[int, int], reduce: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Which regions (B, N) are real, of real pixels (B, H, W); all of them where the mask is not of pixels."""
    if mask is None:
        return None
    if mask.dim() == 2:
        return torch.ones(len(mask), grid[0] * grid[1], dtype=torch.bool, device=mask.device)
    return reduce(mask).flatten(1)
