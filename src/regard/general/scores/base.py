"""What every score is: a module with parameters named as in its formula, that reduces to a form."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.ops.dispatch import autocasting
from regard.ops.forms import AdditiveForm, BilinearForm, Form

Heads = int | tuple[int, ...]


def head_axes(heads: Heads) -> tuple[int, ...]:
    """Leading axes of the parameters: none for a single head."""
    axes = (heads,) if isinstance(heads, int) else tuple(heads)
    if any(size < 1 for size in axes):
        raise ValueError(refusal("heads", heads, "numbers >= 1"))
    return axes


def width(name: str, value: int) -> int:
    """Check a width."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(refusal(name, repr(value), "a whole number >= 1"))
    return value


def matrix(*shape: int) -> nn.Parameter:
    """A Glorot-uniform matrix in the last two axes."""
    bound = math.sqrt(6 / (shape[-1] + shape[-2]))
    return nn.Parameter(torch.empty(*shape).uniform_(-bound, bound))


def vector(*shape: int) -> nn.Parameter:
    """A uniform vector in the last axis, scaled so that a product with it keeps its size."""
    bound = math.sqrt(3 / shape[-1])
    return nn.Parameter(torch.empty(*shape).uniform_(-bound, bound))


def zeros(*shape: int) -> nn.Parameter:
    """A bias; that of a single number is a vector of one, since what spreads parameters over processes splits an axis."""
    return nn.Parameter(torch.zeros(shape))


def affine(x: Tensor, W: Tensor, b: Tensor) -> Tensor:
    """W x + b for vectors x (..., N, d); W and b may have leading axes."""
    # One operation where it gives the same dtype: under autocast the sum with b is as wide as b.
    if W.dim() == 2 and x.dtype == W.dtype == b.dtype and not autocasting(x.device):
        return F.linear(x, W, b)
    return x @ W.mT + b.unsqueeze(-2)


def before(part: nn.Module, *args: Tensor | None) -> None:
    """Run what was hooked before the forward of a part, which is asked in another way: pruning and norms of torch make parameters there."""
    for key, hook in part._forward_pre_hooks.items():
        if key in part._forward_pre_hooks_with_kwargs:
            hook(part, args, {})
        else:
            hook(part, args)


class Score(nn.Module):
    """How well a key answers a query, as a function of both.

    `reduce` projects queries and keys once and gives a form, which the executions know; calling a score gives its
    scores for all pairs, densely.
    """

    query_dim: int | None = None  # None: as wide as the key
    key_dim: int | None = None  # None: as wide as the query
    features: int | None = None  # scores per pair; None for a single-dimensional score
    head_shape: tuple[int, ...] = ()  # leading axes of the parameters
    is_activated = False  # whether there is an activation behind the products, which no library call computes
    needs_query = True

    def reduce(self, query: Tensor | None, key: Tensor) -> Form:
        """Project queries (..., Nq, d_q) and keys (..., N, d_k), and say what remains to be done for a pair."""
        raise NotImplementedError

    def forward(
        self, query: Float[Tensor, "*q nq dq"] | None, key: Float[Tensor, "*k n dk"]
    ) -> Float[Tensor, "*scores"]:
        """Scores (..., Nq, N), or (..., Nq, N, F) when multi-dimensional."""
        if query is None and self.needs_query:
            raise ValueError(refusal("query", None, f"a tensor: {type(self).__name__} compares queries with keys"))
        self.check_widths(query, key)
        form = self.reduce(query, key)
        scores = form.scores(range(form.sizes[0]))
        return scores.movedim(-3, -1) if form.multi else scores

    def check_widths(self, query: Tensor | None, key: Tensor) -> None:
        """Refuse widths that do not fit, naming the argument."""
        of_key = key.shape[-1]
        if self.key_dim is not None and of_key != self.key_dim:
            raise ValueError(refusal("key", f"width {of_key}", f"key_dim={self.key_dim}"))
        if query is None:
            return
        of_query, expected = query.shape[-1], self.query_dim
        if expected is not None and of_query != expected:
            raise ValueError(refusal("query", f"width {of_query}", f"query_dim={expected}"))
        if self.needs_query and expected is None and of_query != of_key:
            raise ValueError(
                refusal(
                    "query",
                    f"width {of_query}",
                    f"the width of the key, {of_key}",
                    "Fix: use General or Additive, which take different widths.",
                )
            )


__all__ = [
    "AdditiveForm",
    "BilinearForm",
    "Form",
    "Heads",
    "Score",
    "affine",
    "head_axes",
    "matrix",
    "vector",
    "width",
    "zeros",
]
