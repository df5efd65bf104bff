"""Recommend: what will a user want next, after the items so far?

Real data: Amazon Beauty. Without data, users go from one group of items to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard import catalog
from regard._errors import refusal
from regard.evaluate.outer import RankCounts, Score
from regard.feature import HierarchicalAttention
from regard.general.attention import Attention
from regard.model import Example, TaskModel
from regard.observe import Trace
from regard.recipes.choice import make_attention
from regard.recipes.look import one_for_each_pair
from regard.recipes.recipe import Judged, Recipe
from regard.recipes.recommend.models import Cloze, Following, Items, LongShort, Recommender
from regard.recipes.recommend.walks import made_up, read
from regard.recipes.runs import HEATMAP
from regard.recipes.stacks import causal_stack
from regard.transformer import BERT4Rec

# How far down a ranking counts.
K = 10


@dataclass(kw_only=True)
class Recommend(Recipe):
    """Rank all items by how likely they come next.

    The last item of a user is tested, the one before it validates, and those before it are trained on. `bert4rec` hides items and tells
    them from both sides; `hierarchical` reads the items of old into one vector and that with the latest items into another (SHAN); a score
    or an alignment does the same with it at both levels; a causal stack, such as `transformer-decoder`, reads from left to right.

    Attributes:
        length: the latest so many items are read.
        dim: width.
        heads: of each layer.
        layers: how many.
        masked: share of the items that are asked for while training; a causal stack is asked for all.
        recent: how many items are the latest (`hierarchical`).
        dropout: while training.
        users: so many are judged while training, drawn once; in the end all are.
        train_size: users made up, where there are no data.
    """

    name: ClassVar[str] = "recommend"
    about: ClassVar[str] = "what a user wants next, ranked among all items: Amazon Beauty"
    watch: ClassVar[str] = f"ndcg_{K}"
    alternatives: ClassVar[tuple[str, ...]] = ("bert4rec", "hierarchical", "transformer-decoder", "additive")
    made_up_only: ClassVar[tuple[str, ...]] = ("train_size",)

    attention: str = "bert4rec"
    length: int = 50
    dim: int = 64
    heads: int = 2
    layers: int = 2
    masked: float = 0.3
    recent: int = 3
    dropout: float = 0.2
    users: int = 2000
    train_size: int = 600
    batch: int = 256
    steps: int = 10_000
    every: int = 500
    patience: int = 4
    lr: float = 1e-3
    warmup: int = 100
    decay: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least_one("length", "recent", "users")

    @classmethod
    def usual(cls, attention: str, data: str | None) -> dict[str, Any]:
        small = {"batch": 64, "steps": 500, "every": 100, "warmup": 20, "lr": 5e-3, "dim": 32, "dropout": 0.1}
        return small if data is None else {}

    @cached_property
    def _walks(self) -> list[list[str]]:
        return made_up(self.train_size, self.seed) if self.data is None else read(self.data)

    def learn(self) -> dict[str, Any]:
        """All items that there are, wanted in training or not, and how many users."""
        return {"items": list(dict.fromkeys(item for walk in self._walks for item in walk)), "users": len(self._walks)}

    @cached_property
    def _number(self) -> dict[str, int]:
        return {item: k for k, item in enumerate(self.known["items"])}

    def examples(self, split: str) -> Sequence[Example]:
        """Sequences without their last two items to train on; and to ask for the last but one, and for the last."""
        held = {"train": 2, "validation": 2, "test": 1}[split]
        found = []
        for k, walk in enumerate(self._walks, 1):
            seen = walk[:-held]
            if split != "train":
                found.append(self._example(seen, k, walk[-held]))
            elif len(seen) > 1:
                found.append(self._example(seen, k))
        return found

    def _example(self, seen: Sequence[str], user: int, target: str | None = None) -> Example:
        seen = seen[-self.length :]
        return Example(
            {"items": torch.tensor([self._number[item] for item in seen])},
            None if target is None else torch.tensor(self._number[target]),
            {"user": torch.tensor(user)},
            words={"items": seen},
        )

    def build(self) -> TaskModel:
        recommender = self._recommender(len(self.known["items"]), int(self.known["users"]) + 1)
        return TaskModel({}, None, recommender, Items(recommender))

    def _recommender(self, items: int, users: int) -> Recommender:
        entry = catalog.find(self.attention, argument="attention")
        d = self.dim
        if entry.cls is BERT4Rec:
            # The paper normalises after each sum; before it, no warm-up decides whether anything is learnt.
            chosen = {"length": self.length + 1, "masked": self.masked, "dropout": self.dropout, "norm": "pre"}
            return Cloze(BERT4Rec(items, d, self.heads, self.layers, **{**chosen, **self.options}))
        levels = entry.path in ("general/scoring", "general/alignment")
        if levels or issubclass(entry.cls, HierarchicalAttention):
            widths = {"query_dim": d, "key_dim": d, "value_dim": d, "hidden_dim": d}
            past, latest = (
                make_attention(self.attention, self.options, **widths) if levels else _preference(d, self.options)
                for _ in range(2)
            )
            return LongShort(past, latest, items, users, d, recent=self.recent, asked=self.masked, dropout=self.dropout)
        sizes = {"dim": d, "heads": self.heads, "layers": self.layers, "length": self.length, "segment": self.length}
        stack = causal_stack(self.attention, self.options, **sizes, dropout=self.dropout)
        return Following(stack, items, d, self.dropout)

    def parse(self, text: str) -> Example:
        seen = text.split()
        unknown = [item for item in seen if item not in self._number]
        if unknown or not seen:
            got = repr(text) if not unknown else f"{text!r}, with {' '.join(unknown[:5])}"
            raise ValueError(refusal("text", got, "items that were seen in training, with spaces between them"))
        return self._example(seen, 0)

    def right_answer(self, example: Example) -> Any:
        return None if example.target is None else self.known["items"][int(example.target)]

    @torch.no_grad()
    def judge(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """Hit rate and NDCG among all items, without those that the user has seen (unless one of them is right)."""
        counts, answers = RankCounts(K), []
        names = self.known["items"]
        for batch in self.batches(examples):
            batch = batch.to(device)
            scores = unseen(model(batch).logits.float(), batch.inputs["items"], batch.masks["items"], batch.target)
            answers += [[names[k] for k in row] for row in scores.topk(min(K, len(names))).indices.tolist()]
            if batch.target is not None:
                counts += RankCounts.of(scores, batch.target, k=K)
        if not counts.total:
            return Judged({}, answers)
        scores_ = {}
        for name in ("hit_rate", "ndcg"):
            found = counts.score(name)
            scores_[f"{name}_{K}"] = Score(name, found.value, f"{found.signature}|seen=left out", found.higher)
        return Judged.of(scores_, answers)

    def glance(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(self.seed))
        return self.judge(model, [examples[k] for k in order[: self.users].tolist()], device)

    def draw(self, trace: Trace, examples: Sequence[Example], folder: Path) -> None:
        """The items of the first user by the weight that each has where the next one is told."""
        from regard.report.figures import save, token_strips

        seen, strips = list(examples[0].words["items"]), {}
        for path, calls in trace.items():
            weights = one_for_each_pair(calls[-1])[0]
            last = len(seen) if self.attention == "bert4rec" else len(seen) - 1
            row = weights[last] if weights.dim() == 2 else weights
            words = {"bert4rec": [*seen, "?"]}.get(self.attention, seen)
            words = ["of old", *seen] if path.endswith("latest") else words
            if len(words) <= len(row):
                strips[path] = words, row[: len(words)]
        if strips:
            save(token_strips(strips, title=self.heading(examples[0])), folder / HEATMAP)


def unseen(scores: Tensor, items: Tensor, mask: Tensor, target: Tensor | None) -> Tensor:
    """Scores (B, V) with minus infinity for items (B, N) that were seen and are not what is asked for."""
    seen = torch.zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.bool, device=scores.device)
    seen = seen.scatter_(1, items.masked_fill(~mask, scores.shape[1]), True)[:, :-1]
    if target is not None:
        seen = seen.scatter(1, target.unsqueeze(1), False)
    return scores.masked_fill(seen, -torch.inf)


def _preference(dim: int, options: dict[str, Any]) -> Attention:
    """SHAN's own: u · relu(W v + b) over items v, which are also what is read."""
    return Attention(**{"score": "dot", "key_map": nn.Sequential(nn.Linear(dim, dim), nn.ReLU()), **options})
