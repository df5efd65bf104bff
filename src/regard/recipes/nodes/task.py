"""What the task is: a graph, classes of some nodes, and a generated one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.model import Example


@dataclass(frozen=True)
class LabelledGraph:
    """A graph with features and classes of its nodes.

    Attributes:
        features: (N, d).
        edges: (2, E), from the first row to the second, without loops.
        labels: (N,), -1 where there is none.
        split: by name, the nodes (n,) whose classes are for training, validation and test.
        classes: their names.
    """

    features: Tensor
    edges: Tensor
    labels: Tensor
    split: Mapping[str, Tensor]
    classes: Sequence[str]

    def example(self, split: str) -> Example:
        """The whole graph, with the classes of one split: -1 elsewhere."""
        target = torch.full_like(self.labels, -1)
        target[self.split[split]] = self.labels[self.split[split]]
        return Example({"nodes": self.features}, target, {"edge_index": self.edges})


def communities(count: int, seed: int, classes: int = 4, words: int = 24) -> LabelledGraph:
    """A stochastic block model (Holland et al. 1983, https://doi.org/10.1016/0378-8733(83)90021-7) with noisy words.

    A node has about seven links within its class and two to others, and a few words, of which fewer than half are typical of its
    class: alone they tell the class of some nodes, with those of the neighbours of nearly all. Ten nodes of each class are for
    training.

    Args:
        count: of nodes.
        seed: of everything that is drawn.
        classes: how many.
        words: of the vocabulary.

    Example:
        >>> graph = communities(80, seed=0)
        >>> graph.features.shape, sorted(graph.split)
        (torch.Size([80, 24]), ['test', 'train', 'validation'])
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    alike = labels[:, None] == labels
    chance = torch.where(alike, 7.0 * classes / count, 2.0 * classes / (count * (classes - 1)))
    linked = (torch.rand(count, count, generator=generator) < chance).triu(1)
    edges = (linked | linked.T).nonzero().T.contiguous()
    typical = torch.arange(words) % classes == labels[:, None]
    features = (torch.rand(count, words, generator=generator) < torch.where(typical, 0.24, 0.12)).float()
    # Nodes in an order of their own, as many of each class in any part of it.
    order = torch.cat(
        [torch.randperm(count // classes, generator=generator)[:, None] * classes + torch.arange(classes)]
    )
    known = order[: min(10, count // (2 * classes))].flatten()
    rest = order[len(known) // classes :].flatten()
    split = {"train": known, "validation": rest[: len(rest) // 3], "test": rest[len(rest) // 3 :]}
    return LabelledGraph(features, edges, labels, split, [f"community {k}" for k in range(classes)])
