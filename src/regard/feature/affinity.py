r"""What is read off the affinity of two inputs, $A_{ij}$, without keeping it: sums along either side, best partners.

Panels of rows are computed one after the other. For the sums they are computed again in the backward; a maximum needs
only the pair that attains it, whose affinity is computed once more, so that its backward is linear in the features.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.general.bound import Bound, Sizes
from regard.general.masks import Mask
from regard.ops.blockwise import panels, recomputed
from regard.ops.call import Call
from regard.ops.dispatch import autocasting, choose, rows_of_panel
from regard.ops.fill import where
from regard.ops.forms import AdditiveForm, BilinearForm, Form, wide
from regard.ops.heap import return_freed_memory


class Sides(Mask):
    """Real features of two inputs that are zero elsewhere already: booleans (..., N1) and (..., N2)."""

    def __init__(self, first: Tensor | None, second: Tensor | None) -> None:
        self.first, self.second = first, second

    def bind(self, sizes: Sizes) -> Bound:
        return _BoundSides(self.first, self.second, sizes)


@dataclass(frozen=True)
class _BoundSides(Bound):
    first: Tensor | None
    second: Tensor | None
    sizes: Sizes
    is_filled = True

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.sizes.lead, self.sizes.nq, self.sizes.n)

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        allowed = torch.ones(1, 1, dtype=torch.bool, device=device)
        if self.first is not None:
            allowed = allowed & self.first[..., i.start : i.stop, None]
        return allowed if self.second is None else allowed & self.second[..., None, j.start : j.stop]

    def keys(self, device: torch.device) -> Tensor | None:
        if self.first is None:
            return self.second
        some = self.first.any(-1, keepdim=True)
        return some.expand(*some.shape[:-1], self.sizes.n) if self.second is None else self.second & some

    def rows(self, device: torch.device) -> Tensor | None:
        if self.second is None:
            return self.first
        some = self.second.any(-1, keepdim=True)
        return some.expand(*some.shape[:-1], self.sizes.nq) if self.first is None else self.first & some


def sums(call: Call, impl: str, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    r"""Both products of the affinity, $\sum_j A_{ij} s_j$ (..., N1, d) and $\sum_i A_{ij} f_i$ (..., N2, d).

    Args:
        call: the affinity, queries along the first input.
        impl: how it is executed.
        first: f (..., N1, d), zero where the first input is padding.
        second: s (..., N2, d), likewise.
    """
    first, second = wide(first), wide(second)
    tiled, rows = _execution(call, impl)
    # Zeros in what is summed remove padding; only a mask that somebody else put there has to be applied to pairs.
    masked = call.mask is not None and not isinstance(call.mask, _BoundSides)

    def part(i: range) -> tuple[Tensor, Tensor]:
        if rows < call.nq and call.device.type == "cpu" and not torch.compiler.is_compiling():
            return_freed_memory()
        a = call.scores(i, tiled=tiled)
        if masked:
            allowed = call.tile(i).mask()
            assert allowed is not None
            a = where(allowed, a, 0.0)
        return a @ second, a.mT @ first[..., i.start : i.stop, :]

    with _uncast(call.device):
        if rows >= call.nq:
            return part(range(call.nq))
        # Written in place: results that wait between the large temporaries of the panels would fragment the heap.
        along_rows = second.new_empty(*call.lead, call.nq, second.shape[-1])
        along_keys = second.new_zeros(*call.lead, call.n, first.shape[-1])
        for i in panels(call, rows):
            of_rows, of_keys = recomputed(part, i, call)
            along_rows[..., i.start : i.stop, :] = of_rows
            along_keys.add_(of_keys)
        return along_rows, along_keys


def maxima(call: Call, impl: str) -> tuple[Tensor, Tensor]:
    """The largest affinity of each row (..., N1) and of each column (..., N2); minus infinity where there is none.

    Where several partners are the largest there is no one gradient: a whole affinity shares it among them, panels give it to the first.
    """
    tiled, rows = _execution(call, impl)
    nq, n = call.form.sizes
    if 0 in (nq, n):
        nothing = wide(call.value).new_full((*call.lead, nq + n), -math.inf)
        return nothing[..., :nq], nothing[..., nq:]
    if rows >= nq:
        a = _allowed(call, range(nq), tiled)
        return a.amax(-1), a.amax(-2)
    of_first, of_second, first_has, second_has = _partners(call, rows, tiled)
    return (
        where(first_has, pair_scores(call, None, of_first), -math.inf),
        where(second_has, pair_scores(call, of_second, None), -math.inf),
    )


def _allowed(call: Call, i: range, tiled: bool) -> Tensor:
    """A panel of the affinity, minus infinity where a pair is not allowed."""
    with _uncast(call.device):
        a = call.scores(i, tiled=tiled)
    mask = None if call.mask is None else call.tile(i).mask()
    a = a if mask is None else where(mask, a, -math.inf)
    whole = (*call.lead, len(i), call.n)
    return a if a.shape == whole else a.expand(whole)


@torch.no_grad()
def _partners(call: Call, rows: int, tiled: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Index of the best partner of each row and of each column, and whether there is one."""
    lead, device = call.lead, call.device
    of_first = torch.zeros(*lead, call.nq, dtype=torch.long, device=device)
    of_second = torch.zeros(*lead, call.n, dtype=torch.long, device=device)
    first_has = torch.zeros(*lead, call.nq, dtype=torch.bool, device=device)
    top = torch.full((*lead, call.n), -math.inf, device=device, dtype=wide(call.value).dtype)
    for i in panels(call, rows):
        a = _allowed(call, i, tiled)
        best, index = a.max(-1)
        of_first[..., i.start : i.stop], first_has[..., i.start : i.stop] = index, best > -math.inf
        best, index = a.max(-2)
        better = best > top
        top, of_second = torch.where(better, best, top), torch.where(better, index + i.start, of_second)
    return of_first, of_second, first_has, top > -math.inf


def pair_scores(call: Call, i: Tensor | None, j: Tensor | None) -> Tensor:
    """Affinities of chosen pairs: of rows i (..., n) with columns j (..., n), None for all of a side in order."""
    with _uncast(call.device):
        e = _pairs_of_form(call.form, call.lead, i, j)
    bias = call.bias
    if bias is None:
        return e
    every = torch.arange(e.shape[-1], device=e.device)
    i, j = every if i is None else i, every if j is None else j
    if not isinstance(bias, Tensor):
        return e + wide(bias(i + call.start, j))
    lead = torch.meshgrid(*(torch.arange(n, device=e.device) for n in call.lead), indexing="ij")
    return e + wide(bias.expand(*call.lead, call.nq, call.n))[(*(x[..., None] for x in lead), i, j)]


def _pairs_of_form(form: Form, lead: tuple[int, ...], i: Tensor | None, j: Tensor | None) -> Tensor:
    if isinstance(form, AdditiveForm):
        hidden = form.activation(wide(_take(form.a, i, lead)) + wide(_take(form.u, j, lead)))
        assert form.weight is not None
        return (hidden @ wide(form.weight).unsqueeze(-1)).squeeze(-1)
    assert isinstance(form, BilinearForm)
    e = (wide(_take(form.query, i, lead)) * wide(_take(form.key, j, lead))).sum(-1) * form.scale
    if form.offset is not None:
        e = e + wide(form.offset).squeeze(-1)
    if form.activation is not None:
        e = form.activation(e)
    if form.query_bias is not None:
        e = e + _take(form.query_bias.unsqueeze(-1), i, lead).squeeze(-1)
    if form.key_bias is not None:
        e = e + _take(form.key_bias.unsqueeze(-1), j, lead).squeeze(-1)
    return e


def _take(x: Tensor, index: Tensor | None, lead: tuple[int, ...]) -> Tensor:
    """Rows of x (..., N, d) by an index (..., n)."""
    if index is None:
        return x
    x = x.expand(*lead, *x.shape[-2:])
    return x.gather(-2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))


def _uncast(device: torch.device) -> AbstractContextManager[object]:
    """The operands already have autocast's dtype; what is computed from them here must stay wide."""
    return torch.autocast(device.type, enabled=False) if autocasting(device) else nullcontext()


def _execution(call: Call, impl: str) -> tuple[bool, int]:
    """Whether to compute panels by tiles, and their rows."""
    found = choose(call, impl)
    if found.path == "fused" and found.reason == "asked for":
        raise NotImplementedError(
            "impl='fused' is not available here: an affinity is summed along both sides. "
            "Fix: use impl='auto', 'blockwise' or 'dense'."
        )
    if found.path == "dense":
        return False, max(call.nq, 1)
    return True, rows_of_panel(call)
