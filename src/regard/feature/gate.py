"""Attention gates: coarse features decide, place by place, how much of the fine ones passes."""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.meta_embedding import SigmoidGate
from regard.feature.parts import AlignLike, ScoreLike, attentions, masked_inputs, pair_of_widths, real


@register(
    name="attention-gate",
    zh="注意力门",
    path="feature/levels",
    equation="a_i = σ(ψ · relu(W_x x_i + W_g g_i + b) + b_ψ),  x̂_i = a_i x_i",
    paper="Oktay et al., Attention U-Net: Learning Where to Look for the Pancreas, MIDL 2018",
    year=2018,
    time="N d_h (d_x + d_g)",
    memory="linear",
    choose="fine features are handed on beside coarse ones that know what matters where: skip connections of a U-Net",
    avoid="places must look at other places (self-attention): a gate sees its own place alone",
)
class AttentionGate(nn.Module):
    r"""Let through what the coarse level asks for (Oktay et al. 2018, https://arxiv.org/abs/1804.03999).

    $$\alpha_i = \sigma\big(\psi \cdot \mathrm{relu}(W_x x_i + W_g g_i + b) + b_\psi\big), \qquad \hat x_i = \alpha_i\, x_i$$

    It is attention with one key for each query: $g_i$ asks, $x_i$ is the only key and value, and a sigmoid in place of the softmax,
    which over a single key would be one, says how much of it is read. Places need not be of a grid; the coarse features have been
    brought to as many of them. Under a trace the weights are at `attention`, (..., N, 1, 1). A place that is not real is zero.

    Args:
        dim: width of the fine and of the coarse features, one number for both or one for each.
        score: of a coarse and a fine feature; the additive one with a relu when not given. A name, a class, a function of the
            widths of query and key, or a ready-made score.
        align: of the single key; the sigmoid when not given.
        **options: arguments of a score and an alignment given by name, such as `hidden_dim`; `dropout`, `impl`.

    Example:
        >>> import torch
        >>> gate = AttentionGate((6, 4), hidden_dim=5)
        >>> gate(torch.randn(2, 7, 6), torch.randn(2, 7, 4)).shape
        torch.Size([2, 7, 6])
    """

    def __init__(
        self, dim: int | tuple[int, int], *, score: ScoreLike = "additive", align: AlignLike = None, **options: Any
    ) -> None:
        super().__init__()
        d_x, d_g = self.widths = pair_of_widths(dim)
        if score == "additive":
            options = {"hidden_dim": max(1, d_x // 2), "activation": "relu", **options}
        given = SigmoidGate if align is None else align
        self.attention = attentions({"attention": (d_g, d_x)}, score, given, options)["attention"]

    def forward(
        self,
        x: Float[Tensor, "*b n dx"],
        gate: Float[Tensor, "*b n dg"],
        mask: Bool[Tensor, "*_ n"] | None = None,
    ) -> Float[Tensor, "*b n dx"]:
        """Fine features, weighed.

        Args:
            x: (..., N, d_x), the fine features.
            gate: (..., N, d_g), the coarse ones of the same places.
            mask: True for real places, (..., N).
        """
        (x, gate), (mask, _) = masked_inputs(
            {"x": x, "gate": gate}, None if mask is None else (mask, mask), self.widths
        )
        if gate.shape[:-1] != x.shape[:-1]:
            fix = "Fix: interpolate the coarse features to as many places."
            raise ValueError(
                refusal("gate", f"shape {tuple(gate.shape)}", f"the places {tuple(x.shape[:-1])} of x", fix)
            )
        allowed = None if mask is None else real(mask.unsqueeze(-1))
        passed: Tensor = self.attention(gate.unsqueeze(-2), x.unsqueeze(-2), mask=allowed)
        return passed.squeeze(-2)
