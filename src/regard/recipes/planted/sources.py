"""Several representations of each token, of which one knows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator

from regard.recipes.planted.task import Batch, choice, hidden_signs, taken


@dataclass(frozen=True)
class InformativeSource:
    """Say the sign of each token, which one of its representations knows.

    Each source has a sign for every token, and a flag that says whether to believe it; one source has the flag. Sources speak
    different languages: each mixes sign and flag by a matrix of its own.
    """

    n: int = 4
    widths: tuple[int, ...] = (7, 5, 6, 4)

    @property
    def classes(self) -> int:
        """Positive or not."""
        return 2

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `sources`, (count, n, width) each; target (count, n); truth `source` (count, n)."""
        knows = choice(count * self.n, len(self.widths), generator)
        signs = hidden_signs(knows, len(self.widths), generator)
        sources = []
        for k, width in enumerate(self.widths):
            plain = torch.stack([signs[:, k], (knows == k).float()], -1)
            mixing = torch.randn(width, 2, generator=Generator().manual_seed(k))
            sources.append((plain @ torch.linalg.qr(mixing).Q.mT).view(count, self.n, width))
        target = (taken(signs, knows) > 0).long().view(count, self.n)
        return Batch({"sources": sources}, target, {"source": knows.view(count, self.n)})
