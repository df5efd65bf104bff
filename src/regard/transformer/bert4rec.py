"""BERT4Rec: what does a user want, seen from both sides of each item."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.general.scores.base import matrix, width, zeros
from regard.ops.fill import kept_rows, where
from regard.ops.forms import wide
from regard.transformer.encoder import TransformerEncoder
from regard.transformer.feedforward import probability
from regard.transformer.positions import LearnedPosition


@register(
    name="bert4rec",
    zh="BERT4Rec 序列推荐",
    path="query/multiplicity",
    equation="softmax(E gelu(W_P h_t + b_P) + b_O),  h = encoder(E_v + P),  masked items",
    paper="Sun et al., BERT4Rec: Sequential Recommendation with Bidirectional Encoder Representations from Transformer, CIKM 2019",
    year=2019,
    time="L (N² d + N d²) + N V d",
    memory="L N d + N V",
    choose="sequences of items whose order is loose: what a user did later tells of what was wanted before",
    avoid="the model must learn from the past alone, as it will be asked (a causal decoder)",
)
class BERT4Rec(nn.Module):
    r"""Predict items that were masked, from those on both sides (Sun et al. 2019, https://arxiv.org/abs/1904.06690).

    $$h = \mathrm{encoder}(E_{v_1} + P_1, \dots, E_{v_N} + P_N), \qquad
      p(v_t) = \mathrm{softmax}\big(E\, \mathrm{gelu}(W_P h_t + b_P) + b_O\big)$$

    Items are 0, …, V - 1; V stands for a masked one (`mask_token`). Training masks a share of the items and asks for them (`loss`); to
    recommend, a masked item is appended and asked for (`recommend`), so some sequences are trained with their last item masked alone.

    Args:
        items: $V$.
        dim: width of the vectors.
        heads: of each attention.
        layers: how many.
        length: the most items of a sequence, the appended one included.
        masked: probability that an item is masked while training.
        last: share of the sequences in which the last item alone is masked.
        **options: of `TransformerEncoder`, such as `dropout`, `norm`, `score`.

    Example:
        >>> model = BERT4Rec(items=20, dim=8, heads=2, layers=1, length=10)
        >>> seen = torch.tensor([[3, 7, 12], [5, 1, 0]])
        >>> model(seen).shape, model.recommend(seen).shape
        (torch.Size([2, 3, 20]), torch.Size([2, 20]))
        >>> model.loss(seen).shape
        torch.Size([])
    """

    def __init__(
        self,
        items: int,
        dim: int,
        heads: int,
        layers: int = 2,
        *,
        length: int = 200,
        masked: float = 0.2,
        last: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__()
        self.items, dim = width("items", items), width("dim", dim)
        self.masked, self.last = probability("masked", masked), probability("last", last)
        self.E = nn.Parameter(0.02 * torch.randn(items + 1, dim))
        position = LearnedPosition(dim, width("length", length))
        self.encoder = TransformerEncoder(dim, heads, layers, position=position, **{"activation": "gelu"} | options)
        self.W_P, self.b_P, self.b_O = matrix(dim, dim), zeros(dim), zeros(items)

    @property
    def mask_token(self) -> int:
        """What stands for a masked item."""
        return self.items

    def forward(self, items: Int[Tensor, "*b n"], mask: Bool[Tensor, "*_ n"] | None = None) -> Float[Tensor, "*b n v"]:
        """Logits of all items at each place; `mask` is True for real ones."""
        if items.dtype.is_floating_point or items.dtype == torch.bool:
            raise TypeError(refusal("items", f"a tensor of {items.dtype}", "integers"))
        return self.read(F.embedding(items, self.E), mask)

    def read(
        self, vectors: Float[Tensor, "*b n d"], mask: Bool[Tensor, "*_ n"] | None = None
    ) -> Float[Tensor, "*b n v"]:
        """The same, from vectors of items; zeros at padding."""
        return kept_rows(self.logits(self.encoder(vectors, mask)), mask)

    def logits(self, hidden: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        """Logits of all items, from what the encoder gave."""
        return F.linear(F.gelu(F.linear(hidden, self.W_P, self.b_P)), self.E[: self.items], self.b_O)

    def cloze(
        self, items: Int[Tensor, "b n"], mask: Bool[Tensor, "b n"] | None = None
    ) -> tuple[Int[Tensor, "b n"], Bool[Tensor, "b n"]]:
        """Sequences with some of their real items masked, at least one each, and which those are."""
        real = torch.ones_like(items, dtype=torch.bool) if mask is None else mask
        place = torch.arange(items.shape[-1], device=items.device)
        final = place == where(real, place, -1).amax(-1, keepdim=True) if items.shape[-1] else real
        draw = torch.rand(items.shape, device=items.device)
        chosen = (draw < self.masked) & real
        only_last = torch.rand(items.shape[:-1], device=items.device).unsqueeze(-1) < self.last
        # A sequence that was spared has its last item asked for.
        chosen = torch.where(only_last | ~chosen.any(-1, keepdim=True), final & real, chosen)
        return torch.where(chosen, self.mask_token, items), chosen

    def loss(self, items: Int[Tensor, "b n"], mask: Bool[Tensor, "b n"] | None = None) -> Float[Tensor, ""]:
        """The mean negative log-probability of items that are masked here and now, and of no others."""
        asked, chosen = self.cloze(items, mask)
        return cloze_loss(self(asked, mask), items, chosen)

    def recommend(self, items: Int[Tensor, "b n"], mask: Bool[Tensor, "b n"] | None = None) -> Float[Tensor, "b v"]:
        """Logits of what comes after the real items of each sequence, which stand at its beginning."""
        real = torch.ones_like(items, dtype=torch.bool) if mask is None else mask
        longer, more = F.pad(items, (0, 1)), F.pad(real, (0, 1))
        place = torch.arange(longer.shape[-1], device=items.device)
        # After the last real item, so that none is overwritten where others are missing before it.
        asked = place == where(more, place + 1, 0).amax(-1, keepdim=True)
        hidden = self.encoder(F.embedding(torch.where(asked, self.mask_token, longer), self.E), more | asked)
        return self.logits((hidden * asked.unsqueeze(-1)).sum(-2))

    def extra_repr(self) -> str:
        return f"items={self.items}, masked={self.masked}, last={self.last}"


def cloze_loss(
    logits: Float[Tensor, "*b n v"], items: Int[Tensor, "*b n"], chosen: Bool[Tensor, "*b n"]
) -> Float[Tensor, ""]:
    """The mean negative log-probability of the chosen items; zero where none is."""
    log_p = wide(logits).log_softmax(-1).gather(-1, where(chosen, items, 0).unsqueeze(-1)).squeeze(-1)
    return -where(chosen, log_p, 0.0).sum() / chosen.sum().clamp(min=1)
