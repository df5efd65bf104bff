"""Facts: answer a question from a story, some of whose facts are needed, one after the other.

Real data: the bAbI tasks (Weston et al. 2015, https://arxiv.org/abs/1502.05698), whose files say which facts an answer follows from.
Without data, people walk about and take things, and the question is where somebody or something is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard import catalog
from regard._errors import refusal
from regard.evaluate.outer import Score, accuracy
from regard.model import SURE, Batch, Embedding, Example, TaskModel
from regard.observe import Trace, record
from regard.query import MultiHopAttention
from regard.recipes.choice import make_attention
from regard.recipes.classification import Classification
from regard.recipes.facts.memory import AdjacentHops, Memories, Said, start_linear
from regard.recipes.facts.parts import Answer, AskedAgain, Question, Sentences
from regard.recipes.facts.stories import MOST_NEEDED, SIZES, TASKS, Story, made_up, read, sentence
from regard.recipes.look import one_for_each_pair
from regard.recipes.recipe import Judged, one_of
from regard.recipes.runs import HEATMAP
from regard.recipes.text import Vocabulary

# The class of answers that no training story has.
_ANOTHER = "<another>"
# As in end-to-end memory networks: ask with the question alone first, and add what was read to it, or read the question again.
_MEMORY_NETWORK = {"score": "dot", "start": "zeros", "see_context": False}
# What makes a multi-hop attention another than that of memory networks.
_OF_HOPS = ("transform", "share", "see_context", "start")
_ADJACENT = {"adjacent": True, "linear": 560, "dim": 20, "lr": 0.1, "eps": 0.1}


@dataclass(kw_only=True)
class Facts(Classification):
    """Answer a question from facts: every fact a key and a value, the question the query, in as many hops as are given.

    Attributes:
        task: number of the bAbI task.
        size: `1k` or `10k` questions to train on.
        needed: facts from which an answer follows, from 1 to 3, where there are no data.
        hops: times that the facts are read, for an attention that can do so more than once.
        adjacent: give every hop of `multi-hop` vectors of words of its own: a hop finds facts by what the one before read of them, and the
            answer is a word as the last one reads it. Otherwise all hops find by the same vectors, and read by the same others.
        linear: updates at the beginning in which the hops have no softmax, so that they do not settle on looking at all facts alike.
        memory: the last so many facts are read.
        dim: width of words, facts and question.
        recurrent: read the words of a sentence with a GRU, not as a sum weighted by their places.
        noise: share of facts that are counted without being there while training, so that no answer hangs on exact distances.
        dropout: of what the answer is told from, while training.
        eps: of Adam: the larger, the more a step goes by the size of its gradient, and not by its sign alone.
        train_size: stories made up for training, where there are no data.
    """

    name: ClassVar[str] = "facts"
    about: ClassVar[str] = "answer a question from a story in several hops: the bAbI tasks"
    alternatives: ClassVar[tuple[str, ...]] = (
        *("multi-hop", "multi-hop-variants", "key-value", "additive", "dot", "sparsemax", "hard"),
    )
    made_up_only: ClassVar[tuple[str, ...]] = ("train_size", "needed")

    attention: str = "multi-hop"
    task: int = 1
    size: str = "1k"
    needed: int = 2
    hops: int = 3
    adjacent: bool = False
    linear: int = 0
    memory: int = 50
    dim: int = 40
    recurrent: bool = False
    noise: float = 0.1
    dropout: float = 0.0
    eps: float = 1e-8
    train_size: int = 4000
    batch: int = 32
    steps: int = 3000
    every: int = 250
    patience: int = 10
    lr: float = 1e-2
    decay: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("size", self.size, tuple(SIZES))
        for key, most in (("task", TASKS[-1]), ("needed", MOST_NEEDED)):
            if not 1 <= getattr(self, key) <= most:
                raise ValueError(refusal(key, getattr(self, key), f"a whole number from 1 to {most}"))
        for key in ("linear", "eps"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(refusal(key, getattr(self, key), "a number >= 0"))
        if self.adjacent and self.attention != "multi-hop":
            raise ValueError(
                refusal("adjacent", True, f"False with {self.attention!r}: only 'multi-hop' has such hops")
            )
        if self.linear and not self._hops:
            raise ValueError(refusal("linear", self.linear, f"0 with {self.attention!r}, which has no hops"))

    @property
    def _hops(self) -> bool:
        return issubclass(catalog.find(self.attention, argument="attention").cls, MultiHopAttention)

    @classmethod
    def usual(cls, attention: str, data: str | None) -> dict[str, Any]:
        # Made-up stories are many and short: whole hops learn them in fewer updates.
        if data is None:
            return {"steps": 600, "every": 100}
        return dict(_ADJACENT) if attention == "multi-hop" else {}

    @cached_property
    def _stories(self) -> dict[str, list[Story]]:
        if self.data is None:
            return made_up(self.train_size, self.needed, self.seed)
        return read(self.data, self.task, self.size)

    def learn(self) -> dict[str, Any]:
        train = self._stories["train"]
        words = Vocabulary.learnt([words for story in train for words in (*story.facts, story.question)])
        return {"words": words, "classes": [*sorted({story.answer or "" for story in train}), _ANOTHER]}

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.known["words"])

    def examples(self, split: str) -> Sequence[Example]:
        number = {answer: k for k, answer in enumerate(self.classes)}
        return [
            self._example(story, torch.tensor(number.get(story.answer or "", len(number) - 1)))
            for story in self._stories[split]
        ]

    def _example(self, story: Story, target: Tensor | None = None) -> Example:
        facts = list(story.facts[-self.memory :])
        first = len(story.facts) - len(facts)
        tokens = torch.zeros(len(facts), max(map(len, facts)), dtype=torch.long)
        real = torch.zeros(tokens.shape, dtype=torch.bool)
        for k, words in enumerate(facts):
            tokens[k, : len(words)] = self.vocabulary.numbers(words)
            real[k, : len(words)] = True
        gold = torch.zeros(1, len(facts), dtype=torch.int8)
        gold[0, [k - first for k in story.needed if k >= first]] = SURE
        question = self.vocabulary.numbers(story.question)
        named = [" ".join(words) for words in facts]
        return Example(
            {"key": tokens, "value": tokens, "question": question, "side": question},
            target,
            masks={"key": real, "value": real, "question": torch.ones(len(question), dtype=torch.bool)},
            gold=None if target is None else gold,
            words={"key": named, "value": named, "question": story.question},
        )

    def groups(self, model: TaskModel) -> list[dict[str, Any]]:
        return [{**group, "eps": self.eps} for group in super().groups(model)]

    def build(self) -> TaskModel:
        if self.adjacent:
            return self._memory_network()
        d, count = self.dim, len(self.vocabulary)
        # Questions and keys have one table, in which the same word is the same vector; what is read has another.
        asked, read_ = Embedding(count, d), Embedding(count, d)
        for table in (asked, read_):
            # Long enough for a word in common to be seen from the first update on: from even weights, hops learn late or never.
            torch.nn.init.normal_(table.table.weight, std=0.3)
        features = {
            "key": Sentences(asked, self.memory, self.noise, self.recurrent),
            "value": Sentences(read_, self.memory, self.noise, self.recurrent),
            "question": Sentences(asked, recurrent=self.recurrent),
            "side": asked,
        }
        options = {**(_MEMORY_NETWORK if self._hops else {}), **self.options}
        widths = {"query_dim": d, "key_dim": d, "value_dim": d, "dim": d, "hidden_dim": d, "hops": self.hops}
        attention = make_attention(self.attention, options, **widths)
        if isinstance(attention, MultiHopAttention):
            start_linear(attention.hops, self.linear * attention.count // len(attention.hops))
            attention = AskedAgain(attention)
        return TaskModel(features, Question(), attention, Answer(d, len(self.classes), self.dropout))

    def _memory_network(self) -> TaskModel:
        """The one of Sukhbaatar et al. 2015 with adjacent weights."""
        for key in _OF_HOPS:
            if key in self.options:
                fix = "Fix: --set adjacent=false."
                got = repr(self.options[key])
                raise ValueError(refusal(f"attention.{key}", got, "none of it where hops are adjacent", fix))
        d, count = self.dim, len(self.vocabulary)
        tables = [Embedding(count, d) for _ in range(self.hops + 1)]
        for table in tables:
            torch.nn.init.normal_(table.table.weight, std=0.1)
        features = {
            "key": Memories([Sentences(table, self.memory, self.noise, self.recurrent) for table in tables]),
            "question": Sentences(tables[0], recurrent=self.recurrent),
        }
        score, widths = (
            {"score": "dot", **self.options},
            {"query_dim": d, "key_dim": d, "value_dim": d, "hidden_dim": d},
        )
        hops = [make_attention("dot", score, **widths) for _ in range(self.hops)]
        start_linear(hops, self.linear)
        words = torch.tensor([self.vocabulary.number.get(answer.lower(), -1) for answer in self.classes])
        return TaskModel(features, Question(), AdjacentHops(hops), Said(tables[-1], words, self.dropout))

    def parse(self, text: str) -> Example:
        *facts, question = [sentence(part) for part in text.replace("?", ".").rstrip(" .").split(".")]
        facts = [words for words in facts if words]
        if not facts or not question:
            raise ValueError(refusal("text", repr(text), "facts and a question, such as: Mary is here. Where is Mary?"))
        return self._example(Story(facts, question))

    @torch.no_grad()
    def judge(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """Accuracy; and where the attention has one weight for each fact, how it falls on those that are needed.

        `fact_accuracy`: the share of questions, all of whose needed facts (of those that are read) are each the heaviest at some hop.
        `fact_weight`: the share of the weight that lies on needed facts, over all hops.
        """
        decided = self.decided(model, examples, device)
        answers = [self.classes[k] for k in decided.tolist()]
        if not examples or examples[0].target is None:
            return Judged({}, answers)
        truth = torch.stack([example.target for example in examples if example.target is not None])
        scores = {"accuracy": accuracy(decided, truth)}
        found, weight, asked = 0, 0.0, 0
        for batch in self.batches(examples):
            hops, gold = hop_weights(model, batch.to(device)), batch.gold
            if not hops or gold is None:
                continue
            needed, weights = gold[:, 0] == SURE, torch.stack(hops).cpu()
            heaviest = torch.zeros(weights.shape, dtype=torch.bool).scatter_(-1, weights.argmax(-1, keepdim=True), True)
            known = needed.any(-1)
            found += int(((heaviest.any(0) | ~needed).all(-1) & known).sum())
            weight += float((weights.mean(0) * needed).sum())
            asked += int(known.sum())
        if asked:
            about = "needed facts, of those that are read"
            scores["fact_accuracy"] = Score("fact_accuracy", found / asked, f"{about}|all heaviest at some hop")
            scores["fact_weight"] = Score("fact_weight", weight / asked, f"{about}|mean over hops")
        return Judged.of(scores, answers)

    def glance(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        return super().judge(model, examples, device)

    def draw(self, trace: Trace, examples: Sequence[Example], folder: Path) -> None:
        """The facts of the first example and how much they weigh at each hop; those that are needed are marked."""
        from regard.report.figures import save, token_strips

        example, hops = examples[0], _hops(trace, max(len(e.inputs["key"]) for e in examples))
        if not hops:
            return
        needed = [False] * len(example.words["key"]) if example.gold is None else (example.gold[0] == SURE).tolist()
        facts = [f"{fact} *" if mark else fact for fact, mark in zip(example.words["key"], needed, strict=True)]
        strips = {f"hop {k}": (facts, each[0, : len(facts)]) for k, each in enumerate(hops, 1)}
        title = f"{' '.join(example.words['question'])}?  (* needed)\n{self.outcome(example)}".rstrip()
        save(token_strips(strips, title=title), folder / HEATMAP)


def hop_weights(model: TaskModel, batch: Batch) -> list[Tensor]:
    """The weights (B, N) of the facts at each hop; none where the attention has others."""
    with record(model) as trace:
        model(batch)
    return _hops(trace, batch.inputs["key"].shape[1])


def _hops(trace: Trace, facts: int) -> list[Tensor]:
    # What a transform reads are the words of the question.
    of_facts = [calls for path, calls in trace.items() if path.startswith("attention") and "transforms" not in path]
    found = [one_for_each_pair(told) for calls in of_facts for told in calls]
    return [weights for weights in found if weights.dim() == 2 and weights.shape[-1] == facts]
