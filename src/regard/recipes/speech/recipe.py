"""Speech: which digits are said?

Real data: the Free Spoken Digit Dataset, a wav file a digit, put together to strings of one speaker. Without data, digits are the
tones of a telephone's keys.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from regard._errors import refusal
from regard.evaluate.outer import Score, per, wer
from regard.feature import RecurrentEncoder
from regard.model import POSSIBLE, Batch, Chain, Example, TaskModel
from regard.model.features import Convolution1d, Spectrogram
from regard.recipes.data import Folder, own_file
from regard.recipes.order import Order
from regard.recipes.recipe import Judged, one_of
from regard.recipes.speech.lexicon import LEXICON, PHONES, WORDS, heard, said
from regard.recipes.speech.sound import RATE, samples_of, tone
from regard.recipes.speech.strings import Recording, Said, Strings
from regard.recipes.writing import TRANSFORMER, Dropped, Writing, aer
from regard.transformer import TransformerEncoder
from regard.transformer.generation import How

UNITS = {"word": WORDS, "phone": PHONES}
SELF = "self-attention"
# A frame every hundredth of a second, and a feature of every four frames.
HOP, STRIDES = 0.01, (2, 2)
_NAME = re.compile(r"(\d)_([^_/]+)_(\d+)\.wav$")


@dataclass(kw_only=True)
class Speech(Writing):
    """Write what is said: frames of a spectrogram, strided convolutions, a recurrent encoder, an attention, a decoder.

    `--attention self-attention` puts self-attention in the place of the recurrent encoder, and reads as `additive` does;
    `transformer` is a Transformer on both sides.

    Attributes:
        unit: what is written, `word` or `phone`; the ten words have a pronunciation each.
        digits: the most digits in a string; 1 for the recordings as they are.
        mels: bands of the spectrogram.
        train_size: strings put together for training.
        test_size: strings put together for the validation, and for the test.
    """

    name: ClassVar[str] = "speech"
    about: ClassVar[str] = "which digits are said: the Free Spoken Digit Dataset, one digit or several"
    watch: ClassVar[str] = "wer"
    lower: ClassVar[bool] = True
    alternatives: ClassVar[tuple[str, ...]] = (*("additive", "general", "local-predictive", "hard", SELF, TRANSFORMER),)
    by_length: ClassVar[bool] = True

    unit: str = "word"
    digits: int = 5
    mels: int = 24
    train_size: int = 20_000
    test_size: int = 300
    hidden_dim: int = 128
    embedding_dim: int = 32
    dropout: float = 0.2
    beam: int = 3
    batch: int = 32
    steps: int = 2500
    every: int = 250
    patience: int = 10
    lr: float = 2e-3
    warmup: int = 100
    decay: str = "cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("unit", self.unit, tuple(UNITS))
        if self.digits < 1:
            raise ValueError(refusal("digits", self.digits, "a whole number >= 1"))

    @classmethod
    def usual(cls, attention: str, data: str | None) -> dict[str, Any]:
        deep = attention in (SELF, TRANSFORMER)
        if data is not None:
            return {"layers": 2, "lr": 1e-3} if deep else {}
        small = {"hidden_dim": 64, "digits": 3, "train_size": 1000, "test_size": 100, "dropout": 0.0}
        return {**small, "lr": 2e-3 if deep else 5e-3, "steps": 300, "every": 100, "warmup": 20}

    @property
    def units(self) -> tuple[str, ...]:
        """What can be written."""
        return UNITS[self.unit]

    @cached_property
    def _recordings(self) -> dict[str, list[Recording]]:
        return made_up(self.seed) if self.data is None else read(self.data)

    def strings(self, split: str) -> Strings:
        """What is said in a split."""
        train = split == "train"
        seed = f"{self.seed} {split}"
        alone = self.digits == 1 and not train
        count = None if alone else self.train_size if train else self.test_size
        # Training knows single digits too; the others are what the task is.
        some = (1 if train or self.digits == 1 else 2, self.digits)
        return Strings(self._recordings[split], count, some, seed, change=train and self.data is not None)

    def examples(self, split: str) -> Sequence[Example]:
        found = self.strings(split)
        return _Examples(self, found) if split == "train" else [self.example(told) for told in found]

    def order(self, examples: Sequence[Example]) -> Order:
        if not isinstance(examples, _Examples):
            return super().order(examples)
        return Order(len(examples), self.batch, self.seed, examples.strings.lengths)

    def example(self, told: Said) -> Example:
        """With links: each word, or each phone of it, may look at the features of its digit."""
        words = [WORDS[digit] for digit in told.digits]
        phones = [LEXICON[word] if self.unit == "phone" else (word,) for word in words]
        units = [unit for some in phones for unit in some]
        times = self.times(len(told.sound))
        gold = torch.zeros(len(units) + 1, len(times), dtype=torch.int8)
        row = 0
        for some, (start, stop) in zip(phones, told.spans, strict=True):
            inside = [start <= time * RATE < stop for time in times]
            gold[row : row + len(some)] = torch.tensor(inside) * POSSIBLE
            row += len(some)
        target = torch.tensor([*(self.units.index(unit) for unit in units), len(self.units)])
        names = {"sound": [f"{time:.2f}" for time in times], "target": [*units, "end"]}
        return Example({"sound": told.sound}, target, gold=gold, words=names)

    def times(self, samples: int) -> list[float]:
        """When the middle of each feature is, in seconds."""
        window, hop = self._spectrogram.window, self._spectrogram.hop
        count, step = 1 + max(0, samples - window) // hop, HOP
        for stride in STRIDES:
            count, step = -(-count // stride), step * stride
        return [k * step + window / 2 / RATE for k in range(count)]

    @cached_property
    def _spectrogram(self) -> Spectrogram:
        return Spectrogram(RATE, self.mels, window=0.032, hop=HOP)

    def build(self) -> TaskModel:
        h = self.hidden_dim
        convolutions = [
            Convolution1d(self.mels if k == 0 else h, h, kernels=5, stride=stride, dropout=self.dropout)
            for k, stride in enumerate(STRIDES)
        ]
        features = Chain(Spectrogram(RATE, self.mels, window=0.032, hop=HOP), *convolutions, *self._encoders())
        read = "additive" if self.attention == SELF else None
        return self.writer(features, len(self.units) + 1, {"sound": h}, read)

    def _encoders(self) -> list[nn.Module]:
        h = self.hidden_dim
        if self.attention in (SELF, TRANSFORMER):
            return [
                TransformerEncoder(h, self.heads, self.layers, position="sinusoidal", norm="pre", dropout=self.dropout)
            ]
        return [part for _ in range(self.layers) for part in (RecurrentEncoder(h, h // 2), Dropped(self.dropout))]

    def longest(self, batch: Batch) -> int:
        phones = max(map(len, LEXICON.values())) if self.unit == "phone" else 1
        return phones * (self.digits + 1) + 1

    def parse(self, text: str) -> Example:
        sound = samples_of(own_file(text, "a wav file"), text)
        return Example({"sound": sound}, words={"sound": [f"{time:.2f}" for time in self.times(len(sound))]})

    def right_answer(self, example: Example) -> str:
        return " ".join(self._words(example.words["target"][:-1]))

    def judge(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """Error rates of words and of phones, each known from the other by the lexicon."""
        return self._judged(model, examples, device, self.searched)

    def glance(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        return self._judged(model, examples, device, None)

    def _judged(
        self, model: TaskModel, examples: Sequence[Example], device: torch.device | str, how: How | None
    ) -> Judged:
        written = [[self.units[k] for k in tokens] for tokens in self.written(model, examples, device, how)]
        words = [self._words(units) for units in written]
        answers = [" ".join(some) for some in words]
        if not examples or examples[0].target is None:
            return Judged({}, answers)
        truth = [self.right_answer(example) for example in examples]
        phones = written if self.unit == "phone" else [said(some) for some in words]
        surprise, links = self.told(model, examples, device)
        scores: dict[str, Score] = {
            "wer": wer(answers, truth),
            "per": per(phones, [said(some.split()) for some in truth]),
            "perplexity": surprise.score(),
            "aer": aer(links),
        }
        return Judged.of(scores, answers)

    def _words(self, units: Sequence[str]) -> list[str]:
        return heard(units) if self.unit == "phone" else list(units)


class _Examples(Sequence[Example]):
    """Examples that are made when they are asked for: strings are many, and their recordings few."""

    def __init__(self, recipe: Speech, strings: Strings) -> None:
        self.recipe, self.strings = recipe, strings

    def __len__(self) -> int:
        return len(self.strings)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]
        return self.recipe.example(self.strings[index])


def made_up(seed: int) -> dict[str, list[Recording]]:
    """Tones of five telephones; those of different splits are different tones."""
    found: dict[str, list[Recording]] = {}
    for split, count in (("train", 10), ("validation", 3), ("test", 3)):
        draw = random.Random(f"{seed} {split} tones")
        found[split] = [
            Recording(digit, f"telephone {k}", tone(digit, draw))
            for k in range(5)
            for digit in range(10)
            for _ in range(count)
        ]
    return found


def read(data: str) -> dict[str, list[Recording]]:
    """Recordings by split: of each digit and speaker, numbers 0 to 4 are the test, 5 and 6 the validation."""
    found: dict[str, list[Recording]] = {"train": [], "validation": [], "test": []}
    for path, content in Folder(data).collected(".wav").items():
        matched = _NAME.search(path)
        if matched is None:
            raise ValueError(refusal("data", path, "wav files named digit_speaker_number.wav"))
        digit, speaker, number = int(matched[1]), matched[2], int(matched[3])
        split = "test" if number < 5 else "validation" if number < 7 else "train"
        found[split].append(Recording(digit, speaker, samples_of(content, path)))
    missing = [split for split, some in found.items() if not some]
    if missing:
        fix = "Fix: docs/data.md shows the files of every data set."
        raise ValueError(refusal("data", repr(data), f"recordings of the {' and of the '.join(missing)}", fix))
    return found


RECIPE = Speech
