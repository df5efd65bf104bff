"""The recipe: co-attention of the words of a question and the cells of a scene."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard._errors import refusal
from regard.evaluate.outer import Score, accuracy
from regard.evaluate.outer.result import signed
from regard.feature import RecurrentEncoder
from regard.model import SURE, Chain, Embedding, Example, On, TaskModel
from regard.observe import Trace, record
from regard.query import CrossModalAttention, PooledQuery
from regard.recipes.choice import assembled, make_attention
from regard.recipes.classification import Classification
from regard.recipes.look import one_for_each_pair
from regard.recipes.made import shared_out
from regard.recipes.questions.parts import Answer, BothSides, Cells
from regard.recipes.questions.scenes import ANSWERS, CELL, GRID, KINDS, Asked, asked
from regard.recipes.recipe import Judged
from regard.recipes.runs import HEATMAP
from regard.recipes.text import Vocabulary

_CO = ("alternating-co-attention", "interactive-co-attention", "parallel-co-attention", "multi-grained-co-attention")


@dataclass(kw_only=True)
class Questions(Classification):
    """Questions about drawn scenes: a recurrent encoder of the words, the cells of the picture, a co-attention of both, an answer.

    Everything is made up, so that it is known which things decide; there is no real data set, and text alone has no scene.

    Attributes:
        hidden_dim: width of words and cells.
        train_size: questions for training.
    """

    name: ClassVar[str] = "questions"
    about: ClassVar[str] = "questions about drawn scenes of coloured shapes; nothing to download"
    alternatives: ClassVar[tuple[str, ...]] = (*_CO, "cross-modal-query-alignment", "multi-hop", "additive")

    attention: str = "parallel-co-attention"
    hidden_dim: int = 64
    train_size: int = 8000
    steps: int = 3000
    every: int = 200
    patience: int = 8
    lr: float = 2e-3
    warmup: int = 100
    decay: str = "cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data is not None:
            raise ValueError(refusal("data", repr(self.data), "none: the scenes of this recipe are all made up"))

    @cached_property
    def _asked(self) -> dict[str, list[Asked]]:
        return shared_out(asked, Asked.said, self.train_size, self.seed)

    def learn(self) -> dict[str, Any]:
        return {"classes": list(ANSWERS), "words": Vocabulary.learnt(a.question.split() for a in self._asked["train"])}

    def examples(self, split: str) -> Sequence[Example]:
        vocabulary = Vocabulary(self.known["words"])
        return [self._example(a, vocabulary) for a in self._asked[split]]

    @staticmethod
    def _example(a: Asked, vocabulary: Vocabulary) -> Example:
        words = a.question.split()
        gold = torch.zeros(1, GRID * GRID, dtype=torch.int8)
        gold[0, list(a.deciding)] = SURE
        return Example(
            {"scene": a.picture(), "question": vocabulary.numbers(words)},
            torch.tensor(ANSWERS.index(a.answer)),
            {"kind": torch.tensor(KINDS.index(a.kind))},
            gold=gold,
            words={"scene": a.names(), "question": words},
        )

    def build(self) -> TaskModel:
        h = self.hidden_dim
        words = Chain(Embedding(len(Vocabulary(self.known["words"])), h), RecurrentEncoder(h, h // 2))
        features = {"scene": Cells(h, GRID * CELL, CELL), "question": words}
        widths = {"query_dim": h, "key_dim": h, "value_dim": h, "dim": h, "hidden_dim": h, "shared_dim": h}
        own: dict[str, Any] = {"transform": "gru"} if self.attention == "multi-hop" else {}
        made = make_attention(self.attention, {**own, **self.options}, **widths)
        if isinstance(made, CrossModalAttention):
            made = BothSides(made)
        two = self.attention in _CO or isinstance(made, BothSides)
        attention = On(made, first="question", second="scene") if two else On(made, key="scene")
        return assembled(
            features,
            attention,
            lambda context: Answer(context.shape[-1], h, 2 * h, len(ANSWERS)),
            {"scene": h, "question": h},
            lambda: On(PooledQuery(), features="question"),
        )

    def parse(self, text: str) -> Example:
        fix = "Fix: regard evaluate RUN, which asks about scenes that are made up."
        raise ValueError(
            refusal("text", repr(text), "nothing: a question here is about a scene, which text has not", fix)
        )

    @torch.no_grad()
    def judge(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """Accuracy, of all questions and of each kind, and how much of the attention on the scene lies on the things that decide."""
        decided, mass = [], []
        for batch in self.batches(examples):
            batch = batch.to(device)
            with record(model) as trace:
                decided.append(model.output.decide(model(batch)).cpu())
            read = _on_scene(trace)
            if batch.gold is not None and read is not None:
                some = (batch.gold[:, 0] > 0).any(-1)
                mass.append((read * (batch.gold[:, 0] > 0)).sum(-1)[some].cpu())
        found, truth = torch.cat(decided), torch.stack([e.target for e in examples if e.target is not None])
        kinds = torch.stack([e.variables["kind"] for e in examples])
        scores = {"accuracy": accuracy(found, truth)}
        for k, kind in enumerate(KINDS):
            if bool((kinds == k).any()):
                scores[f"accuracy_{kind}"] = accuracy(found[kinds == k], truth[kinds == k])
        if mass:
            value = float(torch.cat(mass).double().mean())
            scores["deciding_mass"] = Score("deciding_mass", value, signed(of="weights on the cells that decide"))
        return Judged.of(scores, [ANSWERS[k] for k in found.tolist()])

    def draw(self, trace: Trace, examples: Sequence[Example], folder: Path) -> None:
        """The first scene, and which of its cells were read."""
        from regard.report.figures import picture_maps, save

        read = _on_scene(trace)
        if read is not None:
            title = " ".join(examples[0].words["question"]) + f"?\n{self.outcome(examples[0])}".rstrip()
            shown = {self.attention: read[0].reshape(GRID, GRID)}
            save(picture_maps(examples[0].inputs["scene"], shown, title=title), folder / HEATMAP)


def _on_scene(trace: Trace) -> Tensor | None:
    """Weights on the cells (B, N) of the last attention that read them, in the mean over queries; no question is as long."""
    for _, calls in reversed(list(trace.items())):
        weights = one_for_each_pair(calls[-1])
        if weights.shape[-1] == GRID * GRID:
            return weights if weights.dim() == 2 else weights.mean(1)
    return None


RECIPE = Questions
