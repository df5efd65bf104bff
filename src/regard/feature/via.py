"""Attention-via-attention: read at a coarse level, then at a fine one in the light of what was read."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.parts import Aligns, Scores, attentions, masked_inputs, pair_of_widths
from regard.general.inputs import check_together
from regard.general.masks import Keys
from regard.general.scores.base import width


@register(
    name="attention-via-attention",
    zh="经由注意力的注意力（注意力叠加）",
    path="feature/levels",
    equation="c_w = Attn(q; F_w),  c_c = Attn([q; c_w]; F_c),  out = [c_w; c_c]",
    paper="Zhao & Zhang, Attention-via-Attention Neural Machine Translation, AAAI 2018",
    year=2018,
    time="N_w d_w d + N_c d_w d",
    memory="linear",
    choose="the same input at two granularities (words and characters, segments and frames), the coarse one a guide",
    avoid="the fine level lies inside the coarse one and should be pooled into it (hierarchical)",
)
class AttentionViaAttention(nn.Module):
    r"""Two levels, the first of which guides the second (Zhao & Zhang 2018, https://aaai.org/ocs/index.php/AAAI/AAAI18/paper/view/16534).

    $$c^{w} = \mathrm{Attn}(q; F^{w}), \qquad c^{c} = \mathrm{Attn}([q; c^{w}]; F^{c}), \qquad o = [c^{w}; c^{c}]$$

    The attentions are `words` and `characters`. Not to be confused with attention-over-attention, an attention over the
    distributions of another one.

    Args:
        query_dim: width of the query.
        dim: width of both levels, or of words and characters.
        score: of both levels, or one for each: a name, a class, a function of the widths of query and key, or a ready-made
            score or attention. The query of the characters is as wide as query and words together.
        align: of both levels, or one for each; softmax when not given.
        **options: arguments of scores and alignments given by name, such as `hidden_dim`; `dropout`, `impl`.

    Example:
        >>> attend = AttentionViaAttention(3, (6, 4))
        >>> attend(torch.randn(2, 3), torch.randn(2, 5, 6), torch.randn(2, 11, 4)).shape
        torch.Size([2, 10])
        >>> attend(torch.randn(2, 7, 3), torch.randn(2, 5, 6), torch.randn(2, 11, 4)).shape  # seven queries
        torch.Size([2, 7, 10])
    """

    def __init__(
        self,
        query_dim: int,
        dim: int | tuple[int, int],
        *,
        score: Scores = "additive",
        align: Aligns = None,
        **options: Any,
    ) -> None:
        super().__init__()
        query_dim = width("query_dim", query_dim)
        of_words, of_characters = self.widths = pair_of_widths(dim)
        steps = {"words": (query_dim, of_words), "characters": (query_dim + of_words, of_characters)}
        built = attentions(steps, score, align, options)
        self.words, self.characters = built["words"], built["characters"]

    def forward(
        self,
        query: Float[Tensor, "*q dq"],
        words: Float[Tensor, "*b nw dw"],
        characters: Float[Tensor, "*b nc dc"],
        masks: tuple[Bool[Tensor, "*_ nw"] | None, Bool[Tensor, "*_ nc"] | None] | None = None,
    ) -> Float[Tensor, "*q d"]:
        """Read words, then characters, for one query, (..., d_q) or (d_q,) for all, or many (..., N_q, d_q).

        `masks` are True for real tokens.
        """
        inputs, known = masked_inputs({"words": words, "characters": characters}, masks, self.widths)
        _check_query(query, inputs[0])
        of_words, of_characters = (None if mask is None else Keys(mask) for mask in known)
        c_w = self.words(query, inputs[0], mask=of_words)
        # A query that several inputs share reads different words in each.
        both = torch.cat([query.expand(*c_w.shape[:-1], query.shape[-1]), c_w], -1)
        c_c = self.characters(both, inputs[1], mask=of_characters)
        return torch.cat([c_w, c_c], -1)


def _check_query(query: Tensor, words: Tensor) -> None:
    """Refuse a query that cannot ask these words."""
    if not isinstance(query, Tensor):
        raise TypeError(refusal("query", type(query).__name__, "a floating-point tensor"))
    if query.dim() not in (1, words.dim() - 1, words.dim()):
        got = f"shape {tuple(query.shape)} beside words of shape {tuple(words.shape)}"
        raise ValueError(refusal("query", got, "as many axes as the words (many queries), one fewer, or one"))
    many = query if query.dim() == words.dim() else query.unsqueeze(-2)
    check_together({"words": words, "query": many})
