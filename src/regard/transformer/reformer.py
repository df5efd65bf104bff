"""Reformer: hashed attention in reversible layers, for sequences too long for anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.parts import masked_input
from regard.general.bound import Sizes
from regard.general.causal import refuse_together
from regard.general.masks import Causal, Mask, as_mask
from regard.general.scores.base import width
from regard.ops.fill import kept_rows
from regard.transformer.chunked import ChunkedFeedForward
from regard.transformer.feedforward import hidden_width
from regard.transformer.generation import Generated, How, generate
from regard.transformer.lsh import LSHAttention
from regard.transformer.models import RecomputedDecoding, TokenEmbedding
from regard.transformer.positions import AbsolutePosition, PositionLike, build_position
from regard.transformer.reversible import ReversibleLayer, reversible
from regard.transformer.sharing import share


@register(
    name="reformer",
    zh="Reformer（LSH 注意力与可逆层）",
    path="query/multiplicity",
    equation="y_1 = x_1 + LSH(LN(x_2)),  y_2 = x_2 + FFN(LN(y_1)),  L times;  LN((y_1 + y_2) / 2)",
    paper="Kitaev, Kaiser and Levskaya, Reformer: The Efficient Transformer, ICLR 2020",
    year=2020,
    time="L (R N (3 m d + d √(2 N / m)) + N d²), the backward with one forward more",
    memory="N d + L H R N hashes of two bytes",
    choose="sequences are long, the model is deep, and memory is what ends",
    avoid="it fits without: layers computed twice and pairs that are missed are the price",
)
class Reformer(nn.Module):
    r"""Reversible layers of hashed attention and chunked feed-forward maps (Kitaev et al. 2020, https://arxiv.org/abs/2001.04451).

    $$y_1 = x_1 + \mathrm{LSH}(\mathrm{LN}(x_2)), \qquad y_2 = x_2 + \mathrm{FFN}(\mathrm{LN}(y_1)), \qquad L \text{ times}$$

    Both streams begin as the tokens, and their normalised mean comes out. For the backward nothing is kept of a layer but its hashes:
    going back, each layer's inputs are computed from its outputs. Padding is neither read nor written: it comes out as zeros.
    Under a trace the weights of layer $l$ are at `layers.l.attention.attention`, (..., H, N, N). What is recorded of a layer has no graph,
    since its forward runs without one: a loss on the trace teaches nothing. Under `regard.execution("dense")` the layers are ordinary ones,
    and what is recorded can be learned from.

    Args:
        dim: width of the tokens.
        heads: of each layer.
        layers: how many.
        causal: let no token look at a later one.
        position: `"sinusoidal"`, `"learned"` or another position of tokens.
        feedforward_dim: width inside the feed-forward map; 4 `dim` when not given.
        feedforward_chunk: how many tokens of a sequence it takes at a time.
        dropout: of what each part adds, and of hidden units.
        attention: in place of `LSHAttention`: a function of width and heads that makes one.
        **options: of `LSHAttention`: `rounds`, `chunk`, `buckets`, `across_buckets` and so on; `attention_dropout`, of weights; and
            `activation` of the feed-forward map.

    Example:
        >>> encode = Reformer(8, heads=2, layers=3, rounds=2, chunk=4, causal=True, position="sinusoidal")
        >>> encode(torch.randn(2, 11, 8), torch.arange(11) < torch.tensor([[11], [7]])).shape
        torch.Size([2, 11, 8])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        layers: int = 6,
        *,
        causal: bool = False,
        position: PositionLike = None,
        feedforward_dim: int | None = None,
        feedforward_chunk: int = 1024,
        dropout: float = 0.0,
        attention: Callable[[int, int], nn.Module] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.dim, self.causal = dim, causal = width("dim", dim), causal
        feedforward_chunk = width("feedforward_chunk", feedforward_chunk)
        bottom = build_position(position, dim=dim, heads=heads)
        if bottom is not None and not isinstance(bottom, AbsolutePosition):
            raise ValueError(
                refusal("position", type(bottom).__name__, "one of tokens: queries and keys are the same here")
            )
        self.position = bottom
        activation = options.pop("activation", "relu")
        weights = options.pop("attention_dropout", 0.0)
        if attention is not None and (options or weights):
            name = next(iter(options), "attention_dropout")
            raise TypeError(refusal(name, repr(options.get(name, weights)), "nothing beside an attention of its own"))

        def layer() -> ReversibleLayer:
            made = LSHAttention(dim, heads, dropout=weights, **options) if attention is None else attention(dim, heads)
            if causal and isinstance(made, nn.Module):
                refuse_together(made)
            hidden = hidden_width(dim, feedforward_dim)
            feed = ChunkedFeedForward(dim, hidden, activation, dropout, chunk=feedforward_chunk)
            return ReversibleLayer(dim, made, feed, dropout)

        self.layers = nn.ModuleList(layer() for _ in range(width("layers", layers)))
        self.final_norm = nn.LayerNorm(dim)

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
            pairs: which token may look at which, beside what `causal` says; not `Packed`, which hashed attention refuses.
        """
        tokens, mask = masked_input(tokens, mask, "tokens", self.dim)
        n = tokens.shape[-2]
        if self.causal:
            pairs = Causal() if pairs is None else Causal() & as_mask(pairs)
        shared = share(mask, pairs, Sizes(tuple(tokens.shape[:-2]), n, n), tokens.device)
        if self.position is not None:
            tokens = self.position(tokens)
        y1, y2 = reversible(list(self.layers), tokens, tokens, shared)  # type: ignore[arg-type]
        return kept_rows(self.final_norm((y1 + y2) / 2), mask)

    def extra_repr(self) -> str:
        return f"causal={self.causal}"


class ReformerLanguageModel(nn.Module):
    r"""Each token from those before it, by a causal Reformer (Kitaev et al. 2020, https://arxiv.org/abs/2001.04451).

    $$p(y_t \mid y_{<t}) = \mathrm{softmax}\big(E\, \mathrm{Reformer}(y_{<t})_t\big)$$

    A new token may move the chunks of those before it, and with them what these see. So `generate` keeps nothing from step to step: it
    reads the whole text again for every token, each of which has its probability in the text as it then was.

    Args:
        vocabulary: number of tokens.
        dim: width of the vectors.
        heads: of each attention.
        layers: how many.
        position: of the tokens.
        **options: of `Reformer`.

    Example:
        >>> model = ReformerLanguageModel(11, dim=8, heads=2, layers=1, chunk=4)
        >>> model(torch.tensor([[3, 4, 5]])).shape
        torch.Size([1, 3, 11])
        >>> model.generate(torch.tensor([[3, 4, 5]]), steps=2).tokens.shape
        torch.Size([1, 2])
    """

    def __init__(
        self,
        vocabulary: int,
        dim: int,
        heads: int,
        layers: int = 6,
        *,
        position: PositionLike = "sinusoidal",
        **options: Any,
    ) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(vocabulary, dim)
        self.reformer = Reformer(dim, heads, layers, causal=True, position=position, **options)

    def forward(self, tokens: Int[Tensor, "*b n"], mask: Bool[Tensor, "*_ n"] | None = None) -> Float[Tensor, "*b n v"]:
        """Logits of what follows each token; the mask is True for real ones."""
        return self.embedding.logits(self.reformer(self.embedding(tokens), mask))

    @torch.no_grad()
    def generate(
        self, prompt: Int[Tensor, "b m"], *, end: int | None = None, steps: int, how: How | None = None
    ) -> Generated:
        """Write on after prompts of equal length; the rest is as in `generate`."""
        return generate(RecomputedDecoding(self), prompt, steps=steps, end=end, how=how)
