"""A sentence as the parts that an attention asks for: the target, and what stands left and right of it."""

from __future__ import annotations

import inspect

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.query import PooledQuery


def places(sentence: Tensor, place: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Which tokens of a sentence (B, N, d) are the target, left of it, right of it, and any of them; each (B, N).

    Example:
        >>> found = places(torch.zeros(1, 4, 2), torch.tensor([[1, 2]]), torch.tensor([[True, True, True, False]]))
        >>> {name: where[0].int().tolist() for name, where in found.items()}
        {'target': [0, 1, 0, 0], 'left': [1, 0, 0, 0], 'right': [0, 0, 1, 0], 'sentence': [1, 1, 1, 0]}
    """
    j = torch.arange(sentence.shape[-2], device=sentence.device)
    start, end = place[:, :1], place[:, 1:]
    real = torch.ones(sentence.shape[:-1], dtype=torch.bool, device=sentence.device) if mask is None else mask
    return {
        "target": (start <= j) & (j < end) & real,
        "left": (j < start) & real,
        "right": (end <= j) & real,
        "sentence": real,
    }


class AroundTarget(nn.Module):
    """Call an attention of several inputs with the parts of one sentence.

    The sentence is encoded as a whole, so that a part knows what stands beside it; each input of the attention is the whole sentence
    under the mask of its part. An attention of two inputs, `first` and `second`, reads the sentence and the target. A context may
    be empty: then its mask is.

    Args:
        attention: a module of `target`, `left` and `right`, or of `first` and `second`.

    Example:
        >>> import regard as rg
        >>> read = AroundTarget(rg.RotatoryAttention(4))
        >>> read(torch.randn(1, 5, 4), torch.tensor([[0, 2]])).shape  # nothing stands left of it
        torch.Size([1, 16])
    """

    NAMES = (("target", "left", "right"), ("first", "second"))

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        asked = inspect.signature(attention.forward).parameters
        self.names = next(names for names in self.NAMES if set(names) <= set(asked))

    @classmethod
    def fits(cls, attention: nn.Module) -> bool:
        """Whether an attention asks for such parts."""
        asked = set(inspect.signature(attention.forward).parameters)
        return any(set(names) <= asked for names in cls.NAMES)

    def forward(
        self, sentence: Float[Tensor, "b n d"], place: Int[Tensor, "b 2"], mask: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b dv"]:
        """What the attention reads; `place` is where the target starts and where it has ended."""
        of = places(sentence, place, mask)
        of |= {"first": of["sentence"], "second": of["target"]}
        context: Tensor = self.attention(*(sentence for _ in self.names), masks=tuple(of[name] for name in self.names))
        return context


class TargetQuery(nn.Module):
    r"""The mean of the target's features as the query of a sentence: $q = \mathrm{mean}_{j \in \text{target}} f_j$.

    Example:
        >>> TargetQuery()(torch.tensor([[[1.0], [2.0], [4.0]]]), torch.tensor([[1, 3]]))
        tensor([[3.]])
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = PooledQuery()

    def forward(
        self, sentence: Float[Tensor, "b n d"], place: Int[Tensor, "b 2"], mask: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b d"]:
        pooled: Tensor = self.pool(sentence, places(sentence, place, mask)["target"])
        return pooled
