"""Lite Transformer: attention for what is far, convolution for what is near."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.general.bound import Bound, BoundBand, BoundBoth
from regard.general.causal import refuse_together
from regard.general.masks import Mask
from regard.general.scores.base import matrix, vector, width, zeros
from regard.ops.fill import kept_rows
from regard.transformer.attention import TransformerAttention
from regard.transformer.sharing import Shared


class LightweightConvolution(nn.Module):
    r"""A convolution of each channel whose weights are a softmax, shared in groups (Wu et al. 2019, https://arxiv.org/abs/1901.10430).

    $$y_{i,c} = \sum_{t=1}^{k} \mathrm{softmax}(W_{\lceil cH/d \rceil})_t\; x'_{i + t - \lceil (k+1)/2 \rceil,\, c}, \qquad
      x' = \mathrm{GLU}(W_I x + b_I)$$

    and the result mapped by $W_O$. With `causal`, the window ends at the token.

    Args:
        dim: width of the tokens.
        heads: $H$, groups of channels that share weights.
        kernel: $k$, width of the window; odd unless causal.
        causal: whether a token sees no later one.

    Example:
        >>> LightweightConvolution(6, 2)(torch.randn(2, 5, 6)).shape
        torch.Size([2, 5, 6])
    """

    def __init__(self, dim: int, heads: int, kernel: int = 3, causal: bool = False) -> None:
        super().__init__()
        dim, heads, self.kernel, self.causal = width("dim", dim), width("heads", heads), width("kernel", kernel), causal
        if dim % heads:
            raise ValueError(refusal("heads", heads, f"a divisor of the width {dim}"))
        if kernel % 2 == 0 and not causal:
            raise ValueError(refusal("kernel", kernel, "an odd number, so that there is a middle"))
        self.W_I, self.b_I = matrix(2 * dim, dim), zeros(2 * dim)
        self.W = vector(heads, kernel)
        self.W_O, self.b_O = matrix(dim, dim), zeros(dim)

    def forward(self, tokens: Float[Tensor, "*b n d"], real: Tensor | None = None) -> Float[Tensor, "*b n d"]:
        """Update the tokens (..., N, d) by their neighbours; `real` (..., N) is False for padding."""
        if 0 in tokens.shape:
            return tokens
        x = kept_rows(F.glu(F.linear(tokens, self.W_I, self.b_I), -1), real)
        lead, (n, d) = x.shape[:-2], x.shape[-2:]
        before = self.kernel - 1 if self.causal else self.kernel // 2
        padded = F.pad(x.mT, (before, self.kernel - 1 - before)).reshape(-1, d, n + self.kernel - 1)
        weight = self.W.softmax(-1).repeat_interleave(d // len(self.W), 0).unsqueeze(1)
        mixed = F.conv1d(padded, weight.to(padded.dtype), groups=d).reshape(*lead, d, n).mT
        return F.linear(mixed, self.W_O, self.b_O)

    def extra_repr(self) -> str:
        return f"dim={self.W_O.shape[0]}, heads={len(self.W)}, kernel={self.kernel}, causal={self.causal}"


@register(
    name="lite-transformer",
    zh="Lite Transformer 长短程注意力",
    path="query/multiplicity",
    equation="[MHA(x_1 … x_{d/2}); lightconv(x_{d/2+1} … x_d)]",
    paper="Wu et al., Lite Transformer with Long-Short Range Attention, ICLR 2020",
    year=2020,
    time="N² d / 2 + N d² / 4 + N k d / 2",
    memory="linear (fused, blockwise)",
    choose="a small model: half the width attends to what is far, the other half mixes neighbours for little",
    avoid="there is width to spare, or every relation is long",
)
class LongShortAttention(nn.Module):
    r"""Half the channels attend, half are convolved (Wu et al. 2020, https://arxiv.org/abs/2004.11886).

    $$\mathrm{LSRA}(x) = \big[\mathrm{MHA}(x_{1:d/2});\; \mathrm{lightconv}(x_{d/2+1:d})\big]$$

    A part for the layers of a Transformer: `TransformerEncoder(dim, heads, attention=LongShortAttention)` is a Lite Transformer.
    Neither half sees the other's channels; the feed-forward map mixes them. Its parts are `far` and `near`.

    Args:
        dim: width of the tokens, an even number.
        heads: of the attention, and groups of the convolution.
        kernel: width of the convolution's window.
        causal: whether the convolution sees no later token; what the attention sees is for the mask to say, so
            alignments that are decided by all tokens together, whatever the mask, are refused.
        **options: of `TransformerAttention`, such as `score` and `position`.

    Example:
        >>> import regard as rg
        >>> encode = rg.TransformerEncoder(8, heads=2, layers=2, attention=LongShortAttention)
        >>> encode(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, dim: int, heads: int, kernel: int = 3, causal: bool = False, **options: Any) -> None:
        super().__init__()
        if width("dim", dim) % 2:
            raise ValueError(refusal("dim", dim, "an even number: two halves"))
        self.far = TransformerAttention(dim // 2, heads, **options)
        self.near = LightweightConvolution(dim // 2, heads, kernel, causal)
        if causal:
            refuse_together(self.far)

    def forward(self, tokens: Float[Tensor, "*b n d"], *, mask: Tensor | Mask | None = None) -> Float[Tensor, "*b n d"]:
        """Update the tokens (..., N, d).

        The convolution leaves out keys that the mask lets nobody attend: padding. What it would not obey is refused: `Packed`, and
        unless it is causal a mask such as `Causal()`. Of other masks it knows nothing.
        """
        far, near = tokens.chunk(2, -1)
        real = None
        if mask is not None:
            bound = mask.bound if isinstance(mask, Shared) else self.far._bind(mask, far, far, far)[0]
            if self.near.kernel > 1 and not self.near.causal and not _looks_ahead(bound):
                fix = "Fix: LongShortAttention(dim, heads, causal=True)."
                raise ValueError(refusal("causal", False, "True beside a mask that hides what is later", fix))
            if self.near.kernel > 1 and bound.origins(tokens.device) is not None:
                fix = "Fix: put them side by side, with a mask of the real tokens."
                expected = "one sequence, since the convolution mixes neighbours"
                raise ValueError(refusal("mask", "Packed, several sequences", expected, fix))
            real = bound.keys(tokens.device)
            if real is not None and real.dim() == tokens.dim():
                real = real.any(-2)
        return torch.cat([self.far(far, mask=mask), self.near(near, real)], -1)


def _looks_ahead(bound: Bound) -> bool:
    """Whether a mask may let a token see a later one."""
    if isinstance(bound, BoundBoth):
        return _looks_ahead(bound.left) and _looks_ahead(bound.right)
    return not isinstance(bound, BoundBand) or bound.high > 0
