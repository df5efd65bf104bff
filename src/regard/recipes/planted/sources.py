"""Several representations of each token, of which one knows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator

from regard.recipes.planted.task import Batch, one_hot


@dataclass(frozen=True)
class InformativeSource:
    """Say the class of each token, which one of its representations knows.

    Each source names a class for every token, any class, and has a flag that says whether to believe it; one source has the
    flag. Sources speak different languages: each mixes class and flag by a matrix of its own.
    """

    n: int = 4
    widths: tuple[int, ...] = (8, 6, 7)
    classes: int = 5

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `sources`, (count, n, width) each; target (count, n); truth `source` (count, n)."""
        tokens = (count, self.n)
        knows = torch.randint(len(self.widths), tokens, generator=generator)
        claims = torch.randint(self.classes, (*tokens, len(self.widths)), generator=generator)
        sources = []
        for k, width in enumerate(self.widths):
            plain = torch.cat([one_hot(claims[..., k], self.classes), (knows == k).float()[..., None]], -1)
            mixing = torch.randn(width, self.classes + 1, generator=Generator().manual_seed(k))
            sources.append(plain @ torch.linalg.qr(mixing).Q.mT)
        target = claims.gather(-1, knows[..., None]).squeeze(-1)
        return Batch({"sources": sources}, target, {"source": knows})
