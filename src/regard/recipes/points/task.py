"""Points: sort numbers, find the convex hull of points, or the shortest tour through them; nothing to download.

The tasks of the pointer network (Vinyals et al. 2015, https://arxiv.org/abs/1506.03134): the answer is a sequence of positions of the
input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import catalog
from regard._errors import refusal
from regard.evaluate.outer import Score
from regard.feature import RecurrentEncoder
from regard.model import Chain, Example, PointerOutput, TaskModel
from regard.observe import Trace
from regard.query import PointerNetwork
from regard.recipes.choice import make_attention
from regard.recipes.look import one_for_each_pair
from regard.recipes.planted.hull import area, hull
from regard.recipes.points.tours import length, shortest_tour
from regard.recipes.recipe import Judged, Recipe, one_of
from regard.recipes.runs import HEATMAP

TASKS = ("sort", "hull", "tour")
# Exact tours take 2^n n^2 steps each.
_MOST = {"tour": 12, "hull": 200, "sort": 200}
# Examples whose answers are found together: exact tours hold 2^n n numbers for each, hulls n^2.
_AT_ONCE = 500
# Where the pointer is in a trace, and weights that would only blur a figure.
_POINTER, _FAINT = "output.network.pointer", 0.02


class Unread(nn.Module):
    """Where the tokens are pointed at as they are, none reads the others first."""

    def forward(self, query: Tensor) -> Tensor:
        return query


class Lifted(nn.Module):
    """Coordinates in a wider space: a linear map."""

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__()
        self.linear, self.out_dim = nn.Linear(dim, out_dim), out_dim

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        lifted: Tensor = self.linear(x)
        return lifted if mask is None else lifted * mask.unsqueeze(-1)


@dataclass(kw_only=True)
class Points(Recipe):
    """Point at the tokens of the input in their right order.

    A score by name scores the pointer; any other attention lets the tokens read each other before they are pointed at.

    Attributes:
        task: `sort` numbers, the convex `hull` of points (counter-clockwise, from the point that stands first), or the shortest
            `tour` through them (from the first point, towards its earlier neighbour).
        size: numbers or points of an example.
        hidden_dim: width of the features and of the decoder's state.
        beam: paths that are followed when the answer is looked for.
        train_size: examples to train on.
        test_size: examples to validate on, and to test on.
    """

    name: ClassVar[str] = "points"
    about: ClassVar[str] = "sort numbers, find convex hulls and shortest tours by pointing; nothing to download"
    watch: ClassVar[str] = "accuracy"
    alternatives: ClassVar[tuple[str, ...]] = ("pointer", "general", "dot", "self-attention", "multi-head")

    attention: str = "pointer"
    task: str = "sort"
    size: int = 6
    hidden_dim: int = 64
    beam: int = 1
    train_size: int = 20_000
    test_size: int = 500
    steps: int = 600
    lr: float = 3e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("task", self.task, TASKS)
        if not 3 <= self.size <= _MOST[self.task]:
            raise ValueError(refusal("size", self.size, f"from 3 to {_MOST[self.task]} for the task {self.task!r}"))
        if self.data is not None:
            raise ValueError(refusal("data", repr(self.data), "nothing: the examples of this recipe are drawn"))

    @property
    def data_label(self) -> str:
        return f"generated {self.task}"

    @cached_property
    def _drawn(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Inputs and right positions of every split."""
        sizes = {"train": self.train_size, "validation": self.test_size, "test": self.test_size}
        found = {}
        for k, (split, count) in enumerate(sizes.items()):
            generator = torch.Generator().manual_seed(self.seed * 3 + k)
            points = torch.rand(count, self.size, 1 if self.task == "sort" else 2, generator=generator)
            found[split] = points, self.right(points)
        return found

    def right(self, points: Tensor) -> Tensor:
        """The right positions (B, m), -1 after the end of each."""
        parts = [self._right(some) for some in points.split(_AT_ONCE)]
        longest = max(part.shape[1] for part in parts)
        return torch.cat([F.pad(part, (0, longest - part.shape[1]), value=-1) for part in parts])

    def _right(self, points: Tensor) -> Tensor:
        if self.task == "sort":
            return points.squeeze(-1).argsort(-1)
        if self.task == "tour":
            return shortest_tour(points)
        found = hull(points)
        return found.masked_fill(found == self.size, -1)

    def examples(self, split: str) -> Sequence[Example]:
        points, positions = self._drawn[split]
        return [self._example(x, y) for x, y in zip(points, positions, strict=True)]

    def _example(self, points: Tensor, positions: Tensor | None = None) -> Example:
        words = [
            "(" + ", ".join(f"{x:.2f}" for x in point) + ")" if len(point) > 1 else f"{point[0]:.2f}"
            for point in points.tolist()
        ]
        named: dict[str, Sequence[str]] = {"tokens": words}
        if positions is not None:
            positions = positions[positions >= 0]
            named["target"] = [*(words[k] for k in positions.tolist()), *(["stop"] if self.task == "hull" else [])]
        return Example({"tokens": points}, positions, words=named)

    def build(self) -> TaskModel:
        h, dim = self.hidden_dim, 1 if self.task == "sort" else 2
        entry = catalog.find(self.attention, argument="attention")
        pointing: dict[str, Any] = {"score": "additive", "hidden_dim": h}
        if entry.name == "pointer" or entry.path == "general/scoring":
            read: nn.Module = Unread()
            pointing["score"] = "additive" if entry.name == "pointer" else entry.name
            pointing |= self.options
        else:
            read = make_attention(self.attention, self.options, dim=h, query_dim=h, key_dim=h, hidden_dim=h, heads=4)
        network = PointerNetwork(h, encoder=RecurrentEncoder(h, h // 2), stop=self.task == "hull", **pointing)
        return TaskModel(Chain(Lifted(dim, h)), None, read, PointerOutput(network))

    def parse(self, text: str) -> Example:
        dim = 1 if self.task == "sort" else 2
        try:
            numbers = [float(x) for x in text.replace(",", " ").replace("(", " ").replace(")", " ").split()]
        except ValueError:
            numbers = []
        if not numbers or len(numbers) % dim or len(numbers) < 3 * dim:
            kind = "three numbers or more" if dim == 1 else "the coordinates of three points or more: x y, x y, …"
            raise ValueError(refusal("text", repr(text), kind))
        return self._example(torch.tensor(numbers).reshape(-1, dim))

    def right_answer(self, example: Example) -> Any:
        """Numbers of the points, as answers have them."""
        return None if example.target is None else example.target.tolist()

    @torch.no_grad()
    def judge(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """The share of sequences that are right from end to end, and how much area or way is lost."""
        output = model.output
        assert isinstance(output, PointerOutput)
        answers: list[list[int]] = []
        right, ratios = 0, []
        for batch in self.batches(examples):
            batch = batch.to(device)
            found = model.encode(batch)
            positions = output.generate(model.reader(found), found, beam=self.beam).positions.cpu()
            answers += [[k for k in row if k >= 0] for row in positions.tolist()]
            if batch.target is None:
                continue
            points, target = batch.inputs["tokens"].cpu(), batch.target.cpu()
            right += _equal(positions, target)
            if self.task == "hull":
                ratios += (area(points, positions) / area(points, target)).tolist()
            elif self.task == "tour":
                ratios += (length(points, positions) / length(points, target)).tolist()
        if not examples or examples[0].target is None:
            return Judged({}, answers)
        scores = {"accuracy": Score("accuracy", right / len(examples), f"whole sequences|beam={self.beam}")}
        if ratios:
            name, about = (
                ("area_ratio", "area found / area of the hull")
                if self.task == "hull"
                else ("tour_ratio", "length / shortest length")
            )
            scores[name] = Score(
                name, sum(ratios) / len(ratios), f"{about}, mean|beam={self.beam}", higher=self.task == "hull"
            )
        return Judged.of(scores, answers)

    def draw(self, trace: Trace, examples: Sequence[Example], folder: Path) -> None:
        """Points where they lie: from each of the right way an edge to those that are pointed at next, the right one marked."""
        if self.task == "sort":
            super().draw(trace, examples, folder)
            return
        from regard.report.figures import graph, save

        (told,) = trace[_POINTER]
        points, right = examples[0].inputs["tokens"], examples[0].target
        assert right is not None
        edges, weights, gold = _pointed(one_for_each_pair(told)[0], right.tolist(), len(points))
        title = f"{self.name}: {self.task}, {self.attention}"
        save(
            graph(weights, edges, labels=list(map(str, range(len(points)))), positions=points, gold=gold, title=title),
            folder / HEATMAP,
        )


def _pointed(weights: Tensor, right: Sequence[int], count: int) -> tuple[Tensor, Tensor, list[int]]:
    """Edges (2, E) from each point of the right way to those that may be next, their weights, and which of them are right.

    To stop is to go back to the first point.
    """
    ends: list[tuple[int, int]] = []
    heavy, gold = [], []
    following = [*right[1:], count] if weights.shape[-1] > count else right[1:]
    for step, (here, there) in enumerate(zip(right, following, strict=False), 1):
        for k, weight in enumerate(weights[step].tolist()):
            if k == there:
                gold.append(len(ends))
            elif weight < _FAINT:
                continue
            ends.append((here, right[0] if k == count else k))
            heavy.append(weight)
    return torch.tensor(ends).mT, torch.tensor(heavy), gold


def _equal(found: Tensor, target: Tensor) -> int:
    """Number of sequences that are the same, up to padding."""
    return sum(
        [k for k in a if k >= 0] == [k for k in b if k >= 0]
        for a, b in zip(found.tolist(), target.tolist(), strict=True)
    )
