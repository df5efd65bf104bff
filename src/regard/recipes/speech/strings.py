"""Digits that one speaker says one after the other, put together from recordings of single ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.recipes.speech.sound import RATE, changed, silence


class Recording(NamedTuple):
    """One spoken digit."""

    digit: int
    speaker: str
    sound: Tensor


class Said(NamedTuple):
    """Digits in one sound, and where each begins and ends in it, in samples."""

    sound: Tensor
    digits: list[int]
    spans: list[tuple[int, int]]


class Strings(Sequence[Said]):
    """Strings of digits, put together when they are asked for; the same for the same seed.

    Args:
        recordings: of single digits.
        count: number of strings; None for each recording once, alone.
        digits: the fewest and the most in a string.
        seed: of what is drawn.
        change: whether every digit is changed a little: for training.
    """

    def __init__(
        self,
        recordings: Sequence[Recording],
        count: int | None,
        digits: tuple[int, int],
        seed: str,
        change: bool = False,
    ) -> None:
        self.recordings, self.seed, self.change = recordings, seed, change
        speakers: Mapping[str, list[int]] = {}
        for k, recording in enumerate(recordings):
            speakers.setdefault(recording.speaker, []).append(k)  # type: ignore[attr-defined]
        self.chosen: list[list[int]] = []
        draw = random.Random(f"{seed} strings")
        for _ in range(count or 0):
            of = speakers[draw.choice(sorted(speakers))]
            self.chosen.append([draw.choice(of) for _ in range(draw.randint(*digits))])
        if count is None:
            self.chosen = [[k] for k in range(len(recordings))]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Said:  # type: ignore[override]
        draw = random.Random(f"{self.seed} {index}")
        alter: Callable[[Tensor, random.Random], Tensor] = changed if self.change else lambda sound, _: sound
        parts, spans, at = [], [], 0
        for place, k in enumerate(self.chosen[index]):
            # Before the first digit too: where it begins must not be known beforehand.
            before = silence(draw.uniform(0.0, 0.1) if place == 0 else draw.uniform(0.02, 0.15), draw)
            sound = alter(self.recordings[k].sound, draw)
            parts += [before, sound]
            spans.append((at + len(before), at + len(before) + len(sound)))
            at += len(before) + len(sound)
        parts.append(silence(draw.uniform(0.03, 0.1), draw))
        return Said(torch.cat(parts), [self.recordings[k].digit for k in self.chosen[index]], spans)

    @property
    def lengths(self) -> list[int]:
        """About how long each is, in hundredths of a second."""
        return [sum(len(self.recordings[k].sound) for k in some) * 100 // RATE for some in self.chosen]
