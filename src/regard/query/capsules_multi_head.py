"""Multi-head capsules: every class asks several questions, and judges the answers together."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.catalog import register
from regard.feature.parts import AlignLike, ScoreLike, attentions, masked_input, masked_mean, real
from regard.general.scores.base import matrix, vector, width, zeros
from regard.query.capsules import Capsules, fires, mapped, of_width
from regard.query.parts import one_of, operand, widths

_MAPS = ("identity", "shared", "head")


@register(
    name="multi-head-capsules",
    zh="多头胶囊",
    path="query/multiplicity",
    equation="ctx_c = [ctx_c^1; …; ctx_c^H],  p_c = σ(w_c · ctx_c + b_c),  r_c^h = p_c ctx_c^h",
    paper="Wang, Sun, Han, Liu & Zhu, Sentiment Analysis by Capsules, WWW 2018 (heads are an extension)",
    year=2018,
    time="H C N d",
    memory="linear",
    choose="the evidence of a class lies in several places at once",
    avoid="one place decides: H times the queries, and reconstructions H times as wide",
)
class MultiHeadCapsules(nn.Module):
    r"""Capsules with $H$ queries each, after single-headed ones (Wang et al. 2018, https://doi.org/10.1145/3178876.3186015).

    $$\mathrm{ctx}_c^{(h)} = \sum_j \mathrm{align}(\mathrm{score}(q_c^{(h)}, k_j^{(h)}))_j\, v_j^{(h)}, \qquad
      p_c = \sigma\big(w_c \cdot [\mathrm{ctx}_c^{(1)}; \dots; \mathrm{ctx}_c^{(H)}] + b_c\big), \qquad
      r_c = p_c\, [\mathrm{ctx}_c^{(1)}; \dots; \mathrm{ctx}_c^{(H)}]$$

    Heads share no parameters, but for the maps where these are `"shared"`. One probability speaks for all heads, unless each is to
    judge for itself; then $r_c^{(h)} = p_c^{(h)} \mathrm{ctx}_c^{(h)}$ and $p_c$ is their mean. Under a trace the weights are at
    `attention`, (..., H, C, N).

    Args:
        dim: width of the features; or, with maps, of features, keys and values of a head.
        classes: $C$.
        heads: $H$.
        maps: `"identity"`, `"shared"` or `"head"` ($W_K^{(h)}$, $W_V^{(h)}$).
        judge: `"together"`, one probability, or `"head"`, one for each.
        compare: how a reconstruction meets $\bar f$: `"repeat"`, with one copy of it for each head; or `"map"`, through a matrix
            $M$ from the heads' width to the features'.
        score: a name, a class, a function of the widths of query and key, or a ready-made score (for all heads, with `heads=H`) or
            attention.
        align: likewise; softmax when not given.
        **options: arguments of score and alignment given by name; `dropout`, `impl`.

    Example:
        >>> found = MultiHeadCapsules(5, classes=3, heads=2)(torch.randn(2, 7, 5))
        >>> found.probability.shape, found.reconstruction.shape
        (torch.Size([2, 3]), torch.Size([2, 3, 10]))
    """

    def __init__(
        self,
        dim: int | tuple[int, int, int],
        classes: int,
        heads: int,
        *,
        maps: str = "identity",
        judge: str = "together",
        compare: str = "repeat",
        score: ScoreLike = "dot",
        align: AlignLike = None,
        **options: Any,
    ) -> None:
        super().__init__()
        d_f, d_k, d_v = widths("dim", dim, 3)
        self.dim, C, H = d_f, width("classes", classes), width("heads", heads)
        self.maps, self.judge = one_of("maps", maps, _MAPS), one_of("judge", judge, ("together", "head"))
        self.compare = one_of("compare", compare, ("repeat", "map"))
        own = (H,) if maps == "head" else ()
        self.W_K, self.W_V = mapped(maps, own, d_f, d_k), mapped(maps, own, d_f, d_v)
        self.q = vector(H, C, d_k)
        self.w = vector(C, H, d_v) if judge == "head" else vector(C, H * d_v)
        self.b = zeros(C, H) if judge == "head" else zeros(C)
        self.M = matrix(d_f, H * d_v) if compare == "map" else None
        if options.get("features") is True:
            options["features"] = d_v
        self.attention = attentions({"attention": (d_k, d_k)}, score, align, options, heads=H)["attention"]

    def forward(self, features: Float[Tensor, "*b n df"], mask: Bool[Tensor, "*_ n"] | None = None) -> Capsules:
        """What every capsule says of features (..., N, d_f); `mask` is True for real ones, (..., N)."""
        features, mask = masked_input(of_width("features", features, self.dim), mask, "features")
        operand("features", features, self.q, self.dim)
        mean = masked_mean(features, mask)
        heads = self._contexts(features, mask).movedim(-3, -2)
        context = heads.flatten(-2)
        if self.judge == "head":
            each = fires(heads, self.w, self.b)
            p, r = each.mean(-1), (each.unsqueeze(-1) * heads).flatten(-2)
        else:
            p = fires(context, self.w, self.b)
            r = p.unsqueeze(-1) * context
        if self.M is not None:
            return Capsules(context, p, r @ self.M.mT, mean)
        return Capsules(context, p, r, torch.cat([mean] * len(self.q), -1))

    def _contexts(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """(..., H, C, d_v)."""
        q = self.q.expand(*features.shape[:-2], *self.q.shape)
        features, mask = features.unsqueeze(-3), None if mask is None else mask.unsqueeze(-2)
        features = features.expand(*features.shape[:-3], len(self.q), *features.shape[-2:])
        key = features if self.W_K is None else features @ self.W_K.mT
        value = features if self.W_V is None else features @ self.W_V.mT
        contexts: Tensor = self.attention(q, key, value, mask=real(mask))
        return contexts

    def extra_repr(self) -> str:
        H, C, _ = self.q.shape
        return f"classes={C}, heads={H}, maps={self.maps!r}, judge={self.judge!r}, compare={self.compare!r}"
