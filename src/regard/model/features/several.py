"""Several embeddings of the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard._errors import refusal
from regard.feature.meta_embedding import MetaEmbedding
from regard.model.features.embedding import Embedding


class Embeddings(nn.Module):
    r"""Several tables of vectors, each token's read by attention over them (Kiela et al. 2018, https://arxiv.org/abs/1804.07983).

    $$f_n = \sum_i a_i(x_n)\, (W_i E^{(i)}_{x_n} + b_i)$$

    The joining is `MetaEmbedding`; its weights are at `join.attention` under a trace. A table that lacks a token weighs nothing there; a
    token that all lack is zero.

    Args:
        tables: `Embedding`s over the same token numbers, of any widths.
        dim: width of the result.
        known: for each table which tokens it has, booleans (count,), or None for all.
        **options: of `MetaEmbedding`, such as `align`, `contextual`.

    Example:
        >>> embed = Embeddings([Embedding(20, 8), Embedding(20, 5)], dim=6)
        >>> embed(torch.tensor([[3, 5, 0]])).shape
        torch.Size([1, 3, 6])
    """

    known: Tensor

    def __init__(
        self,
        tables: Sequence[Embedding],
        dim: int,
        known: Sequence[Bool[Tensor, " v"] | None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        tables = list(tables)
        if not tables or not all(isinstance(table, Embedding) for table in tables):
            raise TypeError(refusal("tables", [type(table).__name__ for table in tables], "at least one Embedding"))
        counts = [table.table.num_embeddings for table in tables]
        if len(set(counts)) > 1:
            raise ValueError(refusal("tables", f"tables of {counts} tokens", "one for the same tokens each"))
        given = [None] * len(tables) if known is None else list(known)
        if len(given) != len(tables):
            raise ValueError(
                refusal("known", f"{len(given)} of them", f"one, or None, for each of {len(tables)} tables")
            )
        for has in given:
            if has is not None and (has.dtype != torch.bool or has.shape != (counts[0],)):
                got = f"{has.dtype}, shape {tuple(has.shape)}"
                raise ValueError(refusal("known", got, f"booleans ({counts[0]},), or None"))
        self.tables = nn.ModuleList(tables)
        every = torch.ones(counts[0], dtype=torch.bool)
        self.register_buffer("known", torch.stack([every if has is None else has for has in given]))
        self.join = MetaEmbedding([table.out_dim for table in tables], dim, **options)
        self.out_dim = dim

    def forward(self, tokens: Int[Tensor, "*b n"], mask: Bool[Tensor, "*b n"] | None = None) -> Float[Tensor, "*b n d"]:
        """Vectors (..., N, dim); zero where the mask is False."""
        has = [known[tokens] if mask is None else known[tokens] & mask for known in self.known]
        joined: Tensor = self.join([table(tokens) for table in self.tables], has)
        return joined
