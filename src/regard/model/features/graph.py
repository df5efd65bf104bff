"""Nodes described by counts."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.feature.parts import masked_input
from regard.general.scores.base import width
from regard.ops.fill import kept_rows


class GraphFeatures(nn.Module):
    r"""Bags of words of nodes, as shares: $f_i = W\, \mathrm{dropout}(x_i / \sum_d x_{id})$, with or without $W$.

    A node without words stays zero. What GCN and GAT begin with (Kipf & Welling 2017, https://arxiv.org/abs/1609.02907).

    Args:
        dim: number of words.
        out_dim: width of a feature; None for the shares themselves.
        dropout: of the shares, while training.

    Example:
        >>> import torch
        >>> GraphFeatures(3)(torch.tensor([[1.0, 0.0, 3.0], [0.0, 0.0, 0.0]]))
        tensor([[0.2500, 0.0000, 0.7500],
                [0.0000, 0.0000, 0.0000]])
    """

    def __init__(self, dim: int, out_dim: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.dim = width("dim", dim)
        self.dropout = nn.Dropout(dropout)
        self.linear = None if out_dim is None else nn.Linear(dim, width("out_dim", out_dim), bias=False)
        self.out_dim = dim if out_dim is None else out_dim

    def forward(self, x: Float[Tensor, "*b n d"], mask: Bool[Tensor, "*_ n"] | None = None) -> Float[Tensor, "*b n df"]:
        """Features (..., N, out_dim) of counts (..., N, dim); zero where the mask is False."""
        x, mask = masked_input(x, mask, "x", self.dim)
        total = x.sum(-1, keepdim=True)
        shares: Tensor = self.dropout(x / total.where(total != 0, 1.0))
        return kept_rows(shares if self.linear is None else self.linear(shares), mask)
