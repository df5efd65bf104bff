"""Blockwise execution: panels of complete rows, recomputed in the backward; memory linear in queries and keys.

A panel holds as many query rows as fit a budget, so panels shrink as the number of keys grows. Alignments see complete
rows and need no special form. What is random is drawn by position (ops.random), so recomputing draws it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.ops.call import Call

T = TypeVar("T")

# Scores of one panel. A backward needs a handful of such arrays at once.
CPU_PANEL_ELEMENTS = 1 << 21
GPU_PANEL_ELEMENTS = 1 << 26


def panel_rows(call: Call) -> int:
    """Query rows of one panel."""
    budget = CPU_PANEL_ELEMENTS if call.device.type == "cpu" else GPU_PANEL_ELEMENTS
    return max(1, budget // max(1, math.prod(call.lead) * call.form.row_elements))


def over_rows(call: Call, part: Callable[[range], T], rows: int | None = None) -> list[T]:
    """Compute something of all queries panel by panel.

    One panel alone keeps what its backward needs; several are recomputed there.
    """
    rows = panel_rows(call) if rows is None else rows
    if rows >= call.nq:
        return [part(range(call.nq))]
    panels = [range(i, min(i + rows, call.nq)) for i in range(0, call.nq, rows)]
    if not torch.is_grad_enabled():
        return [part(i) for i in panels]
    return [checkpoint(part, i, use_reentrant=False, preserve_rng_state=False) for i in panels]


def blockwise(call: Call, rows: int | None = None) -> Tensor:
    """Attend panel by panel."""
    panels = over_rows(call, lambda i: call.read(call.weights(i, tiled=True), i), rows)
    return panels[0] if len(panels) == 1 else torch.cat(panels, -2)
