r"""The two forms that every score reduces to, after projecting queries and keys once.

$$\text{bilinear:}\quad E_{ij} = \mathrm{act}(s\, q_i \cdot k_j + o) + \beta_i + \gamma_j \qquad
  \text{additive:}\quad E_{ijf} = \sum_d W_{df}\, \mathrm{act}(a_{id} + u_{jd})$$

A form holds tensors and an activation, never modules. `scores(i)` is the equation, `tiled(i)` the same without the
queries x keys x hidden tensor. Both give (..., [F], len(i), N), keys last, in float32 or wider.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.ops.activations import Activation
from regard.ops.additive import additive_scores, why_not_by_kernel
from regard.ops.places import taken

WIDE = (torch.float32, torch.float64)


def wide(x: Tensor) -> Tensor:
    """At least float32: scores and softmax statistics are never kept in half precision."""
    return x if x.dtype in WIDE else x.to(torch.promote_types(x.dtype, torch.float32))


def product(x: Tensor, y: Tensor, plus: Tensor | None = None) -> Tensor:
    """Matrix product of the last two axes, plus something. Without broadcasting it goes to the library's batched product at once."""
    if x.dim() == y.dim() == 3 and x.shape[0] == y.shape[0]:
        return torch.bmm(x, y) if plus is None else torch.baddbmm(plus, x, y)
    return x @ y if plus is None else x @ y + plus


def common_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that all broadcast to. Most are equal, and the library's own function costs more than a small product."""
    known = [shape for shape in shapes if len(shape) > 0]
    if all(shape == known[0] for shape in known):
        return tuple(known[0]) if known else ()
    return tuple(torch.broadcast_shapes(*known))


@dataclass(frozen=True)
class BilinearForm:
    """One dot product a pair; `multi` says that a feature axis stands before the query and key axes."""

    query: Tensor  # (..., [F], Nq, d)
    key: Tensor  # (..., [F or 1], N, d)
    scale: float = 1.0
    activation: Activation | None = None
    offset: Tensor | None = None  # inside the activation, broadcasts to (..., [F], 1, 1)
    query_bias: Tensor | None = None  # (..., Nq), outside; constant along keys
    key_bias: Tensor | None = None  # (..., N), outside
    multi: bool = False

    @property
    def lead(self) -> tuple[int, ...]:
        axes = -3 if self.multi else -2
        query, key = self.query.shape[:axes], self.key.shape[:axes]
        return key if query == key else common_shape(query, key)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.query.shape[-2], self.key.shape[-2]

    @property
    def features(self) -> int | None:
        return self.query.shape[-3] if self.multi else None

    @property
    def is_plain(self) -> bool:
        """Whether a fused dot-product attention computes it, up to a constant of each row."""
        return not self.multi and (self.activation is None or self.activation.is_identity)

    @property
    def row_elements(self) -> int:
        """Numbers that one query row needs at once, per leading index."""
        return self.key.shape[-2] * (self.features or 1)

    def scores(self, i: range) -> Tensor:
        query = taken(self.query, i, -2)
        offset = None if self.offset is None else wide(self.offset)
        if self.scale == 1.0:
            e = product(wide(query), wide(self.key).mT, offset)
        else:
            e = product(wide(query), wide(self.key).mT) * self.scale
            e = e if offset is None else e + offset
        if self.activation is not None:
            e = self.activation.function(e)
        if self.query_bias is not None:
            e = e + taken(self.query_bias, i, -1)[..., None]
        if self.key_bias is not None:
            e = e + self.key_bias[..., None, :]
        return e

    tiled = scores


@dataclass(frozen=True)
class AdditiveForm:
    """One activation a hidden unit and pair; `weight` None means that the hidden units are the features."""

    a: Tensor  # (..., Nq, D)
    u: Tensor  # (..., N, D)
    weight: Tensor | None  # (..., D) single, (..., D, F) multi-dimensional
    activation: Activation
    multi: bool = False

    @property
    def lead(self) -> tuple[int, ...]:
        query, key = self.a.shape[:-2], self.u.shape[:-2]
        weight = () if self.weight is None else self.weight.shape[: -2 if self.multi else -1]
        return tuple(key) if query == key and len(weight) == 0 else common_shape(query, key, weight)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.a.shape[-2], self.u.shape[-2]

    @property
    def features(self) -> int | None:
        if not self.multi:
            return None
        return self.a.shape[-1] if self.weight is None else self.weight.shape[-1]

    @property
    def is_plain(self) -> bool:
        return False

    @property
    def dtype(self) -> torch.dtype:
        """One floating dtype for all operands: autocast may have projected in half precision."""
        found = torch.promote_types(self.a.dtype, self.u.dtype)
        return found if self.weight is None else torch.promote_types(found, self.weight.dtype)

    def why_not_by_kernel(self, device: str) -> str | None:
        """The reason why no kernel computes `tiled` on a type of device, or None."""
        return why_not_by_kernel(device, self.dtype, math.prod(self.lead), self.features or 1, self.activation.known)

    @property
    def row_elements(self) -> int:
        kept = self.features or 1
        # An unknown activation has no tiled operator: its hidden layer stands in memory, panel by panel.
        if self.weight is not None and self.activation.derivative is None:
            kept = max(kept, self.a.shape[-1])
        return self.u.shape[-2] * kept

    def scores(self, i: range) -> Tensor:
        a, u = wide(taken(self.a, i, -2)), wide(self.u)
        hidden = a[..., :, None, :] + u[..., None, :, :]
        # The largest of all tensors here is written over where that is what autograd would keep anyway.
        hidden = hidden.tanh_() if self.activation.known == "tanh" else self.activation.function(hidden)
        if self.weight is None:
            return hidden.movedim(-1, -3)
        weight = wide(self.weight)
        if self.multi:
            # Without heads one large product, not one for each leading entry.
            return (hidden @ (weight if weight.dim() == 2 else weight[..., None, :, :])).movedim(-1, -3)
        return hidden @ weight if weight.dim() == 1 else (hidden @ weight[..., None, :, None]).squeeze(-1)

    @property
    def by_operator(self) -> bool:
        """Whether an operator of ours computes `tiled`."""
        return self.weight is not None and self.activation.derivative is not None

    def tiled(self, i: range) -> Tensor:
        if self.weight is None or not self.by_operator:
            return self.scores(i)
        a = taken(self.a, i, -2)
        weight = self.weight if self.multi else self.weight[..., None]
        dtype = self.dtype
        scores: Tensor = additive_scores(a.to(dtype), self.u.to(dtype), weight.to(dtype), self.activation.spec)
        return scores if self.multi else scores.squeeze(-3)


Form = BilinearForm | AdditiveForm
