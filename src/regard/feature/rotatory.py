"""Rotatory attention: a target reads its left and right contexts, each of which reads the target again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.parts import (
    Aligns,
    Scores,
    attentions,
    is_empty,
    masked_inputs,
    masked_mean,
    pair_of_widths,
    real,
)
from regard.general.attention import Attention
from regard.general.masks import Keys
from regard.general.scores import ActivatedGeneral
from regard.general.scores.base import width

_ORDERS = ("target-first", "context-first")


class _Vectors(NamedTuple):
    """What a rotation carries from hop to hop, each (..., d)."""

    left: Tensor
    right: Tensor
    target_left: Tensor
    target_right: Tensor


@register(
    name="rotatory",
    zh="旋转注意力",
    path="feature/multiplicity",
    equation="r_l = Attn(r̄_t; F_l),  r_r = Attn(r̄_t; F_r),  r_lt = Attn(r_l; F_t),  r_rt = Attn(r_r; F_t)",
    paper="Zheng & Xia, Left-Center-Right Separated Neural Network for Aspect-based Sentiment Analysis with Rotatory "
    "Attention, 2018",
    year=2018,
    time="hops × (N_l + N_r + 2 N_t) d",
    memory="linear",
    choose="a target between two contexts: aspect sentiment, relation arguments, a span in a text",
    avoid="there is no target, or it is a single token (then its side of the rotation is constant)",
)
class RotatoryAttention(nn.Module):
    r"""LCR-Rot (Zheng & Xia 2018, https://arxiv.org/abs/1802.00892), with hops.

    $$\bar r = \mathrm{mean}(F^t), \qquad r^l = \mathrm{Attn}(\bar r; F^l), \quad r^r = \mathrm{Attn}(\bar r; F^r), \qquad
      r^{lt} = \mathrm{Attn}(r^l; F^t), \quad r^{rt} = \mathrm{Attn}(r^r; F^t), \qquad o = [r^l; r^r; r^{lt}; r^{rt}]$$

    From the second hop on the queries of left and right are $r^{lt}$ and $r^{rt}$ of the hop before, with the same four attentions:
    `left`, `right`, `target_left`, `target_right` (LCR-Rot-hop: Wallaart & Frasincar 2019, https://doi.org/10.1007/978-3-030-21348-0_24).
    `order="context-first"` is the inverse: the means of the contexts read the target, then the target vectors the contexts, as in
    the code that the authors released. `weighting` adds LCR-Rot-hop++ (Truşcă et al. 2020, https://arxiv.org/abs/2004.08673): in each hop
    the two context vectors, and the two target vectors, are scaled by $\mathrm{softmax}(\tanh(w \cdot r + b))$ over the pair.

    Where a context is empty its vector is zero, its target vector is $\bar r$, and nothing is scaled.

    Args:
        dim: width of all inputs, or of target and contexts.
        hops: number of rotations.
        order: `"target-first"`, as in the paper, or `"context-first"`.
        weighting: scale left against right in each hop.
        score: of all four attentions, or one for each: a name, a class, a function of the widths of query and key, or a
            ready-made score or attention.
        align: of all four, or one for each; softmax when not given.
        **options: arguments of scores and alignments given by name, such as `hidden_dim`; `dropout`, `impl`.

    Example:
        >>> rotate = RotatoryAttention(dim=6, hops=3)
        >>> target, left, right = torch.randn(2, 3, 6), torch.randn(2, 5, 6), torch.randn(2, 7, 6)
        >>> rotate(target, left, right).shape
        torch.Size([2, 24])
    """

    def __init__(
        self,
        dim: int | tuple[int, int],
        hops: int = 1,
        *,
        order: str = "target-first",
        weighting: bool = False,
        score: Scores = "activated-general",
        align: Aligns = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if order not in _ORDERS:
            raise ValueError(refusal("order", repr(order), f"one of {', '.join(_ORDERS)}"))
        of_target, of_context = self.widths = pair_of_widths(dim)
        self.hops, self.order = width("hops", hops), order
        outward, inward = (of_target, of_context), (of_context, of_target)
        steps = {"left": outward, "right": outward, "target_left": inward, "target_right": inward}
        built = attentions(steps, score, align, options)
        self.left, self.right = built["left"], built["right"]
        self.target_left, self.target_right = built["target_left"], built["target_right"]
        self.weigh_contexts = Attention(ActivatedGeneral(1, of_context)) if weighting else None
        self.weigh_targets = Attention(ActivatedGeneral(1, of_target)) if weighting else None

    def forward(
        self,
        target: Float[Tensor, "*b nt dt"],
        left: Float[Tensor, "*b nl dc"],
        right: Float[Tensor, "*b nr dc"],
        masks: tuple[Bool[Tensor, "*_ nt"] | None, Bool[Tensor, "*_ nl"] | None, Bool[Tensor, "*_ nr"] | None]
        | None = None,
    ) -> Float[Tensor, "*b d"]:
        """Read left, right, left-aware target and right-aware target, in this order; `masks` are True for real tokens."""
        of_target, of_context = self.widths
        given = {"target": target, "left": left, "right": right}
        inputs, known = masked_inputs(given, masks, (of_target, of_context, of_context))
        tokens = [real(mask) for mask in known]
        empty = [is_empty(x, mask) for x, mask in zip(inputs[1:], known[1:], strict=True)]
        pooled = masked_mean(inputs[0], known[0])
        r = _Vectors(pooled, pooled, pooled, pooled)
        if self.order == "context-first":
            r = r._replace(left=masked_mean(inputs[1], known[1]), right=masked_mean(inputs[2], known[2]))
        for hop in range(self.hops):
            if hop > 0 or self.order == "target-first":
                r = self._read_contexts(r, inputs, tokens, empty)
            r = self._read_target(r, inputs[0], tokens[0], pooled, empty)
        if self.order == "context-first":
            r = self._read_contexts(r, inputs, tokens, empty)
        return torch.cat(r, -1)

    def _read_contexts(
        self, r: _Vectors, inputs: list[Tensor], masks: list[Keys | None], empty: list[Tensor | None]
    ) -> _Vectors:
        left = self.left(r.target_left, inputs[1], mask=masks[1])
        right = self.right(r.target_right, inputs[2], mask=masks[2])
        left, right = _weigh(self.weigh_contexts, left, right, empty)
        return _Vectors(left, right, r.target_left, r.target_right)

    def _read_target(
        self, r: _Vectors, target: Tensor, mask: Keys | None, pooled: Tensor, empty: list[Tensor | None]
    ) -> _Vectors:
        left = _unless(empty[0], self.target_left(r.left, target, mask=mask), pooled)
        right = _unless(empty[1], self.target_right(r.right, target, mask=mask), pooled)
        left, right = _weigh(self.weigh_targets, left, right, empty)
        return _Vectors(r.left, r.right, left, right)

    def extra_repr(self) -> str:
        return f"hops={self.hops}, order={self.order!r}"


def _unless(empty: Tensor | None, vector: Tensor, other: Tensor) -> Tensor:
    return vector if empty is None else torch.where(empty.unsqueeze(-1), other, vector)


def _weigh(attend: Attention | None, left: Tensor, right: Tensor, empty: list[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Scale both vectors by their weights against each other, unless one of them stands alone."""
    if attend is None:
        return left, right
    # Values that are zero in the other's half keep the two terms of the sum apart.
    nothing = torch.zeros_like(left)
    apart = torch.stack([torch.cat([left, nothing], -1), torch.cat([nothing, right], -1)], -2)
    scaled = attend(left.new_ones(1), torch.stack([left, right], -2), apart)
    first, second = scaled.chunk(2, -1)
    for alone in empty:
        first, second = _unless(alone, first, left), _unless(alone, second, right)
    return first, second
