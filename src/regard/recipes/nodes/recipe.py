"""The recipe: graph attention on Cora, Citeseer, or communities that are made up."""

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
from regard.evaluate.outer import accuracy, f1
from regard.model import Example, GraphFeatures, TaskModel
from regard.observe import Trace
from regard.ops.edges import EdgeCall
from regard.query import GraphAttention
from regard.recipes.choice import make_attention
from regard.recipes.nodes.network import GraphNetwork, NodeClasses
from regard.recipes.nodes.planetoid import SETS, planetoid
from regard.recipes.nodes.task import LabelledGraph, communities
from regard.recipes.recipe import Judged, Recipe, one_of
from regard.recipes.runs import HEATMAP


@dataclass(kw_only=True)
class Nodes(Recipe):
    """The class of every node, when a few are known: two graph attentions, with the settings of GAT.

    An example is the whole graph, so a batch is one of them; the settings of `batch` and of the splits have nothing to choose.

    Attributes:
        set: `cora` or `citeseer`, of the data folder.
        heads: of the first attention.
        head_dim: width of each.
        dropout: of what an attention is given, and of its weights.
        node_count: nodes of the graph that is made up, where there are no data.
    """

    name: ClassVar[str] = "nodes"
    about: ClassVar[str] = "the class of every node of a graph: Cora, Citeseer"
    watch: ClassVar[str] = "accuracy"
    alternatives: ClassVar[tuple[str, ...]] = ("gat", "graph-attention")
    made_up_only: ClassVar[tuple[str, ...]] = ("node_count",)

    attention: str = "gat"
    set: str = "cora"
    heads: int = 8
    head_dim: int = 8
    dropout: float = 0.6
    node_count: int = 400
    batch: int = 1
    steps: int = 1000
    every: int = 5
    patience: int = 40
    lr: float = 5e-3
    weight_decay: float = 5e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("set", self.set, SETS)

    @cached_property
    def graph(self) -> LabelledGraph:
        """The only example, before its classes are split."""
        return communities(self.node_count, self.seed) if self.data is None else planetoid(self.data, self.set)

    def learn(self) -> dict[str, Any]:
        return {"classes": list(self.graph.classes), "width": self.graph.features.shape[1]}

    def examples(self, split: str) -> Sequence[Example]:
        return [self.graph.example(split)]

    def build(self) -> TaskModel:
        classes, hidden = len(self.known["classes"]), self.heads * self.head_dim
        words = GraphFeatures(self.known["width"], dropout=self.dropout)
        first = self._attention({}, dim=words.out_dim, heads=self.heads, head_dim=self.head_dim)
        second = self._attention({"heads": 1, "head_dim": classes, "join": "mean"}, dim=hidden)
        return TaskModel({"nodes": words}, None, GraphNetwork(first, second, self.dropout), NodeClasses())

    def _attention(self, fixed: dict[str, Any], **widths: int) -> nn.Module:
        entry = catalog.find(self.attention, argument="attention")
        if entry.cls is not GraphAttention:
            kind = entry.path.removeprefix("general/")
            part = {"scoring": "score", "alignment": "align"}.get(kind)
            fix = f"Fix: --attention graph-attention{f' --set attention.{part}={self.attention}' if part else ''}."
            raise ValueError(refusal("attention", repr(self.attention), "one that reads along edges", fix))
        return make_attention(self.attention, {"dropout": self.dropout, **self.options, **fixed}, **widths)

    def groups(self, model: TaskModel) -> list[dict[str, Any]]:
        """All parameters, with the penalty of the paper: a part of the gradient, not of the update."""
        return [{**group, "decoupled_weight_decay": False} for group in super().groups(model)]

    @torch.no_grad()
    def judge(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """Accuracy, and F1 with every class counting the same, of the nodes whose class is asked; an answer is the classes of all nodes."""
        scores, answers = {}, []
        for batch in self.batches(examples, 1):
            decided = model.output.decide(model(batch.to(device))).cpu()
            answers.append([self.known["classes"][k] for k in decided[0].tolist()])
            if batch.target is not None:
                asked = batch.target >= 0
                found, truth = decided[asked], batch.target[asked]
                scores = {"accuracy": accuracy(found, truth), "f1": f1(found, truth, average="macro")}
        return Judged.of(scores, answers)

    def draw(self, trace: Trace, examples: Sequence[Example], folder: Path) -> None:
        """One of the nodes that were asked, with those that it reads in the first attention."""
        from regard.report.figures import graph, save

        told = trace["attention.first.attention"][0]
        assert isinstance(told.call, EdgeCall)
        ends, weights = told.call.edges.edge_index, told.weights.mean(0)
        centre = _well_connected(examples[0].target, ends)
        nodes = torch.unique(torch.cat([ends[0, ends[1] == centre], centre[None]]))
        shown = torch.isin(ends, nodes).all(0)
        place = torch.searchsorted(nodes, ends[:, shown])
        title = f"{self.name}: {self.attention}, what node {int(centre)} and its neighbours read"
        save(graph(weights[shown], place, labels=[str(k) for k in nodes.tolist()], title=title), folder / HEATMAP)


def _well_connected(target: Tensor | None, ends: Tensor) -> Tensor:
    """A node to look at: the first that was asked and has neither few nor many neighbours, or else the best connected one."""
    degrees = ends[1].bincount()
    asked = torch.ones_like(degrees, dtype=torch.bool) if target is None else target[: len(degrees)] >= 0
    readable = (asked & (degrees > 4) & (degrees < 12)).nonzero().flatten()
    return readable[0] if len(readable) else degrees.argmax()


RECIPE = Nodes
