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

from regard._errors import refusal
from regard.ops.call import Align, Call
from regard.ops.heap import return_freed_memory
from regard.ops.made_of import changed, stamps_of_recomputed
from regard.ops.near import beside, grown, span
from regard.ops.places import PANELS_OF_GRAPH, are_known, panels_of_graph, places, product_of_known

T = TypeVar("T")

# Scores of one panel. A backward needs a handful of such arrays at once.
CPU_PANEL_ELEMENTS = 1 << 20
GPU_PANEL_ELEMENTS = 1 << 26
# From here on a panel's temporaries are worth giving back to the system.
LARGE_PANEL_ELEMENTS = 1 << 19


def panel_rows(call: Call) -> int:
    """Query rows of one panel, beside all keys."""
    if not are_known(call.nq):
        return call.nq
    if not are_known(call.row_elements):
        return max(1, -(-call.nq // PANELS_OF_GRAPH))
    budget = CPU_PANEL_ELEMENTS if call.device_type == "cpu" else GPU_PANEL_ELEMENTS
    return max(1, budget // max(1, product_of_known(call.lead) * call.row_elements))


def near_rows(call: Call) -> int:
    """Query rows of one panel, beside the keys that they may attend."""
    rows = panel_rows(call)
    return rows if torch.compiler.is_compiling() or rows >= call.nq else grown(call, rows)


def over_rows(call: Call, part: Callable[[range], T], rows: int | None = None) -> list[T]:
    """Compute something of all queries panel by panel.

    One panel alone keeps what its backward needs; several are recomputed there.
    """
    rows = panel_rows(call) if rows is None or not are_known(call.nq) else rows
    if rows >= call.nq:
        return [part(places(0, call.nq))]
    tidy = _tidy(call, rows)
    found = []
    for k, i in enumerate(panels(call, rows)):
        if tidy and k % 2 == 0:
            return_freed_memory()
        found.append(recomputed(part, i, call))
    return found


def _tidy(call: Call, rows: int) -> bool:
    """Whether the temporaries of panels are worth giving back to the system."""
    elements = math.prod(call.lead) * rows * call.row_elements
    return call.device.type == "cpu" and elements >= LARGE_PANEL_ELEMENTS and not torch.compiler.is_compiling()


def panels(call: Call, rows: int) -> list[range]:
    """The queries in panels of so many rows."""
    return call.panels(rows)


def recomputed(part: Callable[[range], T], i: range, call: Call) -> T:
    """Compute a panel of a call now, and once more in the backward."""
    if not torch.is_grad_enabled():
        return part(i)
    then = stamps_of_recomputed(call)
    if not are_known(call.nq):
        _read_numbers(call.align)

    def computed(i: range) -> T:
        # The second time, in the backward, from tensors that nothing else holds to what they were.
        if changed(then):
            got = "a tensor that was changed in place since the forward"
            fix = "Fix: call backward before that, or use impl='dense', which keeps what it needs."
            raise RuntimeError(refusal("attention", got, "the inputs, masks and parameters of the forward", fix))
        return part(i)

    result: T = checkpoint(computed, i, use_reentrant=False, preserve_rng_state=_draws_unseen(call))
    return result


def _read_numbers(align: Align) -> float:
    """Read the numbers of an alignment, which are symbols where everything is.

    What is recomputed is a graph within the graph, and would keep for itself what is first read there: the next panel could not have it.
    """
    total = 0.0
    for name in getattr(align, "numbers", ()):
        total = total + getattr(align, name)
    return total


def _draws_unseen(call: Call) -> bool:
    """Whether something of the user's is called that may draw random numbers of its own; ours are drawn by position."""
    activation = call.form.activation
    # Biases of ours say what they learn; a plain function says nothing.
    unknown = callable(call.bias) and not hasattr(call.bias, "requires_grad")
    return unknown or (activation is not None and activation.derivative is None)


def wide_dtype(call: Call) -> torch.dtype:
    """The dtype in which a call is computed."""
    return torch.promote_types(call.value.dtype, torch.float32)


def blockwise(call: Call, rows: int | None = None) -> Tensor:
    """Attend panel by panel."""
    rows = near_rows(call) if rows is None else rows
    if not are_known(call.nq):
        return _for_any_number(call)
    if rows >= call.nq:
        return call.read(call.weights(tiled=True))
    tidy = _tidy(call, rows)

    def attend(i: range) -> Tensor:
        if tidy and i.start // rows % 2 == 0:
            return_freed_memory()
        near = beside(call, span(call, i))
        return near.read(near.weights(i, tiled=True), i)

    if torch.compiler.is_compiling():
        return torch.cat(over_rows(call, attend, rows), -2)
    # Each panel is written to its place at once: results that wait between the large temporaries of the panels would keep
    # their memory from being reused.
    whole = torch.empty(*call.lead, call.nq, call.value.shape[-1], dtype=wide_dtype(call), device=call.device)
    for panel in panels(call, rows):
        whole[..., panel.start : panel.stop, :] = recomputed(attend, panel, call)
    return whole


def _for_any_number(call: Call) -> Tensor:
    """The same in a graph for any number of queries from two up, which has a fixed number of panels."""
    if type(call) is not Call or not getattr(call.align, "is_rowwise", False):
        # Rows that depend on each other are cut out of a whole; what knows its own rows cannot take others.
        return call.read(call.weights(tiled=True))

    def attend(i: range) -> Tensor:
        return call.read(call.weights(i, tiled=True), i)

    parts = [recomputed(attend, i, call) for i in panels_of_graph(call.nq)]
    # Cut by index: what a slice says of its ends would be a condition of the graph.
    return torch.cat(parts, -2).index_select(-2, torch.arange(call.nq, device=call.device))
