"""Cora and Citeseer in the files of Planetoid (Yang et al. 2016, https://arxiv.org/abs/1603.08861)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard._errors import refusal
from regard.recipes.data import Folder
from regard.recipes.nodes.pickled import read
from regard.recipes.nodes.task import LabelledGraph

SETS = ("cora", "citeseer")
_PARTS = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")
# The nodes after the labelled ones, as everybody has them.
VALIDATION = 500


def planetoid(data: str, name: str) -> LabelledGraph:
    """The graph of a folder that has `ind.NAME.x` and its seven companions.

    Labelled nodes come first, then those without labels, then the test nodes, whose places are in `test.index` in an order of their
    own. A place that is in none of the files, as fifteen of Citeseer, is a node without features and without a class.
    """
    files = {part: f"ind.{name}.{part}" for part in _PARTS}
    folder = Folder(data, *files.values())
    found = {
        part: read(folder.bytes(file), str(folder.path / file))
        for part, file in files.items()
        if part not in ("graph", "test.index")
    }
    for part, x in found.items():
        if not isinstance(x, np.ndarray) or x.ndim != 2 or x.shape[1] != found[_like(part)].shape[1]:
            got = f"{folder.path / files[part]}: {getattr(x, 'shape', type(x).__name__)}"
            raise ValueError(refusal("data", got, "a matrix, a row a node, as wide as the others"))
    places = _places(folder, files["test.index"], len(found["tx"]), len(found["allx"]))
    count = int(places.max()) + 1
    features = np.zeros((count, found["allx"].shape[1]), np.float32)
    labels = np.full(count, -1)
    for rows, x, y in (
        (np.arange(len(found["allx"])), found["allx"], found["ally"]),
        (places, found["tx"], found["ty"]),
    ):
        if len(x) != len(y):
            raise ValueError(refusal("data", f"{folder.path}: {len(x)} nodes with {len(y)} classes", "a class a node"))
        features[rows] = x
        labels[rows] = np.where(y.any(1), y.argmax(1), -1)
    edges = _edges(read(folder.bytes(files["graph"]), str(folder.path / files["graph"])), count, str(folder.path))
    first = len(found["x"])
    if first + VALIDATION > len(found["allx"]):
        got = f"{folder.path}: {len(found['allx'])} nodes before the test nodes"
        raise ValueError(refusal("data", got, f"{first} labelled ones and {VALIDATION} for validation"))
    split = {
        "train": torch.arange(first),
        "validation": torch.arange(first, first + VALIDATION),
        "test": torch.from_numpy(np.sort(places)),
    }
    return LabelledGraph(
        torch.from_numpy(features), edges, torch.from_numpy(labels), split, [str(k) for k in range(found["y"].shape[1])]
    )


def _like(part: str) -> str:
    """The file that is as wide."""
    return "x" if part.endswith("x") else "y"


def _places(folder: Folder, file: str, count: int, first: int) -> np.ndarray[Any, Any]:
    """Places of the test nodes in the graph, after all the others."""
    lines = folder.lines(file)
    where = str(folder.path / file)
    if len(lines) != count or not all(line.strip().isdigit() for line in lines):
        raise ValueError(refusal("data", f"{where}: {len(lines)} lines", f"{count} numbers of nodes"))
    places = np.array([int(line) for line in lines])
    # Few places may be in no file; a number far away would be a graph of as many nodes.
    if len(set(lines)) < len(lines) or places.min() < first or places.max() >= first + 2 * count:
        raise ValueError(
            refusal("data", f"{where}: {places.min()} to {places.max()}", f"different numbers from {first} on")
        )
    return places


def _edges(graph: Any, count: int, where: str) -> Tensor:
    """Both ways of every link, each once, without loops, (2, E)."""
    expected = "lists of neighbours by node"
    if not isinstance(graph, dict) or not all(isinstance(others, list) for others in graph.values()):
        raise ValueError(refusal("data", f"{where}: graph, a {type(graph).__name__}", expected))
    # Before anything is hashed or compared: a small file can hold tuples of tuples that take years to hash.
    named = (node for one, others in graph.items() for node in (one, *others))
    if not all(type(node) is int and 0 <= node < count for node in named):
        raise ValueError(refusal("data", f"{where}: graph with other nodes", f"{expected}, from 0 to {count - 1}"))
    pairs = {(i, j) for one, others in graph.items() for other in others for i, j in ((one, other), (other, one))}
    return torch.tensor(sorted((i, j) for i, j in pairs if i != j), dtype=torch.long).reshape(-1, 2).T.contiguous()
