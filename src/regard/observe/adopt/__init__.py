"""`adopt`: let attention that others wrote be recorded and changed like our own.

An adopted attention computes the same function of the same parameters, through a `Call`. Weights, names and checkpoints
of the model stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

from regard._errors import refusal
from regard.general.attention import Attention
from regard.observe.adopt.multihead import adopt_torch, unadopt_torch

M = TypeVar("M", bound=nn.Module)
Undo = Callable[[], None]


def adopt(model: M) -> M:
    """Take over every `torch.nn.MultiheadAttention` and every Hugging Face attention inside a model, in place.

    `record`, `intervene` and `execution` then reach them, under their names in `named_modules()`. Outputs and gradients
    stay those of the model, with two exceptions: a row that may attend nothing reads zeros (torch: NaN or a mean), and
    dropout draws other numbers. torch's encoder leaves its inference fast path, for this model only.

    Args:
        model: holds `nn.MultiheadAttention`, alone or in `nn.Transformer…`, or is, or holds, a transformers model.

    Returns:
        The model.

    Example:
        >>> import torch, regard as rg
        >>> model = rg.adopt(nn.TransformerEncoderLayer(8, nhead=2, batch_first=True))
        >>> with rg.record(model) as trace:
        ...     output = model(torch.randn(3, 5, 8))
        >>> trace["self_attn"].weights.shape
        torch.Size([3, 2, 5, 5])
    """
    _adopt(model)
    return model


def unadopt(model: M) -> M:
    """Give an adopted model back to itself, in place."""
    unadopt_torch(model)
    if "transformers" in sys.modules:
        from regard.observe.adopt.huggingface import unadopt_transformers

        unadopt_transformers(model)
    return model


@contextmanager
def adopted(model: M) -> Iterator[M]:
    """Adopt what is not yet adopted, for as long as the block runs.

    Example:
        >>> import torch, regard as rg
        >>> attention, x = nn.MultiheadAttention(8, num_heads=2), torch.randn(5, 3, 8)
        >>> with rg.adopted(attention), rg.intervene(attention, "uniform"):
        ...     output, weights = attention(x, x, x)
        >>> torch.allclose(weights, torch.full((3, 5, 5), 0.2))
        True
        >>> type(attention) is nn.MultiheadAttention
        True
    """
    undo = _adopt(model)
    try:
        yield model
    finally:
        for one in reversed(undo):
            one()


def _adopt(model: nn.Module) -> list[Undo]:
    """Adopt, and tell how to undo what was done now."""
    if not isinstance(model, nn.Module):
        raise TypeError(refusal("model", type(model).__name__, "a torch.nn.Module"))
    undo, found = adopt_torch(model)
    # A model of transformers cannot be there before its package is.
    if "transformers" in sys.modules:
        from regard.observe.adopt.huggingface import adopt_transformers

        more, others = adopt_transformers(model)
        undo, found = [*undo, *more], found + others
    if not found and not any(isinstance(part, Attention) for part in model.modules()):
        expected = "a model that holds torch.nn.MultiheadAttention or is one of transformers"
        raise ValueError(refusal("model", type(model).__name__, expected))
    return undo
