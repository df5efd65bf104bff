"""Positions that are added to the tokens: sinusoids and learned vectors."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.general.scores.base import width
from regard.transformer.positions.base import AbsolutePosition, angles, wide_dtype


def sinusoids(
    positions: Int[Tensor, "*n"], dim: int, base: float = 10000.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Sines and cosines of each position, in turns: (..., dim)."""
    angle = angles(positions, dim, base, dtype)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :dim]


@register(
    name="positional-encoding",
    zh="位置编码（正弦）",
    path="query/position",
    equation="PE[p, 2i] = sin(p / 10000^{2i/d}),  PE[p, 2i+1] = cos(p / 10000^{2i/d})",
    paper="Vaswani et al., Attention Is All You Need, NeurIPS 2017",
    year=2017,
    time="N d",
    memory="N d",
    choose="the standard: nothing to learn, any length, and a shift is a rotation",
    avoid="lengths far beyond those of training (ALiBi), or only distances should matter (rotary, relative)",
)
class SinusoidalPosition(AbsolutePosition):
    r"""Sinusoids of falling frequency, added to the tokens (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

    $$\mathrm{PE}_{p, 2i} = \sin\big(p / 10000^{2i/d}\big), \qquad \mathrm{PE}_{p, 2i+1} = \cos\big(p / 10000^{2i/d}\big)$$

    $\mathrm{PE}_{p+k}$ is a rotation of $\mathrm{PE}_p$ that does not depend on $p$, so a linear map can look $k$ places back.

    Args:
        base: 10000 in the formula.

    Example:
        >>> SinusoidalPosition()(torch.zeros(1, 2, 4))[0, 1, :2].tolist() == [
        ...     torch.tensor(1.0).sin(),
        ...     torch.tensor(1.0).cos(),
        ... ]
        True
    """

    def __init__(self, base: float = 10000.0) -> None:
        super().__init__()
        if not base > 0:
            raise ValueError(refusal("base", base, "a number > 0"))
        self.base = float(base)

    def forward(self, tokens: Float[Tensor, "*b n d"], start: int = 0) -> Float[Tensor, "*b n d"]:
        n, d = tokens.shape[-2:]
        positions = torch.arange(start, start + n, device=tokens.device)
        return tokens + sinusoids(positions, d, self.base, wide_dtype(tokens.dtype)).to(tokens.dtype)

    def extra_repr(self) -> str:
        return f"base={self.base:g}"


@register(
    name="learned-position",
    zh="可学习位置编码",
    path="query/position",
    equation="x_p + P_p,  P learned",
    paper="Gehring et al., Convolutional Sequence to Sequence Learning, ICML 2017",
    year=2017,
    time="N d",
    memory="N d",
    choose="a fixed largest length and enough data: each place gets the vector that serves best",
    avoid="inputs may be longer than any of training: there is no vector for them",
)
class LearnedPosition(AbsolutePosition):
    r"""A learned vector for each place, added to the tokens (Gehring et al. 2017, https://arxiv.org/abs/1705.03122).

    $$x_p' = x_p + P_p, \qquad P \in \mathbb{R}^{L \times d}$$

    Args:
        dim: $d$, width of the tokens.
        length: $L$, the most places there are.

    Example:
        >>> LearnedPosition(4, length=10)(torch.randn(2, 7, 4)).shape
        torch.Size([2, 7, 4])
    """

    def __init__(self, dim: int, length: int = 512) -> None:
        super().__init__()
        self.P = nn.Parameter(0.02 * torch.randn(width("length", length), width("dim", dim)))

    def forward(self, tokens: Float[Tensor, "*b n d"], start: int = 0) -> Float[Tensor, "*b n d"]:
        end, length = start + tokens.shape[-2], len(self.P)
        if end > length:
            raise ValueError(refusal("tokens", f"{end} places", f"at most length={length}"))
        return tokens + self.P[start:end]

    def extra_repr(self) -> str:
        return f"length={self.P.shape[0]}, dim={self.P.shape[1]}"
