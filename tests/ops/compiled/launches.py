"""Calls of the package's launchers, forward and backward, with tensors that have no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.ops.triton import (
    additive_panel,
    attend,
    bilinear,
    bilinear_aligned,
    graph,
    hashed,
    multi,
    sparse_rows,
    square_rows,
    summaries,
    unit_rows,
)
from regard.ops.triton.additive_tile import Conditions
from regard.ops.triton.align import ADDED, ALL, FLAT, LARGEST, SAMPLED, SCALED, Align

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def on_device(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


# What decides weights beside the scores: noise, choice, whether it learns, where a Gaussian enters, whether positions are in no order.
ALIGNMENTS: dict[str, dict[str, Any]] = {
    "soft": {},
    "noise": {"noise": True},
    "largest": {"choice": LARGEST, "learns": False},
    "straight": {"choice": LARGEST},
    "sampled": {"choice": SAMPLED, "noise": True},
    "reinforce": {"choice": SAMPLED, "learns": False},
    "window": {"gaussian": FLAT},
    "added": {"gaussian": ADDED},
    "scaled": {"gaussian": SCALED, "scattered": True},
}


def align_of(name: str, dropout: bool, nq: int, lead: int) -> Align:
    kinds = ALIGNMENTS[name]
    random = dropout or kinds.get("noise", False) or kinds.get("choice", ALL) == SAMPLED
    return Align(
        seed=on_device(1, dtype=torch.int64) if random else None,
        position=on_device(lead, nq) if "gaussian" in kinds else None,
        window=10.0 if "gaussian" in kinds else 0.0,
        dropout=0.1 if dropout else 0.0,
        **kinds,
    )


def mask_of(kind: str, *shape: int) -> tuple[Tensor | None, bool]:
    """A mask in bytes, and whether it is causal instead."""
    return (on_device(*shape, dtype=torch.uint8) if kind == "mask" else None), kind == "causal"


def additive(
    dtype: torch.dtype = F32, hidden: int = 64, values: int = 64, act: str = "tanh", align: str = "soft",
    mask: str = "", bias: bool = False, dropout: bool = False, n: int = 1024,
) -> None:  # fmt: skip
    a, u, v = (on_device(2, n, size, dtype=dtype) for size in (hidden, hidden, values))
    w = on_device(1, hidden)
    allowed, causal = mask_of(mask, 2, n, n)
    added = on_device(1, n, n) if bias else None
    given = (allowed, added, *align_of(align, dropout, n, 2).flat(), causal, act)
    results = attend._forward(a, u, w, v, *given)
    attend._gradients(torch.empty_like(v), a, u, w, v, *results, bias, *given)


def panel(dtype: torch.dtype = F32, hidden: int = 64, act: str = "tanh", n: int = 1024) -> None:
    a, u, w = on_device(2, 512, hidden, dtype=dtype), on_device(2, n, hidden, dtype=dtype), on_device(1, hidden)
    e = additive_panel.panel(a, u, w, act)
    additive_panel.gradients(e.to(dtype), a, u, w, act)


def summary(
    dtype: torch.dtype = F32, hidden: int = 64, act: str = "tanh", mask: str = "", bias: bool = False, k: int = 0,
    names: tuple[str, ...] = ("log_sum_exp", "entropy", "expected_position", "mass_on", "mass_received"), n: int = 1024,
    values: int = 64,
) -> None:  # fmt: skip
    a, u, w = on_device(2, n, hidden, dtype=dtype), on_device(2, n, hidden, dtype=dtype), on_device(1, hidden)
    allowed, causal = mask_of(mask, 2, n, n)
    region = on_device(1, n, dtype=torch.uint8) if "mass_on" in names else None
    given = Conditions(allowed, on_device(1, n, n) if bias else None, causal)
    summaries.summaries(a, u, w, act, given, names, region, k)
    # The same beside contexts.
    v, room = on_device(2, n, values, dtype=dtype), summaries.room_for(a, u, names, region, k, along=True)
    none, align = (None, None), Align().flat()
    attend.additive(a, u, w, v, given.mask, given.bias, *none, *align[2:], causal, act, summary=room)


def scores(
    dtype: torch.dtype = F32, width: int = 64, values: int = 64, act: str = "tanh", align: str = "soft",
    mask: str = "", terms: bool = False, dropout: bool = False, n: int = 1024,
) -> None:  # fmt: skip
    """Bilinear scores; `terms` are an offset, a bias of each key and a temperature in memory."""
    q, k, v = (on_device(2, 4, n, size, dtype=dtype) for size in (width, width, values))
    allowed, causal = mask_of(mask, 2, 1, n, n)
    extra = (on_device(2, 4), on_device(2, 4, n), on_device(1)) if terms else (None, None, None)
    x = bilinear.Operands(q, k, v, *extra, allowed, causal, 0.125, 1.0, act)
    how, do, dlse = align_of(align, dropout, n, 8), torch.empty_like(v), on_device(2, 4, n) if terms else None
    if how.is_plain:
        bilinear.backward(x, *bilinear.forward(x), do, dlse)
    else:
        bilinear_aligned.backward(x, how, bilinear_aligned.forward(x, how), do, dlse)


def features(
    dtype: torch.dtype = F32, hidden: int = 64, values: int = 64, act: str = "tanh", align: str = "soft",
    mask: str = "", matrix: bool = True, dropout: bool = False, n: int = 1024,
) -> None:  # fmt: skip
    """A weight for each feature, with a matrix behind the hidden layer or without."""
    hidden = hidden if matrix else values
    a, u, v = (on_device(2, n, size, dtype=dtype) for size in (hidden, hidden, values))
    w = on_device(1, hidden, values) if matrix else on_device(1, values)
    allowed, causal = mask_of(mask, 2, n, n)
    call = (a, u, w, v, allowed, causal, act, *align_of(align, dropout, n, 2).flat())
    out, lse, soft, pick, reach = multi._forward(*call)
    multi._gradients(torch.empty_like(out), lse, out if soft is None else soft, pick, reach, *call)


def edges(
    dtype: torch.dtype = F32, heads: int = 8, hidden: int = 16, values: int = 16, act: str = "leaky_relu", own_value: bool = False,
    by_edge: bool = False, mask: bool = False, dropout: bool = False, n: int = 1024,
) -> None:  # fmt: skip
    count = 16 * n
    index = [on_device(count, dtype=torch.int64) for _ in range(3)]
    readers = on_device(count, dtype=torch.int64), on_device(n + 1, dtype=torch.int64)
    value = on_device(n, heads, values, dtype=dtype) if own_value or by_edge else None
    x = graph.Operands(
        *(on_device(n, heads, hidden, dtype=dtype) for _ in range(2)), value, on_device(heads, hidden), index[0],
        index[1] if by_edge else None, index[2], on_device(n + 1, dtype=torch.int64),
        *readers, *(readers if by_edge else (None, None)), on_device(heads, count, dtype=torch.uint8) if mask else None,
        on_device(1, dtype=torch.int64) if dropout else None, 0.1 if dropout else 0.0, act,
    )  # fmt: skip
    context, lse = graph.forward(x)
    graph.backward(x, context, lse, torch.empty_like(context))


def buckets(
    dtype: torch.dtype = F32, chunk: int = 64, width: int = 64, values: int = 64, rounds: int = 1, across: bool = False,
    ahead: bool = False, n: int = 1024,
) -> None:  # fmt: skip
    q, k, v = (on_device(2, n, size, dtype=dtype) for size in (width, width, values))
    order, in_order = (on_device(2, rounds, n, dtype=torch.int64) for _ in range(2))
    spots = None if rounds == 1 else on_device(2, rounds, n, dtype=torch.int32)
    places = hashed.Places(order, in_order, spots, chunk, across, -(2**30), 2**30 if ahead else 0)
    assert hashed.why_not(q, v, chunk) is None
    out, total = hashed.forward(q, k, v, places)
    hashed.backward(torch.empty_like(v), q, k, v, out, total, places)


def rows(
    dtype: torch.dtype = F32,
    n: int = 1024,
    alpha: float = 2.0,
    learned: bool = False,
    mask: bool = False,
    count: int = 256,
) -> None:
    z = on_device(2, count, n, dtype=dtype)
    at = on_device(1)[0] if learned else None
    p = sparse_rows.aligned(z, on_device(2, count, n, dtype=torch.uint8) if mask else None, at, alpha)
    sparse_rows.gradients(torch.empty_like(p), p, at, alpha)


def units(dtype: torch.dtype = F32, width: int = 64) -> None:
    x = on_device(512, width, dtype=dtype).requires_grad_()
    for y in (unit_rows.UnitRows.apply(x, 1e-12), square_rows.SquareRows.apply(x, 1.0)):
        torch.autograd.grad(y, x, torch.empty_like(y))


Launch = Callable[..., None]
Case = tuple[Launch, dict[str, Any]]


def case(launch: Launch, **given: Any) -> Case:
    return launch, given


def told(x: Case) -> str:
    launch, given = x
    parts = (f"{name}={str(value).removeprefix('torch.')}" for name, value in given.items())
    return " ".join((launch.__name__, *parts))
