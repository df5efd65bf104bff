"""Sentiment: is a sentence for or against?

Real data: SST-2, SST-5, movie reviews and customer reviews, a class and a tokenised sentence a line. Without data, sentences are made
up of a few dozen words, some of which praise or blame, and of `not`, which turns the next of them around.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from regard.feature import RecurrentEncoder
from regard.general.attention import Attention
from regard.model import Chain, Example, TaskModel
from regard.query import LearnableQuery
from regard.recipes.choice import assembled, make_attention
from regard.recipes.classification import Classification
from regard.recipes.data import Folder, numbered
from regard.recipes.made import shared_out
from regard.recipes.recipe import one_of
from regard.recipes.text import TextRecipe, ordinary, separate_words

CLASSES = {
    "sst2": ("negative", "positive"),
    "sst5": ("very negative", "negative", "neutral", "positive", "very positive"),
    "mr": ("negative", "positive"),
    "cr": ("negative", "positive"),
}
_PRAISE = ("good", "fine", "lovely", "clever", "moving", "funny", "fresh", "warm")
_BLAME = ("bad", "dull", "awful", "stupid", "cold", "boring", "stale", "weak")
_FILLERS = (
    *("the", "a", "film", "story", "actor", "plot", "is", "was", "and", "with", "of", "this", "very", "quite"),
    *("some", "scene", "music", "end", "beginning", "which", "seems", "to", "be", "it", "all", "in", "one", "two"),
)

Sentence = tuple[list[str], int]


@dataclass(kw_only=True)
class Sentiment(TextRecipe, Classification):
    """Is a sentence for or against: a recurrent encoder, an attention, a classifier.

    Attributes:
        set: `sst2`, `sst5`, `mr` or `cr`, of the data folder.
        hidden_dim: width of the features.
        train_size: sentences made up for training, where there are no data.
    """

    name: ClassVar[str] = "sentiment"
    about: ClassVar[str] = "is a sentence for or against: SST-2, SST-5, MR, CR"
    alternatives: ClassVar[tuple[str, ...]] = (
        *("additive", "query-free", "multi-dimensional", "self-attention", "multi-query-concat"),
        *("source-to-token", "directional-self-attention", "reinforced-self-attention", "feature-update"),
        *("transformer-encoder", "capsule-based-attention", "reinforced", "sparsemax", "structured", "budget"),
    )
    made_up_only: ClassVar[tuple[str, ...]] = ("train_size",)
    by_length: ClassVar[bool] = True

    set: str = "sst2"
    hidden_dim: int = 128
    train_size: int = 1000
    steps: int = 600
    every: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("set", self.set, tuple(CLASSES))

    @classmethod
    def usual(cls, attention: str, data: str | None) -> dict[str, Any]:
        return {"hidden_dim": 64, "steps": 300} if data is None else {}

    @cached_property
    def _sentences(self) -> dict[str, list[Sentence]]:
        return made_up(self.train_size, self.seed) if self.data is None else read(self.data, self.set)

    def learn(self) -> dict[str, Any]:
        words = self.learn_words(words for words, _ in self._sentences["train"])
        return {**words, "classes": CLASSES["sst2" if self.data is None else self.set]}

    def examples(self, split: str) -> Sequence[Example]:
        return [self._example(words, number) for words, number in self._sentences[split]]

    def _example(self, words: list[str], number: int | None = None) -> Example:
        target = None if number is None else torch.tensor(number)
        return Example({"tokens": self.vocabulary.numbers(words)}, target, words={"tokens": words})

    def build(self) -> TaskModel:
        h = self.hidden_dim
        features = Chain(self.embedding(), RecurrentEncoder(self.word_dim, h // 2, kind="lstm"))
        widths = {"query_dim": h, "key_dim": h, "value_dim": h, "dim": h, "hidden_dim": h // 2, "heads": 4}
        attention = make_attention(self.attention, self.options, **widths, classes=len(self.classes))
        # Plain attention takes a query as it is; other mechanisms want an axis of queries, if only for one.
        count = 4 if self.attention == "multi-query-concat" else None if isinstance(attention, Attention) else 1
        return assembled(
            features,
            attention,
            lambda context: self.output(context, self.dropout),
            {"tokens": h},
            lambda: LearnableQuery(h, count),
        )

    def parse(self, text: str) -> Example:
        words = separate_words(text)
        if not words:
            raise ValueError("text: got nothing, expected a sentence.")
        return self._example(words)


def made_up(count: int, seed: int) -> dict[str, list[Sentence]]:
    """Sentences whose sign is that of their last word of praise or blame, turned around by `not`.

    Example:
        >>> words, sign = made_up(1, seed=0)["train"][0]
        >>> sign in (0, 1)
        True
    """
    return shared_out(_sentence, lambda sentence: " ".join(sentence[0]), count, seed)


def _sentence(draw: random.Random) -> Sentence:
    praises, turned = draw.random() < 0.5, draw.random() < 0.3
    telling = [*(["not"] if turned else []), draw.choice(_PRAISE if praises else _BLAME)]
    before = draw.choices(_FILLERS, k=draw.randint(1, 8))
    after = draw.choices(_FILLERS, k=draw.randint(0, 8))
    return [*before, *telling, *after], int(praises != turned)


def read(data: str, name: str) -> dict[str, list[Sentence]]:
    """The sentences of a data folder by split; where a set has one file, every tenth line is a test and the one after it a validation."""
    if name in ("mr", "cr"):
        lines = _sentences(Folder(data, f"{name}.all"), f"{name}.all", name)
        parts: dict[str, list[Sentence]] = {"train": [], "validation": [], "test": []}
        for k, sentence in enumerate(lines):
            parts[{0: "test", 1: "validation"}.get(k % 10, "train")].append(sentence)
        return parts
    files = {"train": f"{name}.train", "validation": f"{name}.dev", "test": f"{name}.test"}
    folder = Folder(data, *files.values())
    return {split: _sentences(folder, file, name) for split, file in files.items()}


def _sentences(folder: Folder, file: str, name: str) -> list[Sentence]:
    encoding = "latin-1" if name == "mr" else "utf-8"
    found = []
    for number, line in enumerate(folder.lines(file, encoding), 1):
        label, _, text = line.partition(" ")
        if text.strip():
            found.append((ordinary(text), numbered(label, CLASSES[name], f"{folder.path / file}, line {number}")))
    return found


RECIPE = Sentiment
