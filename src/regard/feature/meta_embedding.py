"""Meta-embeddings: several representations of each token, weighed against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.encoders import RecurrentEncoder
from regard.feature.parts import AlignLike, ScoreLike, attentions, masked_inputs
from regard.general.alignments import Alignment
from regard.general.scores.base import vector, width, zeros
from regard.ops.call import Tile
from regard.ops.fill import where


class SigmoidGate(Alignment):
    r"""Every key by itself: $a_j = \mathrm{sigmoid}(e_j + c)$. The weights need not sum to one (Kiela et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.c = zeros(1)

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        weights = torch.sigmoid(scores + self.c)
        return weights if mask is None else where(mask, weights, 0.0)


@register(
    name="meta-embedding",
    zh="多表示注意力（元嵌入）",
    path="feature/representations",
    equation="x = Σ_i a_i (W_i x_i + b_i),  a = softmax_i(u · (W_i x_i + b_i))",
    paper="Kiela, Wang & Cho, Dynamic Meta-Embeddings for Improved Sentence Representations, EMNLP 2018",
    year=2018,
    time="N Σ_i d_i d",
    memory="linear",
    choose="several embeddings of the same tokens are at hand and it is not known which suits which token",
    avoid="one embedding is clearly best, or width is cheap: then concatenate",
)
class MetaEmbedding(nn.Module):
    r"""Dynamic meta-embeddings (Kiela et al. 2018, https://arxiv.org/abs/1804.07983).

    Each token has $E$ representations $x^{(i)}$, of different widths. They are mapped to one width and read by attention over them:

    $$t^{(i)} = W_i x^{(i)} + b_i, \qquad a = \mathrm{align}_i\big(\mathrm{score}(u, t^{(i)})\big), \qquad x = \sum_i a_i t^{(i)}$$

    With `contextual`, keys are the states of a BiLSTM over the sequence of each source in place of $t^{(i)}$ (CDME). A source that
    lacks a token is masked there; a token that all sources lack is zero.

    Args:
        dims: widths of the sources.
        dim: width of the result.
        score: what scores a representation: a name, a class, a function of the widths, or a ready-made score. One that
            compares has the learned query $u$; the paper has the dot product.
        align: `"soft"` when not given; `"sigmoid"` for gates that are independent of each other; or any alignment.
        contextual: width of each direction of the BiLSTM; the paper has 2.
        **options: arguments of a score and an alignment given by name, such as `hidden_dim`; `dropout`, `impl`.

    Example:
        >>> embed = MetaEmbedding((6, 4, 3), dim=5)
        >>> embed([torch.randn(2, 7, 6), torch.randn(2, 7, 4), torch.randn(2, 7, 3)]).shape
        torch.Size([2, 7, 5])
    """

    def __init__(
        self,
        dims: Sequence[int],
        dim: int,
        *,
        score: ScoreLike = "dot",
        align: AlignLike = None,
        contextual: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(dims, Sequence) or not dims:
            raise ValueError(refusal("dims", repr(dims), "the width of each source, of at least one"))
        dim = width("dim", dim)
        self.widths = [width("dims", d) for d in dims]
        self.maps = nn.ModuleList(nn.Linear(d, dim) for d in self.widths)
        self.encoder = None if contextual is None else RecurrentEncoder(dim, contextual, kind="lstm")
        key_dim = dim if self.encoder is None else self.encoder.out_dim
        align = SigmoidGate if align == "sigmoid" else align
        self.attention = attentions({"attention": (key_dim, key_dim)}, score, align, options)["attention"]
        wanted = self.attention.score.query_dim or key_dim
        self.u = vector(wanted) if self.attention.score.needs_query else None

    def forward(
        self,
        sources: Sequence[Float[Tensor, "*b n _"]],
        masks: Sequence[Bool[Tensor, "*_b n"] | None] | None = None,
    ) -> Float[Tensor, "*b n d"]:
        """Embed tokens; a mask is True where its source knows the token."""
        inputs, known = masked_inputs(self._named(sources), masks, self.widths)
        mapped = torch.stack([embed(x) for embed, x in zip(self.maps, inputs, strict=True)], -2)
        present = None
        if any(mask is not None for mask in known):
            everywhere = torch.ones(mapped.shape[:-2], dtype=torch.bool, device=mapped.device)
            present = torch.stack([everywhere if mask is None else mask for mask in known], -1)
        context: Tensor = self.attention(self.u, self._keys(mapped, present), mapped, mask=present)
        return context

    def _keys(self, mapped: Tensor, present: Tensor | None) -> Tensor:
        if self.encoder is None:
            return mapped
        along = None if present is None else present.mT
        states: Tensor = self.encoder(mapped.transpose(-2, -3), along)
        return states.transpose(-2, -3)

    def _named(self, sources: Any) -> Mapping[str, Tensor]:
        if isinstance(sources, Tensor) or len(sources) != len(self.maps):
            got = "one tensor" if isinstance(sources, Tensor) else f"{len(sources)} of them"
            raise ValueError(refusal("sources", got, f"{len(self.maps)}, one for each of `dims`"))
        for k, x in enumerate(sources):
            if not isinstance(x, Tensor):
                raise TypeError(refusal(f"source {k}", type(x).__name__, "a floating-point tensor, (..., N, d)"))
        shape = sources[0].shape[:-1]
        for k, x in enumerate(sources):
            if x.shape[:-1] != shape:
                raise ValueError(
                    refusal(f"source {k}", f"shape {tuple(x.shape)}", f"tokens {tuple(shape)}, as source 0")
                )
        return {f"source {k}": x for k, x in enumerate(sources)}
