"""Alternating co-attention: read one input, then the other by what was read, then the first again."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.catalog import register
from regard.feature.parts import Aligns, Scores, attentions, masked_inputs, pair_of_widths, real


@register(
    name="alternating-co-attention",
    zh="交替协同注意力",
    path="feature/multiplicity",
    equation="c⁰ = Attn(F₁),  c² = Attn(c⁰; F₂),  c¹ = Attn(c²; F₁),  out = [c¹; c²]",
    paper="Lu, Yang, Batra & Parikh, Hierarchical Question-Image Co-Attention for Visual Question Answering, NeurIPS 2016",
    year=2016,
    time="(2 N₁ + N₂) d_w d",
    memory="linear",
    choose="two inputs, one of which sets the question: each is read in the light of a summary of the other",
    avoid="single features of both inputs must be matched (parallel), or neither input comes first (interactive)",
)
class AlternatingCoAttention(nn.Module):
    r"""Coarse-grained co-attention, one input after the other (Lu et al. 2016, https://arxiv.org/abs/1606.00061).

    $$c^{0} = \mathrm{align}\big(w \cdot \mathrm{act}(W F^{1} + b)\big) F^{1}, \qquad
      c^{2} = \mathrm{align}\big(\mathrm{score}(c^{0}, F^{2})\big) F^{2}, \qquad
      c^{1} = \mathrm{align}\big(\mathrm{score}'(c^{2}, F^{1})\big) F^{1}, \qquad o = [c^{1}; c^{2}]$$

    The first step has no query, the others have the context before them. Exchanging the inputs gives another function. The
    three steps are `summary`, `second` and `first`. Where first and last step are tied they are one attention, `first`, called
    with a query of zeros and then with $c^2$ (Brauwers & Frasincar 2023); the authors' code has three separate ones.

    Args:
        dim: width of the inputs, or of each.
        score: of the steps with a query; or one for each step (`summary`, `second`, `first`; without `summary` when tied). A name,
            a class, a function of the widths of query and key, or a ready-made score or attention.
        align: of all steps, or one for each; softmax when not given.
        tie_first_last: let the first and the last step share their parameters.
        **options: arguments of scores and alignments given by name, such as `hidden_dim`; `dropout`, `impl`.

    Example:
        >>> attend = AlternatingCoAttention((6, 4))
        >>> attend(torch.randn(2, 5, 6), torch.randn(2, 3, 4)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        dim: int | tuple[int, int],
        *,
        score: Scores = "additive",
        align: Aligns = None,
        tie_first_last: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        d1, d2 = self.widths = pair_of_widths(dim)
        steps: dict[str, tuple[int | None, int]] = {"summary": (None, d1), "second": (d1, d2), "first": (d2, d1)}
        if tie_first_last:
            del steps["summary"]
        elif not isinstance(score, list | tuple):
            score = ("query-free", score, score)
        built = attentions(steps, score, align, options)
        self.summary = built.get("summary")
        self.second, self.first = built["second"], built["first"]

    def forward(
        self,
        first: Float[Tensor, "*b n1 d1"],
        second: Float[Tensor, "*b n2 d2"],
        masks: tuple[Bool[Tensor, "*_ n1"] | None, Bool[Tensor, "*_ n2"] | None] | None = None,
    ) -> Float[Tensor, "*b d"]:
        """Read both inputs; `masks` are True for real tokens."""
        (first, second), (mask1, mask2) = masked_inputs({"first": first, "second": second}, masks, self.widths)
        c0 = self._summarize(first, mask1)
        c2 = self.second(c0, second, mask=real(mask2))
        c1 = self.first(c2, first, mask=real(mask1))
        return torch.cat([c1, c2], -1)

    def _summarize(self, first: Tensor, mask: Tensor | None) -> Tensor:
        if self.summary is not None:
            summary: Tensor = self.summary(None, first, mask=real(mask))
            return summary
        nothing = first.new_zeros(*first.shape[:-2], self.first.score.query_dim or first.shape[-1])
        tied: Tensor = self.first(nothing, first, mask=real(mask))
        return tied
