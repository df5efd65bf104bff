"""A symbol at the beginning of a text, asked for at its end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from regard.recipes.planted.task import Batch, choice


@dataclass(frozen=True)
class Recall:
    """Say which symbol was marked, when all of a text has passed since.

    Tokens are `ask`, the symbols, and the symbols with a mark. One of the first `segment` tokens is marked, and `ask` stands at the
    end of the last of `segments`; every other token is any symbol. Whoever sees the last segment alone can only guess.
    """

    segment: int = 5
    segments: int = 3
    symbols: int = 4

    ask = 0

    @property
    def classes(self) -> int:
        """The symbols."""
        return self.symbols

    @property
    def vocabulary(self) -> int:
        """All tokens."""
        return 1 + 2 * self.symbols

    def draw(self, count: int, generator: Generator) -> Batch:
        """Input `tokens` (count, segments · segment); truth `tokens`, the place of what is asked for."""
        n = self.segment * self.segments
        tokens = 1 + torch.randint(self.symbols, (count, n), generator=generator)
        place, target = choice(count, self.segment, generator), choice(count, self.symbols, generator)
        tokens[torch.arange(count), place] = 1 + self.symbols + target
        tokens[:, -1] = self.ask
        return Batch({"tokens": tokens}, target, {"tokens": place})


class InSegments(nn.Module):
    """A model of segments on a whole text, one segment after the other: logits at its end, of the plain symbols of a `Recall`.

    Args:
        model: gives logits of tokens and a memory, as `TransformerXLLanguageModel` does.
        segment: tokens of a segment.
        symbols: how many there are.

    Example:
        >>> import regard as rg
        >>> task = Recall()
        >>> model = InSegments(
        ...     rg.TransformerXLLanguageModel(task.vocabulary, 8, 2, 1, memory=16), task.segment, task.symbols
        ... )
        >>> model(**task.draw(5, torch.Generator()).inputs).shape
        torch.Size([5, 4])
    """

    def __init__(self, model: nn.Module, segment: int, symbols: int) -> None:
        super().__init__()
        self.model, self.segment, self.symbols = model, segment, symbols

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (count, symbols)."""
        memory = None
        for part in tokens.split(self.segment, -1):
            logits, memory = self.model(part, memory)
        last: Tensor = logits[:, -1, 1 : 1 + self.symbols]
        return last
