"""Graphs in which it is known which edge to read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from regard.recipes.planted.task import Batch, choice, hidden_signs, one_hot, permutations


def _complete(count: int, n_targets: int, n_sources: int) -> Tensor:
    """Edges of count graphs, from every source of one to every target of it, (2, E), targets outermost."""
    graph = torch.arange(count)[:, None, None]
    shape = (count, n_targets, n_sources)
    source = (graph * n_sources + torch.arange(n_sources)).expand(shape)
    target = (graph * n_targets + torch.arange(n_targets)[:, None]).expand(shape)
    return torch.stack([source.flatten(), target.flatten()])


@dataclass(frozen=True)
class NodeLookup:
    """Every node must read another neighbour: the one with its own code (the dictionary lookup of Brody et al. 2022).

    A graph has n nodes that ask, one for each code, and n that answer; every one that asks has an edge from every one that
    answers. Whoever ranks the neighbours alike for all nodes is right for one of them and guesses for the others.
    """

    n: int = 5
    classes: int = 4

    @property
    def dims(self) -> tuple[int, int]:
        """Widths of those that ask and of those that answer."""
        return self.n, self.n + self.classes

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `nodes` (count n, n), `source` (count n, n + classes) and `edge_index`; truth `edge` (count n)."""
        codes, answers = permutations(count, self.n, generator), permutations(count, self.n, generator)
        values = torch.randint(self.classes, (count, self.n), generator=generator)
        place = (answers[:, None, :] == codes[:, :, None]).long().argmax(-1)
        source = torch.cat([one_hot(answers, self.n), one_hot(values, self.classes)], -1)
        inputs = {
            "nodes": one_hot(codes, self.n).flatten(0, 1),
            "source": source.flatten(0, 1),
            "edge_index": _complete(count, self.n, self.n),
        }
        edge = place.flatten() + self.n * torch.arange(count * self.n)
        return Batch(inputs, values.gather(1, place).flatten(), {"edge": edge})


@dataclass(frozen=True)
class TypedNeighbours:
    """Say the sign of the one neighbour whose edge has another type than all others.

    The ends of the edges tell nothing: neighbours have a sign each, of which neither the sum nor the sum of the others gives the
    answer away. Only the type of the edge says which one it is.
    """

    n: int = 5
    types: int = 2

    @property
    def classes(self) -> int:
        """Negative and positive."""
        return 2

    @property
    def dims(self) -> tuple[int, int]:
        """Widths of those that ask, which know nothing, and of the neighbours."""
        return 1, 2

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `nodes` (count, 1), `source` (count n, 2), `edge_index` and `edge_type`; truth `edge` (count)."""
        place = choice(count, self.n, generator)
        signs = hidden_signs(place, self.n, generator)
        source = torch.stack([torch.ones_like(signs), signs], -1).flatten(0, 1)
        inputs = {
            "nodes": torch.ones(count, 1),
            "source": source,
            "edge_index": _complete(count, 1, self.n),
            "edge_type": (torch.arange(self.n) == place[:, None]).long().flatten(),
        }
        edge = place + self.n * torch.arange(count)
        return Batch(inputs, (signs.flatten()[edge] > 0).long(), {"edge": edge})
