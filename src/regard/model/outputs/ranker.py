"""Which of several candidates: their scores beside the context."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.general.scores.base import width
from regard.model.batch import Batch
from regard.model.features.embedding import Embedding
from regard.model.naming import Available
from regard.model.outputs.base import Output, target_of
from regard.model.outputs.classifier import pooled
from regard.ops.fill import kept_rows


class Ranker(Output):
    r"""Scores of candidates, $s_k = (W c) \cdot f_k$, the target being one of them.

    $$\mathcal{L} = -\log \mathrm{softmax}_k(s)_y$$

    Candidates are an input of the task, such as the answers of a question or one right item among some that were drawn (a sampled
    softmax); or all that a `table` holds (a full one). A candidate that is not real scores minus infinity.

    Args:
        dim: width of the context.
        candidate_dim: width of the candidates' features; where it is `dim`, also when not given, there is no $W$.
        candidates: name of the input that holds them, (B, K, d).
        table: an `Embedding` of all candidates, in place of an input.

    Example:
        >>> from regard.model.naming import Available
        >>> found = Available({"candidates": torch.randn(2, 5, 8)}, {}, {})
        >>> Ranker(8)(torch.randn(2, 8), found).shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        dim: int,
        candidate_dim: int | None = None,
        candidates: str = "candidates",
        table: Embedding | None = None,
    ) -> None:
        super().__init__()
        self.candidates = candidates
        self.dim = width("dim", dim)
        self.table = None if table is None else table.table
        if table is not None and candidate_dim not in (None, table.out_dim):
            raise ValueError(refusal("table", f"vectors of width {table.out_dim}", f"candidate_dim={candidate_dim}"))
        own = dim if table is None else table.out_dim
        own = own if candidate_dim is None else width("candidate_dim", candidate_dim)
        self.map = None if own == dim else nn.Linear(dim, own, bias=False)

    def forward(self, context: Float[Tensor, "b *n d"], found: Available) -> Float[Tensor, "b k"]:
        if context.shape[-1] != self.dim:
            raise ValueError(refusal("context", f"width {context.shape[-1]}", f"dim={self.dim}"))
        context = pooled(context, found)
        asked: Tensor = context if self.map is None else self.map(context)
        if self.table is not None:
            return F.linear(asked, self.table.weight)
        if self.candidates not in found.inputs:
            at_hand = ", ".join(found.inputs)
            raise ValueError(refusal("candidates", repr(self.candidates), f"the name of an input: {at_hand}"))
        features, mask = found.inputs[self.candidates], found.masks.get(self.candidates)
        if features.dim() != 3 or features.shape[-1] != asked.shape[-1]:
            got = f"{self.candidates!r} of shape {tuple(features.shape)}"
            raise ValueError(refusal("candidates", got, f"(B, K, {asked.shape[-1]})"))
        scores = (kept_rows(features, mask) @ asked.unsqueeze(-1)).squeeze(-1)
        return scores if mask is None else scores.masked_fill(~mask, -torch.inf)

    def loss(self, prediction: Float[Tensor, "b k"], batch: Batch) -> Tensor:
        return F.cross_entropy(prediction, target_of(batch))

    def decide(self, prediction: Float[Tensor, "b k"]) -> Tensor:
        return prediction.argmax(-1)


class PairRanker(Output):
    r"""One score for a pair, such as a question and an answer, $s = w \cdot c + b$; candidates are ranked by it.

    $$\mathcal{L} = -\,y \log \sigma(s) - (1 - y) \log(1 - \sigma(s))$$

    Args:
        dim: width of the context.
        dropout: on the context, while training.

    Example:
        >>> from regard.model.naming import Available
        >>> PairRanker(8)(torch.randn(2, 8), Available({}, {}, {})).shape
        torch.Size([2])
    """

    def __init__(self, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout, self.linear = nn.Dropout(dropout), nn.Linear(width("dim", dim), 1)

    def forward(self, context: Float[Tensor, "b *n d"], found: Available) -> Float[Tensor, " b"]:
        score: Tensor = self.linear(self.dropout(pooled(context, found)))
        return score.squeeze(-1)

    def loss(self, prediction: Float[Tensor, " b"], batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(prediction, target_of(batch).to(prediction.dtype))

    def decide(self, prediction: Float[Tensor, " b"]) -> Tensor:
        """Whether the pair belongs together."""
        return prediction > 0
