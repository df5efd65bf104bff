"""Transformers on tokens: embeddings below, logits above, and generation with a cache."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard._errors import refusal
from regard.general.scores.base import width
from regard.query.parts import widths
from regard.transformer.decoder import TransformerDecoder
from regard.transformer.generation import Generated, How, a_token, generate
from regard.transformer.positions import PositionLike
from regard.transformer.transformer import Transformer


class TokenEmbedding(nn.Module):
    r"""Tokens as vectors, $\sqrt{d}\, E_t$, and vectors as logits of tokens, $E h$.

    Args:
        vocabulary: how many tokens there are.
        dim: $d$.

    Example:
        >>> embed = TokenEmbedding(11, 4)
        >>> embed(torch.tensor([[3, 5]])).shape, embed.logits(torch.randn(1, 2, 4)).shape
        (torch.Size([1, 2, 4]), torch.Size([1, 2, 11]))
    """

    def __init__(self, vocabulary: int, dim: int) -> None:
        super().__init__()
        vocabulary, dim = width("vocabulary", vocabulary), width("dim", dim)
        self.E = nn.Parameter(torch.randn(vocabulary, dim) / math.sqrt(dim))

    def forward(self, tokens: Int[Tensor, "*b n"]) -> Float[Tensor, "*b n d"]:
        if tokens.dtype.is_floating_point or tokens.dtype == torch.bool:
            raise TypeError(refusal("tokens", f"a tensor of {tokens.dtype}", "integers"))
        return F.embedding(tokens, self.E) * math.sqrt(self.E.shape[1])

    def logits(self, hidden: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
        return F.linear(hidden, self.E)

    def extra_repr(self) -> str:
        return f"vocabulary={self.E.shape[0]}, dim={self.E.shape[1]}"


class SequenceToSequence(nn.Module):
    r"""A Transformer from tokens to tokens (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

    $$p(y_t \mid y_{<t}, x) = \mathrm{softmax}\big(E\, \mathrm{decoder}(y_{<t}, \mathrm{encoder}(x))_t\big)$$

    Embeddings are those of the output too, and of both sides where they share a vocabulary. Its parts are `source`, `target` and
    `transformer`.

    Args:
        vocabulary: number of tokens, of both sides or of each.
        dim: width of the vectors.
        heads: of each attention.
        layers: of each, or of encoder and decoder.
        position: as in `TransformerEncoder`.
        **options: of `Transformer`.

    Example:
        >>> model = SequenceToSequence(11, dim=8, heads=2, layers=1)
        >>> source = torch.tensor([[3, 4, 5]])
        >>> model(source, torch.tensor([[0, 5, 4]])).shape
        torch.Size([1, 3, 11])
        >>> model.generate(source, begin=0, steps=4).tokens.shape
        torch.Size([1, 4])
    """

    def __init__(
        self,
        vocabulary: int | tuple[int, int],
        dim: int,
        heads: int,
        layers: int | tuple[int, int] = 6,
        *,
        position: PositionLike = "sinusoidal",
        **options: Any,
    ) -> None:
        super().__init__()
        sizes = widths("vocabulary", vocabulary, 2)
        self.target = TokenEmbedding(sizes[1], dim)
        self.source = self.target if isinstance(vocabulary, int) else TokenEmbedding(sizes[0], dim)
        self.transformer = Transformer(dim, heads, layers, position=position, **options)

    def forward(
        self,
        source: Int[Tensor, "*b n"],
        target: Int[Tensor, "*b m"],
        mask: Bool[Tensor, "*_ n"] | None = None,
        target_mask: Bool[Tensor, "*_ m"] | None = None,
    ) -> Float[Tensor, "*b m v"]:
        """Logits of what follows each token of the target; masks are True for real tokens."""
        hidden = self.transformer(self.source(source), self.target(target), mask, target_mask)
        return self.target.logits(hidden)

    @torch.no_grad()
    def generate(
        self,
        source: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b n"] | None = None,
        *,
        begin: int,
        end: int | None = None,
        steps: int,
        how: How | None = None,
    ) -> Generated:
        """Write a target for each source, after the token `begin`; the rest is as in `generate`."""
        if source.dim() != 2:
            raise ValueError(refusal("source", f"shape {tuple(source.shape)}", "(batch, N)"))
        begin = a_token("begin", begin, len(self.target.E))
        memory = self.transformer.encoder(self.source(source), mask)
        mask = None if mask is None else mask.expand(source.shape)
        decoding = CachedDecoding(self.transformer.decoder, self.target, memory, mask)
        return generate(decoding, source.new_full((len(source), 1), begin), steps=steps, end=end, how=how)


class LanguageModel(nn.Module):
    r"""A decoder alone: each token from those before it (Radford et al. 2018, https://openai.com/index/language-unsupervised).

    $$p(y_t \mid y_{<t}) = \mathrm{softmax}\big(E\, \mathrm{decoder}(y_{<t})_t\big)$$

    Args:
        vocabulary: number of tokens.
        dim: width of the vectors.
        heads: of each attention.
        layers: how many.
        position: as in `TransformerEncoder`.
        **options: of `TransformerDecoder`.

    Example:
        >>> model = LanguageModel(11, dim=8, heads=2, layers=1, position="rotary")
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
        self.decoder = TransformerDecoder(dim, heads, layers, cross=False, position=position, **options)

    def forward(self, tokens: Int[Tensor, "*b n"], mask: Bool[Tensor, "*_ n"] | None = None) -> Float[Tensor, "*b n v"]:
        """Logits of what follows each token; the mask is True for real ones."""
        return self.embedding.logits(self.decoder(self.embedding(tokens), None, mask))

    @torch.no_grad()
    def generate(
        self, prompt: Int[Tensor, "b m"], *, end: int | None = None, steps: int, how: How | None = None
    ) -> Generated:
        """Write on after prompts of equal length; the rest is as in `generate`."""
        return generate(CachedDecoding(self.decoder, self.embedding), prompt, steps=steps, end=end, how=how)


class CachedDecoding:
    """A decoder in the middle of decoding, with the cache of what it has seen.

    Args:
        decoder: called with the new tokens alone.
        embedding: of tokens, and of logits.
        memory: what the decoder reads beside, (B, M, d).
        mask: True for what is real there, (B, M).
    """

    def __init__(
        self,
        decoder: TransformerDecoder,
        embedding: TokenEmbedding,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> None:
        self.decoder, self.embedding, self.memory, self.mask = decoder, embedding, memory, mask
        self.cache = decoder.cache()

    def step(self, tokens: Tensor) -> Tensor:
        hidden = self.decoder(self.embedding(tokens), self.memory, None, self.mask, cache=self.cache)
        return self.embedding.logits(hidden[:, -1])

    def spread(self, times: int) -> None:
        self.cache.spread(times)
        self.memory = None if self.memory is None else self.memory.repeat_interleave(times, 0)
        self.mask = None if self.mask is None else self.mask.repeat_interleave(times, 0)

    def reorder(self, rows: Tensor) -> None:
        # Paths of one beam read the same memory.
        self.cache.reorder(rows, cross=False)


class RecomputedDecoding:
    """A model in the middle of decoding that keeps nothing of a step but its tokens, and reads them all again at the next.

    Args:
        model: from tokens (R, N) to logits (R, N, V) of what follows each.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tokens: Tensor | None = None

    def step(self, tokens: Tensor) -> Tensor:
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], -1)
        logits: Tensor = self.model(self.tokens)[:, -1]
        return logits

    def spread(self, times: int) -> None:
        self.tokens = None if self.tokens is None else self.tokens.repeat_interleave(times, 0)

    def reorder(self, rows: Tensor) -> None:
        self.tokens = None if self.tokens is None else self.tokens[rows]
