"""Cross-modal query alignment: questions of two modalities in one space, and each reads the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.parts import AlignLike, attentions, masked_inputs, masked_mean, pair_of_widths
from regard.general.bound import Bound, Sizes
from regard.general.masks import Pairs
from regard.general.scores.base import matrix, width
from regard.ops.forms import wide
from regard.query.parts import Filled, operand, uncast
from regard.query.transport import sinkhorn

_SIDES = ("first", "second")


class Crossed(NamedTuple):
    """What each modality read of the other."""

    first: Float[Tensor, "*b n db"]
    second: Float[Tensor, "*b m da"]


def info_nce(
    first: Float[Tensor, "b d"], second: Float[Tensor, "b d"], temperature: float | Tensor = 0.07
) -> Float[Tensor, ""]:
    r"""The contrastive loss of pairs, both ways (van den Oord et al. 2018; Radford et al. 2021, https://arxiv.org/abs/2103.00020).

    $$L = -\frac{1}{2B} \sum_i \Big( \log \frac{e^{a_i \cdot b_i / \tau}}{\sum_j e^{a_i \cdot b_j / \tau}} +
      \log \frac{e^{a_i \cdot b_i / \tau}}{\sum_j e^{a_j \cdot b_i / \tau}} \Big)$$

    of unit vectors $a$, $b$. It is $\log B$ where pairs cannot be told apart.

    Args:
        first: one vector a row; the partner of each is in the same row of the other. They are brought to length one.
        second: likewise.
        temperature: $\tau > 0$.

    Example:
        >>> loss = info_nce(torch.eye(3), torch.eye(3), temperature=0.01)
        >>> bool(loss < 1e-6)
        True
    """
    if first.shape != second.shape or first.dim() != 2:
        got = f"shapes {tuple(first.shape)} and {tuple(second.shape)}"
        raise ValueError(refusal("first and second", got, "the same shape (B, d) twice"))
    if not isinstance(temperature, Tensor) and not 0 < temperature < math.inf:
        raise ValueError(refusal("temperature", temperature, "a finite number > 0"))
    with uncast(first.device):
        a, b = _unit(wide(first)), _unit(wide(second))
        logits = a @ b.mT / temperature
        target = torch.arange(len(a), device=a.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.mT, target)) / 2


@register(
    name="cross-modal-query-alignment",
    zh="跨模态查询对齐",
    path="query/emerging",
    equation="e_ij = cos(P_a q_i, P_b q'_j)/τ,  c_i = Σ_j align(e_i)_j q'_j,  both ways;  L = InfoNCE(P_a q̄, P_b q̄')",
    paper="after Radford et al. (CLIP), ICML 2021; Li et al. (BLIP-2), ICML 2023",
    year=2021,
    time="N M d + (N + M) d d_a",
    memory="linear (soft); N M (transport)",
    choose="two modalities describe the same things, and each should find its counterpart in the other",
    avoid="both inputs are of one kind and width: co-attention needs no space of its own",
)
class CrossModalAttention(nn.Module):
    r"""Bring two modalities into one space and let each read the other (after Radford et al. 2021, https://arxiv.org/abs/2103.00020).

    $$e_{ij} = \frac{1}{\tau} \cos(P_a q_i, P_b q'_j), \qquad c_i = \sum_j \mathrm{align}(e_i)_j\, q'_j, \qquad
      c'_j = \sum_i \mathrm{align}(e^\top_j)_i\, q_i$$

    `contrast` is the loss that makes the space: symmetric InfoNCE between the pooled queries $P_a \bar q$ and $P_b \bar q'$ of a batch of
    pairs. Sets are aligned by a softmax, or one to one by `Sinkhorn`; `transport` is what matching them costs. The attentions are `first`
    (queries of the first modality) and `second`; they share $\tau$, which is learned.

    Args:
        dim: width of the two modalities, one number for both or one for each.
        shared_dim: width of the common space.
        temperature: $\tau$ at the start.
        align: of both ways: a name, a class, a function without arguments, or a ready-made alignment without parameters.
        **options: arguments of an alignment given by name; `dropout`, `impl`.

    Example:
        >>> cross = CrossModalAttention((3, 5), shared_dim=4)
        >>> image, text = torch.randn(2, 7, 3), torch.randn(2, 11, 5)
        >>> [x.shape for x in cross(image, text)]
        [torch.Size([2, 7, 5]), torch.Size([2, 11, 3])]
        >>> cross.contrast(image, text).shape
        torch.Size([])
    """

    def __init__(
        self,
        dim: int | tuple[int, int],
        shared_dim: int,
        *,
        temperature: float = 0.07,
        align: AlignLike = None,
        **options: Any,
    ) -> None:
        super().__init__()
        first_dim, second_dim = pair_of_widths(dim)
        shared_dim = width("shared_dim", shared_dim)
        if not 0 < temperature < math.inf:
            raise ValueError(refusal("temperature", temperature, "a finite number > 0"))
        self.P_a, self.P_b = matrix(shared_dim, first_dim), matrix(shared_dim, second_dim)
        self.log_temperature = nn.Parameter(torch.tensor([float(temperature)]).log())
        built = attentions(dict.fromkeys(_SIDES, (shared_dim, shared_dim)), "dot", align, options)
        self.first, self.second = (built[name] for name in _SIDES)

    @property
    def temperature(self) -> Tensor:
        r"""$\tau$ as it is now."""
        return self.log_temperature[0].exp()

    def forward(
        self,
        first: Float[Tensor, "*b n da"],
        second: Float[Tensor, "*b m db"],
        masks: Sequence[Bool[Tensor, "..."] | None] | None = None,
    ) -> Crossed:
        """What each query read of the other modality: (..., n, d_b) and (..., m, d_a); `masks` are True for real ones."""
        (first, second), (real, other) = self._inputs(first, second, masks)
        a, b = _unit(first @ self.P_a.mT), _unit(second @ self.P_b.mT)
        sharpness = (-self.log_temperature).exp().to(a.dtype)
        of_second = self.first(a * sharpness, b, second, mask=_pairs(first, real, second, other))
        of_first = self.second(b * sharpness, a, first, mask=_pairs(second, other, first, real))
        return Crossed(of_second, of_first)

    def _inputs(
        self, first: Tensor, second: Tensor, masks: Sequence[Tensor | None] | None
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Both without what is not real, and what is."""
        found, real = masked_inputs({"first": first, "second": second}, masks)
        operand("first", found[0], self.P_a)
        operand("second", found[1], self.P_b)
        return found, real

    def contrast(
        self,
        first: Float[Tensor, "b n da"],
        second: Float[Tensor, "b m db"],
        masks: Sequence[Bool[Tensor, "..."] | None] | None = None,
    ) -> Float[Tensor, ""]:
        """Symmetric InfoNCE of a batch of pairs of sets."""
        (first, second), (real, other) = self._inputs(first, second, masks)
        a, b = masked_mean(first, real) @ self.P_a.mT, masked_mean(second, other) @ self.P_b.mT
        return info_nce(a, b, self.temperature)

    def transport(
        self,
        first: Float[Tensor, "*b n da"],
        second: Float[Tensor, "*b m db"],
        masks: Sequence[Bool[Tensor, "..."] | None] | None = None,
        *,
        epsilon: float = 0.1,
        iterations: int = 50,
    ) -> Float[Tensor, "*b"]:
        r"""What it costs to match the two sets of a pair, $\sum_{ij} T_{ij} (1 - \cos(P_a q_i, P_b q'_j))$."""
        (first, second), (real, other) = self._inputs(first, second, masks)
        with uncast(first.device):
            a, b = _unit(wide(first @ self.P_a.mT)), _unit(wide(second @ self.P_b.mT))
            cost = 1 - a @ b.mT
            allowed = _both(real, other, cost)
            return (sinkhorn(cost, epsilon, iterations, allowed) * cost).sum((-2, -1))


def _unit(x: Tensor) -> Tensor:
    """Vectors of length one; zero stays zero."""
    return F.normalize(wide(x), dim=-1, eps=1e-8).to(x.dtype)


def _both(real: Tensor | None, other: Tensor | None, like: Tensor) -> Tensor | None:
    """Pairs of real tokens."""
    if real is None and other is None:
        return None
    allowed = torch.ones_like(like, dtype=torch.bool)
    allowed = allowed if real is None else allowed & real.unsqueeze(-1)
    return allowed if other is None else allowed & other.unsqueeze(-2)


def _pairs(query: Tensor, asking: Tensor | None, key: Tensor, asked: Tensor | None) -> Filled | None:
    """Which pairs of two filled inputs are real."""
    if asking is None and asked is None:
        return None
    lead = tuple(torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]))
    like = query.new_empty(()).expand(*lead, query.shape[-2], key.shape[-2])
    allowed = _both(asking, asked, like)
    assert allowed is not None
    bound: Bound = Pairs(allowed).bind(Sizes(lead, query.shape[-2], key.shape[-2]))
    return Filled(bound)
