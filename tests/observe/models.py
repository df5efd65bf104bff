"""Small models that hold attention at some depth."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import regard as rg

DIM = 5


class Block(nn.Module):
    def __init__(self, align: str = "soft", **options: object) -> None:
        super().__init__()
        self.attention = rg.Attention("additive", align, query_dim=DIM, key_dim=DIM, hidden_dim=3, **options)
        self.output = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.output(self.attention(x, x, mask=mask))


class Model(nn.Module):
    """Two blocks and a pooling attention that is used twice."""

    def __init__(self, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Block(), Block("entmax")])
        self.pool = rg.Attention("query-free", key_dim=DIM, hidden_dim=3)
        self.checkpointing = checkpointing  # the reentrant kind or the other; None for neither

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.encoder:
            if self.checkpointing is None:
                x = block(x, mask)
            else:
                x = checkpoint(block, x, mask, use_reentrant=self.checkpointing)
        return self.pool(None, x) + self.pool(None, 2 * x)


PATHS = ["encoder.0.attention", "encoder.1.attention", "pool"]


def model(**options: object) -> Model:
    torch.manual_seed(0)
    return Model(**options).double()


def batch(n: int = 7) -> Tensor:
    return torch.randn(3, n, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
