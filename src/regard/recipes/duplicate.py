"""Duplicate: write a word a second time; nothing to download.

The duplication task of the Reformer (Kitaev et al. 2020, https://arxiv.org/abs/2001.04451): in 0 w 0 w the second w can be told from the
first alone, which stands far away. The paper's words have 511 of 127 symbols; so `--set size=511 --set symbols=127`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard._errors import refusal
from regard.evaluate.outer import Score
from regard.model import Embedding, Example, LanguageHead, TaskModel
from regard.recipes.planted import Duplicate as Words
from regard.recipes.recipe import Judged, Recipe
from regard.recipes.stacks import causal_stack
from regard.transformer import LSHAttention

# Links of longer texts cannot be read in a figure, and would take more memory than all the rest.
_READABLE = 128


@dataclass(kw_only=True)
class Duplicate(Recipe):
    """Write a word a second time: a causal stack, whose attention must find the place where the word stood.

    Attributes:
        size: symbols of a word.
        symbols: how many there are.
        rounds: numbers of hashing rounds that a trained model is judged with in the end, beside its own (hashed attentions only).
        dim: width.
        heads: of each layer.
        layers: how many.
        train_size: words to train on.
        test_size: words to validate on, and to test on.
    """

    name: ClassVar[str] = "duplicate"
    about: ClassVar[str] = "write a word a second time, far from the first; nothing to download"
    watch: ClassVar[str] = "accuracy"
    alternatives: ClassVar[tuple[str, ...]] = ("lsh-attention", "transformer-decoder", "reformer", "relative-position")

    attention: str = "lsh-attention"
    size: int = 15
    symbols: int = 15
    rounds: str = "1,2,4"
    dim: int = 64
    heads: int = 2
    layers: int = 1
    train_size: int = 20_000
    test_size: int = 200
    steps: int = 600
    lr: float = 3e-3
    warmup: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data is not None:
            raise ValueError(refusal("data", repr(self.data), "nothing: the words of this recipe are drawn"))
        self._judged_rounds()

    def _judged_rounds(self) -> list[int]:
        found = [int(k) if k.strip().isdigit() else 0 for k in str(self.rounds).split(",")]
        if min(found) < 1:
            raise ValueError(
                refusal("rounds", repr(self.rounds), "whole numbers with commas between them, such as 1,2,4")
            )
        return found

    @cached_property
    def _words(self) -> Words:
        return Words(self.size, self.symbols)

    def examples(self, split: str) -> Sequence[Example]:
        k = ("train", "validation", "test").index(split)
        count = self.train_size if split == "train" else self.test_size
        drawn = self._words.draw(count, torch.Generator().manual_seed(self.seed * 3 + k))
        return [self._example(tokens) for tokens in drawn.inputs["tokens"]]

    def _example(self, tokens: Tensor) -> Example:
        """Only the second word is asked for: before it, what comes next is chance."""
        target = torch.full_like(tokens, -1)
        target[self.size + 1 : -1] = tokens[self.size + 2 :]
        gold = None
        if len(tokens) <= _READABLE:
            # The place from which a symbol is told, and the symbol in the first word.
            gold = torch.zeros(len(tokens), len(tokens), dtype=torch.int8)
            asked = torch.arange(self.size + 1, 2 * self.size + 1)
            gold[asked, asked - self.size] = 2
        words = [str(k) for k in tokens.tolist()]
        return Example({"tokens": tokens}, target, gold=gold, words={"tokens": words})

    def build(self) -> TaskModel:
        table = Embedding(self._words.classes, self.dim)
        length = self._words.length
        options = dict(self.options)
        if self.attention in ("lsh-attention", "reformer"):
            # As many tokens to a chunk as the paper has, or a quarter of a shorter text.
            options = {"chunk": min(64, max(4, length // 4)), "rounds": 2, **options}
        stack = causal_stack(
            self.attention,
            options,
            dim=self.dim,
            heads=self.heads,
            layers=self.layers,
            length=length,
            segment=length,
        )
        # Not the embedding once more: with one layer, a token would begin by telling itself.
        return TaskModel(table, None, stack, LanguageHead(self.dim, self._words.classes))

    def parse(self, text: str) -> Example:
        numbers = [int(k) if k.isdigit() else -1 for k in text.split()]
        if len(numbers) != self.size or not all(1 <= k <= self.symbols for k in numbers):
            raise ValueError(refusal("text", repr(text), f"{self.size} numbers from 1 to {self.symbols}"))
        word = torch.tensor([0, *numbers])
        example = self._example(torch.cat([word, word]))
        return Example(example.inputs, words=example.words)

    def right_answer(self, example: Example) -> Any:
        return None if example.target is None else example.target[self.size + 1 : -1].tolist()

    def glance(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        value, answers = self._told(model, examples, device)
        return Judged.of({"accuracy": _accuracy(value)}, answers)

    @torch.no_grad()
    def judge(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """Share of the second word's symbols that are right, with the model's own rounds of hashing and with others."""
        own, answers = self._told(model, examples, device)
        if not examples or examples[0].target is None:
            return Judged({}, answers)
        scores = {"accuracy": _accuracy(own)}
        hashed = [module for module in model.modules() if isinstance(module, LSHAttention)]
        before = [module.rounds for module in hashed]
        try:
            for rounds in self._judged_rounds() if hashed else []:
                for module in hashed:
                    module.rounds = rounds
                found = _accuracy(self._told(model, examples, device)[0], rounds)
                scores[found.name] = found
        finally:
            for module, rounds in zip(hashed, before, strict=True):
                module.rounds = rounds
        return Judged.of(scores, answers)

    def _told(
        self, model: TaskModel, examples: Sequence[Example], device: torch.device | str
    ) -> tuple[float, list[list[int]]]:
        right = asked = 0
        answers: list[list[int]] = []
        # Hashes are drawn anew at every call: the same for the same examples.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            for batch in self.batches(examples):
                found = model(batch.to(device)).argmax(-1).cpu()
                answers += found[:, self.size + 1 : -1].tolist()
                if batch.target is not None:
                    real = batch.target >= 0
                    right += int((found == batch.target)[real].sum())
                    asked += int(real.sum())
        return right / max(1, asked), answers


def _accuracy(value: float, rounds: int | None = None) -> Score:
    about = "symbols of the second word, told the ones before"
    if rounds is None:
        return Score("accuracy", value, about)
    return Score(f"accuracy_rounds_{rounds}", value, f"{about}|rounds={rounds}")


RECIPE = Duplicate
