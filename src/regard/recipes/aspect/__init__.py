"""Aspect: what does a sentence say of a target in it?

Real data: SemEval 2014 to 2016 and Twitter, three lines an example. Without data, sentences are made up that say something of two
things, and something else of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from regard.feature import RecurrentEncoder
from regard.model import Chain, Example, Pretrained, TaskModel
from regard.recipes.aspect.data import CLASSES, SETS, Opinion, bracketed, made_up, read
from regard.recipes.aspect.parts import AroundTarget, TargetQuery
from regard.recipes.choice import assembled, make_attention
from regard.recipes.classification import Classification
from regard.recipes.pieces import Pieces, learn_encoder, load_encoder
from regard.recipes.recipe import one_of
from regard.recipes.text import TextRecipe, apart


@dataclass(kw_only=True)
class Aspect(TextRecipe, Classification):
    """What is said of a target: a recurrent encoder of the sentence, an attention between target and contexts, a classifier.

    Attributes:
        set: `semeval14_restaurant`, `semeval14_laptop`, `semeval15_restaurant`, `semeval16_restaurant`, `twitter_acl14`,
            `haabsa2015_restaurant` or `haabsa2016_restaurant`, of the data folder.
        encoder: folder of a pretrained encoder of transformers (`config.json`, `tokenizer.json`, weights), in place of word vectors.
        freeze: leave the encoder as it is, with a recurrent one above it; otherwise it is trained on.
        encoder_lr: learning rate of the encoder.
        hidden_dim: width of the features; a pretrained encoder that is trained on has its own.
        train_size: sentences made up for training, where there are no data.
    """

    name: ClassVar[str] = "aspect"
    about: ClassVar[str] = "what a sentence says of a target in it: SemEval 14 to 16, Twitter"
    alternatives: ClassVar[tuple[str, ...]] = (
        *("rotatory", "interactive-co-attention", "parallel-co-attention", "additive", "multi-hop"),
    )
    made_up_only: ClassVar[tuple[str, ...]] = ("train_size",)
    by_length: ClassVar[bool] = True

    attention: str = "rotatory"
    set: str = "semeval14_restaurant"
    encoder: str | None = None
    freeze: bool = False
    encoder_lr: float = 5e-5
    hidden_dim: int = 200
    train_size: int = 1000
    dropout: float = 0.3
    batch: int = 32
    steps: int = 600
    every: int = 50
    # As many as there are evaluations: the last ones, at small steps, are often the best.
    patience: int = 12
    lr: float = 2e-3
    decay: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("set", self.set, SETS)

    @classmethod
    def usual(cls, attention: str, data: str | None) -> dict[str, Any]:
        return {"hidden_dim": 64, "steps": 300} if data is None else {}

    @cached_property
    def _opinions(self) -> dict[str, list[Opinion]]:
        return made_up(self.train_size, self.seed) if self.data is None else read(self.data, self.set)

    def learn(self) -> dict[str, Any]:
        text = {} if self.encoder is None else learn_encoder(self.encoder)
        return {**(text or self.learn_words(o.words for o in self._opinions["train"])), "classes": list(CLASSES)}

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(self.known["tokenizer"])

    def examples(self, split: str) -> Sequence[Example]:
        return [self._example(opinion) for opinion in self._opinions[split]]

    def _example(self, opinion: Opinion) -> Example:
        target = None if opinion.polarity is None else torch.tensor(opinion.polarity)
        place = torch.tensor([opinion.start, opinion.end])
        if self.encoder is None:
            sentence = {"sentence": self.vocabulary.numbers(opinion.words)}
            return Example(sentence, target, {"place": place}, words={"sentence": opinion.words})
        cut = self._pieces.cut(opinion.words)
        return Example(
            {"sentence": cut.tokens},
            target,
            {"place": place + cut.start},
            {"sentence": cut.mask},
            words={"sentence": cut.words},
        )

    def build(self) -> TaskModel:
        features = self._features()
        h = int(features.out_dim or 0)
        options = {"hops": 3, **self.options} if self.attention == "rotatory" else self.options
        widths = {"query_dim": h, "key_dim": h, "value_dim": h, "dim": h, "hidden_dim": h // 2}
        attention = make_attention(self.attention, options, **widths)
        return assembled(
            features,
            AroundTarget(attention) if AroundTarget.fits(attention) else attention,
            lambda context: self.output(context, self.dropout),
            {"sentence": h},
            TargetQuery,
            {"place": torch.tensor([[1, 2]])},
        )

    def _features(self) -> Chain:
        if self.encoder is None:
            return Chain(self.embedding(), RecurrentEncoder(self.word_dim, self.hidden_dim // 2, kind="lstm"))
        encoder = Pretrained(self.known["encoder"], freeze=self.freeze)
        if not self.freeze:
            return Chain(encoder)
        return Chain(encoder, RecurrentEncoder(encoder.out_dim, self.hidden_dim // 2, kind="lstm"))

    def initialise(self, model: TaskModel) -> None:
        if self.encoder is None:
            super().initialise(model)
        for module in model.modules():
            if self.encoder is not None and isinstance(module, Pretrained):
                load_encoder(module, self.encoder)

    def groups(self, model: TaskModel) -> list[dict[str, Any]]:
        """An encoder that knows something learns more slowly than what knows nothing yet."""
        if self.encoder is None or self.freeze:
            return super().groups(model)
        return apart(model, Pretrained, self.encoder_lr, self.lr)

    def parse(self, text: str) -> Example:
        """A sentence with its target in brackets: `the [food] was great`."""
        return self._example(bracketed(text))


RECIPE = Aspect
