"""Vectors of token numbers."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard._errors import refusal
from regard.general.scores.base import width
from regard.ops.fill import kept_rows


class Embedding(nn.Module):
    """Vectors of token numbers, random or given.

    Args:
        count: number of tokens.
        dim: width; that of `vectors` where they are given.
        vectors: (count, dim), pretrained.
        freeze: leave them as they are.
        dropout: share of the numbers that are dropped while training.

    Example:
        >>> import torch
        >>> Embedding(20, 8)(torch.tensor([[3, 5, 0]])).shape
        torch.Size([1, 3, 8])
    """

    fills_padding = True
    # A mask says where zeros go, and nothing else.
    only_fills_padding = True

    def __init__(
        self,
        count: int,
        dim: int | None = None,
        vectors: Float[Tensor, "v d"] | None = None,
        freeze: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if vectors is None:
            if dim is None:
                raise ValueError(refusal("dim", None, "a width, or vectors"))
            self.table = nn.Embedding(width("count", count), width("dim", dim))
        else:
            if vectors.dim() != 2 or len(vectors) != count or dim not in (None, vectors.shape[1]):
                expected = f"({count}, {'d' if dim is None else dim})"
                raise ValueError(refusal("vectors", f"shape {tuple(vectors.shape)}", expected))
            self.table = nn.Embedding.from_pretrained(vectors.clone(), freeze=freeze)
        self.out_dim = self.table.embedding_dim
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Int[Tensor, "*b n"], mask: Bool[Tensor, "*b n"] | None = None) -> Float[Tensor, "*b n d"]:
        """Vectors (..., N, d); zero where the mask is False."""
        if tokens.dtype.is_floating_point:
            raise TypeError(refusal("tokens", f"a tensor of {tokens.dtype}", "whole numbers"))
        vectors: Tensor = self.dropout(self.table(tokens))
        return kept_rows(vectors, mask)
