"""A U-Net whose skip connections pass gates, or whose bottom looks at itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.general.scores.base import width


class UNet(nn.Module):
    r"""Down to coarse features and up again (Ronneberger et al. 2015, https://arxiv.org/abs/1505.04597), with attention on the way.

    $$h_0 = \mathrm{conv}(x), \qquad h_l = \mathrm{conv}(\mathrm{pool}(h_{l-1})), \qquad
      u_l = \mathrm{conv}\big([\mathrm{gate}_l(h_l, \mathrm{up}(u_{l+1}));\ \mathrm{up}(u_{l+1})]\big)$$

    from $u_L = h_L$, or $h_L + \gamma\, \mathrm{bottom}(h_L)$ with $\gamma = 0$ at the start. Gates (Oktay et al. 2018,
    https://arxiv.org/abs/1804.03999) let through what the coarse features ask for; without them skip connections pass as they are. The
    first convolution halves the picture, so that places are 2 x 2 pixels.

    Args:
        channels: of the picture.
        widths: channels of each level, from the finest on.
        gate: makes the gate of a level from the widths of fine and coarse features; None for none.
        bottom: an attention of the places of the coarsest level; None for none.

    Example:
        >>> import regard as rg
        >>> net = UNet(3, (8, 16), gate=rg.AttentionGate)
        >>> net(torch.rand(2, 3, 16, 24)).shape
        torch.Size([2, 96, 8])
    """

    def __init__(
        self,
        channels: int,
        widths: Sequence[int],
        gate: Callable[[tuple[int, int]], nn.Module] | None = None,
        bottom: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if isinstance(widths, int) or len(widths) < 2:
            raise ValueError(refusal("widths", repr(widths), "the channels of each level, of at least two"))
        every = [width("widths", d) for d in widths]
        self.down = nn.ModuleList(
            [_block(width("channels", channels), every[0], stride=2), *(_block(a, b) for a, b in pairwise(every))]
        )
        self.up = nn.ModuleList(_block(fine + coarse, fine) for fine, coarse in pairwise(every))
        self.gates = nn.ModuleList([] if gate is None else [gate((fine, coarse)) for fine, coarse in pairwise(every)])
        self.bottom, self.out_dim = bottom, every[0]
        # From zero: the network begins without attention, and takes to it as it learns.
        self.gamma = None if bottom is None else nn.Parameter(torch.zeros(1))
        self.multiple = 2 ** len(every)

    def forward(self, image: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n d"]:
        """Features of the places (B, H/2 W/2, d), row by row."""
        if any(side % self.multiple for side in image.shape[-2:]):
            raise ValueError(
                refusal("image", f"shape {tuple(image.shape)}", f"sides that are multiples of {self.multiple}")
            )
        levels = [self.down[0](image)]
        for down in self.down[1:]:
            levels.append(down(F.max_pool2d(levels[-1], 2)))
        u = levels.pop()
        if self.bottom is not None and self.gamma is not None:
            u = u + self.gamma * _as_grid(self.bottom(_as_places(u)), u)
        for level in reversed(range(len(levels))):
            fine, coarse = levels[level], F.interpolate(u, scale_factor=2.0, mode="nearest")
            if len(self.gates):
                fine = _as_grid(self.gates[level](_as_places(fine), _as_places(coarse)), fine)
            u = self.up[level](torch.cat([fine, coarse], 1))
        return _as_places(u)


def _block(before: int, after: int, stride: int = 1) -> nn.Sequential:
    # Statistics of groups, not of batches: small batches, and the same in training and evaluation.
    groups = 4 if after % 4 == 0 else 1
    return nn.Sequential(
        *(nn.Conv2d(before, after, 3, stride, 1), nn.GroupNorm(groups, after), nn.ReLU()),
        *(nn.Conv2d(after, after, 3, 1, 1), nn.GroupNorm(groups, after), nn.ReLU()),
    )


def _as_places(x: Tensor) -> Tensor:
    return x.flatten(2).mT


def _as_grid(x: Tensor, like: Tensor) -> Tensor:
    return x.mT.reshape(like.shape)
