"""A token for each position: the next one, or one that was hidden."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn

from regard._errors import refusal
from regard.general.scores.base import width, zeros
from regard.model.batch import Batch
from regard.model.features.embedding import Embedding
from regard.model.naming import Available
from regard.model.outputs.base import Output, real_terms, target_of
from regard.model.outputs.classifier import real_of
from regard.model.outputs.decoding import a_share
from regard.ops.fill import kept_rows


class LanguageHead(Output):
    r"""Logits of tokens at every position, $\hat y_t = E c_t + b$.

    The loss is the mean cross-entropy over the positions whose target is not -1. What is asked is for the target to say: the token
    that follows (`next_tokens`), with an attention that does not look ahead; or a token that was hidden (`hide_tokens`), as in BERT4Rec
    (Sun et al. 2019, https://arxiv.org/abs/1904.06690).

    Args:
        dim: width of the context.
        count: number of tokens; that of the `table` where one is given.
        table: an `Embedding` whose vectors are those of the output too (Press & Wolf 2017, https://arxiv.org/abs/1608.05859).
        dropout: on the context, while training.
        smoothing: share of the target that is spread over all tokens.

    Example:
        >>> from regard.model.naming import Available
        >>> table = Embedding(20, 8)
        >>> LanguageHead(8, table=table)(torch.randn(2, 7, 8), Available({}, {}, {})).shape
        torch.Size([2, 7, 20])
    """

    def __init__(
        self,
        dim: int,
        count: int | None = None,
        table: Embedding | None = None,
        dropout: float = 0.0,
        smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        dim = width("dim", dim)
        if table is None:
            if count is None:
                raise ValueError(refusal("count", None, "a number of tokens, or a table"))
            self.E = nn.Parameter(torch.randn(width("count", count), dim) / dim**0.5)
        else:
            self.E = cast(nn.Parameter, table.table.weight)
            if self.E.shape[1] != dim or count not in (None, len(self.E)):
                expected = f"vectors ({'V' if count is None else count}, {dim})"
                raise ValueError(refusal("table", f"vectors {tuple(self.E.shape)}", expected))
        self.b = zeros(len(self.E))
        self.dropout, self.smoothing = nn.Dropout(a_share("dropout", dropout)), a_share("smoothing", smoothing)

    def forward(self, context: Float[Tensor, "b *n d"], found: Available) -> Float[Tensor, "b *n v"]:
        context = kept_rows(context, real_of(context, found)) if context.dim() == 3 else context
        return F.linear(self.dropout(context), self.E, self.b)

    def loss(self, prediction: Float[Tensor, "b *n v"], batch: Batch) -> Tensor:
        target = target_of(batch)
        if target.shape != prediction.shape[:-1]:
            got, expected = (
                f"target of shape {tuple(target.shape)}",
                f"a token for each of {tuple(prediction.shape[:-1])}",
            )
            raise ValueError(refusal("batch", got, expected))
        flat = prediction.reshape(-1, prediction.shape[-1])
        return F.cross_entropy(flat, target.flatten(), ignore_index=-1, label_smoothing=self.smoothing)

    def terms(self, batch: Batch) -> Tensor:
        return real_terms(batch)

    def decide(self, prediction: Float[Tensor, "b *n v"]) -> Tensor:
        return prediction.argmax(-1)


def next_tokens(tokens: Int[Tensor, "*b n"], mask: Bool[Tensor, "*b n"] | None = None) -> Int[Tensor, "*b n"]:
    """The target of a model that says what follows: the next real token, -1 where there is none.

    Example:
        >>> next_tokens(torch.tensor([3, 1, 4])).tolist()
        [1, 4, -1]
    """
    following = F.pad(tokens[..., 1:], (0, 1), value=-1)
    if mask is None:
        return following
    return following.where(mask & F.pad(mask[..., 1:], (0, 1), value=False), -1)


class Hidden(NamedTuple):
    """Tokens, some of them replaced, and what these were, -1 elsewhere."""

    tokens: Int[Tensor, "*b n"]
    target: Int[Tensor, "*b n"]


def hide_tokens(
    tokens: Int[Tensor, "*b n"],
    by: int,
    share: float = 0.15,
    mask: Bool[Tensor, "*b n"] | None = None,
    generator: Generator | None = None,
) -> Hidden:
    """Replace some of the real tokens, each with the same probability, and at least one of every sequence that has any.

    Args:
        tokens: (..., N).
        by: the token that stands for a hidden one.
        share: probability of being hidden.
        mask: True for real tokens.
        generator: where the numbers are drawn from.

    Example:
        >>> hidden = hide_tokens(torch.tensor([3, 1, 4, 1, 5]), by=9, share=0.0, generator=Generator().manual_seed(0))
        >>> (hidden.tokens == 9).sum().item(), (hidden.target >= 0).sum().item()
        (1, 1)
    """
    drawn = torch.rand(tokens.shape, generator=generator, device=tokens.device)
    if mask is not None:
        drawn = drawn.masked_fill(~mask, torch.inf)
    # What has the smallest number is hidden whatever the share is: a sequence that hides nothing teaches nothing.
    first = drawn == drawn.amin(-1, keepdim=True)
    hidden = (drawn < a_share("share", share)) | (first & drawn.isfinite())
    return Hidden(tokens.masked_fill(hidden, by), tokens.where(hidden, -1))
