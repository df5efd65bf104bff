"""The decoder of a capsule network: draw the input again from the capsule of its class."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from jaxtyping import Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.general.scores.base import width
from regard.ops.fill import where
from regard.ops.forms import wide
from regard.query.capsule_losses import Target, classes
from regard.query.routing import lengths


class CapsuleDecoder(nn.Module):
    r"""Reconstruct an input from one of its capsules (Sabour et al. 2017, https://arxiv.org/abs/1710.09829).

    $$\hat x = \sigma\big(\mathrm{MLP}([T_1 v_1; \dots; T_J v_J])\big), \qquad \mathcal{L} = 0.0005 \sum_d (\hat x_d - x_d)^2$$

    All capsules but that of the target are set to zero, or, where there is no target, all but the longest. The squares are summed,
    not averaged: for the 784 pixels of the paper the weight is 0.392 of their mean.

    Args:
        capsules: $J$.
        dim: their width.
        out_dim: width of what is reconstructed, with values from 0 to 1.
        hidden: widths of the layers in between.

    Example:
        >>> import torch
        >>> decode = CapsuleDecoder(capsules=10, dim=16, out_dim=64, hidden=(32,))
        >>> decode(torch.randn(2, 10, 16)).shape
        torch.Size([2, 64])
    """

    def __init__(self, capsules: int, dim: int, out_dim: int, hidden: Sequence[int] = (512, 1024)) -> None:
        super().__init__()
        if isinstance(hidden, int):
            raise TypeError(
                refusal("hidden", hidden, "the width of each layer in between", f"Fix: hidden=({hidden},).")
            )
        self.shape = (width("capsules", capsules), width("dim", dim))
        first = capsules * dim
        sizes = [first, *(width("hidden", d) for d in hidden), width("out_dim", out_dim)]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        layers[-1] = nn.Sigmoid()
        self.layers = nn.Sequential(*layers)

    def forward(self, v: Float[Tensor, "*b j d"], target: Target | None = None) -> Float[Tensor, "*b out"]:
        """Inputs (..., out_dim) from capsules (..., J, d) and the class that is to be drawn; the longest when not given."""
        if v.shape[-2:] != self.shape:
            raise ValueError(refusal("v", f"shape {tuple(v.shape)}", "capsules (..., {}, {})".format(*self.shape)))
        length = lengths(v)
        kept = classes(length.argmax(-1) if target is None else target, length)
        drawn: Tensor = self.layers(where(kept.unsqueeze(-1), v, 0.0).flatten(-2))
        return drawn

    def loss(
        self,
        v: Float[Tensor, "*b j d"],
        target: Target,
        x: Float[Tensor, "*b out"],
        weight: float = 0.0005,
    ) -> Float[Tensor, ""]:
        """The weighted sum of squared differences to the input, in the mean over examples."""
        return weight * (wide(self(v, target)) - wide(x)).square().sum(-1).mean()
