"""A Transformer-XL on tokens: logits of what follows, segment by segment, and generation from any memory."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from regard.transformer.generation import Generated, How, generate
from regard.transformer.models import TokenEmbedding
from regard.transformer.transformer_xl import Memory, Segment, TransformerXL


class TransformerXLLanguageModel(nn.Module):
    r"""Each token from those before it, in this segment and in the memory (Dai et al. 2019, https://arxiv.org/abs/1901.02860).

    $$p(y_t \mid y_{<t}) = \mathrm{softmax}\big(E\, \mathrm{xl}(y_{<t}, m)_t\big)$$

    Args:
        vocabulary: number of tokens.
        dim: width of the vectors, an even number.
        heads: of each attention.
        layers: how many.
        memory: the most tokens that are remembered.
        **options: of `TransformerXL`.

    Example:
        >>> model = TransformerXLLanguageModel(11, dim=8, heads=2, layers=1, memory=7)
        >>> text, memory = torch.randint(11, (2, 10)), None
        >>> for segment in text.split(5, dim=-1):
        ...     logits, memory = model(segment, memory)
        >>> logits.shape, memory.length
        (torch.Size([2, 5, 11]), 7)
        >>> model.generate(text[:, -1:], memory=memory, steps=3).tokens.shape
        torch.Size([2, 3])
    """

    def __init__(self, vocabulary: int, dim: int, heads: int, layers: int = 6, *, memory: int, **options: Any) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(vocabulary, dim)
        self.decoder = TransformerXL(dim, heads, layers, memory=memory, **options)

    def forward(
        self, tokens: Int[Tensor, "*b n"], memory: Memory | None = None, mask: Bool[Tensor, "*_ n"] | None = None
    ) -> Segment:
        """Logits (..., N, V) of what follows each token, and the memory for the next segment; the mask is True for real tokens."""
        hidden, memory = self.decoder(self.embedding(tokens), memory, mask)
        return Segment(self.embedding.logits(hidden), memory)

    @torch.no_grad()
    def generate(
        self,
        prompt: Int[Tensor, "b m"],
        *,
        memory: Memory | None = None,
        end: int | None = None,
        steps: int,
        how: How | None = None,
    ) -> Generated:
        """Write on after prompts of equal length, and after what is in the memory; the rest is as in `generate`."""
        return generate(_Streaming(self, memory), prompt, steps=steps, end=end, how=how)


class _Streaming:
    """A model in the middle of decoding, with the memory of what it has seen."""

    def __init__(self, model: TransformerXLLanguageModel, memory: Memory | None) -> None:
        self.model, self.memory = model, memory

    def step(self, tokens: Tensor) -> Tensor:
        segment: Segment = self.model(tokens, self.memory)
        self.memory = segment.memory
        return segment.output[:, -1]

    def spread(self, times: int) -> None:
        if self.memory is not None:
            state = self.memory.states[0]
            self.reorder(torch.arange(len(state), device=state.device).repeat_interleave(times))

    def reorder(self, rows: Tensor) -> None:
        self.memory = None if self.memory is None else self.memory.reorder(rows)
