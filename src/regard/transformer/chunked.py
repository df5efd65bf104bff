"""A feed-forward map that never holds the hidden units of a whole sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.general.scores.base import width
from regard.ops.dispatch import wants_dense
from regard.transformer.feedforward import FeedForward


class ChunkedFeedForward(FeedForward):
    r"""$\mathrm{FFN}(x) = W_2\, \mathrm{act}(W_1 x + b_1) + b_2$, some tokens at a time (Kitaev et al. 2020, https://arxiv.org/abs/2001.04451).

    The same function as `FeedForward`, with hidden units of `chunk` tokens of a sequence in memory instead of all N: the backward
    computes them again, chunk by chunk.

    Args:
        dim: width of a token.
        hidden_dim: width in between.
        activation: as in `FeedForward`.
        dropout: probability of dropping a hidden unit while training.
        bias: have $b_1$ and $b_2$.
        chunk: how many tokens of each sequence at a time.

    Example:
        >>> ChunkedFeedForward(6, 24, chunk=2)(torch.randn(2, 5, 6)).shape
        torch.Size([2, 5, 6])
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        dropout: float = 0.0,
        bias: bool = True,
        *,
        chunk: int = 1024,
    ) -> None:
        super().__init__(dim, hidden_dim, activation, dropout, bias)
        self.chunk = width("chunk", chunk)

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        plain = super().forward
        # Recomputing has no second derivative, and a compiler decides by itself what to keep.
        if x.shape[-2] <= self.chunk or wants_dense() or torch.compiler.is_compiling():
            return plain(x)
        if not torch.is_grad_enabled():
            return torch.cat([plain(part) for part in x.split(self.chunk, -2)], -2)
        random = self.training and self.dropout > 0.0
        parts = [
            checkpoint(plain, part, use_reentrant=False, preserve_rng_state=random) for part in x.split(self.chunk, -2)
        ]
        return torch.cat(parts, -2)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, chunk={self.chunk}"
