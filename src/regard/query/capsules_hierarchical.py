"""Hierarchical capsules: capsules of features, capsules of those capsules, up to the classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.parts import masked_input
from regard.general.scores.base import width
from regard.query.capsules import CapsuleAttention, Capsules, of_width
from regard.query.parts import one_of
from regard.query.routing import DynamicRouting

# A name, or a function of the widths of features and capsules and of the number of capsules that makes a layer of them.
Link: TypeAlias = str | Callable[[int, int, int], nn.Module]

_LINKS = ("attention", "routing")
_OF_ROUTING = ("iterations", "detach")


@register(
    name="hierarchical-capsules",
    zh="层次化胶囊",
    path="query/multiplicity",
    equation="G^0 = F,  G^{t+1} = r(G^t): capsules that attend, or are routed to, those below",
    paper="Wang, Sun, Han, Liu & Zhu, Sentiment Analysis by Capsules, WWW 2018 (levels are an extension)",
    year=2018,
    time="Σ_t C_{t+1} C_t d",
    memory="linear (attention); C_t C_{t+1} d (routing)",
    choose="classes are made of parts that several of them share, and parts of features",
    avoid="classes can be told from the features directly: each level passes on only what its capsules read",
)
class HierarchicalCapsules(nn.Module):
    r"""Capsules on capsules, after one level of them (Wang et al. 2018, https://doi.org/10.1145/3178876.3186015).

    $$G^{(0)} = F, \qquad G^{(t+1)}_c = r_c = p_c \sum_i \mathrm{align}(\mathrm{score}(q_c^{(t)}, G^{(t)}_i))_i\, G^{(t)}_i
      \qquad\text{or}\qquad G^{(t+1)} = \mathrm{routing}(G^{(t)})$$

    The last level has the classes and the loss; `levels_of` gives the others too, for a loss of their own. Under a trace they are
    `levels.0.attention`, or `levels.0.routing`, and so on. The first level is routed with the same matrices for all features, the
    others with a matrix for each capsule below.

    Args:
        dim: width of the features; or of the features and of every level.
        capsules: their number at each level, from the bottom up; the last is that of the classes.
        link: `"attention"`, `"routing"`, or a function of the widths of features and capsules and of the number of capsules that makes
            a layer; one for all levels or a list with one for each.
        **options: of `CapsuleAttention` (`maps`, `score`, …) and `DynamicRouting` (`iterations`, `detach`) for levels given by name.

    Example:
        >>> import torch
        >>> attend = HierarchicalCapsules(5, capsules=(7, 3))
        >>> attend(torch.randn(2, 11, 5)).probability.shape
        torch.Size([2, 3])
        >>> mixed = HierarchicalCapsules((5, 5, 4), capsules=(7, 3), link=["attention", "routing"])
        >>> [level.reconstruction.shape[1:] for level in mixed.levels_of(torch.randn(2, 11, 5))]
        [torch.Size([7, 5]), torch.Size([3, 4])]
    """

    def __init__(
        self,
        dim: int | Sequence[int],
        capsules: Sequence[int],
        *,
        link: Link | Sequence[Link] = "attention",
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(capsules, int):
            raise TypeError(
                refusal("capsules", capsules, "their number at each level", f"Fix: capsules=({capsules},).")
            )
        counts = [width("capsules", count) for count in capsules]
        if not counts:
            raise ValueError(refusal("capsules", "none", "the number of capsules at one level or more"))
        dims = [dim] * (len(counts) + 1) if isinstance(dim, int) else list(dim)
        if len(dims) != len(counts) + 1:
            raise ValueError(refusal("dim", f"{len(dims)} widths", f"one, or {len(counts) + 1}: features and levels"))
        links = [link] * len(counts) if isinstance(link, str) or callable(link) else list(link)
        if len(links) != len(counts):
            raise ValueError(refusal("link", f"{len(links)} links", f"one, or one for each of {len(counts)} levels"))
        layers = []
        for t, (kind, count) in enumerate(zip(links, counts, strict=True)):
            below = counts[t - 1] if t else None
            layers.append(_layer(kind, dims[t], dims[t + 1], count, below, options))
        for name in options:
            taker = "routing" if name in _OF_ROUTING else "attention"
            if taker not in links:
                raise TypeError(refusal(name, repr(options[name]), f"an argument of a level, and none is {taker!r}"))
        self.dim, self.levels = dims[0], nn.ModuleList(layers)

    def forward(self, features: Float[Tensor, "*b n d"], mask: Bool[Tensor, "*_ n"] | None = None) -> Capsules:
        """What the last level says of features (..., N, d); `mask` is True for real ones, (..., N)."""
        return self.levels_of(features, mask)[-1]

    def levels_of(self, features: Float[Tensor, "*b n d"], mask: Bool[Tensor, "*_ n"] | None = None) -> list[Capsules]:
        """What every level says, from the bottom up."""
        features, mask = masked_input(of_width("features", features, self.dim), mask, "features")
        found: list[Capsules] = []
        for level in self.levels:
            one: Capsules = (
                level.capsules(features, mask) if isinstance(level, DynamicRouting) else level(features, mask)
            )
            found.append(one)
            features = one.reconstruction
            # Every capsule is real, unless it stands on nothing.
            mask = None if mask is None else mask.any(-1, keepdim=True).expand(features.shape[:-1])
        return found


def _layer(link: Link, dim: int, out_dim: int, count: int, below: int | None, options: dict[str, Any]) -> nn.Module:
    if not isinstance(link, str):
        if not callable(link):
            raise TypeError(refusal("link", type(link).__name__, "a name, or a function that makes a layer"))
        return link(dim, out_dim, count)
    if one_of("link", link, _LINKS) == "routing":
        of_routing = {name: options[name] for name in _OF_ROUTING if name in options}
        return DynamicRouting((dim, out_dim), count, below, **of_routing)
    rest = {name: given for name, given in options.items() if name not in _OF_ROUTING}
    return CapsuleAttention((dim, out_dim, out_dim), count, **rest)
