r"""Folds: attention read one block of keys after the other, or from partial states merged in any order.

A fold keeps a bounded state for each query. `start` is neutral, `absorb` takes a block of keys, `merge` joins two states
of disjoint blocks, associatively and commutatively, and `finish` gives the context. For the softmax the state is
$(m, l, o)$ with $m = \max_j s_j$, $l = \sum_j e^{s_j - m}$, $o = \sum_j e^{s_j - m} g_j v_j$, and

$$m = \max(m_1, m_2), \quad l = e^{m_1 - m} l_1 + e^{m_2 - m} l_2, \quad o = e^{m_1 - m} o_1 + e^{m_2 - m} o_2, \qquad c = o / l.$$

Beside the maximum of the whole, which needs no gradient, the rest of a state is a sum over blocks. `share` is the summand of one block:
its gradient is that of the sum, so a backward needs the whole state and one block at a time, in any order and on any rank.

States are shaped (..., [F], rows, 1 or width), like the scores, and autograd differentiates through them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.ops.call import Tile
from regard.ops.fill import where

State = tuple[Tensor, ...]
OfTile = Callable[[Tile], Tensor]
OfScores = Callable[[Tensor, Tile], Tensor]


@runtime_checkable
class Fold(Protocol):
    """How an alignment reads blocks of keys."""

    def start(self, tile: Tile) -> State: ...

    def absorb(self, state: State, scores: Tensor, tile: Tile) -> State:
        """Take the keys of the tile, with their scores (bias included, mask not applied)."""
        ...

    def merge(self, left: State, right: State) -> State: ...

    def share(self, part: State, whole: State) -> State:
        """What a part has given to the whole that it was merged into."""
        ...

    def read(self, state: State) -> Tensor:
        """The context, shaped like the state."""
        ...


def fold_keys(fold: Fold, tile: Tile, blocks: list[range], scores: Tensor) -> Tensor:
    """Read some rows block by block, in the given order: (..., rows, d_v)."""
    state = fold.start(tile)
    for j in blocks:
        part = Tile(tile.call, tile.i, j)
        state = fold.absorb(state, scores[..., j.start : j.stop], part)
    return finish(fold, state, tile)


def finish(fold: Fold, state: State, tile: Tile) -> Tensor:
    """The contexts (..., rows, d_v) of a state."""
    context = fold.read(state)
    return context.squeeze(-1).mT if tile.call.form.multi else context


def tempered(scores: Tensor, temperature: float | Tensor) -> Tensor:
    """Scores over the temperature; a score of minus infinity stays, and teaches the temperature nothing."""
    if not isinstance(temperature, Tensor):
        return scores if temperature == 1.0 else scores / temperature
    finite = scores != -math.inf
    return where(finite, where(finite, scores, 0.0) / temperature, -math.inf)


class SoftFold:
    """Softmax, its scores changed by `change`, its numerator multiplied by `gain`."""

    def __init__(
        self,
        temperature: float | Tensor = 1.0,
        change: OfScores | None = None,
        gain: OfTile | None = None,
        detach_values: bool = False,
    ) -> None:
        self.temperature, self.change, self.gain, self.detach_values = temperature, change, gain, detach_values

    def start(self, tile: Tile) -> State:
        m, o = _empty(tile)
        return m, torch.zeros_like(m), o

    def absorb(self, state: State, scores: Tensor, tile: Tile) -> State:
        if self.change is not None:
            scores = self.change(scores, tile)
        mask = tile.mask()
        scores = tempered(scores, self.temperature)
        scores = scores if mask is None else where(mask, scores, -math.inf)
        m = _maximum(scores)
        weights = torch.exp(scores - _finite(m))
        gained = weights if self.gain is None else weights * self.gain(tile).to(weights.dtype)
        gained = _dropped(gained, tile)
        values = _values(tile, weights.dtype)
        read = gained @ (values.detach() if self.detach_values else values)
        return self.merge(state, (m, weights.sum(-1, keepdim=True), read))

    def merge(self, left: State, right: State) -> State:
        m = torch.maximum(left[0], right[0])
        first, second = (torch.exp(part[0] - _finite(m)) for part in (left, right))
        return m, first * left[1] + second * right[1], first * left[2] + second * right[2]

    def share(self, part: State, whole: State) -> State:
        scale = torch.exp(part[0] - _finite(whole[0]))
        return whole[0], scale * part[1], scale * part[2]

    def read(self, state: State) -> Tensor:
        _, mass, total = state
        return where(mass > 0, total / where(mass > 0, mass, 1.0), 0.0)


class BestFold:
    """The value of the key with the largest priority, the first of equals; zeros where nothing is allowed."""

    def __init__(self, priority: OfScores, gain: OfTile | None = None) -> None:
        self.priority, self.gain = priority, gain

    def start(self, tile: Tile) -> State:
        top, value = _empty(tile)
        return top, torch.full_like(top, -1, dtype=torch.long), value

    def absorb(self, state: State, scores: Tensor, tile: Tile) -> State:
        if len(tile.j) == 0:
            return state
        mask = tile.mask()
        priority = self.priority(scores, tile).detach()
        priority = priority if mask is None else where(mask, priority, -math.inf)
        top = priority.amax(-1, keepdim=True)
        first = (priority == top).to(torch.uint8).argmax(-1, keepdim=True)
        positions = tile.positions()[1]
        index = where(top > -math.inf, first + positions[0, 0], -1)
        hot = (positions == index).to(scores.dtype)
        hot = hot if self.gain is None else hot * self.gain(tile).to(hot.dtype)
        return self.merge(state, (top, index, _dropped(hot, tile) @ _values(tile, scores.dtype)))

    def merge(self, left: State, right: State) -> State:
        wins = (right[0] > left[0]) | ((right[0] == left[0]) & (right[1] >= 0) & (right[1] < left[1]))
        wins = wins | ((left[1] < 0) & (right[1] >= 0))
        top, index, value = (torch.where(wins, b, a) for a, b in zip(left, right, strict=True))
        return top, index, value

    def share(self, part: State, whole: State) -> State:
        return whole[0], whole[1], where(part[1] == whole[1], part[2], 0.0)

    def read(self, state: State) -> Tensor:
        return state[2]


class FallbackFold:
    """One fold, and another where the first has found nothing."""

    def __init__(self, first: SoftFold, other: Fold) -> None:
        self.first, self.other = first, other

    def start(self, tile: Tile) -> State:
        return (*self.first.start(tile), *self.other.start(tile))

    def absorb(self, state: State, scores: Tensor, tile: Tile) -> State:
        return (*self.first.absorb(state[:3], scores, tile), *self.other.absorb(state[3:], scores, tile))

    def merge(self, left: State, right: State) -> State:
        return (*self.first.merge(left[:3], right[:3]), *self.other.merge(left[3:], right[3:]))

    def share(self, part: State, whole: State) -> State:
        return (*self.first.share(part[:3], whole[:3]), *self.other.share(part[3:], whole[3:]))

    def read(self, state: State) -> Tensor:
        return torch.where(state[1] > 0, self.first.read(state[:3]), self.other.read(state[3:]))


class StraightThroughFold:
    """The value of one fold, the gradient of another on top of it."""

    def __init__(self, value: BestFold, gradient: SoftFold) -> None:
        self.value, self.gradient = value, gradient

    def start(self, tile: Tile) -> State:
        return (*self.value.start(tile), *self.gradient.start(tile))

    def absorb(self, state: State, scores: Tensor, tile: Tile) -> State:
        return (*self.value.absorb(state[:3], scores, tile), *self.gradient.absorb(state[3:], scores, tile))

    def merge(self, left: State, right: State) -> State:
        return (*self.value.merge(left[:3], right[:3]), *self.gradient.merge(left[3:], right[3:]))

    def share(self, part: State, whole: State) -> State:
        return (*self.value.share(part[:3], whole[:3]), *self.gradient.share(part[3:], whole[3:]))

    def read(self, state: State) -> Tensor:
        soft = self.gradient.read(state[3:])
        return self.value.read(state[:3]) + (soft - soft.detach())


def _empty(tile: Tile) -> tuple[Tensor, Tensor]:
    """The neutral maximum and the zero sum of a tile's rows."""
    call = tile.call
    features = () if call.form.features is None else (call.form.features,)
    shape = (*call.lead, *features, len(tile.i))
    dtype = torch.promote_types(call.value.dtype, torch.float32)
    width = 1 if features else call.value.shape[-1]
    top = torch.full((*shape, 1), -math.inf, dtype=dtype, device=call.device)
    return top, torch.zeros(*shape, width, dtype=dtype, device=call.device)


def _dropped(weights: Tensor, tile: Tile) -> Tensor:
    """Weights after dropout; the mass that a softmax divides by is that before it."""
    return weights if tile.call.dropout == 0.0 else weights * tile.keep(weights.dtype)


def _values(tile: Tile, dtype: torch.dtype) -> Tensor:
    """Values of the tile's keys, in the layout of the scores."""
    value = tile.call.value[..., tile.j.start : tile.j.stop, :].to(dtype)
    return value.mT[..., None] if tile.call.form.multi else value


def _maximum(scores: Tensor) -> Tensor:
    """The maximum over a block, which cancels and so needs no gradient."""
    if scores.shape[-1] == 0:
        return scores.new_full((*scores.shape[:-1], 1), -math.inf)
    return scores.detach().amax(-1, keepdim=True)


def _finite(m: Tensor) -> Tensor:
    return where(m > -math.inf, m, 0.0)
