"""Attention capsules: one query a class, each of which reads for itself, judges what it read, and represents it."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.parts import AlignLike, ScoreLike, attentions, masked_input, masked_mean, real
from regard.general.scores.base import matrix, vector, width, zeros
from regard.query.parts import one_of, operand, widths

_MAPS = ("identity", "shared", "class")


class Capsules(NamedTuple):
    r"""What a layer of $C$ capsules says: what each read, how sure it is, and the product of both.

    `reconstruction` is $r_c = p_c\, \mathrm{ctx}_c$, `mean` is $\bar f$, that of the real features, which a reconstruction is
    compared with.
    """

    context: Float[Tensor, "*b c dv"]
    probability: Float[Tensor, "*b c"]
    reconstruction: Float[Tensor, "*b c dr"]
    mean: Float[Tensor, "*b dm"]

    @property
    def prediction(self) -> Int[Tensor, "*b"]:
        """The class of the surest capsule."""
        return self.probability.argmax(-1)


@register(
    name="capsule-based-attention",
    zh="胶囊注意力",
    path="query/multiplicity",
    equation="ctx_c = Σ_j align(score(q_c, f_j)) f_j,  p_c = σ(w_c · ctx_c + b_c),  r_c = p_c ctx_c",
    paper="Wang, Sun, Han, Liu & Zhu, Sentiment Analysis by Capsules, WWW 2018",
    year=2018,
    time="C N d",
    memory="linear",
    choose="each class has evidence of its own, and what it is based on should be shown class by class",
    avoid="there are very many classes, or one look tells them apart: one query and a linear map cost less",
)
class CapsuleAttention(nn.Module):
    r"""A query, a probability and a reconstruction for every class (Wang et al. 2018, https://doi.org/10.1145/3178876.3186015).

    $$e_{cj} = \mathrm{score}(q_c, k_j), \qquad \mathrm{ctx}_c = \sum_j \mathrm{align}(e_c)_j\, v_j, \qquad
      p_c = \sigma(w_c \cdot \mathrm{ctx}_c + b_c), \qquad r_c = p_c\, \mathrm{ctx}_c$$

    The queries $q_c$ belong to classes, not to positions. Keys and values are the features themselves, as in the paper; maps, shared
    or of each class ($k_j^{(c)} = W_K^{(c)} f_j$), are an addition. Train with `CapsuleLoss`; the prediction is the largest $p_c$.
    Under a trace the weights of all classes are at `attention`, (..., C, N). With no real features contexts and reconstructions are
    zero, and the probabilities those of the biases.

    Args:
        dim: width of the features; or, with maps, of features, keys and values.
        classes: $C$.
        maps: `"identity"`, `"shared"` ($W_K$, $W_V$) or `"class"` ($W_K^{(c)}$, $W_V^{(c)}$).
        score: a name, a class, a function of the widths of query and key, or a ready-made score or attention.
        align: likewise; softmax when not given.
        drop_context: probability of dropping a feature of the context before it is judged, while training.
        **options: arguments of score and alignment given by name; `features=True` for one weight for each feature; `dropout` (of
            weights), `impl`.

    Example:
        >>> import torch
        >>> attend = CapsuleAttention(5, classes=3)
        >>> found = attend(torch.randn(2, 7, 5))
        >>> found.probability.shape, found.reconstruction.shape, found.prediction.shape
        (torch.Size([2, 3]), torch.Size([2, 3, 5]), torch.Size([2]))
    """

    def __init__(
        self,
        dim: int | tuple[int, int, int],
        classes: int,
        *,
        maps: str = "identity",
        score: ScoreLike = "dot",
        align: AlignLike = None,
        drop_context: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__()
        d_f, d_k, d_v = widths("dim", dim, 3)
        self.dim, C = d_f, width("classes", classes)
        self.maps = one_of("maps", maps, _MAPS)
        own = (C,) if maps == "class" else ()
        self.W_K, self.W_V = mapped(maps, own, d_f, d_k), mapped(maps, own, d_f, d_v)
        self.q, self.w, self.b = vector(C, d_k), vector(C, d_v), zeros(C)
        self.drop = nn.Dropout(_probability(drop_context))
        if options.get("features") is True:
            options["features"] = d_v
        self.attention = attentions({"attention": (d_k, d_k)}, score, align, options)["attention"]

    def forward(self, features: Float[Tensor, "*b n df"], mask: Bool[Tensor, "*_ n"] | None = None) -> Capsules:
        """What every capsule says of features (..., N, d_f); `mask` is True for real ones, (..., N)."""
        features, mask = masked_input(of_width("features", features, self.dim), mask, "features")
        operand("features", features, self.q, self.dim)
        context = self._contexts(features, mask)
        p = fires(self.drop(context), self.w, self.b)
        return Capsules(context, p, p.unsqueeze(-1) * context, masked_mean(features, mask))

    def _contexts(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """(..., C, d_v)."""
        q = self.q.expand(*features.shape[:-2], *self.q.shape)
        if self.maps == "class":
            # Every class has keys of its own: an axis before theirs, and a single query for each.
            features, mask = features.unsqueeze(-3), None if mask is None else mask.unsqueeze(-2)
        key = features if self.W_K is None else features @ self.W_K.mT
        value = features if self.W_V is None else features @ self.W_V.mT
        contexts: Tensor = self.attention(q, key, value, mask=real(mask))
        return contexts

    def extra_repr(self) -> str:
        return f"classes={len(self.q)}, maps={self.maps!r}"


def of_width(name: str, x: Tensor, dim: int) -> Tensor:
    """Refuse an input (..., N, d) of another width."""
    if isinstance(x, Tensor) and x.dim() > 1 and x.shape[-1] != dim:
        raise ValueError(refusal(name, f"width {x.shape[-1]}", f"dim={dim}"))
    return x


def fires(context: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """How sure capsules are of contexts (..., C, d_v): (..., C)."""
    return ((context * w).sum(-1) + b).sigmoid()


def mapped(maps: str, own: tuple[int, ...], d_f: int, d: int) -> nn.Parameter | None:
    """A map from features to keys or values, with these axes of its own; None where they are the features."""
    if maps != "identity":
        return matrix(*own, d, d_f)
    if d != d_f:
        fix = "Fix: maps='shared', which has matrices."
        raise ValueError(refusal("maps", "'identity'", f"equal widths, not {d_f} and {d}", fix))
    return None


def _probability(p: float) -> float:
    if not 0.0 <= p <= 1.0:
        raise ValueError(refusal("drop_context", p, "a probability, from 0 to 1"))
    return float(p)
