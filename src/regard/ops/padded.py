r"""Padded sequences side by side: those with about as many real keys go together, beside no more keys than they have.

A mask of real keys says of every entry of the first axis where its keys begin and end. On a CPU looking at them costs nothing; time then
grows with $N_q \sum_b N_b$, not with $B N_q N$. Entries that go together are a call of their own, for which any execution serves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from regard.ops.banded import cut_form
from regard.ops.call import Call, Mask
from regard.ops.forms import AdditiveForm
from regard.ops.near import beside
from regard.ops.transforms import transformed

# Keys that are computed, padding included, for each that is asked for: more than that is another group.
WASTE = 1.25
# It pays where so many times fewer pairs are left, of no fewer than so many numbers in all.
WORTHWHILE, WORTH_A_GROUP = 1.25, 1 << 20


class Extents(NamedTuple):
    """Of every entry of the first axis: from which key to which some may be attended, and whether all between them may."""

    first: tuple[int, ...]
    end: tuple[int, ...]
    is_full: tuple[bool, ...]


class _Padding(Protocol):
    """What a mask must know to be taken apart."""

    @property
    def extents(self) -> Extents | None: ...

    def entries(self, chosen: Tensor) -> Mask: ...

    @property
    def is_keys_alone(self) -> bool: ...


class _Group(NamedTuple):
    """Entries that go together, and their keys."""

    entries: list[int]
    keys: range


def why_not_padded(call: Call) -> str | None:
    """The reason why this call is not computed by groups of sequences of about one length, or None."""
    width = call.form.a.shape[-1] if isinstance(call.form, AdditiveForm) else call.form.key.shape[-1]
    size = math.prod(call.lead) * call.pairs * width
    if not size or size < WORTH_A_GROUP:
        return "too small"
    if type(call) is not Call or call.first_key or call.device_type != "cpu" or transformed():
        return "only whole sequences on a CPU"
    if not getattr(call.align, "is_rowwise", False):
        return f"alignment {type(call.align).__name__} looks at more than the keys that a row may attend"
    if call.seed is not None or callable(call.bias):
        return "what is drawn, or a function of places, is of all entries"
    rows = {*getattr(call.align, "of_queries", ()), *getattr(call.align, "of_keys", ())}
    if any(name not in rows for name, x in call.prepared.items() if isinstance(x, Tensor)) or _is_shared(call):
        return "something that all entries share"
    extents = _extents(call)
    if extents is None:
        return "no padding that can be looked at"
    pairs = sum(len(group.entries) * len(group.keys) for group in _groups(extents))
    if not pairs:
        return "nothing to attend to"
    if len(extents.end) * call.n < WORTHWHILE * pairs:
        return "hardly any padding"
    return None


def padded(call: Call, execute: Callable[[Call], Tensor]) -> Tensor:
    """Attend group by group, by whatever execution each takes."""
    extents, mask = _extents(call), cast(_Padding, call.mask)
    assert extents is not None
    groups = _groups(extents)
    order = torch.tensor([b for group in groups for b in group.entries], device=call.device)
    parts = _parts(call, order, [len(group.entries) for group in groups])
    found = []
    for part, group in zip(parts, groups, strict=True):
        if not group.keys:
            found.append(part.value.new_zeros(*part.lead, part.nq, part.value.shape[-1]))
            continue
        whole = mask.is_keys_alone and all(_fills(extents, b, group.keys) for b in group.entries)
        chosen = torch.tensor(group.entries, device=call.device)
        near = beside(replace(part, mask=mask.entries(chosen)), group.keys)
        found.append(execute(replace(near, mask=None) if whole else near))
    context = torch.cat(found)
    return context.index_select(0, order.argsort())


def _extents(call: Call) -> Extents | None:
    found: Extents | None = getattr(call.mask, "extents", None)
    if found is None or not call.lead:
        return None
    if len(found.end) == 1:
        b = call.lead[0]
        return Extents(found.first * b, found.end * b, found.is_full * b)
    axes = call.mask.shape[:-2] if call.mask is not None else ()
    # One of each entry of the first axis, and the same along the others.
    mine = len(axes) == len(call.lead) and all(size == 1 for size in axes[1:])
    return found if mine and len(found.end) == call.lead[0] else None


def _is_shared(call: Call) -> bool:
    """Whether parameters have the first axis too, which then is none of sequences."""
    form, axes = call.form, len(call.lead)
    if isinstance(form, AdditiveForm):
        return form.weight is not None and form.weight.dim() - (2 if form.multi else 1) >= axes
    own = 3 if form.multi else 2
    return form.offset is not None and form.offset.dim() - own >= axes


def _groups(extents: Extents) -> list[_Group]:
    """Entries by how many keys they have, the longest first."""
    sizes = [end - first for first, end in zip(extents.first, extents.end, strict=True)]
    groups: list[_Group] = []
    for b in sorted(range(len(sizes)), key=lambda b: sizes[b], reverse=True):
        keys = range(extents.first[b], extents.end[b])
        last = groups[-1] if groups else None
        reach = None if last is None else range(min(last.keys.start, keys.start), max(last.keys.stop, keys.stop))
        if last is not None and reach is not None and len(reach) <= WASTE * len(keys):
            groups[-1] = _Group([*last.entries, b], reach)
        else:
            groups.append(_Group([b], keys))
    return groups


def _fills(extents: Extents, b: int, keys: range) -> bool:
    return extents.is_full[b] and (extents.first[b], extents.end[b]) == (keys.start, keys.stop)


def _parts(call: Call, order: Tensor, counts: list[int]) -> list[Call]:
    """The entries of each group; every operand is put in order once, so that its gradient is put together once."""
    kept: dict[int, tuple[Tensor, ...]] = {}
    axes, size = len(call.lead), call.lead[0]

    def ordered(x: Tensor, own: int) -> tuple[Tensor, ...]:
        if id(x) not in kept:
            per_entry = x.dim() - own == axes and x.shape[0] == size and size > 1
            kept[id(x)] = x.index_select(0, order).split(counts) if per_entry else (x,) * len(counts)
        return kept[id(x)]

    def part(g: int) -> Call:
        def cut(x: Tensor, own: int = 2) -> Tensor:
            return ordered(x, own)[g]

        form = cut_form(call.form, cut, cut)
        return replace(
            call,
            form=form,
            value=cut(call.value),
            query=None,
            key=form.u if isinstance(form, AdditiveForm) else form.key,
            bias=cut(call.bias) if isinstance(call.bias, Tensor) else None,
            prepared={name: cut(x, 1) if isinstance(x, Tensor) else x for name, x in call.prepared.items()},
        )

    return [part(g) for g in range(len(counts))]
