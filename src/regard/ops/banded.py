r"""Softmax attention under a band, $l \le j - i \le h$: blocks of queries beside the few blocks of keys that they reach.

Queries are cut into blocks of $R$ rows, and each block is put beside its own keys and those of the neighbouring blocks, so that time
and memory grow with $N (h - l)$ instead of $N^2$. All blocks are one call with one more leading axis, which any execution takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.ops.call import Call
from regard.ops.forms import AdditiveForm, BilinearForm, Form

LEAST_ROWS = 64
# Blocks pay where a row's keys are so many times fewer than all.
WORTHWHILE = 4


class Reach(NamedTuple):
    """The keys of a query i, which stands at the key p = i + ahead: those from p + low to p + high that are real."""

    low: int
    high: int
    real: Tensor | None = None  # (..., N)
    ahead: int = 0


class _Blocks(NamedTuple):
    rows: int
    before: int  # neighbouring blocks of keys, to the left
    after: int

    @property
    def keys(self) -> int:
        return self.rows * (self.before + 1 + self.after)


def why_not_banded(call: Call) -> str | None:
    """The reason why this call is not computed by blocks, or None."""
    reach = _reach(call)
    if reach is None or type(call) is not Call:
        return "no band of keys around each query"
    if call.align.temperature_of_softmax is None:
        return "not a plain softmax"
    if call.seed is not None:
        return "dropout is drawn by position"
    if call.bias is not None:
        return "a bias of pairs"
    blocks = _blocks(reach)
    if call.n < WORTHWHILE * blocks.keys:
        return "a band as wide as a good part of the keys"
    if call.nq < blocks.rows:
        return "fewer queries than a block"
    return None


def banded(call: Call, execute: Callable[[Call], Tensor]) -> Tensor:
    """Attend block by block, all of them by one execution."""
    reach = _reach(call)
    assert reach is not None
    blocks, axes = _blocks(reach), len(call.lead)

    count = -(-call.nq // blocks.rows)

    def blocked(x: Tensor, own: int, first: int, number: int) -> Tensor:
        """So many blocks from a row on, which may lie outside: (C, ..., R, d); `own` axes are the rows and what follows them."""
        x = x.reshape(*(1,) * (axes + own - x.dim()), *x.shape)
        # Padding of less than nothing cuts.
        x = F.pad(x, (0,) * (2 * own - 2) + (-first, first + number * blocks.rows - x.shape[-own]))
        found: Tensor = x.unflatten(-own, (number, blocks.rows)).movedim(-own - 1, 0)
        return found

    def cut(x: Tensor, own: int = 2) -> Tensor:
        """Rows of queries (..., Nq, d) in blocks: (C, ..., R, d)."""
        return blocked(x, own, 0, count)

    def beside(x: Tensor, own: int = 2) -> Tensor:
        """Rows of keys (..., N, d) in the blocks beside these, with the neighbouring ones: (C, ..., S, d)."""
        first = reach.ahead - blocks.before * blocks.rows
        near = blocked(x, own, first, blocks.before + count + blocks.after)
        return torch.cat([near[k : k + count] for k in range(blocks.before + 1 + blocks.after)], -own)

    part = replace(
        call,
        form=cut_form(call.form, cut, beside),
        value=beside(call.value),
        query=None,
        key=beside(call.key),
        mask=_allowed(call, reach, blocks, beside),
    )
    context = execute(part).movedim(0, -3).flatten(-3, -2)
    return context[..., : call.nq, :]


def _reach(call: Call) -> Reach | None:
    found: Reach | None = getattr(call.mask, "reach", None)
    return found


def _blocks(reach: Reach) -> _Blocks:
    left, right = max(0, -reach.low), max(0, reach.high)
    rows = max(LEAST_ROWS, left, right)
    return _Blocks(rows, math.ceil(left / rows), math.ceil(right / rows))


def cut_form(form: Form, cut: Callable[..., Tensor], beside: Callable[..., Tensor]) -> Form:
    """A form of some of its rows: what has rows of queries is cut by one function, what has rows of keys by the other."""
    if isinstance(form, AdditiveForm):
        return replace(form, a=cut(form.a), u=beside(form.u))
    assert isinstance(form, BilinearForm)
    return replace(
        form,
        query=cut(form.query, 2) if not form.multi else _with_features(form.query, cut),
        key=beside(form.key, 2) if not form.multi else _with_features(form.key, beside),
        query_bias=None if form.query_bias is None else cut(form.query_bias, 1),
        key_bias=None if form.key_bias is None else beside(form.key_bias, 1),
    )


def _with_features(x: Tensor, change: Callable[..., Tensor]) -> Tensor:
    """Features (..., F, N, d) stand before the rows, and after the leading axes."""
    return change(x.movedim(-3, -1), 3).movedim(-1, -3)


@dataclass(frozen=True)
class _Allowed:
    """A mask that is written out: (C, ..., R, S)."""

    allowed: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.allowed.shape)

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        return self.allowed[..., i.start : i.stop, j.start : j.stop]

    def keys(self, device: torch.device) -> Tensor:
        return self.allowed.any(-2)

    def rows(self, device: torch.device) -> Tensor:
        return self.allowed.any(-1)


def _allowed(call: Call, reach: Reach, blocks: _Blocks, beside: Callable[..., Tensor]) -> _Allowed:
    device = call.device
    i = torch.arange(blocks.rows, device=device)[:, None]
    j = torch.arange(blocks.keys, device=device) - blocks.before * blocks.rows
    near = (j - i >= reach.low) & (j - i <= reach.high)
    # What is written into the padding of a cut is False.
    real = torch.ones(call.n, dtype=torch.bool, device=device) if reach.real is None else reach.real
    return _Allowed(beside(real, 1).unsqueeze(-2) & near)
