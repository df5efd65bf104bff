"""Translate: a sentence in another language.

Real data: Multi30k, captions of photographs in English, German and French, a sentence a line. Without data, sentences of a small
language that was made up, whose alignments are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from regard._errors import refusal
from regard.evaluate.outer import Score, bleu, chrf, meteor
from regard.feature import RecurrentEncoder
from regard.model import POSSIBLE, SURE, Chain, Embedding, Example, TaskModel
from regard.recipes.data import Folder
from regard.recipes.recipe import Judged, one_of
from regard.recipes.subwords import Subwords, tokens_of
from regard.recipes.text import words_of
from regard.recipes.translate.language import Pair, pairs
from regard.recipes.writing import TRANSFORMER, Dropped, Writing, aer
from regard.transformer import TransformerEncoder

LANGUAGES = ("en", "de", "fr")
TESTS = {"2016": "test_2016_flickr", "2017": "test_2017_flickr"}
# What reads words and their characters, one in the light of the other.
VIA = "attention-via-attention"

Sentences = list[tuple[str, str]]


@dataclass(kw_only=True)
class Translate(Writing):
    """Translate a sentence: a recurrent encoder in both directions, an attention, a recurrent decoder; or a Transformer.

    Attributes:
        source: language of the input, `en`, `de` or `fr`.
        target: language of the output.
        test: year of the test set, `2016` or `2017`.
        merges: of the byte-pair encoding that both languages share.
        lowercase: forget the case of letters; the scores then do, too.
        validation_size: sentences of the validation set that are looked at while training.
        train_size: sentences made up for training, where there are no data.
    """

    name: ClassVar[str] = "translate"
    about: ClassVar[str] = "a sentence in another language: Multi30k, English, German and French"
    watch: ClassVar[str] = "bleu"
    alternatives: ClassVar[tuple[str, ...]] = (
        *("additive", "general", "local-predictive", VIA, "multi-head", TRANSFORMER),
    )
    made_up_only: ClassVar[tuple[str, ...]] = ("train_size",)
    by_length: ClassVar[bool] = True

    source: str = "en"
    target: str = "de"
    test: str = "2016"
    merges: int = 10_000
    lowercase: bool = False
    validation_size: int = 500
    train_size: int = 2000
    embedding_dim: int = 256
    hidden_dim: int = 512
    dropout: float = 0.5
    smoothing: float = 0.1
    batch: int = 128
    steps: int = 6000
    every: int = 300
    patience: int = 8
    lr: float = 1e-3
    warmup: int = 300
    decay: str = "cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("source", "target"):
            one_of(key, getattr(self, key), LANGUAGES)
        if self.source == self.target:
            raise ValueError(refusal("target", repr(self.target), f"another language than the source, {self.source!r}"))
        one_of("test", self.test, tuple(TESTS))

    @classmethod
    def usual(cls, attention: str, data: str | None) -> dict[str, Any]:
        if data is None:
            small = {"embedding_dim": 32, "hidden_dim": 128, "dropout": 0.0, "smoothing": 0.0, "batch": 64}
            return {**small, "steps": 300, "every": 100, "warmup": 20, "lr": 5e-3 if attention != TRANSFORMER else 2e-3}
        if attention == TRANSFORMER:
            return {"hidden_dim": 256, "layers": 3, "dropout": 0.3, "batch": 256, "warmup": 1000}
        return {}

    @property
    def levels(self) -> bool:
        """Whether characters are read beside words."""
        return self.attention == VIA

    @cached_property
    def _read(self) -> dict[str, Sentences]:
        assert self.data is not None
        return read(self.data, self.source, self.target, TESTS[self.test])

    @cached_property
    def _pairs(self) -> dict[str, list[Pair]]:
        return pairs(self.train_size, self.seed)

    def _texts(self, split: str) -> Sentences:
        if self.data is None:
            return [pair.texts for pair in self._pairs[split]]
        return self._read[split]

    def _cased(self, text: str) -> str:
        return text.lower() if self.lowercase else text

    def learn(self) -> dict[str, Any]:
        found = Subwords.learnt((self._cased(text) for pair in self._texts("train") for text in pair), self.merges)
        return {"characters": found.characters, "merges": [list(pair) for pair in found.merges]}

    @cached_property
    def pieces(self) -> Subwords:
        """The byte-pair encoding."""
        return Subwords(self.known["characters"], self.known["merges"])

    @property
    def end(self) -> int:
        """The token that ends a sentence."""
        return len(self.pieces)

    def examples(self, split: str) -> Sequence[Example]:
        if self.data is None:
            return [self._linked(pair) for pair in self._pairs[split]]
        texts = self._read[split]
        return [self._example(*pair) for pair in (texts[: self.validation_size] if split == "validation" else texts)]

    def _example(self, source: str, target: str | None = None) -> Example:
        source = self._cased(source)
        cut = self.pieces.cut(source)
        numbers = torch.tensor(self.pieces.numbers(cut))
        inputs, words = {"words" if self.levels else "tokens": numbers}, {"words" if self.levels else "tokens": cut}
        if self.levels:
            characters = "".join(tokens_of(source))
            inputs["characters"] = torch.tensor(self.pieces.numbers(characters))
            words["characters"] = list(characters)
        if target is None:
            return Example(inputs, words=words)
        told = self.pieces.cut(self._cased(target))
        return Example(
            inputs,
            torch.tensor([*self.pieces.numbers(told), self.end]),
            words={**words, "target": [*told, "end"]},
        )

    def _linked(self, pair: Pair) -> Example:
        """An example with the links of its pieces: sure where the word of the source is one piece, possible where it is several."""
        source, target = pair.texts
        found, of_source = self._example(source, target), self._owners(source)
        gold = torch.zeros(len(found.words["target"]), len(of_source), dtype=torch.int8)
        for i, owner in enumerate(self._owners(target)):
            word = pair.target[owner]
            for j, place in enumerate(of_source):
                if place in word.sure:
                    gold[i, j] = SURE if of_source.count(place) == 1 else POSSIBLE
                elif place in word.possible:
                    gold[i, j] = POSSIBLE
        return Example(found.inputs, found.target, gold=gold, words=found.words)

    def _owners(self, text: str) -> list[int]:
        """For every piece of a text the word or mark that it belongs to."""
        return [k for k, token in enumerate(tokens_of(self._cased(text))) for _ in self.pieces.cut_token(token)]

    def build(self) -> TaskModel:
        vocabulary, h = len(self.pieces), self.hidden_dim
        if self.levels:
            features = {"words": self._encoder(vocabulary), "characters": self._encoder(vocabulary)}
            return self.writer(features, vocabulary + 1, {"words": h, "characters": h})
        return self.writer(self._encoder(vocabulary), vocabulary + 1, {"tokens": h})

    def _encoder(self, vocabulary: int) -> nn.Module:
        h, d = self.hidden_dim, self.embedding_dim
        if self.attention == TRANSFORMER:
            return Chain(
                Embedding(vocabulary, h, dropout=self.dropout),
                TransformerEncoder(h, self.heads, self.layers, position="sinusoidal", norm="pre", dropout=self.dropout),
            )
        layers = [RecurrentEncoder(d if k == 0 else h, h // 2) for k in range(self.layers)]
        between = [part for layer in layers for part in (layer, Dropped(self.dropout))]
        return Chain(Embedding(vocabulary, d, dropout=self.dropout), *between)

    def parse(self, text: str) -> Example:
        if not text.strip():
            raise ValueError(refusal("text", repr(text), f"a sentence in the source language, {self.source!r}"))
        return self._example(text)

    def _spelt(self, tokens: Sequence[int]) -> str:
        return self.pieces.joined(self.pieces.pieces[k] for k in tokens)

    def right_answer(self, example: Example) -> str:
        return self.pieces.joined(example.words["target"][:-1])

    def judge(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """BLEU, chrF and METEOR of what is found by beam search, as text; perplexity and alignment when told what came before."""
        answers = [self._spelt(tokens) for tokens in self.written(model, examples, device, self.searched)]
        if not examples or examples[0].target is None:
            return Judged({}, answers)
        truth = self._truth(examples)
        scores = {
            **self._shared(model, examples, device, answers),
            "chrf": chrf(answers, truth, lowercase=self.lowercase),
        }
        told = Judged.of(scores, answers)
        try:
            # METEOR's words are what blanks separate.
            score = meteor(*([" ".join(words_of(text)) for text in texts] for texts in (answers, truth)))
        except ImportError as error:
            told.signatures["meteor"] = f"not computed: {error}"
        else:
            told.metrics["meteor"], told.signatures["meteor"] = float(score), score.signature
        return told

    def glance(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """BLEU of the likeliest token at every step, and perplexity."""
        answers = [self._spelt(tokens) for tokens in self.written(model, examples, device)]
        return Judged.of(self._shared(model, examples, device, answers), answers)

    def _shared(
        self, model: TaskModel, examples: Sequence[Example], device: torch.device | str, answers: list[str]
    ) -> dict[str, Score]:
        surprise, links = self.told(model, examples, device)
        scores = {
            "bleu": bleu(answers, self._truth(examples), lowercase=self.lowercase),
            "perplexity": surprise.score(),
        }
        return scores if examples[0].gold is None else {**scores, "aer": aer(links)}

    def _truth(self, examples: Sequence[Example]) -> list[str]:
        return [self.right_answer(example) for example in examples]


def read(data: str, source: str, target: str, test: str) -> dict[str, Sentences]:
    """Pairs of sentences by split; a pair of which either is empty is left out."""
    files = {"train": "train", "validation": "val", "test": test}
    folder = Folder(data, *(f"{file}.{language}" for file in files.values() for language in (source, target)))
    found = {}
    for split, file in files.items():
        here, there = (folder.lines(f"{file}.{language}") for language in (source, target))
        if len(here) != len(there):
            got = f"{file}.{source} of {len(here)} lines and {file}.{target} of {len(there)}"
            raise ValueError(refusal("data", got, "as many lines in both: a line is a sentence and its translation"))
        found[split] = [(a, b) for a, b in zip(here, there, strict=True) if a.strip() and b.strip()]
    return found


RECIPE = Translate
