"""The encoder: layers in which tokens read each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.parts import masked_input
from regard.general.bound import Sizes
from regard.general.masks import Mask
from regard.general.scores.base import width
from regard.ops.fill import kept_rows
from regard.ops.parallel.ranks import first_place
from regard.transformer.layers import EncoderLayer
from regard.transformer.positions import AbsolutePosition, PositionLike, build_position
from regard.transformer.sharing import share


@register(
    name="transformer-encoder",
    zh="Transformer 编码器",
    path="query/multiplicity",
    equation="x ← LN(x + MHA(x, x)),  x ← LN(x + FFN(x)),  L times",
    paper="Vaswani et al., Attention Is All You Need, NeurIPS 2017",
    year=2017,
    time="L (N² d + N d²)",
    memory="L N d (for the backward); weights linear (fused, blockwise)",
    choose="whole inputs are to be understood in context, in both directions: classify, tag, retrieve",
    avoid="text is to be generated (decoder), or inputs are so long that N² counts (Linformer, Reformer, windows)",
)
class TransformerEncoder(nn.Module):
    r"""Layers of self-attention: many heads side by side, many hops one after the other (https://arxiv.org/abs/1706.03762).

    $$x \leftarrow \mathrm{LN}(x + \mathrm{MHA}(x, x)), \qquad x \leftarrow \mathrm{LN}(x + \mathrm{FFN}(x)), \qquad L \text{ times}$$

    Without positions the order of the tokens does not matter. Padding is neither read nor written: it comes out as zeros. Under a
    trace the weights of layer $l$ are at `layers.l.attention.attention`, (..., H, N, N).

    Args:
        dim: width of the tokens.
        heads: of each layer.
        layers: how many, or ready-made ones, each called as `layer(tokens, mask)`.
        position: `"sinusoidal"` or `"learned"`, added to the tokens; `"rotary"`, `"alibi"`, `"relative"`, `"transformer-xl"` or
            `"directional"`, in every layer's scores. A name or a function makes one for each layer, a ready-made one serves all.
        final_norm: normalise at the end; so by default with `norm="pre"`.
        **options: of each `EncoderLayer`: `norm`, `feedforward_dim`, `activation`, `dropout`, `bias`, `attention`, and of its
            attention: `score`, `align`, `key_heads`, `attention_dropout`, `impl` and so on.

    Example:
        >>> import torch
        >>> encode = TransformerEncoder(8, heads=2, layers=3, position="rotary", norm="pre")
        >>> encode(torch.randn(2, 5, 8), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        layers: int | Sequence[nn.Module] = 6,
        *,
        position: PositionLike = None,
        final_norm: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.dim = width("dim", dim)
        self.position, self.layers = stack(EncoderLayer, dim, heads, layers, position, options)
        wanted = options.get("norm") == "pre" if final_norm is None else final_norm
        self.final_norm = nn.LayerNorm(dim, bias=options.get("bias", True)) if wanted else None

    def forward(
        self,
        tokens: Float[Tensor, "*b n d"],
        mask: Bool[Tensor, "*_ n"] | None = None,
        *,
        pairs: Mask | Tensor | None = None,
    ) -> Float[Tensor, "*b n d"]:
        """Read the tokens in context.

        Args:
            tokens: (..., N, d).
            mask: True for real tokens, (..., N).
            pairs: which token may look at which: a mask object such as `Window(8)`, or booleans that broadcast to (..., N, N).
        """
        tokens, mask = masked_input(tokens, mask, "tokens", self.dim)
        n = tokens.shape[-2]
        shared = share(mask, pairs, Sizes(tuple(tokens.shape[:-2]), n, n), tokens.device)
        if self.position is not None:
            tokens = self.position(tokens, first_place(n))
        for layer in self.layers:
            tokens = layer(tokens, shared)
        if self.final_norm is not None:
            tokens = self.final_norm(tokens)
        return kept_rows(tokens, mask)

    @classmethod
    def from_torch(cls, module: nn.TransformerEncoder, **options: Any) -> TransformerEncoder:
        """The same function as an encoder of torch, with copies of its weights.

        Axes are (..., N, d) whatever its `batch_first` says, True in a mask means a real token, and padding comes out as zeros.
        """
        if not isinstance(module, nn.TransformerEncoder):
            raise TypeError(refusal("module", type(module).__name__, "an nn.TransformerEncoder"))
        layers = [EncoderLayer.from_torch(layer, **options) for layer in module.layers]
        attention: Any = module.layers[0].self_attn
        ours = cls(attention.embed_dim, attention.num_heads, layers)
        ours.final_norm = copied_norm(module.norm)
        return ours.train(module.training)


def stack(
    kind: Callable[..., nn.Module],
    dim: int,
    heads: int,
    layers: int | Sequence[nn.Module],
    position: PositionLike,
    options: dict[str, Any],
) -> tuple[AbsolutePosition | None, nn.ModuleList]:
    """The position at the bottom, if it stands there, and the layers, with it in each if it does not."""
    if not isinstance(layers, int):
        if not isinstance(layers, list | tuple | nn.ModuleList):
            raise TypeError(refusal("layers", repr(layers), "a whole number >= 1, or a list of ready-made layers"))
        if options:
            name = next(iter(options))
            raise TypeError(refusal(name, repr(options[name]), "nothing beside layers that are ready-made"))
        bottom = build_position(position, dim=dim, heads=heads)
        if bottom is not None and not isinstance(bottom, AbsolutePosition):
            fix = "Fix: make each layer with it."
            raise ValueError(refusal("position", type(bottom).__name__, "one of tokens beside ready-made layers", fix))
        return bottom, nn.ModuleList(layers)
    if isinstance(options.get("attention"), nn.Module) and layers > 1:
        got = f"one {type(options['attention']).__name__}"
        fix = "Fix: pass a function of width and heads that makes one."
        raise ValueError(refusal("attention", got, f"parameters for {layers} layers", fix))
    head_dim = options.get("head_dim") or max(1, dim // width("heads", heads))
    head_dim = head_dim if isinstance(head_dim, int) else head_dim[0]
    first = build_position(position, dim=dim, heads=heads, head_dim=head_dim)
    if first is None or isinstance(first, AbsolutePosition):
        return first, nn.ModuleList(kind(dim, heads, **options) for _ in range(width("layers", layers)))
    return None, nn.ModuleList(kind(dim, heads, position=position, **options) for _ in range(width("layers", layers)))


def copied_norm(norm: nn.Module | None) -> nn.LayerNorm | None:
    """A normalisation of torch at the end of a stack, copied; None where there is none."""
    if norm is None:
        return None
    if not isinstance(norm, nn.LayerNorm):
        raise TypeError(refusal("module", f"one that ends in {type(norm).__name__}", "one that ends in a LayerNorm"))
    copy = nn.LayerNorm(norm.normalized_shape, norm.eps, bias=norm.bias is not None)
    copy.to(norm.weight.device, norm.weight.dtype).load_state_dict(norm.state_dict())
    return copy
