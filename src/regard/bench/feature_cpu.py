"""Feature-related mechanisms on a CPU: what composing them costs beside the same arithmetic written out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from regard.bench.measure import Row, cpu_peak_mib, relative_error
from regard.bench.paired import paired_seconds
from regard.feature import (
    AlternatingCoAttention,
    HierarchicalAttention,
    InteractiveCoAttention,
    MultiGrainedCoAttention,
    ParallelCoAttention,
    RotatoryAttention,
)

QUESTION = "feature-cpu"

_MEMORY = """
import torch, regard as rg
torch.set_num_threads(2)
n, width, scoring = int(argv[0]), int(argv[1]), argv[2]
attend = rg.ParallelCoAttention(width, scoring=scoring)
first, second = (torch.randn(1, n, width, requires_grad=True) for _ in range(2))
attend(first[:, :64], second[:, :64]).sum().backward()
first.grad = second.grad = None
ready()
attend(first, second).sum().backward()
"""

Masks = tuple[Tensor, ...] | None


def _filled(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else torch.where(mask.unsqueeze(-1), x, 0.0)


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    return x.mean(-2) if mask is None else x.sum(-2) / mask.sum(-1, keepdim=True)


def _read(e: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
    e = e if mask is None else e.masked_fill(~mask, -math.inf)
    return (e.softmax(-1).unsqueeze(-2) @ x).squeeze(-2)


def _general(s: Any, q: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
    """Attention with the activated general score."""
    return _read(torch.tanh(((q @ s.W.mT).unsqueeze(-2) @ x.mT).squeeze(-2) + s.b), x, mask)


def _additive(s: Any, q: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
    return _read(torch.tanh(x @ s.W2.mT + (q @ s.W1.mT + s.b).unsqueeze(-2)) @ s.w, x, mask)


def _query_free(s: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    return _read(torch.tanh(x @ s.W.mT + s.b) @ s.w, x, mask)


def rotatory(m: Any, inputs: tuple[Tensor, ...], masks: Masks) -> Tensor:
    """Written out for target-first order; no context is empty."""
    mt, ml, mr = masks or (None, None, None)
    target, left, right = (_filled(x, mask) for x, mask in zip(inputs, (mt, ml, mr), strict=True))
    tl = tr = _mean(target, mt)
    for _ in range(m.hops):
        rl, rr = _general(m.left.score, tl, left, ml), _general(m.right.score, tr, right, mr)
        tl = _general(m.target_left.score, rl, target, mt)
        tr = _general(m.target_right.score, rr, target, mt)
    return torch.cat([rl, rr, tl, tr], -1)


def hierarchical(m: Any, inputs: tuple[Tensor, ...], masks: Masks) -> Tensor:
    """Written out for two levels."""
    mask = None if masks is None else masks[0]
    words = _query_free(m.levels["word"].score, _filled(inputs[0], mask), mask)
    return _query_free(m.levels["sentence"].score, words, None if mask is None else mask.any(-1))


def alternating(m: Any, inputs: tuple[Tensor, ...], masks: Masks) -> Tensor:
    """Written out."""
    m1, m2 = masks or (None, None)
    x, y = _filled(inputs[0], m1), _filled(inputs[1], m2)
    c2 = _additive(m.second.score, _query_free(m.summary.score, x, m1), y, m2)
    return torch.cat([_additive(m.first.score, c2, x, m1), c2], -1)


def interactive(m: Any, inputs: tuple[Tensor, ...], masks: Masks) -> Tensor:
    """Written out."""
    m1, m2 = masks or (None, None)
    x, y = _filled(inputs[0], m1), _filled(inputs[1], m2)
    return torch.cat([_general(m.first.score, _mean(y, m2), x, m1), _general(m.second.score, _mean(x, m1), y, m2)], -1)


def parallel(m: Any, inputs: tuple[Tensor, ...], masks: Masks) -> Tensor:
    """Written out, the affinity in memory."""
    m1, m2 = masks or (None, None)
    x, y = _filled(inputs[0], m1), _filled(inputs[1], m2)
    s = m.affinity.score
    a = torch.tanh((x @ s.W.mT) @ y.mT + s.b)
    if m.scoring[0] == "max":
        if m1 is not None and m2 is not None:
            a = a.masked_fill(~(m1.unsqueeze(-1) & m2.unsqueeze(-2)), -math.inf)
        return torch.cat([_read(a.amax(-1), x, m1), _read(a.amax(-2), y, m2)], -1)
    p, q = x @ m.W1.mT, y @ m.W2.mT
    e1 = torch.tanh(p + a @ q) @ m.first.score.w
    e2 = torch.tanh(q + a.mT @ p) @ m.second.score.w
    return torch.cat([_read(e1, x, m1), _read(e2, y, m2)], -1)


def multi_grained(m: Any, inputs: tuple[Tensor, ...], masks: Masks) -> Tensor:
    """Written out."""
    return torch.cat([interactive(m.coarse, inputs, masks), parallel(m.fine, inputs, masks)], -1)


ByHand = Callable[[Any, tuple[Tensor, ...], Masks], Tensor]


def subjects(width: int) -> dict[str, tuple[nn.Module, ByHand, int]]:
    """The mechanisms, each with its arithmetic by hand and its number of inputs (0: one input in segments)."""
    return {
        "rotatory": (RotatoryAttention(width), rotatory, 3),
        "rotatory, 3 hops": (RotatoryAttention(width, hops=3), rotatory, 3),
        "hierarchical": (HierarchicalAttention(width), hierarchical, 0),
        "alternating": (AlternatingCoAttention(width), alternating, 2),
        "interactive": (InteractiveCoAttention(width), interactive, 2),
        "parallel": (ParallelCoAttention(width), parallel, 2),
        "parallel, max": (ParallelCoAttention(width, scoring="max"), parallel, 2),
        "multi-grained": (MultiGrainedCoAttention(width), multi_grained, 2),
    }


def speed(batch: int = 32, n: int = 128, width: int = 128) -> Iterator[Row]:
    """Forward and training step of each mechanism beside its arithmetic by hand, with masks and without."""
    torch.manual_seed(0)
    for name, (module, by_hand, count) in subjects(width).items():
        shape = (batch, 8, n // 8) if count == 0 else (batch, n)
        inputs = tuple(torch.randn(*shape, width, requires_grad=True) for _ in range(max(count, 1)))
        lengths = torch.randint(n // 16, shape[-1] + 1, (*shape[:-1], 1))
        padded: Masks = tuple((torch.arange(shape[-1]) < lengths).contiguous() for _ in inputs)
        for masks in (None, padded):
            yield from _pair(name, module, by_hand, inputs, masks, f"B{batch} N{n} D{width} float32")


def _pair(
    name: str, module: nn.Module, by_hand: ByHand, inputs: tuple[Tensor, ...], masks: Masks, size: str
) -> Iterator[Row]:
    of_module: Any = masks if masks is None or len(inputs) > 1 else masks[0]

    def ours() -> Tensor:
        result: Tensor = module(*inputs, of_module)
        return result

    def theirs() -> Tensor:
        return by_hand(module, inputs, masks)

    def step(run: Callable[[], Tensor]) -> Callable[[], None]:
        def both() -> None:
            for x in (*inputs, *module.parameters()):
                x.grad = None
            run().sum().backward()

        return both

    masked = "" if masks is None else ", masks"
    error = relative_error(ours().detach(), theirs().detach())
    with torch.no_grad():
        forward = paired_seconds(ours, theirs)
    training = paired_seconds(step(ours), step(theirs))
    for what, times in (("forward", forward), ("training step", training)):
        case = f"{name}{masked}, {size}, {what}"
        ratio = times[0] / times[1]
        yield Row(QUESTION, case, "regard", times[0], error=error, extra={"ratio": ratio})
        yield Row(QUESTION, case, "by hand", times[1])


def memory(width: int = 64, sizes: tuple[int, ...] = (4096, 8192, 16384)) -> Iterator[Row]:
    """Peak memory of a training step of parallel co-attention; the affinity alone would be N² x 4 bytes."""
    for scoring in ("aggregated", "max"):
        for n in sizes:
            peak = cpu_peak_mib(_MEMORY, n, width, scoring)
            case = f"parallel, {scoring}, B1 N{n} D{width} float32, training step"
            yield Row(QUESTION, case, "regard", peak_mib=peak, extra={"affinity_mib": n * n * 4 / 2**20})


def rows() -> Iterator[Row]:
    """All of it."""
    torch.set_num_threads(1)
    yield from speed()
    yield from memory()
