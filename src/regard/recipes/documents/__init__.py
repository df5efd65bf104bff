"""Documents: what is a text of many sentences?

Real data: IMDB (for or against), two newsgroups about sports, and movie reviews with the words that annotators gave as reasons. Without
data, reviews are made up in which several people judge a film, and only the writer's own judgement counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard import catalog
from regard.evaluate.outer import mean_average_precision
from regard.feature import HierarchicalAttention, RecurrentEncoder
from regard.model import SURE, Batch, Chain, Example, TaskModel
from regard.observe import Recorded, Trace, record
from regard.query import LearnableQuery
from regard.recipes.choice import assembled, make_attention
from regard.recipes.classification import Classification
from regard.recipes.documents.data import CLASSES, Document, made_up, read, sentences_of
from regard.recipes.recipe import Judged, one_of
from regard.recipes.runs import HEATMAP
from regard.recipes.text import TextRecipe

# More sentences than these cannot be read in a figure.
_SHOWN = 16


@dataclass(kw_only=True)
class Documents(TextRecipe, Classification):
    """What a document is: words are read into sentences and sentences into the document; or all words at once, by a flat attention.

    Attributes:
        set: `imdb`, `newsgroups` or `movies`, of the data folder.
        sentences: the most of a document; what follows is left out.
        words: the most of a sentence; what follows is another one.
        hidden_dim: width of the features.
        train_size: documents made up for training, where there are no data.
    """

    name: ClassVar[str] = "documents"
    about: ClassVar[str] = (
        "what a long text is, words to sentences to document: IMDB, newsgroups, movie reviews with reasons"
    )
    alternatives: ClassVar[tuple[str, ...]] = ("hierarchical", "additive", "self-attention", "entmax")
    made_up_only: ClassVar[tuple[str, ...]] = ("train_size",)
    by_length: ClassVar[bool] = True

    attention: str = "hierarchical"
    set: str = "imdb"
    sentences: int = 64
    words: int = 32
    hidden_dim: int = 100
    train_size: int = 1000
    at_least: int = 2
    dropout: float = 0.5
    batch: int = 32
    steps: int = 448
    every: int = 112
    lr: float = 2e-3
    decay: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("set", self.set, tuple(CLASSES))

    @classmethod
    def usual(cls, attention: str, data: str | None) -> dict[str, Any]:
        return {"hidden_dim": 32, "steps": 300, "every": 50, "lr": 3e-3, "decay": "none"} if data is None else {}

    @cached_property
    def levels(self) -> int:
        """Two where the attention reads sentences, one where it reads words."""
        return 2 if catalog.find(self.attention, argument="attention").cls is HierarchicalAttention else 1

    @cached_property
    def _documents(self) -> dict[str, list[Document]]:
        return made_up(self.train_size, self.seed) if self.data is None else read(self.data, self.set)

    def learn(self) -> dict[str, Any]:
        words = self.learn_words(s for document in self._documents["train"] for s in document.sentences)
        return {**words, "classes": CLASSES["imdb" if self.data is None else self.set]}

    def examples(self, split: str) -> Sequence[Example]:
        return [self._example(document) for document in self._documents[split]]

    def _example(self, document: Document) -> Example:
        reasons = document.reasons or [[False] * len(words) for words in document.sentences]
        pieces = [
            (words[k : k + self.words], marks[k : k + self.words])
            for words, marks in zip(document.sentences, reasons, strict=True)
            for k in range(0, len(words), self.words)
        ][: self.sentences]
        if self.levels == 1:
            pieces = [
                ([word for words, _ in pieces for word in words], [mark for _, marks in pieces for mark in marks])
            ]
        longest = max(len(words) for words, _ in pieces)
        tokens = torch.zeros(len(pieces), longest, dtype=torch.long)
        real = torch.zeros(tokens.shape, dtype=torch.bool)
        gold = torch.zeros(tokens.shape, dtype=torch.int8)
        for k, (words, marks) in enumerate(pieces):
            tokens[k, : len(words)] = self.vocabulary.numbers(words)
            real[k, : len(words)] = True
            gold[k, : len(words)] = SURE * torch.tensor(marks, dtype=torch.int8)
        if self.levels == 1:
            tokens, real, gold = tokens[0], real[0], gold[0]
        return Example(
            {"document": tokens},
            None if document.label is None else torch.tensor(document.label),
            masks={"document": real},
            gold=None if document.reasons is None else gold.unsqueeze(0),
            words={"document": [word for words, _ in pieces for word in words]},
        )

    def build(self) -> TaskModel:
        h = self.hidden_dim
        features = Chain(self.embedding(), RecurrentEncoder(self.word_dim, h // 2))
        options = self.options
        if self.levels == 2:
            options = {"encoders": [None, RecurrentEncoder(h, h // 2)], **options}
        widths = {"query_dim": h, "key_dim": h, "value_dim": h, "dim": h, "hidden_dim": h}
        attention = make_attention(self.attention, options, **widths)
        return assembled(
            features,
            attention,
            lambda context: self.output(context, self.dropout),
            {"document": h},
            lambda: LearnableQuery(h),
        )

    def parse(self, text: str) -> Example:
        sentences = sentences_of(text)
        if not sentences:
            raise ValueError("text: got nothing, expected a document.")
        return self._example(Document(sentences))

    def batches(self, examples: Sequence[Example], size: int = 64) -> list[Batch]:
        return super().batches(examples, size)

    def glance(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        return super().judge(model, examples, device)

    @torch.no_grad()
    def judge(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """As a classification; and where the reasons are known, how far up they are among the words by weight."""
        judged = super().judge(model, examples, device)
        if not examples or examples[0].gold is None:
            return judged
        weights: list[Tensor] = []
        truth: list[Tensor] = []
        groups: list[Tensor] = []
        for batch in self.batches(examples):
            found = word_weights(model, batch.to(device)).float().cpu()
            assert batch.gold is not None
            real, gold = batch.masks["document"], batch.gold.squeeze(1)
            number = torch.arange(len(batch)).view(-1, *(1,) * (real.dim() - 1)) + (
                groups[-1].max() + 1 if groups else 0
            )
            weights.append(found[real])
            truth.append((gold == SURE)[real].long())
            groups.append(number.expand(real.shape)[real])
        marked, of = torch.cat(truth), torch.cat(groups)
        score = mean_average_precision(torch.cat(weights), marked, groups=of)
        judged.metrics["reasons_map"], judged.signatures["reasons_map"] = float(score), score.signature
        # What an order without sense would reach, nearly: the share of the words that are reasons.
        shares = torch.stack([marked[of == k].double().mean() for k in of.unique()])
        judged.metrics["reasons_share"] = float(shares[shares > 0].mean())
        return judged

    def draw(self, trace: Trace, examples: Sequence[Example], folder: Path) -> None:
        """The sentences that weigh most, in their order, each under its weight and shaded by the weights of its words in the whole."""
        if self.levels == 1:
            super().draw(trace, examples, folder)
            return
        of_words, of_sentences = (
            one_weight(trace[f"attention.levels.{level}"][-1])[0] for level in ("word", "sentence")
        )
        words = iter(examples[0].words["document"])
        counts = examples[0].masks["document"].sum(-1).tolist()
        heaviest = of_sentences[: len(counts)].topk(min(_SHOWN, len(counts))).indices.tolist()
        strips = {}
        for k, count in enumerate(counts):
            sentence = [next(words) for _ in range(count)]
            if k in heaviest:
                share = float(of_sentences[k])
                strips[f"sentence {k + 1}, weight {share:.2f}"] = (sentence, share * of_words[k, :count])
        from regard.report.figures import save, token_strips

        save(token_strips(strips, title=self.heading(examples[0])), folder / HEATMAP)


def one_weight(told: Recorded) -> Tensor:
    """Weights without an axis of features: their mean."""
    weights: Tensor = told.weights.mean(-1) if told.call.form.multi else told.weights
    return weights


def word_weights(model: TaskModel, batch: Batch) -> Tensor:
    """How much every word weighs in what is read, shaped as the mask: the mean over features, heads and queries."""
    with record(model) as trace:
        model(batch)
    if isinstance(model.attention, HierarchicalAttention):
        whole = model.attention.leaf_weights(trace, "attention")
        return whole if whole.dim() == 3 else whole.mean(-1)
    told = next(calls for _, calls in trace.items())[-1]
    weights = one_weight(told)
    while weights.dim() > 2:
        weights = weights.mean(1)
    return weights


RECIPE = Documents
