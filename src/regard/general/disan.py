"""Directional and reinforced self-attention: multi-dimensional attention of tokens on each other, gated with the tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.general.alignments import Alignment, ReinforcedPairs, Soft
from regard.general.attention import Attention
from regard.general.causal import refuse_together
from regard.general.inputs import masked_input
from regard.general.masks import Directional, Keys, Mask, Where
from regard.general.scores import TokenToToken
from regard.general.scores.base import width
from regard.ops.fill import where

_DIRECTIONS = ("forward", "backward", "both")


class FusionGate(nn.Module):
    r"""Mix tokens with what they read: $o = g \odot h + (1 - g) \odot c$, $g = \mathrm{sigmoid}(W_i h + W_a c + b)$."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.of_input, self.of_context = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False)

    def forward(self, tokens: Float[Tensor, "*b n d"], context: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        gate = torch.sigmoid(self.of_input(tokens) + self.of_context(context))
        return gate * tokens + (1 - gate) * context


@register(
    name="directional-self-attention",
    zh="有向自注意力（DiSA）",
    path="general/mechanism",
    equation="c_if = Σ_{j<i} softmax_j(c tanh((W1 h_i + W2 h_j + b)_f / c)) h_jf,  o = g h + (1−g) c",
    paper="Shen et al., DiSAN: Directional Self-Attention Network for RNN/CNN-Free Language Understanding, AAAI 2018",
    year=2018,
    time="N² d activations",
    memory="linear (blockwise); N² d dense",
    choose="encoding short texts without recurrence, where the order of words matters",
    avoid="long sequences: every pair costs d activations",
)
class DirectionalSelfAttention(nn.Module):
    r"""DiSAN's block (Shen et al. 2018, https://arxiv.org/abs/1709.04696).

    $$h = \mathrm{elu}(W_h x + b_h), \qquad c_{if} = \sum_{j \in \Omega_i} a_{ijf} h_{jf}, \qquad
      a_{ijf} = \mathrm{softmax}_j\big(c \tanh((W_1 h_i + W_2 h_j + b)_f / c)\big), \qquad o = g \odot h + (1 - g) \odot c$$

    with $\Omega_i$ the tokens before $i$ (`forward`), after it (`backward`), or all but itself (`both`).

    Args:
        dim: width of the tokens.
        features: width of the result; `dim` when not given.
        direction: `"forward"`, `"backward"` or `"both"`; DiSAN concatenates the first two.
        bound: $c$, the bound of the scores.
        align: an alignment in place of softmax; with a direction one that decides each row by itself.

    Example:
        >>> DirectionalSelfAttention(6, direction="forward")(torch.randn(2, 5, 6)).shape
        torch.Size([2, 5, 6])
    """

    def __init__(
        self,
        dim: int,
        features: int | None = None,
        direction: str = "both",
        bound: float = 5.0,
        align: Alignment | None = None,
    ) -> None:
        super().__init__()
        if direction not in _DIRECTIONS:
            raise ValueError(refusal("direction", repr(direction), f"one of {', '.join(_DIRECTIONS)}"))
        features = width("dim", dim) if features is None else width("features", features)
        self.direction = direction
        self.input = nn.Linear(width("dim", dim), features)
        self.attention = Attention(TokenToToken(features, c=bound), Soft() if align is None else align)
        # Pairs that are selected read the mean of all where they are not; ReSA says so.
        if direction != "both" and not isinstance(align, ReinforcedPairs):
            refuse_together(self.attention)
        self.gate = FusionGate(features)

    def forward(
        self, tokens: Float[Tensor, "*b n d"], mask: Bool[Tensor, "*b n"] | None = None
    ) -> Float[Tensor, "*b n f"]:
        """Encode tokens; those that the mask calls False are neither read nor written."""
        others: Mask = Where(_apart) if self.direction == "both" else Directional(self.direction)
        tokens, mask = masked_input(tokens, mask, "tokens", self.input.in_features)
        if mask is not None:
            others = others & Keys(mask) & mask.unsqueeze(-1)
        hidden = F.elu(self.input(tokens))
        fused: Tensor = self.gate(hidden, self.attention(hidden, hidden, mask=others))
        return fused if mask is None else where(mask.unsqueeze(-1), fused, 0.0)


def _apart(i: Tensor, j: Tensor) -> Tensor:
    return i != j


@register(
    name="reinforced-self-attention",
    zh="强化自注意力（ReSA）",
    path="general/mechanism",
    equation="M_ij = [z^h_i = z^d_j = 1, i ≠ j],  c = DiSA under M",
    paper="Shen et al., Reinforced Self-Attention Network: a Hybrid of Hard and Soft Attention, IJCAI 2018",
    year=2018,
    time="N² d activations",
    memory="linear (blockwise)",
    choose="few dependencies between tokens matter, and they should be selected outright",
    avoid="no reward to train the selection with",
)
class ReinforcedSelfAttention(DirectionalSelfAttention):
    r"""ReSAN's block (Shen et al. 2018, https://arxiv.org/abs/1801.10296).

    Directional self-attention between selected tokens: two policies choose which tokens attend, $z^h$, and which are
    attended, $z^d$,

    $$M_{ij} = [z^h_i = z^d_j = 1, \; i \ne j]$$

    A token that does not attend reads the mean of all. `regard.reinforce(trace, reward)` trains the policies; with
    everything selected this is `DirectionalSelfAttention`.

    Args:
        dim: width of the tokens.
        features: width of the result; `dim` when not given.
        direction: `"forward"`, `"backward"` or `"both"`.
        bound: $c$, the bound of the scores.
        context: let the policies see the mean of the tokens.

    Example:
        >>> ReinforcedSelfAttention(6)(torch.randn(2, 5, 6)).shape
        torch.Size([2, 5, 6])
    """

    def __init__(
        self,
        dim: int,
        features: int | None = None,
        direction: str = "both",
        bound: float = 5.0,
        context: bool = False,
    ) -> None:
        pairs = ReinforcedPairs(dim if features is None else features, context=context)
        super().__init__(dim, features, direction, bound, pairs)

    @property
    def selecting(self) -> bool:
        """Whether the policies decide; False takes every token, as at the start of training."""
        return self.attention.align.selecting  # type: ignore[return-value]

    @selecting.setter
    def selecting(self, value: bool) -> None:
        self.attention.align.selecting = value  # type: ignore[assignment]
