"""Opinions on several aspects, of which one is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from regard.recipes.planted.task import Batch, choice, hidden_signs, one_hot, permutations, taken


@dataclass(frozen=True)
class TargetSentiment:
    """Say whether the opinion on the target is positive.

    A text has a target, and four opinions on each side of it, or none on one side. An opinion is an aspect and a sign; one of
    them is on the target's aspect. A mean of a side tells nothing about its sign. Up to two fillers stand before the opinions
    of a side, and one beside the target.
    """

    aspects: int = 8

    @property
    def dim(self) -> int:
        """Width of a token: its aspect, a sign, and whether it is a filler."""
        return self.aspects + 2

    @property
    def classes(self) -> int:
        """Positive or not."""
        return 2

    @property
    def readout(self) -> Tensor:
        """The logits of the classes from left and right, target and target, (classes, 4 dim)."""
        weight = torch.zeros(self.classes, 4, self.dim)
        weight[:, :2, -2] = torch.tensor([[-1.0], [1.0]])
        return weight.flatten(1)

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `target` (count, 2, dim), `left` and `right` (count, 6, dim) with `masks`.

        Truth: `left` and `right` give the index of the opinion on the target, or -1 on the side without it.
        """
        aspects = permutations(count, self.aspects, generator)[:, :8].view(count, 2, 4)
        side, place = choice(count, 2, generator), choice(count, 4, generator)
        # A third of the texts has nothing on the other side.
        alone = choice(count, 3, generator) == 0
        # Where the target's opinion is not, signs are balanced: what is read there by mistake says nothing.
        balanced = 2.0 * (permutations(count, 4, generator) % 2) - 1
        here = side[:, None, None] == torch.arange(2)[:, None]
        signs = torch.where(here, hidden_signs(place, 4, generator)[:, None], balanced[:, None])
        opinions = torch.cat([one_hot(aspects, self.aspects), signs[..., None], torch.zeros(count, 2, 4, 1)], -1)
        filler = torch.zeros(self.dim)
        filler[-1] = 1.0
        tokens = torch.cat([filler.expand(count, 2, 2, self.dim), opinions], 2)
        fillers = torch.randint(3, (count, 2, 1), generator=generator)
        masks = torch.arange(6) >= 2 - fillers
        masks &= ~(alone[:, None] & (torch.arange(2) != side[:, None]))[..., None]
        word = torch.cat([one_hot(taken(taken(aspects, side), place), self.aspects), torch.zeros(count, 2)], -1)
        target = torch.stack([word, filler.expand(count, self.dim)], 1)
        truth = {name: torch.where(side == k, place + 2, -1) for k, name in enumerate(("left", "right"))}
        (left, right), (left_mask, right_mask) = tokens.unbind(1), masks.unbind(1)
        everywhere = torch.ones(count, 2, dtype=torch.bool)
        inputs = {"target": target, "left": left, "right": right, "masks": (everywhere, left_mask, right_mask)}
        return Batch(inputs, (taken(taken(signs, side), place) > 0).long(), truth)
