"""Language: say what comes next in a text, character by character or word by word.

Real data: Tiny Shakespeare; WikiText-2, trained on its validation part. Without data, a small grammar writes sentences in which a verb
agrees with a noun that may stand far before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard._errors import refusal
from regard.evaluate.outer import PerplexityCounts, Score
from regard.model import Batch, Embedding, Example, LanguageHead, TaskModel
from regard.recipes.language.texts import made_up, pieces_of, read_texts
from regard.recipes.recipe import Judged, Recipe, one_of
from regard.recipes.stacks import CAUSAL, causal_stack
from regard.recipes.text import UNKNOWN, Vocabulary

SETS = ("shakespeare", "wikitext2")


@dataclass(kw_only=True)
class Language(Recipe):
    """Say what comes next: embeddings, a causal stack with any attention in its layers, a head that shares the embeddings.

    Attributes:
        set: `shakespeare` or `wikitext2`, of the data folder.
        unit: `character` or `word`.
        length: tokens of an example.
        segment: tokens that a Transformer-XL reads at once.
        dim: width.
        heads: of each layer.
        layers: how many.
        dropout: while training.
        at_least: how often a word must occur to be known.
        sentences: made up for training, where there are no data.
        continued: tokens that are written after a text of a user's own.
    """

    name: ClassVar[str] = "language"
    about: ClassVar[str] = "what comes next in a text: Tiny Shakespeare, WikiText-2"
    watch: ClassVar[str] = "perplexity"
    lower: ClassVar[bool] = True
    alternatives: ClassVar[tuple[str, ...]] = CAUSAL
    made_up_only: ClassVar[tuple[str, ...]] = ("sentences",)

    attention: str = "transformer-decoder"
    set: str = "shakespeare"
    unit: str = "character"
    length: int = 128
    segment: int = 32
    dim: int = 64
    heads: int = 4
    layers: int = 2
    dropout: float = 0.1
    at_least: int = 2
    sentences: int = 2000
    continued: int = 60
    batch: int = 32
    steps: int = 300
    lr: float = 2e-3
    warmup: int = 50
    decay: str = "cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("set", self.set, SETS)
        one_of("unit", self.unit, ("character", "word"))
        if self.length < 2:
            raise ValueError(refusal("length", self.length, "a whole number >= 2"))

    @classmethod
    def usual(cls, attention: str, data: str | None) -> dict[str, Any]:
        if data is None:
            return {}
        sizes = {"length": 256, "segment": 64, "dim": 384, "heads": 6, "layers": 6, "dropout": 0.2}
        return {**sizes, "batch": 64, "steps": 5000, "every": 250, "lr": 1e-3, "warmup": 100, "weight_decay": 0.1}

    @cached_property
    def _texts(self) -> dict[str, str]:
        return made_up(self.sentences, self.seed) if self.data is None else read_texts(self.data, self.set)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.known["tokens"])

    def learn(self) -> dict[str, Any]:
        at_least = 1 if self.unit == "character" else self.at_least
        return {"tokens": Vocabulary.learnt([pieces_of(self._texts["train"], self.unit)], at_least)}

    def examples(self, split: str) -> Sequence[Example]:
        """Windows of a text; those of training overlap by half, so that every token is once in a second half."""
        pieces = pieces_of(self._texts[split], self.unit)
        numbers = self.vocabulary.numbers(pieces)
        step = max(1, self.length // 2) if split == "train" else self.length
        begins = range(0, max(1, len(numbers) - 1), step)
        found = []
        for begin in begins:
            window = numbers[begin : begin + self.length + 1]
            if len(window) > 1:
                words = {"tokens": pieces[begin : begin + len(window) - 1]}
                found.append(Example({"tokens": window[:-1]}, window[1:], words=words))
        if not found:
            raise ValueError(refusal("data", f"{len(pieces)} tokens of {split}", "two or more"))
        return found

    def build(self) -> TaskModel:
        table = Embedding(len(self.vocabulary), self.dim, dropout=self.dropout)
        with torch.no_grad():
            # The table is that of the output too, where vectors of length one keep the first logits small.
            table.table.weight.mul_(self.dim**-0.5)
        stack = causal_stack(
            self.attention,
            self.options,
            dim=self.dim,
            heads=self.heads,
            layers=self.layers,
            length=self.length,
            segment=self.segment,
            dropout=self.dropout,
        )
        return TaskModel(table, None, stack, LanguageHead(self.dim, table=table, dropout=self.dropout))

    def parse(self, text: str) -> Example:
        pieces = pieces_of(text, self.unit)
        if not pieces:
            raise ValueError(refusal("text", repr(text), "a text to go on with"))
        return Example({"tokens": self.vocabulary.numbers(pieces)}, words={"tokens": pieces})

    @torch.no_grad()
    def judge(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """Perplexity and bits per token, each told from those before it in its window; a text without a target is gone on with."""
        if not examples or examples[0].target is None:
            return Judged({}, [self.continue_(model, example.inputs["tokens"].to(device)) for example in examples])
        counts, answers = PerplexityCounts(0.0, 0), []
        for batch in self.batches(examples, size=64):
            batch = batch.to(device)
            logits = model(batch)
            assert batch.target is not None
            counts += PerplexityCounts.of(logits, batch.target)
            answers += [
                PerplexityCounts.of(row, target).perplexity for row, target in zip(logits, batch.target, strict=True)
            ]
        perplexity = counts.score()
        bits = Score(f"bits_per_{self.unit}", perplexity.details["bits_per_token"], perplexity.signature, higher=False)
        return Judged.of({"perplexity": perplexity, bits.name: bits}, answers)

    def continue_(self, model: TaskModel, tokens: Tensor) -> str:
        """The likeliest next tokens, one after the other, each told from the last `length`."""
        found = tokens
        for _ in range(self.continued):
            logits = model(Batch({"tokens": found[-self.length :].unsqueeze(0)}))[0, -1]
            # What is unknown cannot be written.
            logits[self.vocabulary.number[UNKNOWN]] = -torch.inf
            found = torch.cat([found, logits.argmax(-1, keepdim=True)])
        pieces = [self.vocabulary.words[k] for k in found[len(tokens) :].tolist()]
        return "".join(pieces) if self.unit == "character" else " ".join(pieces)
