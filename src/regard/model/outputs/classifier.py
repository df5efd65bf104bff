"""One class for each example."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.feature.parts import masked_mean
from regard.general.scores.base import width
from regard.model.batch import Batch
from regard.model.naming import Available
from regard.model.outputs.base import Output, target_of
from regard.ops.fill import kept_rows


class Classifier(Output):
    r"""Logits of classes, $W c + b$; of the mean over the real tokens where there is a context for each.

    Args:
        dim: width of the context.
        classes: number of classes.
        dropout: on the context, while training.

    Example:
        >>> import torch
        >>> from regard.model.naming import Available
        >>> Classifier(8, 3)(torch.randn(2, 8), Available({}, {}, {})).shape
        torch.Size([2, 3])
    """

    def __init__(self, dim: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(width("dim", dim), width("classes", classes))

    def forward(self, context: Float[Tensor, "b *n d"], found: Available) -> Float[Tensor, "b c"]:
        logits: Tensor = self.linear(self.dropout(pooled(context, found)))
        return logits

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(prediction, target_of(batch))

    def reward(self, prediction: Tensor, batch: Batch) -> Tensor:
        return -F.cross_entropy(prediction, target_of(batch), reduction="none")

    def decide(self, prediction: Tensor) -> Tensor:
        return prediction.argmax(-1)

    def probabilities(self, prediction: Tensor) -> Tensor:
        return prediction.float().softmax(-1)


def pooled(context: Float[Tensor, "b *n d"], found: Available) -> Float[Tensor, "b d"]:
    """One context for each example: the mean of its tokens' where each has one."""
    if context.dim() != 3:
        return context
    mask = real_of(context, found)
    return masked_mean(kept_rows(context, mask), mask)


def real_of(context: Float[Tensor, "b n d"], found: Available) -> Tensor | None:
    """Which contexts belong to real tokens (B, N), where they are those of an input."""
    names = found.masks if found.reads is None else found.reads
    masks = (found.masks.get(name) for name in names)
    return next((mask for mask in masks if mask is not None and mask.shape == context.shape[:2]), None)
