"""Where a Synthesizer's scores come from: from one token each, from nothing, or from pairs after all."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.general.scores.base import matrix, width, zeros
from regard.query.multi_head import split_heads
from regard.query.parts import widths
from regard.transformer.positions import StreamedBias


class Synthesis(NamedTuple):
    """Scores of all heads: products of rows, and a bias; one of them may be missing.

    The products are of `left` (..., H, N, r) and `right` (..., H, N, r).
    """

    left: Tensor | None = None
    right: Tensor | None = None
    bias: StreamedBias | None = None


class Synthesizing(nn.Module):
    """A way to score every place for every token."""

    length: int | None = None  # the most tokens there are; None for any number

    def forward(self, asking: Float[Tensor, "*b n d"], read: Float[Tensor, "*b n d"]) -> Synthesis:
        """Scores for tokens that ask and tokens that are read: the same, but for what a mask has zeroed in each."""
        raise NotImplementedError


class DenseSynthesis(Synthesizing):
    r"""Each token says by itself how much it wants of every place (Tay et al. 2021, https://arxiv.org/abs/2005.00743).

    $$S_i = W_2\, \mathrm{relu}(W_1 x_i + b_1) + b_2 \in \mathbb{R}^{L}$$

    Args:
        dim: width of the tokens.
        heads: each with parameters of its own.
        length: $L$, the most tokens there are.
        hidden_dim: width of the hidden layer; `dim` over `heads`, at least 1, when not given.

    Example:
        >>> x = torch.randn(2, 5, 8)
        >>> DenseSynthesis(8, heads=2, length=11)(x, x).right.shape
        torch.Size([2, 5, 5])
    """

    def __init__(self, dim: int, heads: int, length: int, hidden_dim: int | None = None) -> None:
        super().__init__()
        self.length = length
        hidden = width("hidden_dim", max(1, dim // heads) if hidden_dim is None else hidden_dim)
        self.W1, self.b1 = matrix(width("heads", heads), hidden, width("dim", dim)), zeros(heads, hidden)
        self.W2, self.b2 = matrix(heads, width("length", length), hidden), zeros(heads, length)

    def forward(self, asking: Float[Tensor, "*b n d"], read: Float[Tensor, "*b n d"]) -> Synthesis:
        n = asking.shape[-2]
        hidden = split_heads(asking, self.W1, self.b1).relu()
        # One more unit that is always on carries the biases of the places.
        left = torch.cat([hidden, torch.ones_like(hidden[..., :1])], -1)
        return Synthesis(left, torch.cat([self.W2, self.b2.unsqueeze(-1)], -1)[:, :n])

    def extra_repr(self) -> str:
        return f"length={self.length}, hidden_dim={self.W1.shape[1]}"


class FactorizedDenseSynthesis(Synthesizing):
    r"""Two short vectors of each token, multiplied out to all places (Tay et al. 2021, https://arxiv.org/abs/2005.00743).

    $$S_{ij} = \alpha_{i,\, j \bmod a}\; \beta_{i,\, \lfloor j / a \rfloor}, \qquad
      \alpha_i = W_2^A\, \mathrm{relu}(W_1^A x_i + b_1^A) + b_2^A \in \mathbb{R}^{a}, \qquad
      \beta_i \in \mathbb{R}^{b} \text{ likewise}, \qquad ab = L$$

    Args:
        dim: width of the tokens.
        heads: each with parameters of its own.
        length: $L$, the most tokens there are.
        factors: $a$ and $b$; the two that are nearest to each other when not given.
        hidden_dim: width of both hidden layers; `dim` over `heads`, at least 1, when not given.

    Example:
        >>> FactorizedDenseSynthesis(8, heads=2, length=12).factors
        (4, 3)
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        length: int,
        factors: tuple[int, int] | None = None,
        hidden_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.length = width("length", length)
        self.factors = _near_the_root(length) if factors is None else widths("factors", factors, 2)
        if math.prod(self.factors) != length:
            raise ValueError(refusal("factors", factors, f"two whose product is length={length}"))
        hidden = width("hidden_dim", max(1, dim // heads) if hidden_dim is None else hidden_dim)
        a, b = self.factors
        self.W1_A, self.b1_A = matrix(width("heads", heads), hidden, width("dim", dim)), zeros(heads, hidden)
        self.W1_B, self.b1_B = matrix(heads, hidden, dim), zeros(heads, hidden)
        self.W2_A, self.b2_A = matrix(heads, a, hidden), zeros(heads, a)
        self.W2_B, self.b2_B = matrix(heads, b, hidden), zeros(heads, b)

    def forward(self, asking: Float[Tensor, "*b n d"], read: Float[Tensor, "*b n d"]) -> Synthesis:
        alpha = _two_layers(asking, self.W1_A, self.b1_A, self.W2_A, self.b2_A)
        beta = _two_layers(asking, self.W1_B, self.b1_B, self.W2_B, self.b2_B)
        a = self.factors[0]

        def tile(i: Tensor, j: Tensor) -> Tensor:
            i, j = i.flatten(), j.flatten()
            rows = alpha.index_select(-2, i), beta.index_select(-2, i)
            return rows[0].index_select(-1, j % a) * rows[1].index_select(-1, j // a)

        return Synthesis(bias=StreamedBias(tile, tuple(alpha.shape[:-2]), alpha.requires_grad))

    def extra_repr(self) -> str:
        return f"length={self.length}, factors={self.factors}"


class RandomSynthesis(Synthesizing):
    r"""The same scores whatever the tokens are (Tay et al. 2021, https://arxiv.org/abs/2005.00743).

    $$S = R \in \mathbb{R}^{L \times L}$$

    Args:
        heads: each with a matrix of its own.
        length: $L$, the most tokens there are.
        trained: whether $R$ is learned, or stays as it was drawn.

    Example:
        >>> RandomSynthesis(heads=2, length=11, trained=False).R.requires_grad
        False
    """

    R: Tensor

    def __init__(self, heads: int, length: int, trained: bool = True) -> None:
        super().__init__()
        self.length = width("length", length)
        R = torch.randn(width("heads", heads), length, length)
        if trained:
            self.R = nn.Parameter(R)
        else:
            self.register_buffer("R", R)

    def forward(self, asking: Float[Tensor, "*b n d"], read: Float[Tensor, "*b n d"]) -> Synthesis:
        R = self.R

        def tile(i: Tensor, j: Tensor) -> Tensor:
            return R.index_select(-2, i.flatten()).index_select(-1, j.flatten())

        return Synthesis(bias=StreamedBias(tile, (len(R),), R.requires_grad))

    def extra_repr(self) -> str:
        return f"length={self.length}, trained={self.R.requires_grad}"


class FactorizedRandomSynthesis(Synthesizing):
    r"""The same scores whatever the tokens are, of low rank (Tay et al. 2021, https://arxiv.org/abs/2005.00743).

    $$S = R_1 R_2^\top, \qquad R_1, R_2 \in \mathbb{R}^{L \times k}$$

    Args:
        heads: each with matrices of its own.
        length: $L$, the most tokens there are.
        rank: $k$.

    Example:
        >>> sum(p.numel() for p in FactorizedRandomSynthesis(heads=2, length=11, rank=3).parameters())
        132
    """

    def __init__(self, heads: int, length: int, rank: int = 8) -> None:
        super().__init__()
        self.length = width("length", length)
        # Products of two such rows have unit variance.
        spread = width("rank", rank) ** -0.25
        self.R1 = nn.Parameter(spread * torch.randn(width("heads", heads), length, rank))
        self.R2 = nn.Parameter(spread * torch.randn(heads, length, rank))

    def forward(self, asking: Float[Tensor, "*b n d"], read: Float[Tensor, "*b n d"]) -> Synthesis:
        n = asking.shape[-2]
        return Synthesis(self.R1[:, :n], self.R2[:, :n])

    def extra_repr(self) -> str:
        return f"length={self.length}, rank={self.R1.shape[-1]}"


class DotSynthesis(Synthesizing):
    r"""The scaled dot product of pairs, for mixtures (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

    $$S_{ij} = \frac{W_Q x_i \cdot W_K x_j}{\sqrt{d}}$$

    Args:
        dim: width of the tokens.
        heads: each with projections of its own.
        head_dim: $d$; `dim` over `heads`, at least 1, when not given.

    Example:
        >>> x = torch.randn(2, 5, 8)
        >>> DotSynthesis(8, heads=2)(x, x).left.shape
        torch.Size([2, 2, 5, 4])
    """

    def __init__(self, dim: int, heads: int, head_dim: int | None = None) -> None:
        super().__init__()
        d = width("head_dim", max(1, dim // heads) if head_dim is None else head_dim)
        self.W_Q, self.W_K = matrix(width("heads", heads), d, width("dim", dim)), matrix(heads, d, dim)

    def forward(self, asking: Float[Tensor, "*b n d"], read: Float[Tensor, "*b n d"]) -> Synthesis:
        left = split_heads(asking, self.W_Q, None) / math.sqrt(self.W_Q.shape[1])
        return Synthesis(left, split_heads(read, self.W_K, None))

    def extra_repr(self) -> str:
        return f"heads={self.W_Q.shape[0]}, head_dim={self.W_Q.shape[1]}"


def _two_layers(x: Tensor, W1: Tensor, b1: Tensor, W2: Tensor, b2: Tensor) -> Tensor:
    """(..., N, d) to (..., H, N, places)."""
    result: Tensor = split_heads(x, W1, b1).relu() @ W2.mT + b2.unsqueeze(-2)
    return result


def _near_the_root(length: int) -> tuple[int, int]:
    """Two factors of a number, the larger one first, as near to each other as there are."""
    b = next(k for k in range(math.isqrt(length), 0, -1) if length % k == 0)
    return length // b, b
