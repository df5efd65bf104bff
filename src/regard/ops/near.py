"""Panels of queries beside the keys that any of them may attend: under a window, in a prefix or in sequences end to end, few of all.

What a mask says without being looked at is a range of keys for some queries. The others could as well not be there, for an alignment whose
weights depend on nothing but the keys that a row may attend; so a panel is a call of its own with fewer keys, which knows their places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.ops.call import Call, Mask
from regard.ops.parts import operands, rebuilt
from regard.ops.places import places


def span(call: Call, i: range) -> range:
    """The keys beside which weights of some queries can be computed as if there were no others."""
    # An alignment may read fewer keys than its mask allows.
    chosen = getattr(call.align, "span", None)
    found: range | None = chosen(call, i) if chosen is not None and _is_cut(call) else None
    return span_of_mask(call, i) if found is None else found


def span_of_mask(call: Call, i: range) -> range:
    """The same for what counts every key that the mask allows, read or not."""
    allowed = getattr(call.mask, "span", None) if _is_cut(call) else None
    found: range = places(0, call.n) if allowed is None else allowed(i)
    return found


def _is_cut(call: Call) -> bool:
    """Whether some of the keys of a call can be left out at all."""
    if type(call) is not Call or call.first_key or torch.compiler.is_compiling():
        return False
    return bool(getattr(call.align, "is_rowwise", False))


def beside(call: Call, j: range) -> Call:
    """All queries beside some keys."""
    if torch.compiler.is_compiling() or len(j) == call.n:
        return call
    given = {
        each.name: each.tensor.narrow(each.axis, j.start, len(j)) if each.side == "key" else each.tensor
        for each in operands(call)
    }
    mask = None if call.mask is None else _Beside(call.mask, j)
    part = rebuilt(call, given, range(call.nq), j, mask)
    # Alignments may look at what was asked, and where nothing was, know that.
    return replace(part, query=call.query)


def grown(call: Call, rows: int) -> int:
    """More rows of a panel, where all of them together reach fewer keys than there are: as many scores as before."""
    scores, nq = rows * call.n, call.nq
    while 2 * rows <= nq:
        begins = (0, (nq - 2 * rows) // 2, nq - 2 * rows)
        widest = max(len(span(call, range(i, i + 2 * rows))) for i in begins)
        if 2 * rows * widest > scores:
            break
        rows *= 2
    return rows


@dataclass(frozen=True)
class _Beside:
    """A mask of some keys."""

    mask: Mask
    j: range

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.mask.shape[:-1], len(self.j))

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        return self.mask.tile(i, self.j[j.start : j.stop], device)

    def keys(self, device: torch.device) -> Tensor | None:
        found = self.mask.keys(device)
        return None if found is None else found[..., self.j.start : self.j.stop]

    def rows(self, device: torch.device) -> Tensor | None:
        return self.mask.rows(device)
