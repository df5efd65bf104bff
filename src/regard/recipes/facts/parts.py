"""Sentences as vectors, and an answer from what was read and what was asked."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard._errors import refusal
from regard.feature import RecurrentEncoder
from regard.model import Batch, Classifier, Embedding, Output
from regard.model.naming import Available
from regard.ops.fill import kept_rows
from regard.query import MultiHopAttention


class Sentences(nn.Module):
    r"""One vector for each sentence (Sukhbaatar et al. 2015, https://arxiv.org/abs/1503.08895).

    $$m_i = \sum_{j=1}^{J} l_j \odot E_{x_{ij}} + T_{t(i)}, \qquad l_{jk} = \Big(1 - \frac jJ\Big) - \frac kd \Big(1 - \frac{2j}J\Big)$$

    The weights $l$ tell the order of the $J$ words of a sentence; $t(i)$ counts the sentences after it. While training, some that are not
    there are counted too, so that the answer cannot hang on exact distances.

    Args:
        table: vectors $E$ of words.
        times: rows of $T$; sentences that lie farther back share the last. None for sentences without an order.
        noise: sentences that are counted without being there, as a share of those that are.
        recurrent: a GRU over the words, in place of their weighted sum.

    Example:
        >>> read = Sentences(Embedding(20, 8), times=10)
        >>> read(torch.randint(20, (2, 5, 3)), torch.ones(2, 5, 3, dtype=torch.bool)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, table: Embedding, times: int | None = None, noise: float = 0.0, recurrent: bool = False) -> None:
        super().__init__()
        self.table, self.noise, self.out_dim = table, noise, table.out_dim
        d = table.out_dim
        self.encoder = RecurrentEncoder(d, d, bidirectional=False) if recurrent else None
        self.T = None if times is None else nn.Parameter(0.1 * torch.randn(times, d))

    def forward(
        self, words: Int[Tensor, "*b j"], mask: Bool[Tensor, "*b j"], ages: Int[Tensor, "*b"] | None = None
    ) -> Float[Tensor, "*b d"]:
        """Vectors of sentences; `mask` is True for real words, and `ages` are $t$ where others have counted already."""
        vectors, length = self.table(words, mask), mask.sum(-1, keepdim=True).clamp(min=1)
        if self.encoder is not None:
            last = torch.arange(words.shape[-1], device=words.device) == length - 1
            read = (self.encoder(vectors, mask) * last.unsqueeze(-1)).sum(-2)
        else:
            j = torch.arange(1, words.shape[-1] + 1, device=words.device) / length
            k = torch.arange(1, self.out_dim + 1, device=words.device) / self.out_dim
            read = (vectors * (1 - j.unsqueeze(-1) - k * (1 - 2 * j).unsqueeze(-1))).sum(-2)
        real = mask.any(-1)
        if self.T is not None:
            read = read + self.T[self.ages(real) if ages is None else ages]
        return kept_rows(read, real)

    def ages(self, real: Bool[Tensor, "*b n"]) -> Int[Tensor, "*b n"]:
        """How many sentences there are after each, at most as many as there are vectors for."""
        assert self.T is not None
        after = real.long()
        if self.training and self.noise:
            after = after + real * (torch.rand(real.shape, device=real.device) < self.noise)
        return (after.flip(-1).cumsum(-1).flip(-1) - after).clamp(max=len(self.T) - 1)

    def mask_after(self, mask: Bool[Tensor, "*b j"]) -> Bool[Tensor, "*b"]:
        """A sentence is real where any word is."""
        return mask.any(-1)


class Question(nn.Module):
    """The query is the question."""

    def forward(self, question: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        return question


class AskedAgain(nn.Module):
    """Hops that may read the words of the question again before each look.

    Args:
        attention: over facts, with a `side` that is the question's words.
    """

    def __init__(self, attention: MultiHopAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self,
        query: Float[Tensor, "b d"],
        key: Float[Tensor, "b n d"],
        value: Float[Tensor, "b n d"],
        side: Float[Tensor, "b m d"],
        masks: tuple[Tensor | None, Tensor | None, Tensor | None],
    ) -> Float[Tensor, "b d"]:
        context: Tensor = self.attention(query, key, value, masks[0], side=side, side_mask=masks[2])
        return context


class Answer(Output):
    r"""Logits of answers from what was read and what was asked, $W [c; q] + b$.

    Args:
        dim: width of the context and of the question, each.
        classes: number of answers.
        dropout: of both, while training.
    """

    def __init__(self, dim: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dim, self.classifier = dim, Classifier(2 * dim, classes, dropout)

    def forward(self, context: Float[Tensor, "b d"], found: Available) -> Float[Tensor, "b c"]:
        if context.dim() != 2 or context.shape[-1] != self.dim:
            got = f"one that gives {tuple(context.shape)}"
            raise ValueError(refusal("attention", got, f"one context for a question, {self.dim} wide"))
        logits: Tensor = self.classifier(torch.cat([context, found.inputs["question"]], -1), found)
        return logits

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        return self.classifier.loss(prediction, batch)

    def reward(self, prediction: Tensor, batch: Batch) -> Tensor:
        return self.classifier.reward(prediction, batch)

    def decide(self, prediction: Tensor) -> Tensor:
        return self.classifier.decide(prediction)

    def probabilities(self, prediction: Tensor) -> Tensor:
        return self.classifier.probabilities(prediction)
