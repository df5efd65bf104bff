"""A document, and a question about one of its words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator

from regard.recipes.planted.task import Batch, choice, permutations, taken


@dataclass(frozen=True)
class Cloze:
    """Say which entity follows the marker that the question asks about.

    A document is a shuffled list of pairs *marker entity*. The question has one of its markers among words that no document
    holds, so that most of the question says nothing.
    """

    pairs: int = 5
    entities: int = 8
    markers: int = 8
    fillers: int = 4

    @property
    def classes(self) -> int:
        """All tokens: entities first."""
        return self.entities + self.markers + self.fillers

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `document` (count, 2 pairs) and `question` (count, 4), tokens; truth `document`, where the answer stands."""
        entities = permutations(count, self.entities, generator)[:, : self.pairs]
        markers = self.entities + permutations(count, self.markers, generator)[:, : self.pairs]
        place = choice(count, self.pairs, generator)
        fillers = self.entities + self.markers + choice(count * 4, self.fillers, generator).view(count, 4)
        where = choice(count, 4, generator)
        question = torch.where(torch.arange(4) == where[:, None], taken(markers, place)[:, None], fillers)
        document = torch.stack([markers, entities], -1).flatten(1)
        inputs = {"document": document, "question": question}
        return Batch(inputs, taken(entities, place), {"document": 2 * place + 1})
