r"""Ring execution: keys and values go from rank to rank, and each rank folds what comes by into the states of its own queries.

Rank $r$ holds the keys of rank $r - s$ in step $s$. A state (ops.folds) is read when all have come by; nothing larger than a panel of
queries beside the keys of one rank is ever written, and no rank holds more keys than its own and its neighbour's. Every rank passes all
keys on, but a panel is computed beside those alone that it may reach (ops.parallel.reached): beside none of most ranks, under a window.

Backward. With the whole state known, the summand of each block is a function of that block alone, and the gradient of every summand
is that of the sum. So keys go round once more; each rank computes the block again, keeps what its own queries and the parameters get, and
adds what the keys get to a sum that travels with them, and is home after one more step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard._errors import refusal
from regard.ops.blockwise import LARGE_PANEL_ELEMENTS
from regard.ops.call import Call
from regard.ops.folds import Fold, SoftFold, State, finish
from regard.ops.forms import wide
from regard.ops.heap import return_freed_memory
from regard.ops.parallel.reached import reached, rows_of_block
from regard.ops.parallel.sharded import ShardedCall, beside, facts
from regard.ops.parts import Operand, bias_beside, operands, rebuilt

# Panels between two visits to the allocator, each of which costs as much as half a panel of dot products.
TIDY_EVERY = 4
_GATHER = "Fix: parallel.context(mesh, exchange='gather'), which holds the keys of all ranks on each."


def why_not_ring(call: ShardedCall) -> str | None:
    """The reason why this call cannot go round a ring, or None."""
    fold = getattr(call.align, "fold", None)
    probe = _probe(call)
    if fold is None or (call.align.temperature_of_softmax is None and fold(probe.tile()) is None):
        return f"alignment {type(call.align).__name__} has no fold: it needs the scores of all keys at once"
    return None


def ring(call: ShardedCall, rows: int | None = None) -> Tensor:
    """Attend, once all agree: (..., Nq, d_v) of this rank's queries."""
    job = _Job(call, rows)
    context: Tensor = _Ring.apply(job, *(operand.tensor for operand in job.operands))  # type: ignore[no-untyped-call]
    return context


def agree(call: ShardedCall) -> None:
    """Let all ranks say what goes round, and refuse what a ring would not teach."""
    said = call.shard.ranks.agree("attending", facts(call), {"hidden": _learns_unseen(call)})
    for each in said:
        if each["hidden"] is not None:
            expected = "inside parallel.context, tensors that are named, so that their gradients are found"
            raise NotImplementedError(refusal(each["hidden"], "a function that learns", expected, _GATHER))


@dataclass(frozen=True, eq=False)
class _Job:
    """What to do, but for the tensors to do it with."""

    call: ShardedCall
    rows: int | None  # of a panel, if somebody asked

    @cached_property
    def operands(self) -> list[Operand]:
        return list(operands(self.call))

    @cached_property
    def keys(self) -> list[int]:
        """Which of the operands go round."""
        return [k for k, operand in enumerate(self.operands) if operand.side == "key"]

    @cached_property
    def key_elements(self) -> int:
        """Numbers that one query needs at once beside one key."""
        return math.prod(self.call.lead) * _probe(self.call).row_elements

    @cached_property
    def panels(self) -> list[range]:
        return self.call.panels(rows_of_block(self.call, self.key_elements) if self.rows is None else self.rows)

    def tidy(self, k: int, j: range) -> None:
        """Give the temporaries of some panels back to the system, where they are worth it."""
        elements = len(self.panels[0]) * len(j) * self.key_elements
        if self.call.device.type == "cpu" and elements >= LARGE_PANEL_ELEMENTS and k % TIDY_EVERY == 0:
            return_freed_memory()

    def shapes(self, owner: int) -> list[list[int]]:
        """Of the operands of a rank's keys."""
        found = []
        for k in self.keys:
            shape = list(self.operands[k].tensor.shape)
            shape[self.operands[k].axis] = self.call.shard.keys[owner]
            found.append(shape)
        return found

    def blocks(self, owner: int) -> Iterator[tuple[int, range, range]]:
        """The panels that reach keys of a rank: their number, their queries, and these keys."""
        for k, i in enumerate(self.panels):
            j = reached(self.call, i, owner)
            if j:
                yield k, i, j

    def cut(self, tensors: Sequence[Tensor], held: Sequence[Tensor], i: range, j: range, owner: int) -> list[Tensor]:
        """The operands of a panel beside some keys of the rank whose keys are held."""
        cut = [operand.cut(i, x) for operand, x in zip(self.operands, tensors, strict=True)]
        for k, x in zip(self.keys, held, strict=True):
            cut[k] = self.columns(k, x, j, owner)
        return cut

    def columns(self, k: int, x: Tensor, j: range, owner: int) -> Tensor:
        """What of an operand that goes round belongs to some keys of its owner."""
        return x.narrow(self.operands[k].axis, j.start - self.call.shard.first_keys[owner], len(j))

    def part(self, tensors: Sequence[Tensor], i: range, j: range) -> Call:
        """A panel of queries beside some keys, from operands that are cut to them."""
        given = {operand.name: x for operand, x in zip(self.operands, tensors, strict=True)}
        return beside(self.call, given, i, j)

    def alone(self, tensors: Sequence[Tensor], i: range) -> Call:
        """A panel of queries beside no keys, of which states begin and are read."""
        ranks = self.call.shard.ranks
        first = self.call.shard.first_key
        held = [tensors[k] for k in self.keys]
        none = range(first, first)
        return self.part(self.cut(tensors, held, i, none, ranks.rank), i, none)

    def fold(self, part: Call, tensors: Sequence[Tensor]) -> Fold:
        for operand, x in zip(self.operands, tensors, strict=True):
            if operand.name == "temperature":
                return SoftFold(x)
        fold: Fold = part.align.fold(part.tile())  # type: ignore[attr-defined]
        return fold

    def wide(self) -> AbstractContextManager[object]:
        """The operands already have autocast's dtype; what is computed from them must stay wide."""
        kind = self.call.device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, *tensors: Tensor) -> Tensor:
        call, ranks = job.call, job.call.shard.ranks
        started = [job.alone(tensors, i) for i in job.panels]
        folds = [job.fold(part, tensors) for part in started]
        states = [fold.start(part.tile()) for fold, part in zip(folds, started, strict=True)]
        held = [tensors[k] for k in job.keys]
        for step in range(ranks.size):
            owner = ranks.owner(step)
            passing = ranks.passing(held, job.shapes(ranks.owner(step + 1))) if step < ranks.size - 1 else None
            for k, i, j in job.blocks(owner):
                cut = job.cut(tensors, held, i, j, owner)
                part = job.part(cut, i, j)
                states[k] = job.fold(part, cut).absorb(states[k], part.scores(tiled=True), part.tile())
                job.tidy(k, j)
            held = held if passing is None else passing.done()
        contexts = [finish(*each) for each in zip(folds, states, (part.tile() for part in started), strict=True)]
        ctx.job, ctx.sizes = job, [len(state) for state in states]
        ctx.save_for_backward(*tensors, *(x for state in states for x in state))
        if not contexts:
            return wide(call.value).new_zeros(*call.lead, 0, call.value.shape[-1])
        return torch.cat(contexts, -2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        job: _Job = ctx.job
        count = len(job.operands)
        tensors, flat = ctx.saved_tensors[:count], iter(ctx.saved_tensors[count:])
        states = [tuple(next(flat) for _ in range(size)) for size in ctx.sizes]
        needed = ctx.needs_input_grad[1:]
        with job.wide():
            return None, *_backward(job, tensors, states, needed, grad)


def _backward(
    job: _Job, tensors: Sequence[Tensor], states: list[State], needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    ranks = job.call.shard.ranks
    found = [torch.zeros_like(wide(x)) if need else None for x, need in zip(tensors, needed, strict=True)]
    learning = [k for k in job.keys if needed[k]]
    due = [_of_state(job, tensors, state, i, grad) for state, i in zip(states, job.panels, strict=True)]
    held = [tensors[k] for k in job.keys]
    for step in range(ranks.size):
        owner = ranks.owner(step)
        passing = ranks.passing(held, job.shapes(ranks.owner(step + 1))) if step < ranks.size - 1 else None
        gained: dict[int, Tensor] = {
            k: torch.zeros_like(wide(x)) for k, x in zip(job.keys, held, strict=True) if needed[k]
        }
        for k, i, j in job.blocks(owner):
            beside_keys = {which: job.columns(which, x, j, owner) for which, x in gained.items()}
            cut = job.cut(tensors, held, i, j, owner)
            _absorb_gradients(job, cut, needed, (states[k], due[k]), (i, j), found, beside_keys)
            job.tidy(k, j)
        # The sum of the keys' gradients follows the keys: what earlier ranks found, and now this one.
        total = [gained[k] if step == 0 else gained[k].add_(found[k]) for k in learning]  # type: ignore[arg-type]
        shapes = dict(zip(job.keys, job.shapes(ranks.owner(step + 1)), strict=True))
        arrived = ranks.passing(total, [shapes[k] for k in learning]).done() if ranks.size > 1 else total
        for k, x in zip(learning, arrived, strict=True):
            found[k] = x
        held = held if passing is None else passing.done()
    return [None if g is None else g.to(x.dtype) for g, x in zip(found, tensors, strict=True)]


def _of_state(job: _Job, tensors: Sequence[Tensor], state: State, i: range, grad: Tensor) -> list[Tensor | None]:
    """The gradient of each entry of a panel's state, None where there is none."""
    part = job.alone(tensors, i)
    leaves = tuple(x.detach().requires_grad_() if x.dtype.is_floating_point else x for x in state)
    with torch.enable_grad():
        context = finish(job.fold(part, tensors), leaves, part.tile())
    floats = [x for x in leaves if x.requires_grad]
    wanted = grad[..., i.start : i.stop, :].to(context.dtype)
    grads = iter(torch.autograd.grad(context, floats, wanted, allow_unused=True))
    return [next(grads) if x.requires_grad else None for x in leaves]


def _absorb_gradients(
    job: _Job,
    cut: Sequence[Tensor],
    needed: Sequence[bool],
    of_state: tuple[State, list[Tensor | None]],
    where: tuple[range, range],
    found: list[Tensor | None],
    gained: dict[int, Tensor],
) -> None:
    """Compute a block again, and add what its operands get: to `gained` for those that go round, to `found` for the others."""
    (state, wanted), (i, j) = of_state, where
    leaves = [x.detach().requires_grad_() if need else x.detach() for x, need in zip(cut, needed, strict=True)]
    with torch.enable_grad():
        part = job.part(leaves, i, j)
        fold, tile = job.fold(part, leaves), part.tile()
        share = fold.share(fold.absorb(fold.start(tile), part.scores(tiled=True), tile), state)
    pairs = [(x, g) for x, g in zip(share, wanted, strict=True) if g is not None and x.requires_grad]
    if not pairs:
        return
    learning = [k for k, need in enumerate(needed) if need]
    outputs, due = zip(*pairs, strict=True)
    grads = torch.autograd.grad(outputs, [leaves[k] for k in learning], due, allow_unused=True)
    for k, g in zip(learning, grads, strict=True):
        if g is not None:
            total = gained[k] if k in gained else job.operands[k].cut(i, found[k])
            total += g


def _probe(call: ShardedCall) -> Call:
    """A query and a key of zeros, to learn what does not depend on how many there are."""
    given = {}
    for operand in operands(call):
        shape = list(operand.tensor.shape)
        if operand.side in ("query", "key"):
            shape[operand.axis] = 1
        if operand.side == "pair":
            shape[-2:] = [1, 1]
        given[operand.name] = operand.tensor.new_zeros(shape) if shape else operand.tensor.detach()
    return rebuilt(replace(call, bias=None), given, range(1), range(1), None)


def _learns_unseen(call: ShardedCall) -> str | None:
    """What has parameters that only autograd would find: its name; None where there is nothing."""
    if not torch.is_grad_enabled():
        return None
    with torch.enable_grad():
        probe = _probe(call)
        if probe.form.scores(range(1)).requires_grad:
            return "activation"
        tile = probe.tile()
        temperature = call.align.temperature_of_softmax
        fold = SoftFold() if isinstance(temperature, Tensor) else call.align.fold(tile)  # type: ignore[attr-defined]
        state = fold.absorb(fold.start(tile), probe.scores().detach(), tile)
        if any(x.requires_grad for x in state):
            return "align"
        if call.bias is None or isinstance(call.bias, Tensor) or call.nq == 0:
            return None
        named = {f"bias.{k}": x.detach() for k, x in enumerate(getattr(call.bias, "tensors", ()))}
        bias: Any = bias_beside(call, named, range(1))
        place = torch.full((1, 1), call.start, device=call.device)
        return "bias" if bias(place, torch.zeros_like(place)).requires_grad else None
