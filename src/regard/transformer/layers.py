"""The layers of a Transformer: attention and a feed-forward map, each added to the tokens and normalised."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.general.masks import Mask
from regard.general.scores.base import width
from regard.query.multi_head import MultiHeadAttention
from regard.query.parts import one_of
from regard.transformer.attention import TransformerAttention
from regard.transformer.cache import Slot
from regard.transformer.feedforward import FeedForward, dropped, hidden_width, probability

# A ready-made attention, or a function of the width of the tokens and the number of heads that makes one.
AttentionLike: TypeAlias = nn.Module | Callable[[int, int], nn.Module] | None


class _Layer(nn.Module):
    """Parts f that are added to the tokens: x <- LN(x + f(x)), or x <- x + f(LN(x))."""

    def __init__(self, norm: str, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = one_of("norm", norm, ("post", "pre")), probability("dropout", dropout)

    def _added(self, tokens: Tensor, norm: nn.Module, part: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm == "pre":
            return tokens + dropped(part(norm(tokens)), self.dropout, self.training)
        normalised: Tensor = norm(tokens + dropped(part(tokens), self.dropout, self.training))
        return normalised

    def extra_repr(self) -> str:
        return f"norm={self.norm!r}, dropout={self.dropout}"


class EncoderLayer(_Layer):
    r"""Tokens read each other, then each is mapped by itself (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

    $$x \leftarrow \mathrm{LN}(x + \mathrm{MHA}(x, x)), \qquad x \leftarrow \mathrm{LN}(x + \mathrm{FFN}(x))$$

    with the normalisation after each sum, as in the paper, or before each part (`norm="pre"`, Xiong et al. 2020,
    https://arxiv.org/abs/2002.04745): $x \leftarrow x + \mathrm{MHA}(\mathrm{LN}(x))$. A layer takes masks of pairs and leaves padding
    alone; `TransformerEncoder`, even of one layer, takes masks of tokens.

    Args:
        dim: width of the tokens.
        heads: of the attention.
        feedforward_dim: width inside the feed-forward map; 4 `dim` when not given.
        norm: `"post"` or `"pre"`.
        activation: of the feed-forward map.
        dropout: of what each part adds, and of hidden units.
        bias: have biases in all maps and normalisations.
        attention: in place of `TransformerAttention`: a module, or a function of width and heads that makes one.
        **options: of `TransformerAttention`, such as `score`, `align`, `position`, `key_heads`, `impl`; and `attention_dropout`, of
            weights.

    Example:
        >>> EncoderLayer(8, 2, score="additive", norm="pre")(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        feedforward_dim: int | None = None,
        *,
        norm: str = "post",
        activation: str | Callable[[Tensor], Tensor] = "relu",
        dropout: float = 0.0,
        bias: bool = True,
        attention: AttentionLike = None,
        **options: Any,
    ) -> None:
        super().__init__(norm, dropout)
        dim = width("dim", dim)
        self.attention = _attention(attention, dim, heads, bias, options)
        self.norm_attention = nn.LayerNorm(dim, bias=bias)
        self.feedforward = FeedForward(dim, hidden_width(dim, feedforward_dim), activation, dropout, bias)
        self.norm_feedforward = nn.LayerNorm(dim, bias=bias)

    def forward(self, tokens: Float[Tensor, "*b n d"], mask: Tensor | Mask | None = None) -> Float[Tensor, "*b n d"]:
        """Update the tokens (..., N, d); the mask says which may look at which, as in `MultiHeadAttention`."""
        tokens = self._added(tokens, self.norm_attention, lambda x: self.attention(x, mask=mask))
        return self._added(tokens, self.norm_feedforward, self.feedforward)

    @classmethod
    def from_torch(cls, module: nn.TransformerEncoderLayer, **options: Any) -> EncoderLayer:
        """The same function as a layer of torch, with copies of its weights.

        Axes are (..., N, d) whatever its `batch_first` says, and True in a mask means *may attend*.
        """
        if not isinstance(module, nn.TransformerEncoderLayer):
            raise TypeError(refusal("module", type(module).__name__, "an nn.TransformerEncoderLayer"))
        ours = cls(**_arguments(module), **options)
        _copy(
            ours,
            module,
            {"attention": module.self_attn},
            {"norm_attention": module.norm1, "norm_feedforward": module.norm2},
        )
        return ours


class DecoderLayer(_Layer):
    r"""Tokens read each other, then the encoder's output (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

    $$x \leftarrow \mathrm{LN}(x + \mathrm{MHA}(x, x)), \qquad x \leftarrow \mathrm{LN}(x + \mathrm{MHA}(x, m)), \qquad
      x \leftarrow \mathrm{LN}(x + \mathrm{FFN}(x))$$

    Its attentions are `attention` and `cross`. That no token sees a later one is for the mask to say; `TransformerDecoder`, even of
    one layer, says it by itself.

    Args:
        dim: width of the tokens.
        heads: of both attentions.
        feedforward_dim: width inside the feed-forward map; 4 `dim` when not given.
        cross: whether there is an encoder's output to read, or its width; False for a decoder alone.
        norm: `"post"` or `"pre"`.
        activation: of the feed-forward map.
        dropout: of what each part adds, and of hidden units.
        bias: have biases in all maps and normalisations.
        attention: as in `EncoderLayer`; of the tokens among themselves.
        **options: of both attentions, but for `position`, which is of the first; of `cross` alone beside an `attention` of its own.

    Example:
        >>> DecoderLayer(8, 2)(torch.randn(2, 5, 8), torch.randn(2, 7, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        feedforward_dim: int | None = None,
        *,
        cross: bool | int = True,
        norm: str = "post",
        activation: str | Callable[[Tensor], Tensor] = "relu",
        dropout: float = 0.0,
        bias: bool = True,
        attention: AttentionLike = None,
        **options: Any,
    ) -> None:
        super().__init__(norm, dropout)
        dim = width("dim", dim)
        both = {name: value for name, value in options.items() if name != "position"}
        of_own = options if attention is None or cross is False else {k: v for k, v in options.items() if k not in both}
        self.attention = _attention(attention, dim, heads, bias, of_own)
        self.norm_attention = nn.LayerNorm(dim, bias=bias)
        self.cross: nn.Module | None = None
        self.norm_cross: nn.Module | None = None
        if cross is not False:
            memory_dim = dim if cross is True else width("cross", cross)
            self.cross = _attention(None, (dim, memory_dim, memory_dim), heads, bias, both)
            self.norm_cross = nn.LayerNorm(dim, bias=bias)
        self.feedforward = FeedForward(dim, hidden_width(dim, feedforward_dim), activation, dropout, bias)
        self.norm_feedforward = nn.LayerNorm(dim, bias=bias)

    def forward(
        self,
        tokens: Float[Tensor, "*b n d"],
        memory: Float[Tensor, "*_ m dm"] | None = None,
        mask: Tensor | Mask | None = None,
        memory_mask: Tensor | Mask | None = None,
        *,
        cache: tuple[Slot, Slot] | None = None,
    ) -> Float[Tensor, "*b n d"]:
        """Update the tokens.

        Args:
            tokens: (..., N, d).
            memory: what the encoder gave, (..., M, d_m).
            mask: which token may look at which, such as `Causal()`.
            memory_mask: which token may look at which of the memory, such as `Keys(real)`.
            cache: what earlier calls have left for `attention` and for `cross`.
        """
        if (memory is None) != (self.cross is None):
            expected = "nothing: this layer has cross=False" if self.cross is None else "what the encoder gave"
            raise ValueError(refusal("memory", "none" if memory is None else "a tensor", expected))
        if cache is not None and not isinstance(self.attention, TransformerAttention):
            _takes_cache(self.attention)
        of_own, of_memory = ({}, {}) if cache is None else ({"cache": cache[0]}, {"cache": cache[1]})
        tokens = self._added(tokens, self.norm_attention, lambda x: self.attention(x, mask=mask, **of_own))
        if self.cross is not None and self.norm_cross is not None:
            read = self.cross
            tokens = self._added(tokens, self.norm_cross, lambda x: read(x, memory, mask=memory_mask, **of_memory))
        return self._added(tokens, self.norm_feedforward, self.feedforward)

    @classmethod
    def from_torch(cls, module: nn.TransformerDecoderLayer, **options: Any) -> DecoderLayer:
        """The same function as a layer of torch, with copies of its weights; masks and axes as in `EncoderLayer.from_torch`."""
        if not isinstance(module, nn.TransformerDecoderLayer):
            raise TypeError(refusal("module", type(module).__name__, "an nn.TransformerDecoderLayer"))
        ours = cls(**_arguments(module), **options)
        norms = {"norm_attention": module.norm1, "norm_cross": module.norm2, "norm_feedforward": module.norm3}
        _copy(ours, module, {"attention": module.self_attn, "cross": module.multihead_attn}, norms)
        return ours


def _attention(
    given: AttentionLike, dim: int | tuple[int, int, int], heads: int, bias: bool, options: Mapping[str, Any]
) -> nn.Module:
    """The attention of a layer: the usual one with these options, or another, to which they mean nothing."""
    if given is None:
        rest = {name: value for name, value in options.items() if name != "attention_dropout"}
        return TransformerAttention(dim, heads, bias=bias, dropout=options.get("attention_dropout", 0.0), **rest)
    if options:
        name = next(iter(options))
        raise TypeError(refusal(name, repr(options[name]), "nothing beside an attention of its own"))
    made = given(dim, heads) if callable(given) and not isinstance(given, nn.Module) else given  # type: ignore[arg-type]
    if not isinstance(made, nn.Module):
        raise TypeError(refusal("attention", type(made).__name__, "a module, or a function of width and heads"))
    return made


def _takes_cache(attention: nn.Module) -> None:
    """Refuse to decode in portions with an attention that cannot."""
    parameters = inspect.signature(attention.forward).parameters.values()
    if not any(p.name == "cache" or p.kind is p.VAR_KEYWORD for p in parameters):
        expected = f"none: {type(attention).__name__} reads all tokens at once and keeps none"
        fix = "Fix: call the decoder with all tokens so far; to generate, use an attention whose forward takes cache=."
        raise TypeError(refusal("cache", "one", expected, fix))


def _arguments(module: Any) -> dict[str, Any]:
    """What a layer of torch was made with."""
    attention = module.self_attn
    return {
        "dim": attention.embed_dim,
        "heads": attention.num_heads,
        "feedforward_dim": module.linear1.out_features,
        "norm": "pre" if module.norm_first else "post",
        "activation": module.activation,
        "dropout": module.dropout.p,
        "attention_dropout": attention.dropout,
        "bias": module.linear1.bias is not None,
    }


@torch.no_grad()
def _copy(
    ours: Any, theirs: Any, attentions: Mapping[str, nn.MultiheadAttention], norms: Mapping[str, nn.LayerNorm]
) -> None:
    """Weights of torch's layer into ours, on its device and in its dtype."""
    ours.to(theirs.linear1.weight.device, theirs.linear1.weight.dtype)
    for name, attention in attentions.items():
        getattr(ours, name).load_state_dict(MultiHeadAttention.from_torch(attention).state_dict(), strict=True)
    for name, norm in norms.items():
        getattr(ours, name).load_state_dict(norm.state_dict())
        getattr(ours, name).eps = norm.eps
    feedforward = {"W1": theirs.linear1.weight, "W2": theirs.linear2.weight}
    if theirs.linear1.bias is not None:
        feedforward |= {"b1": theirs.linear1.bias, "b2": theirs.linear2.bias}
    ours.feedforward.load_state_dict(feedforward)
    ours.train(theirs.training)
