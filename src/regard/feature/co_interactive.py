"""Interactive co-attention: both inputs at once, each read by the mean of the other."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.catalog import register
from regard.feature.parts import Aligns, Scores, attentions, masked_inputs, masked_mean, pair_of_widths, real


@register(
    name="interactive-co-attention",
    zh="交互式协同注意力",
    path="feature/multiplicity",
    equation="c¹ = Attn(mean F₂; F₁),  c² = Attn(mean F₁; F₂),  out = [c¹; c²]",
    paper="Ma, Li, Zhang & Wang, Interactive Attention Networks for Aspect-Level Sentiment Classification, IJCAI 2017",
    year=2017,
    time="(N₁ + N₂) d",
    memory="linear",
    choose="two short inputs that explain each other and of which neither comes first; the cheapest co-attention",
    avoid="the mean of an input says little about it: long texts, or one relevant feature among many",
)
class InteractiveCoAttention(nn.Module):
    r"""Coarse-grained co-attention, both inputs at once (Ma et al. 2017, https://arxiv.org/abs/1709.00893).

    $$\bar f^{i} = \frac{1}{S_i} \sum_{j \le S_i} f^{i}_j, \qquad
      c^{1} = \mathrm{align}\big(\mathrm{score}_1(\bar f^{2}, F^{1})\big) F^{1}, \qquad
      c^{2} = \mathrm{align}\big(\mathrm{score}_2(\bar f^{1}, F^{2})\big) F^{2}, \qquad o = [c^{1}; c^{2}]$$

    Means are over true lengths $S_i$; the mean of an empty input is zero. The attentions are `first` and `second`.

    Args:
        dim: width of the inputs, or of each.
        score: of both sides, or one for each: a name, a class, a function of the widths of query and key, or a ready-made
            score or attention. The paper has the activated general score.
        align: of both sides, or one for each; softmax when not given.
        **options: arguments of scores and alignments given by name, such as `hidden_dim`; `dropout`, `impl`.

    Example:
        >>> attend = InteractiveCoAttention((6, 4))
        >>> attend(torch.randn(2, 5, 6), torch.randn(2, 3, 4)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        dim: int | tuple[int, int],
        *,
        score: Scores = "activated-general",
        align: Aligns = None,
        **options: Any,
    ) -> None:
        super().__init__()
        d1, d2 = self.widths = pair_of_widths(dim)
        built = attentions({"first": (d2, d1), "second": (d1, d2)}, score, align, options)
        self.first, self.second = built["first"], built["second"]

    def forward(
        self,
        first: Float[Tensor, "*b n1 d1"],
        second: Float[Tensor, "*b n2 d2"],
        masks: tuple[Bool[Tensor, "*_ n1"] | None, Bool[Tensor, "*_ n2"] | None] | None = None,
    ) -> Float[Tensor, "*b d"]:
        """Read both inputs; `masks` are True for real tokens."""
        (first, second), (mask1, mask2) = masked_inputs({"first": first, "second": second}, masks, self.widths)
        c1 = self.first(masked_mean(second, mask2), first, mask=real(mask1))
        c2 = self.second(masked_mean(first, mask1), second, mask=real(mask2))
        return torch.cat([c1, c2], -1)
