"""Pairs: what do two texts have to do with each other?

Real data: SICK and SNLI (does one follow from the other?), WikiQA (which sentence answers a question?). Without data, pairs are made up
of what one does and of a claim about it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard._errors import refusal
from regard.evaluate.outer import mean_average_precision, mean_reciprocal_rank
from regard.feature import RecurrentEncoder
from regard.model import Chain, Classifier, Example, Output, PairRanker, TaskModel
from regard.query import AttentionOverAttention, LearnableQuery
from regard.recipes.choice import assembled, make_attention
from regard.recipes.classification import Classification
from regard.recipes.pairs.compare import Compared, EachOverOther
from regard.recipes.pairs.data import CLASSES, RANKED, Pair, made_up, read
from regard.recipes.recipe import Judged, Recipe, one_of
from regard.recipes.text import TextRecipe, separate_words


@dataclass(kw_only=True)
class Pairs(TextRecipe, Classification):
    """Two texts: a recurrent encoder of both, a co-attention, a comparison of what was read.

    Attributes:
        set: `sick`, `snli` or `wikiqa`, of the data folder.
        hidden_dim: width of the features.
        shared: tell the output model beside what was read how many words the texts share.
        train_size: pairs made up for training, where there are no data.
    """

    name: ClassVar[str] = "pairs"
    about: ClassVar[str] = "does one text follow from another, or answer it: SICK, SNLI, WikiQA"
    alternatives: ClassVar[tuple[str, ...]] = (
        *("interactive-co-attention", "alternating-co-attention", "parallel-co-attention"),
        *("multi-grained-co-attention", "attention-over-attention"),
    )
    made_up_only: ClassVar[tuple[str, ...]] = ("train_size",)
    by_length: ClassVar[bool] = True

    attention: str = "interactive-co-attention"
    set: str = "sick"
    hidden_dim: int = 200
    shared: bool = True
    train_size: int = 2000
    steps: int = 1000
    every: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("set", self.set, tuple(CLASSES))
        if self.ranked:
            # Of a class, but here of this recipe: what it is judged by depends on the set.
            self.__dict__["watch"] = "map"

    @classmethod
    def usual(cls, attention: str, data: str | None) -> dict[str, Any]:
        return {"hidden_dim": 64, "steps": 600} if data is None else {}

    @property
    def ranked(self) -> bool:
        """Whether pairs are ranked, not classed."""
        return self.data is not None and self.set == RANKED

    @cached_property
    def _pairs(self) -> dict[str, list[Pair]]:
        return made_up(self.train_size, self.seed) if self.data is None else read(self.data, self.set)

    def drawn(self, split: str, count: int) -> Sequence[int]:
        # Candidates of a question stand together, and are ranked together.
        return range(min(self.limit or count, count)) if self.ranked else super().drawn(split, count)

    def learn(self) -> dict[str, Any]:
        words = self.learn_words(text for pair in self._pairs["train"] for text in (pair.first, pair.second))
        return {**words, "classes": CLASSES["sick" if self.data is None else self.set]}

    def examples(self, split: str) -> Sequence[Example]:
        return [self._example(pair) for pair in self._pairs[split]]

    def _example(self, pair: Pair) -> Example:
        texts = {"first": pair.first, "second": pair.second}
        return Example(
            {name: self.vocabulary.numbers(words) for name, words in texts.items()},
            None if pair.label is None else torch.tensor(pair.label),
            {"group": torch.tensor(pair.group), "shared": self._shared(pair)},
            words=texts,
        )

    def _shared(self, pair: Pair) -> Tensor:
        """Of the words of each text, the share that the other has too; a word counts as much as it is rare."""
        rank, last = self.vocabulary.number, len(self.vocabulary)

        def weight(words: set[str]) -> float:
            # The logarithm of its rank is that of its rarity, as words are distributed (Zipf).
            return sum(math.log(1 + rank.get(word, last)) for word in words)

        first, second = set(pair.first), set(pair.second)
        both = weight(first & second)
        return torch.tensor([both / (weight(first) or 1.0), both / (weight(second) or 1.0)])

    def build(self) -> TaskModel:
        h = self.hidden_dim
        features = Chain(self.embedding(), RecurrentEncoder(self.word_dim, h // 2, kind="lstm"))
        attention = make_attention(self.attention, self.options, dim=h, key_dim=h, hidden_dim=h // 2)
        if isinstance(attention, AttentionOverAttention):
            attention = EachOverOther(attention)
        return assembled(features, attention, self._compared, {"first": h, "second": h}, lambda: LearnableQuery(h))

    def _compared(self, context: Any) -> Output:
        h = self.hidden_dim
        last = PairRanker(h, self.dropout) if self.ranked else Classifier(h, len(self.classes), self.dropout)
        return Compared(h, context.shape[-1] // (2 * h), last, h, self.dropout, 2 if self.shared else 0)

    def parse(self, text: str) -> Example:
        """Two texts with a bar between them."""
        first, _, second = map(separate_words, text.partition("|"))
        if not first or not second:
            raise ValueError(refusal("text", repr(text), "two texts with | between them"))
        return self._example(Pair(first, second))

    def right_answer(self, example: Example) -> Any:
        # Answers of what is ranked are scores.
        return Recipe.right_answer(self, example) if self.ranked else super().right_answer(example)

    @torch.no_grad()
    def judge(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """As a classification; candidates of a question by how far up the right ones are ranked."""
        if not self.ranked:
            return super().judge(model, examples, device)
        scores = torch.cat([model(batch.to(device)).float().cpu() for batch in self.batches(examples)])
        answers = scores.tolist()
        if examples[0].target is None:
            return Judged({}, answers)
        truth = [int(example.target) for example in examples if example.target is not None]
        groups = [int(example.variables["group"]) for example in examples]
        found = {
            "map": mean_average_precision(scores, truth, groups=groups),
            "mrr": mean_reciprocal_rank(scores, truth, groups=groups),
        }
        return Judged.of(found, answers)


RECIPE = Pairs
