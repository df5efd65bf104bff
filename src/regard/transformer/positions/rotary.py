"""Rotary positions: queries and keys are turned, by their place, before they are compared."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard._errors import refusal
from regard.catalog import register
from regard.general.scores import Additive, QueryFree, Score, TokenToToken
from regard.general.scores.base import BilinearForm
from regard.ops.parallel.ranks import shard_of
from regard.transformer.positions.base import RelativePosition, angles, wide_dtype


@register(
    name="rotary-position",
    zh="旋转位置编码",
    path="query/position",
    equation="e_ij = ⟨R_i q'_i, R_j k'_j⟩,  R_p turns pair t of coordinates by p θ_t,  θ_t = 10000^{−2t/d}",
    paper="Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021",
    year=2021,
    time="N d",
    memory="linear (fused)",
    choose="distances should matter and speed counts: nothing is added to the scores, every kernel still serves",
    avoid="additive scores, which have no product to turn (ALiBi, relative), or lengths far beyond those of training",
)
class RotaryPosition(RelativePosition):
    r"""Turn each pair of coordinates by an angle that grows with the place (Su et al. 2021, https://arxiv.org/abs/2104.09864).

    $$e_{ij} = \langle R_i q_i', R_j k_j' \rangle = \langle q_i', R_{j-i} k_j' \rangle, \qquad
      R_p = \mathrm{diag}\begin{pmatrix} \cos p\theta_t & -\sin p\theta_t \\ \sin p\theta_t & \cos p\theta_t \end{pmatrix}_t, \qquad
      \theta_t = 10000^{-2t/d}$$

    Here $q'$ and $k'$ are what a bilinear score compares after its own projections, so this goes with every score of that form and
    with no additive one. The pairs are neighbouring coordinates; their number is half of an even width.

    Args:
        base: 10000 in the formula.

    Example:
        >>> import regard as rg
        >>> attend = rg.Attention(RotaryPosition().score(rg.General(query_dim=3, key_dim=4)))
        >>> attend(torch.randn(2, 5, 3), torch.randn(2, 5, 4)).shape
        torch.Size([2, 5, 4])
    """

    def __init__(self, base: float = 10000.0) -> None:
        super().__init__()
        if not base > 0:
            raise ValueError(refusal("base", base, "a number > 0"))
        self.base = float(base)

    def score(self, score: Score) -> Score:
        return RotatedScore(score, self.base)

    def extra_repr(self) -> str:
        return f"base={self.base:g}"


class RotatedScore(Score):
    """A bilinear score whose projected queries and keys are turned by their places.

    Args:
        inner: the score.
        base: of the frequencies.
    """

    def __init__(self, inner: Score, base: float = 10000.0) -> None:
        super().__init__()
        if isinstance(inner, Additive | QueryFree | TokenToToken):
            raise ValueError(_no_product(inner))
        self.inner, self.base = inner, base
        self.query_dim, self.key_dim = inner.query_dim, inner.key_dim
        self.features, self.head_shape, self.needs_query = inner.features, inner.head_shape, inner.needs_query

    def reduce(self, query: Tensor | None, key: Tensor) -> BilinearForm:
        form = self.inner.reduce(query, key)
        if not isinstance(form, BilinearForm):
            raise ValueError(_no_product(self.inner))
        nq, n = form.sizes
        shard = shard_of(nq, n)
        first, place = (n - nq, 0) if shard is None else (shard.n - shard.nq + shard.first_query, shard.first_key)
        return replace(form, query=rotated(form.query, first, self.base), key=rotated(form.key, place, self.base))


def _no_product(score: Score) -> str:
    fix = "Fix: a bilinear score such as 'scaled-dot' or 'general'; or ALiBi or relative positions, which are biases."
    return refusal("position", f"rotary with {type(score).__name__}", "a score that is a product", fix)


def rotated(x: Tensor, start: int, base: float = 10000.0) -> Tensor:
    """Rows (..., N, d), the one at p turned by the angles of place start + p."""
    n, d = x.shape[-2:]
    if d % 2:
        fix = "Fix: heads of an even width."
        raise ValueError(refusal("position", f"rotary with queries and keys {d} wide", "an even width", fix))
    dtype = wide_dtype(x.dtype)
    angle = angles(torch.arange(start, start + n, device=x.device), d, base, dtype)
    cos, sin = angle.cos(), angle.sin()
    first, second = x.to(dtype).unflatten(-1, (d // 2, 2)).unbind(-1)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)
    return turned.to(x.dtype)
