"""Graph attention on a CPU, beside the GATv2Conv of torch_geometric with the same weights: time, memory, error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from regard._errors import missing_extra
from regard.bench.measure import Row, cpu_peak_mib, relative_error
from regard.bench.paired import paired_seconds
from regard.query import GraphAttention

QUESTION = "graph-cpu"
PEER = "torch_geometric, GATv2Conv"

_MEMORY = """
import torch, regard as rg
from torch_geometric.nn import GATv2Conv
torch.set_num_threads(1)
n, e, heads, width, who, step = int(argv[0]), int(argv[1]), int(argv[2]), int(argv[3]), argv[4], argv[5] == "step"
torch.manual_seed(0)
theirs = GATv2Conv(heads * width, width, heads=heads, add_self_loops=False)
attend = rg.GraphAttention.from_geometric(theirs) if who == "regard" else theirs
x, edges = torch.randn(n, heads * width, requires_grad=step), torch.randint(n, (2, e))
small = torch.randint(64, (2, 256))
attend(x[:64], small).sum().backward() if step else attend(x[:64], small)
x.grad = None
ready()
torch.set_grad_enabled(step)
result = attend(x, edges)
if step:
    result.sum().backward()
"""


def _pair(n: int, edges: int, heads: int, width: int) -> tuple[GraphAttention, Any, Tensor, Tensor]:
    """Ours and theirs with the same weights, and a random graph."""
    try:
        geometric = import_module("torch_geometric.nn")
    except ImportError as error:
        raise ImportError(missing_extra("torch_geometric", "graph", "regard bench graph-cpu")) from error
    torch.manual_seed(0)
    theirs = geometric.GATv2Conv(heads * width, width, heads=heads, add_self_loops=False)
    x = torch.randn(n, heads * width, requires_grad=True)
    return GraphAttention.from_geometric(theirs), theirs, x, torch.randint(n, (2, edges))


def _errors(heads: int, width: int) -> dict[str, float]:
    """Of the results of both, relative to torch_geometric in float64, on a smaller graph."""
    ours, theirs, x, index = _pair(5000, 100_000, heads, width)
    with torch.no_grad():
        found = {"regard": ours(x, index), PEER: theirs(x, index)}
        exact = theirs.double()(x.double(), index)
    return {name: relative_error(y, exact) for name, y in found.items()}


def _step(run: Callable[[], Tensor], x: Tensor, parameters: list[Tensor]) -> Callable[[], None]:
    def both() -> None:
        for leaf in (x, *parameters):
            leaf.grad = None
        run().sum().backward()

    return both


def rows(n: int = 100_000, edges: int = 2_000_000, heads: int = 8, width: int = 16) -> Iterator[Row]:
    """Forward and training step; processor time of one thread, the runs of both taken in turns."""
    torch.set_num_threads(1)
    size = f"{n} nodes, {edges} edges, {heads} heads of {width}, float32"
    errors = _errors(heads, width)
    ours, theirs, x, index = _pair(n, edges, heads, width)

    def mine() -> Tensor:
        result: Tensor = ours(x, index)
        return result

    def other() -> Tensor:
        result: Tensor = theirs(x, index)
        return result

    parameters = [*ours.parameters(), *theirs.parameters()]
    for what in ("forward", "training step"):
        step = what != "forward"
        with torch.set_grad_enabled(step):
            first: Callable[[], object] = _step(mine, x, parameters) if step else mine
            second: Callable[[], object] = _step(other, x, parameters) if step else other
            times = paired_seconds(first, second, budget=0.0, least=3)
        for who, taken in zip(("regard", PEER), times, strict=True):
            short = "regard" if who == "regard" else "peer"
            peak = cpu_peak_mib(_MEMORY, n, edges, heads, width, short, "step" if step else "forward")
            yield Row(QUESTION, f"{size}, {what}", who, taken, peak, errors[who])
