"""What a layer does with each token by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.general.scores.base import matrix, width, zeros
from regard.ops.activations import activation as resolve
from regard.ops.parallel.dropping import dropped_by_place
from regard.ops.parallel.ranks import current


class FeedForward(nn.Module):
    r"""Two maps with an activation between them: $\mathrm{FFN}(x) = W_2\, \mathrm{act}(W_1 x + b_1) + b_2$.

    Args:
        dim: width of a token.
        hidden_dim: width in between.
        activation: `"relu"`, `"gelu"` or another name, or a function.
        dropout: probability of dropping a hidden unit while training.
        bias: have $b_1$ and $b_2$.

    Example:
        >>> import torch
        >>> FeedForward(6, 24)(torch.randn(2, 5, 6)).shape
        torch.Size([2, 5, 6])
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        dim, hidden = width("dim", dim), width("feedforward_dim", hidden_dim)
        self.W1, self.W2 = matrix(hidden, dim), matrix(dim, hidden)
        self.b1, self.b2 = (zeros(hidden) if bias else None), (zeros(dim) if bias else None)
        self.activation = resolve(activation)
        self.dropout = probability("dropout", dropout)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        hidden = self.activation(F.linear(x, self.W1, self.b1))
        return F.linear(dropped(hidden, self.dropout, self.training), self.W2, self.b2)

    def extra_repr(self) -> str:
        return f"{self.W2.shape[0]}, {self.W1.shape[0]}, {self.activation.spec!r}, dropout={self.dropout}"


def hidden_width(dim: int, given: int | None) -> int:
    """The width inside a feed-forward map: four times that of the tokens when not given."""
    return 4 * dim if given is None else width("feedforward_dim", given)


def dropped(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout, or x itself where nothing is dropped: asking the library for that is the cost of a small operation."""
    if not training or p == 0.0:
        return x
    return F.dropout(x, p) if current() is None else dropped_by_place(x, p)


def probability(name: str, value: float) -> float:
    """Check a probability."""
    if not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise ValueError(refusal(name, repr(value), "a probability, from 0 to 1"))
    return float(value)
