"""Losses of capsules: of their probabilities, and of their reconstructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard._errors import refusal
from regard.ops.fill import where
from regard.ops.forms import wide
from regard.query.capsules import Capsules
from regard.query.parts import in_range, one_of

# The class of each example (...), or booleans T (..., C) where several may be true.
Target: TypeAlias = Int[Tensor, "*b"] | Bool[Tensor, "*b c"]


def hinge(x: Float[Tensor, "*b c"], target: Target) -> Float[Tensor, "*b"]:
    r"""One margin for the sum: $\max(0,\, 1 + \sum_c y_c x_c)$, $y_c$ being $-1$ for a true class and $1$ for the others.

    Of Wang et al. (2018, https://doi.org/10.1145/3178876.3186015), for probabilities and for reconstructions.
    """
    return (1 + torch.where(classes(target, x), -x, x).sum(-1)).relu()


def multi_margin(x: Float[Tensor, "*b c"], target: Target) -> Float[Tensor, "*b"]:
    r"""A margin for every pair of a true class $y$ and a wrong one: $\frac{1}{C} \sum_y \sum_{c \ne y} \max(0, 1 - x_y + x_c)$.

    What the implementation of Wang et al. (2018) minimises; `torch.nn.MultiMarginLoss` for one true class. Without wrong classes zero.
    """
    true = classes(target, x)
    if target.dtype == torch.bool:
        pairs = true.unsqueeze(-1) & ~true.unsqueeze(-2)
        apart = (1 - x.unsqueeze(-1) + x.unsqueeze(-2)).relu()
        return where(pairs, apart, 0.0).sum((-2, -1)) / x.shape[-1]
    right = where(true, x, 0.0).sum(-1, keepdim=True)
    return where(~true, (1 - right + x).relu(), 0.0).sum(-1) / x.shape[-1]


def binary_cross_entropy(p: Float[Tensor, "*b c"], target: Target) -> Float[Tensor, "*b"]:
    r"""Of every class by itself: $-\sum_c \big[T_c \log p_c + (1 - T_c) \log(1 - p_c)\big]$."""
    least = torch.finfo(p.dtype).eps
    return -torch.where(classes(target, p), p, 1 - p).clamp(min=least).log().sum(-1)


def margin(p: Float[Tensor, "*b c"], target: Target) -> Float[Tensor, "*b"]:
    r"""$\sum_c T_c \max(0, 0.9 - p_c)^2 + \frac{1}{2} (1 - T_c) \max(0, p_c - 0.1)^2$ (Sabour et al. 2017, https://arxiv.org/abs/1710.09829)."""
    return torch.where(classes(target, p), (0.9 - p).relu().square(), 0.5 * (p - 0.1).relu().square()).sum(-1)


def cross_entropy_of_sigmoids(p: Float[Tensor, "*b c"], target: Target) -> Float[Tensor, "*b"]:
    r"""$-\sum_c T_c \log p_c$ over independent sigmoids. Degenerate, and here for the record alone.

    Wrong classes have no gradient: $p_c = 1$ for every class is a minimum. It is found in summaries, in no source.
    """
    least = torch.finfo(p.dtype).eps
    return -where(classes(target, p), p.clamp(min=least).log(), 0.0).sum(-1)


PROBABILITY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "multi-margin": multi_margin,
    "hinge": hinge,
    "bce": binary_cross_entropy,
    "margin": margin,
    "cross-entropy": cross_entropy_of_sigmoids,
}


def squared_to_all(found: Capsules, target: Target) -> Float[Tensor, "*b"]:
    r"""$\sum_c \lVert r_c - \bar f \rVert^2$. Degenerate, and here for the record alone.

    It pulls the capsule of every class to the same vector, whichever class is true.
    """
    return (wide(found.reconstruction) - wide(found.mean).unsqueeze(-2)).square().sum((-2, -1))


def similarities(found: Capsules) -> Float[Tensor, "*b c"]:
    r"""How well each reconstruction agrees with the mean, $\langle \bar f, r_c \rangle$."""
    return (wide(found.reconstruction) @ wide(found.mean).unsqueeze(-1)).squeeze(-1)


RECONSTRUCTION: dict[str, Callable[[Capsules, Tensor], Tensor]] = {
    "multi-margin": lambda found, target: multi_margin(similarities(found), target),
    "hinge": lambda found, target: hinge(similarities(found), target),
    "squared": squared_to_all,
}


class CapsuleLoss(nn.Module):
    r"""What capsules are trained with: $\mathcal{L} = \mathcal{L}_p(p, T) + \lambda\, \mathcal{L}_r(\langle \bar f, r \rangle, T)$.

    | name | of probabilities | of reconstructions |
    |---|---|---|
    | `"multi-margin"` | the implementation of the paper (default) | likewise |
    | `"hinge"` | the paper, Wang et al. 2018 | likewise |
    | `"bce"` | each class by itself, also for several true ones | |
    | `"margin"` | Sabour et al. 2017 | |
    | `"cross-entropy"` | degenerate: wrong classes have no gradient | |
    | `"squared"` | | degenerate: every capsule is pulled to the mean |

    A reconstruction of the true class is attracted to the mean, those of the others are repelled, by inner products.

    Args:
        probability: the loss of probabilities.
        reconstruction: the loss of reconstructions.
        weight: $\lambda$; with 0 there is no reconstruction, and widths may differ.

    Example:
        >>> from regard import CapsuleAttention
        >>> found = CapsuleAttention(5, classes=3)(torch.randn(2, 7, 5))
        >>> CapsuleLoss()(found, torch.tensor([0, 2])).shape
        torch.Size([])
    """

    def __init__(
        self, probability: str = "multi-margin", reconstruction: str = "multi-margin", weight: float = 1.0
    ) -> None:
        super().__init__()
        self.probability = one_of("probability", probability, tuple(PROBABILITY))
        self.reconstruction = one_of("reconstruction", reconstruction, tuple(RECONSTRUCTION))
        if not weight >= 0:
            raise ValueError(refusal("weight", weight, "a number >= 0"))
        self.weight = float(weight)

    def forward(self, found: Capsules, target: Target) -> Float[Tensor, ""]:
        """The mean over examples.

        Args:
            found: what the capsules gave.
            target: the class of each example, (...); or booleans (..., C), where several may be true.
        """
        if not isinstance(found, Capsules):
            raise TypeError(refusal("found", type(found).__name__, "what a layer of capsules gives, Capsules"))
        loss = PROBABILITY[self.probability](wide(found.probability), target)
        if self.weight:
            if found.reconstruction.shape[-1] != found.mean.shape[-1]:
                got = f"reconstructions of width {found.reconstruction.shape[-1]}"
                fix = "Fix: weight=0, or capsules that keep the width."
                raise ValueError(refusal("found", got, f"that of the features, {found.mean.shape[-1]}", fix))
            loss = loss + self.weight * RECONSTRUCTION[self.reconstruction](found, target)
        return loss.mean()

    def extra_repr(self) -> str:
        return f"{self.probability!r}, reconstruction={self.reconstruction!r}, weight={self.weight}"


def classes(target: Target, of: Float[Tensor, "*b c"]) -> Bool[Tensor, "*b c"]:
    """Booleans like `of` (..., C): those given, or true at the class of each example."""
    if not isinstance(target, Tensor):
        raise TypeError(refusal("target", type(target).__name__, "a tensor: the class of each example, or booleans"))
    if target.dtype == torch.bool:
        if target.shape != of.shape:
            raise ValueError(
                refusal("target", f"shape {tuple(target.shape)}", f"that of the classes, {tuple(of.shape)}")
            )
        return target
    if target.dtype.is_floating_point or target.shape != of.shape[:-1]:
        got = f"a tensor of {target.dtype}, shape {tuple(target.shape)}"
        raise ValueError(refusal("target", got, f"whole numbers {tuple(of.shape[:-1])}, or booleans {tuple(of.shape)}"))
    in_range("target", target, 0, of.shape[-1], "classes of {high}")
    return torch.arange(of.shape[-1], device=of.device) == target.unsqueeze(-1)
