"""One class for each example, the one whose capsule is surest."""

from __future__ import annotations

from torch import Tensor

from regard._errors import refusal
from regard.model.batch import Batch
from regard.model.naming import Available
from regard.model.outputs.base import Output, target_of
from regard.query.capsule_decoder import CapsuleDecoder
from regard.query.capsule_losses import CapsuleLoss
from regard.query.capsules import Capsules
from regard.query.routing import lengths


class CapsuleClassifier(Output):
    r"""The class of the surest capsule; trained by a loss of capsules (Sabour et al. 2017, https://arxiv.org/abs/1710.09829).

    $$\hat y = \arg\max_c p_c, \qquad p_c = \lVert v_c \rVert, \qquad
      \mathcal{L} = \mathcal{L}_\text{capsules}(p, y) + \mathcal{L}_\text{drawn}(\hat x, x)$$

    The attention gives capsules: `CapsuleAttention`, with probabilities of its own; or vectors (B, C, d) whose lengths are the
    probabilities, as `DynamicRouting` does. With a `decoder` the input is drawn again from the capsule of its class.

    Args:
        loss: a `CapsuleLoss`; the margin loss of the paper when not given.
        decoder: a `CapsuleDecoder`, from capsules to the input.
        drawn: name of the input, or of the variable, that it draws, with values from 0 to 1.

    Example:
        >>> import torch, regard as rg
        >>> from regard.model import Batch
        >>> model = rg.TaskModel({}, None, rg.CapsuleAttention(5, classes=3), CapsuleClassifier(rg.CapsuleLoss()))
        >>> batch = Batch({"features": torch.randn(2, 7, 5)}, target=torch.tensor([0, 2]))
        >>> found = model(batch)
        >>> model.output.decide(found).shape, model.loss(found, batch).shape
        (torch.Size([2]), torch.Size([]))
    """

    def __init__(
        self, loss: CapsuleLoss | None = None, decoder: CapsuleDecoder | None = None, drawn: str | None = None
    ) -> None:
        super().__init__()
        self.criterion = CapsuleLoss("margin", weight=0.0) if loss is None else loss
        if not isinstance(self.criterion, CapsuleLoss):
            raise TypeError(refusal("loss", type(loss).__name__, "a CapsuleLoss"))
        if (decoder is None) != (drawn is None):
            raise ValueError(refusal("drawn", repr(drawn), "the name of what the decoder draws, beside a decoder"))
        self.decoder, self.drawn = decoder, drawn

    def forward(self, context: Capsules | Tensor, found: Available) -> Capsules:
        if isinstance(context, Capsules):
            return context
        if context.dim() != 3:
            raise ValueError(refusal("context", f"shape {tuple(context.shape)}", "Capsules, or vectors (B, C, d)"))
        if self.criterion.weight:
            fix = "Fix: CapsuleLoss(…, weight=0)."
            raise ValueError(refusal("context", "vectors", "Capsules, whose reconstructions the loss compares", fix))
        return Capsules(context, lengths(context), context, context.mean(-2))

    def loss(self, prediction: Capsules, batch: Batch) -> Tensor:
        target = target_of(batch)
        loss: Tensor = self.criterion(prediction, target)
        if self.decoder is None or self.drawn is None:
            return loss
        wanted = batch.variables.get(self.drawn, batch.inputs.get(self.drawn))
        if wanted is None:
            at_hand = ", ".join([*batch.inputs, *batch.variables])
            raise ValueError(refusal("drawn", repr(self.drawn), f"one of {at_hand}"))
        return loss + self.decoder.loss(prediction.reconstruction, target, wanted.flatten(1))

    def decide(self, prediction: Capsules) -> Tensor:
        return prediction.prediction

    def probabilities(self, prediction: Capsules) -> Tensor:
        """How sure each capsule is: they do not add up to one."""
        return prediction.probability
