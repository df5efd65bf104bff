"""Linformer: keys and values are shortened along the sequence before anything looks at them."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.general.masks import Mask
from regard.general.scores.base import matrix, width
from regard.ops.fill import kept_rows
from regard.query.multi_head import MultiHeadAttention
from regard.query.parts import one_of
from regard.transformer.encoder import TransformerEncoder
from regard.transformer.inputs import masked, real_keys
from regard.transformer.positions import AbsolutePosition, PositionLike, build_position

SHARING = ("none", "headwise", "key-value", "layerwise")
_OF_LAYERS = ("feedforward_dim", "norm", "activation", "dropout", "bias")


class LengthProjection(nn.Module):
    r"""A learned map along the sequence, from $N \le L$ rows to $k$: $x \mapsto E_{:, 1:N}\, x$.

    Args:
        length: $L$, the most rows there are.
        rank: $k$.
        heads: one map for each head; 1 for a map that all share.

    Example:
        >>> import torch
        >>> LengthProjection(length=11, rank=3, heads=2)(torch.randn(5, 2, 7, 4)).shape
        torch.Size([5, 2, 3, 4])
    """

    def __init__(self, length: int, rank: int, heads: int = 1) -> None:
        super().__init__()
        self.E = matrix(width("heads", heads), width("rank", rank), width("length", length))

    @property
    def length(self) -> int:
        """The most rows there are."""
        return self.E.shape[-1]

    def forward(self, x: Float[Tensor, "*b h n d"]) -> Float[Tensor, "*b h k d"]:
        """Shorten (..., H, N, d) to (..., H, k, d)."""
        n = x.shape[-2]
        if n > self.length:
            fix = "Fix: make it with a greater length; there are no weights for later places."
            raise ValueError(refusal("tokens", f"{n} of them", f"at most length={self.length}", fix))
        shorter: Tensor = self.E[..., :n] @ x
        return shorter

    def extra_repr(self) -> str:
        heads, rank, length = self.E.shape
        return f"length={length}, rank={rank}, heads={heads}"


class LinformerAttention(MultiHeadAttention):
    r"""Attention to $k$ mixtures of keys and values instead of $N$ of them (Wang et al. 2020, https://arxiv.org/abs/2006.04768).

    $$C_h = \mathrm{softmax}\!\Big(\frac{Q_h (E_h K_h)^\top}{\sqrt{d}}\Big)\, F_h V_h, \qquad E_h, F_h \in \mathbb{R}^{k \times L}$$

    A part for the layers of a Transformer. $E$ and $F$ are learned. A shorter input takes their first $N$ columns; a longer one is
    refused. Padding is zero before it is projected, so it weighs nothing. Masks that differ between queries (causal ones, windows)
    are refused: a projected key is made of all places. The weights (..., H, N, k) of all heads are at `attention` under a trace.

    Args:
        dim: width of the tokens.
        heads: $H$.
        length: $L$, the most tokens there are.
        rank: $k$.
        share: `"none"`: each head has its own $E_h$ and $F_h$; `"headwise"`: $E$ and $F$ are the same in all heads; `"key-value"`:
            besides, $F = E$.
        projection: a `LengthProjection` to use for keys and values, in place of `length`, `rank` and `share`. It stays with its owner,
            such as a stack that has one for all its layers, and is no submodule here.
        bias: add $b_Q$, $b_K$, $b_V$ and $b_O$ to the projections of width.
        **options: of `MultiHeadAttention`, such as `score` and `align`.

    Example:
        >>> import torch
        >>> LinformerAttention(8, 2, length=512, rank=16)(torch.randn(2, 100, 8)).shape
        torch.Size([2, 100, 8])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        length: int | None = None,
        rank: int = 256,
        *,
        share: str = "headwise",
        projection: LengthProjection | None = None,
        bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(dim, heads, bias=bias, **options)
        if (length is None) == (projection is None):
            got = "neither" if length is None else "both"
            raise ValueError(refusal("length and projection", got, "one of them"))
        one_of("share", share, SHARING[:-1])
        self.shorten: LengthProjection | None = None
        self.shorten_values: LengthProjection | None = None
        # In a tuple a module is not registered: whoever made it saves it, once.
        self._given: tuple[LengthProjection, ...] = () if projection is None else (projection,)
        if length is not None:
            each = self.key_heads if share == "none" else 1
            self.shorten = LengthProjection(length, rank, each)
            self.shorten_values = None if share == "key-value" else LengthProjection(length, rank, each)

    @property
    def projections(self) -> tuple[LengthProjection, LengthProjection]:
        """Of keys and of values."""
        of_keys = self._given[0] if self.shorten is None else self.shorten
        return of_keys, of_keys if self.shorten_values is None else self.shorten_values

    def forward(  # type: ignore[override]
        self, tokens: Float[Tensor, "*b n d"], *, mask: Tensor | Mask | None = None
    ) -> Float[Tensor, "*b n d"]:
        """Update the tokens (..., N, d).

        Args:
            tokens: at most `length` of them.
            mask: which keys are real, the same for every query: `Keys(real)`, or booleans (..., 1, N).
        """
        shared, asking, read = masked(tokens, mask, self.n_heads)
        real = real_keys(shared, tokens, "Linformer")
        q, k, v = self.project(asking, read, read)
        if real is not None:
            # The projections' biases stand in padding too.
            k, v = kept_rows(k, real.unsqueeze(-2)), kept_rows(v, real.unsqueeze(-2))
        shorten_keys, shorten_values = self.projections
        context = self._attend(q, shorten_keys(k), shorten_values(v), None, False, None)
        return kept_rows(self.join(context), None if shared is None else shared.rows)


@register(
    name="linformer",
    zh="Linformer（低秩线性复杂度）",
    path="query/multiplicity",
    equation="C = softmax(Q (E K)ᵀ / √d) F V,  E, F ∈ R^{k×L}",
    paper="Wang et al., Linformer: Self-Attention with Linear Complexity, 2020",
    year=2020,
    time="N k d + N d², each layer",
    memory="N d, each layer (for the backward); weights N k",
    choose="long inputs of a bounded length, read as a whole: classification, retrieval",
    avoid="text is generated (no causal form), or lengths have no bound: E and F have one weight for each place",
)
class Linformer(TransformerEncoder):
    r"""An encoder in time and memory linear in the length (Wang et al. 2020, https://arxiv.org/abs/2006.04768).

    $$C = \mathrm{softmax}\!\Big(\frac{Q (E K)^\top}{\sqrt{d}}\Big)\, F V, \qquad E, F \in \mathbb{R}^{k \times L}$$

    in the place of every layer's attention: `LinformerAttention`. Under a trace the weights of layer $l$ are at
    `layers.l.attention.attention`, (..., H, N, k).

    Args:
        dim: width of the tokens.
        heads: of each layer.
        layers: how many.
        length: $L$ of the projections, the most tokens there are.
        rank: $k$.
        share: `"none"`, `"headwise"` or `"key-value"` as in `LinformerAttention`; `"layerwise"`: one $E$ for keys and values of all heads
            of all layers, at `shorten`.
        position: `"sinusoidal"` or `"learned"`; distances have no meaning among projected keys.
        **options: of each `EncoderLayer` (`norm`, `feedforward_dim`, `activation`, `dropout`, `bias`), and of its attention.

    Example:
        >>> import torch
        >>> encode = Linformer(8, heads=2, layers=3, length=512, rank=16, share="layerwise")
        >>> encode(torch.randn(2, 100, 8)).shape
        torch.Size([2, 100, 8])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        layers: int = 6,
        *,
        length: int,
        rank: int = 256,
        share: str = "layerwise",
        position: PositionLike = "sinusoidal",
        **options: Any,
    ) -> None:
        layerwise = one_of("share", share, SHARING) == "layerwise"
        shorten = LengthProjection(length, rank) if layerwise else None
        of_layers = {name: options.pop(name) for name in _OF_LAYERS if name in options}
        final_norm = options.pop("final_norm", None)
        options["bias"] = of_layers.get("bias", True)
        options["dropout"] = options.pop("attention_dropout", 0.0)

        def attention(dim: int, heads: int) -> LinformerAttention:
            if shorten is not None:
                return LinformerAttention(dim, heads, projection=shorten, **options)
            return LinformerAttention(dim, heads, length, rank, share=share, **options)

        bottom = build_position(position, dim=width("dim", dim), heads=heads, head_dim=dim)
        if bottom is not None and not isinstance(bottom, AbsolutePosition):
            expected = "one of tokens, 'sinusoidal' or 'learned': keys that are mixtures have no distances"
            raise ValueError(refusal("position", type(bottom).__name__, expected))
        super().__init__(dim, heads, layers, position=bottom, final_norm=final_norm, attention=attention, **of_layers)
        self.shorten = shorten
