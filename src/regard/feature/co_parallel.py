"""Parallel co-attention: every feature of one input is compared with every feature of the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.affinity import Sides, maxima, sums
from regard.feature.parts import Aligns, ScoreLike, attentions, masked_inputs, pair_of_widths, real
from regard.general.scores import Score
from regard.general.scores.base import AdditiveForm, BilinearForm, Heads, head_axes, matrix, vector, width
from regard.ops import hooks
from regard.ops.activations import activation as resolve
from regard.ops.call import Call
from regard.ops.fill import kept_rows, where
from regard.ops.forms import wide

_SCORINGS = ("aggregated", "max")
_OUTPUTS = ("concat", "sum")


class Trilinear(Score):
    r"""Trilinear score (Seo et al. 2017, https://arxiv.org/abs/1611.01603).

    $$e_{ij} = w \cdot [q_i; k_j; q_i \odot k_j] = w_q \cdot q_i + w_k \cdot k_j + (w_p \odot q_i) \cdot k_j$$

    One vector $w \in \mathbb{R}^{3d}$. The concatenation is never formed: the pair costs one dot product.

    Args:
        dim: $d$, the width of queries and keys.
        heads: leading axes of the parameters, aligned with the last leading axes of the inputs.

    Example:
        >>> Trilinear(3)(torch.randn(2, 7, 3), torch.randn(2, 11, 3)).shape
        torch.Size([2, 7, 11])
    """

    def __init__(self, dim: int, heads: Heads = ()) -> None:
        super().__init__()
        self.query_dim = self.key_dim = width("dim", dim)
        self.head_shape = head_axes(heads)
        self.w = vector(*self.head_shape, 3 * dim)

    def reduce(self, query: Tensor | None, key: Tensor) -> BilinearForm:
        assert query is not None
        of_query, of_key, of_product = self.w.chunk(3, -1)
        return BilinearForm(
            query * of_product.unsqueeze(-2),
            key,
            query_bias=wide(query @ of_query.unsqueeze(-1)).squeeze(-1),
            key_bias=wide(key @ of_key.unsqueeze(-1)).squeeze(-1),
        )

    def extra_repr(self) -> str:
        return f"dim={self.query_dim}"


class HiddenScore(Score):
    r"""Score of a key that is a hidden layer already: $e_j = w \cdot \mathrm{act}(k_j)$, or $W_d^\top \mathrm{act}(k_j)$."""

    needs_query = False
    is_activated = True

    def __init__(
        self, key_dim: int, activation: str | Callable[[Tensor], Tensor] = "tanh", features: int | None = None
    ) -> None:
        super().__init__()
        self.key_dim = width("key_dim", key_dim)
        self.features = features
        if features is None:
            self.w = vector(key_dim)
        else:
            self.W_d = matrix(key_dim, features)
        self.activation = resolve(activation)
        # A module among the callables keeps its own parameters: it must be found by .parameters().
        self.activation_module = activation if isinstance(activation, nn.Module) else None

    def reduce(self, query: Tensor | None, key: Tensor) -> AdditiveForm:
        multi = self.features is not None
        return AdditiveForm(
            key.new_zeros(1, key.shape[-1]), key, self.W_d if multi else self.w, self.activation, multi=multi
        )


class Unscored(Score):
    """A score of zero for every key: what counts is the bias that the attention is called with."""

    needs_query = False

    def reduce(self, query: Tensor | None, key: Tensor) -> BilinearForm:
        return BilinearForm(key.new_zeros(1, 1), key.new_zeros(key.shape[-2], 1))


@register(
    name="parallel-co-attention",
    zh="并行协同注意力",
    path="feature/multiplicity",
    equation="A = tanh(F₁ W F₂ᵀ),  e¹ = w₁ · act(W₁ F₁ + A (W₂ F₂))  or  max_j A_ij,  c¹ = align(e¹) F₁, likewise c²",
    paper="Lu, Yang, Batra & Parikh, Hierarchical Question-Image Co-Attention for Visual Question Answering, NeurIPS 2016; "
    "Seo et al., Bidirectional Attention Flow for Machine Comprehension, ICLR 2017",
    year=2016,
    time="N₁ N₂ d",
    memory="linear",
    choose="single features of two inputs must be matched: question words and image regions, passages and questions",
    avoid="very long inputs whose gist is enough: every pair is compared (alternating and interactive are linear)",
)
class ParallelCoAttention(nn.Module):
    r"""Fine-grained co-attention (Lu et al. 2016, https://arxiv.org/abs/1606.00061).

    $$A_{ij} = \mathrm{affinity}(f^{1}_i, f^{2}_j), \qquad c^{1} = \mathrm{align}(e^{1}) F^{1}, \quad c^{2} = \mathrm{align}(e^{2}) F^{2}$$

    with scores that are aggregated over the other input, or the largest affinity (Seo et al. 2017, https://arxiv.org/abs/1611.01603):

    $$\text{aggregated:}\quad e^{1} = w_1 \cdot \mathrm{act}\big(W_1 F^{1} + A\, (W_2 F^{2})\big), \quad
      e^{2} = w_2 \cdot \mathrm{act}\big(W_2 F^{2} + A^\top (W_1 F^{1})\big) \qquad
      \text{max:}\quad e^{1}_i = \max_j A_{ij}, \quad e^{2}_j = \max_i A_{ij}$$

    The affinity is $\tanh(f^{1\top}_i W f^{2}_j + b)$, with $b$ zero at the start, unless another score is given. It is streamed:
    nothing of size $N_1 N_2$ is kept, forward or backward. A trace has it under `affinity`, as scores of a call whose queries are the first
    input; its weights are their softmax along the second, BiDAF's context-to-query attention. The readers are `first` and
    `second`, and have $w_1$, $w_2$. Padding is in no sum and no maximum. An input whose partner is empty has equal maxima, hence
    its mean.

    Args:
        dim: width of the inputs, or of each.
        affinity: a score, queries from the first input: a name (`"trilinear"` too), a class, a function of the two widths,
            or a ready-made score.
        scoring: `"aggregated"`, `"max"`, or one for each side; BiDAF takes the maximum on the side of the context alone.
        align: of both readers, or one for each; softmax when not given.
        hidden_dim: $d_w$, the rows of $W_1$ and $W_2$; the larger width when not given.
        activation: of aggregated scores.
        output: `"concat"` or `"sum"` of the two contexts.
        **options: arguments of an affinity and alignments given by name; `features=True` for aggregated scores with one
            weight for each feature; `dropout`, `impl`.

    Example:
        >>> attend = ParallelCoAttention((6, 4))
        >>> attend(torch.randn(2, 5, 6), torch.randn(2, 3, 4)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        dim: int | tuple[int, int],
        *,
        affinity: ScoreLike = "activated-general",
        scoring: str | tuple[str, str] = "aggregated",
        align: Aligns = None,
        hidden_dim: int | None = None,
        activation: str | Callable[[Tensor], Tensor] = "tanh",
        output: str = "concat",
        **options: Any,
    ) -> None:
        super().__init__()
        d1, d2 = self.widths = pair_of_widths(dim)
        self.scoring = (scoring, scoring) if isinstance(scoring, str) else tuple(scoring)
        if len(self.scoring) != 2 or not set(self.scoring) <= set(_SCORINGS):
            raise ValueError(refusal("scoring", repr(scoring), f"one of {', '.join(_SCORINGS)}, or two of them"))
        if output not in _OUTPUTS:
            raise ValueError(refusal("output", repr(output), f"one of {', '.join(_OUTPUTS)}"))
        if output == "sum" and d1 != d2:
            raise ValueError(refusal("output", repr(output), f"'concat', since the widths {d1} and {d2} differ"))
        self.output = output
        hidden_dim = max(d1, d2) if hidden_dim is None else width("hidden_dim", hidden_dim)
        aggregated = "aggregated" in self.scoring
        self.W1 = matrix(hidden_dim, d1) if aggregated else None
        self.W2 = matrix(hidden_dim, d2) if aggregated else None
        features = bool(options.pop("features", False))
        if features and "max" in self.scoring:
            raise ValueError(refusal("features", True, "aggregated scores on both sides: a maximum is one number"))
        widths = [hidden_dim if how == "aggregated" else d for how, d in zip(self.scoring, (d1, d2), strict=True)]
        readers = [
            HiddenScore(hidden_dim, activation, d if features else None) if how == "aggregated" else Unscored()
            for how, d in zip(self.scoring, (d1, d2), strict=True)
        ]
        built = attentions(
            {"affinity": (d1, d2), "first": (None, widths[0]), "second": (None, widths[1])},
            [Trilinear if affinity == "trilinear" else affinity, *readers],
            [None, *(align if isinstance(align, list | tuple) else (align, align))],
            options,
            hidden_dim=hidden_dim,
        )
        self.affinity, self.first, self.second = built["affinity"], built["first"], built["second"]
        self.affinity.scores_alone, self.affinity.dropout = True, 0.0
        for reader, how in zip((self.first, self.second), self.scoring, strict=True):
            if how == "max" and "impl" not in options:
                # The scores are at hand; a library call would compute them once more, as zeros.
                reader.impl = "dense"
        if self.affinity.score.query_dim not in (None, d1):
            got = f"{type(self.affinity.score).__name__} of queries of width {self.affinity.score.query_dim}"
            raise ValueError(refusal("affinity", got, f"the width of the first input, {d1}"))
        if self.affinity.score.features is not None:
            raise ValueError(refusal("affinity", "a multi-dimensional score", "one number for each pair"))

    def forward(
        self,
        first: Float[Tensor, "*b n1 d1"],
        second: Float[Tensor, "*b n2 d2"],
        masks: tuple[Bool[Tensor, "*_ n1"] | None, Bool[Tensor, "*_ n2"] | None] | None = None,
    ) -> Float[Tensor, "*b d"]:
        """Read both inputs; `masks` are True for real tokens."""
        (first, second), (mask1, mask2) = masked_inputs({"first": first, "second": second}, masks, self.widths)
        sides = None if mask1 is None and mask2 is None else Sides(mask1, mask2)
        affinity = hooks.changed(self.affinity, self.affinity.call(first, second, mask=sides))
        hidden = self._hidden(affinity, first, second) if "aggregated" in self.scoring else None
        largest = _maxima(affinity, self.affinity.impl) if "max" in self.scoring else None
        hooks.seen(self.affinity, affinity)
        contexts = []
        for k, (reader, x, mask) in enumerate(((self.first, first, mask1), (self.second, second, mask2))):
            if self.scoring[k] == "max":
                assert largest is not None
                contexts.append(reader(None, x, mask=real(mask), bias=largest[k]))
            else:
                assert hidden is not None
                # What is summed reaches padding too; a softmax never looks there, other alignments may.
                plain = reader.align.temperature_of_softmax is not None
                keys = hidden[k] if plain else kept_rows(hidden[k], mask)
                contexts.append(reader(None, keys, x, mask=real(mask)))
        return contexts[0] + contexts[1] if self.output == "sum" else torch.cat(contexts, -1)

    def _hidden(self, affinity: Call, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden layers of aggregated scores, (..., N1, d_w) and (..., N2, d_w); at padding what is summed there, finite."""
        assert self.W1 is not None
        assert self.W2 is not None
        p1, p2 = first @ self.W1.mT, second @ self.W2.mT
        of_first, of_second = sums(affinity, self.affinity.impl, p1, p2)
        return p1 + of_first.to(p1.dtype), p2 + of_second.to(p2.dtype)

    def extra_repr(self) -> str:
        return f"scoring={self.scoring}, output={self.output!r}"


def _maxima(affinity: Call, impl: str) -> list[Tensor]:
    """The largest affinity of each feature, all zero where no feature has a partner: equal scores, not none."""
    found = maxima(affinity, impl)
    if affinity.mask is None and 0 not in affinity.form.sizes:
        return list(found)
    return [where((x > -math.inf).any(-1, keepdim=True), x, 0.0) for x in found]
