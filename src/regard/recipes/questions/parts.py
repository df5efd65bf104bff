"""What a model of questions is made of beside its attention: cells of a picture, two sides that are read together, answers."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.feature.parts import masked_mean
from regard.general.scores.base import width
from regard.model import Classifier, Patches
from regard.model.naming import Available


class Cells(nn.Module):
    r"""The cells of a scene, $f = W_2\, \mathrm{relu}(\mathrm{patch}(4 (x - \tfrac12))) + b_2$: grey is zero, and each knows where it is.

    Args:
        dim: width of a cell.
        size: pixels of a side of the picture.
        cell: pixels of a side of a cell.

    Example:
        >>> Cells(8, 24, 6)(torch.rand(2, 3, 24, 24)).shape
        torch.Size([2, 16, 8])
    """

    def __init__(self, dim: int, size: int, cell: int) -> None:
        super().__init__()
        self.patches, self.linear = Patches(3, 2 * dim, size, cell), nn.Linear(2 * dim, dim)
        self.out_dim = dim

    def forward(self, image: Float[Tensor, "b 3 h w"], mask: Tensor | None = None) -> Float[Tensor, "b n d"]:
        found: Tensor = self.linear(self.patches(4 * (image - 0.5), mask).relu())
        return found

    def mask_after(self, mask: Tensor | None) -> Tensor | None:
        """Every cell is real."""
        return self.patches.mask_after(mask)


class BothSides(nn.Module):
    """What each of two sides read of the other, in the mean over those that asked, side by side.

    Args:
        cross: an attention of two inputs that gives a context for each of their tokens, as `CrossModalAttention` does.

    Example:
        >>> import regard as rg
        >>> read = BothSides(rg.CrossModalAttention((3, 5), 4))
        >>> read(torch.randn(2, 7, 3), torch.randn(2, 11, 5)).shape
        torch.Size([2, 8])
    """

    def __init__(self, cross: nn.Module) -> None:
        super().__init__()
        self.cross = cross

    def forward(
        self,
        first: Float[Tensor, "b n da"],
        second: Float[Tensor, "b m db"],
        masks: tuple[Tensor | None, ...] = (None, None),
    ) -> Float[Tensor, "b d"]:
        """(B, d_b + d_a)."""
        found = self.cross(first, second, masks)
        return torch.cat([masked_mean(x, mask) for x, mask in zip(found, masks, strict=True)], -1)


class Answer(Classifier):
    r"""An answer from what was read, and from the question: $W\, \mathrm{relu}(U [c;\, \bar q] + b) + b'$.

    Args:
        dim: width of what was read.
        question_dim: width of a word of the question, whose mean is $\bar q$.
        hidden: width in between.
        classes: number of answers.

    Example:
        >>> found = Available({"question": torch.randn(2, 7, 3)}, {}, {})
        >>> Answer(5, 3, 8, classes=4)(torch.randn(2, 5), found).shape
        torch.Size([2, 4])
    """

    def __init__(self, dim: int, question_dim: int, hidden: int, classes: int) -> None:
        super().__init__(width("hidden", hidden), classes)
        self.hidden = nn.Linear(dim + question_dim, hidden)

    def forward(self, context: Any, found: Available) -> Float[Tensor, "b c"]:
        words = masked_mean(found.inputs["question"], found.masks.get("question"))
        logits: Tensor = self.linear(self.hidden(torch.cat([context, words], -1)).relu())
        return logits
