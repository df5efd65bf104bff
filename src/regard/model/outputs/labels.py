"""Any number of labels for each example."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard._errors import refusal
from regard.model.batch import Batch
from regard.model.outputs.base import real_terms, target_of
from regard.model.outputs.classifier import Classifier


class MultiLabel(Classifier):
    r"""Each label by itself: $p_c = \sigma(w_c \cdot c + b_c)$, true where it is at least the threshold.

    $$\mathcal{L} = -\,\mathrm{mean}_c \big[y_c \log p_c + (1 - y_c) \log(1 - p_c)\big]$$

    The target has a 1 for a label that is true, 0 for one that is not, -1 for one that is not known, which costs nothing. As in
    `Classifier`, contexts of several tokens are averaged.

    Args:
        dim: width of the context.
        labels: how many.
        threshold: the least probability of a label that is said to be true.
        dropout: on the context, while training.

    Example:
        >>> import torch
        >>> MultiLabel(8, 3).decide(torch.tensor([[2.0, -1.0, 0.1]]))
        tensor([[ True, False,  True]])
    """

    def __init__(self, dim: int, labels: int, threshold: float = 0.5, dropout: float = 0.0) -> None:
        super().__init__(dim, labels, dropout)
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0.0 < threshold < 1.0:
            raise ValueError(refusal("threshold", repr(threshold), "a probability between 0 and 1"))
        self.threshold = float(threshold)

    def loss(self, prediction: Float[Tensor, "b c"], batch: Batch) -> Tensor:
        target = target_of(batch)
        if target.shape != prediction.shape:
            got, expected = f"target of shape {tuple(target.shape)}", f"one number a label, {tuple(prediction.shape)}"
            raise ValueError(refusal("batch", got, expected))
        known = target >= 0
        each = F.binary_cross_entropy_with_logits(prediction, target.to(prediction.dtype), reduction="none")
        return each.where(known, 0.0).sum() / known.sum().clamp(min=1)

    def terms(self, batch: Batch) -> Tensor:
        return real_terms(batch)

    def decide(self, prediction: Float[Tensor, "b c"]) -> Tensor:
        return prediction.sigmoid() >= self.threshold

    def probabilities(self, prediction: Float[Tensor, "b c"]) -> Tensor:
        """Of each label by itself: they do not add up to one."""
        return prediction.float().sigmoid()
