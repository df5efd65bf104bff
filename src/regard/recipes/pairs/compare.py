"""What two texts were read as, compared."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.general.scores.base import width
from regard.model import Batch, Output
from regard.model.naming import Available
from regard.query import AttentionOverAttention


class Compared(Output):
    r"""The contexts of both texts side by side, and where they differ and agree, before another output model.

    $$x = \mathrm{ReLU}\big(W\, [c^1;\; c^2;\; |c^1 - c^2|;\; c^1 \odot c^2]\big), \qquad \hat y = \mathrm{output}(x)$$

    (Mou et al. 2016, https://arxiv.org/abs/1512.08422.) A context of several pairs, such as that of a multi-grained co-attention, is
    compared pair by pair. Where the example has a variable `shared`, it stands beside them: how many words the texts have in common,
    which says much about answers to a question (Yang et al. 2015, https://aclanthology.org/D15-1237).

    Args:
        dim: width of one text's context.
        pairs: number of pairs.
        output: of a vector, `hidden_dim` wide.
        hidden_dim: rows of $W$.
        dropout: on what is compared, while training.
        shared: width of that variable; 0 where there is none.
    """

    def __init__(
        self, dim: int, pairs: int, output: Output, hidden_dim: int, dropout: float = 0.0, shared: int = 0
    ) -> None:
        super().__init__()
        self.dim, self.pairs = width("dim", dim), width("pairs", pairs)
        self.dropout = nn.Dropout(dropout)
        self.shared = shared
        self.linear = nn.Linear(4 * dim * pairs + shared, width("hidden_dim", hidden_dim))
        self.output = output

    def forward(self, context: Float[Tensor, "b d"], found: Available) -> Any:
        if context.shape[-1] != 2 * self.dim * self.pairs:
            raise ValueError(refusal("context", f"width {context.shape[-1]}", f"{2 * self.pairs} times {self.dim}"))
        first, second = context.unflatten(-1, (self.pairs, 2, self.dim)).unbind(-2)
        compared = torch.cat([first, second, (first - second).abs(), first * second], -1).flatten(-2)
        compared = self.dropout(compared)
        if self.shared:
            compared = torch.cat([compared, found.values["shared"].to(compared.dtype)], -1)
        return self.output(torch.relu(self.linear(compared)), found)

    def loss(self, prediction: Any, batch: Batch) -> Tensor:
        return self.output.loss(prediction, batch)

    def terms(self, batch: Batch) -> Tensor | int:
        return self.output.terms(batch)

    def reward(self, prediction: Any, batch: Batch) -> Tensor:
        return self.output.reward(prediction, batch)

    def decide(self, prediction: Any) -> Tensor:
        return self.output.decide(prediction)

    def probabilities(self, prediction: Any) -> Tensor | None:
        return self.output.probabilities(prediction)


class EachOverOther(nn.Module):
    r"""Both texts read by attention-over-attention: each is the document once, and the question once.

    $$c^1 = \sum_i s_i(F^1, F^2)\, f^1_i, \qquad c^2 = \sum_i s_i(F^2, F^1)\, f^2_i, \qquad o = [c^1; c^2]$$

    Args:
        attention: gives weights of a document's words.

    Example:
        >>> read = EachOverOther(AttentionOverAttention(4))
        >>> read(torch.randn(2, 5, 4), torch.randn(2, 3, 4)).shape
        torch.Size([2, 8])
    """

    def __init__(self, attention: AttentionOverAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self,
        first: Float[Tensor, "b n1 d"],
        second: Float[Tensor, "b n2 d"],
        masks: tuple[Bool[Tensor, "b n1"] | None, Bool[Tensor, "b n2"] | None] = (None, None),
    ) -> Float[Tensor, "b d2"]:
        contexts = [
            (self.attention(x, other, (mask, theirs)).unsqueeze(-2) @ x).squeeze(-2)
            for x, other, mask, theirs in ((first, second, *masks), (second, first, *reversed(masks)))
        ]
        return torch.cat(contexts, -1)
