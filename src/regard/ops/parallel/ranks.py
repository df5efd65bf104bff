"""Ranks that share a sequence: who they are, what they must agree on, and how tensors pass between them.

Whatever the ranks do together begins with a short note to each other (`agree`). All notes are of one size, so that ranks which are not
doing the same thing read that in the notes, and say it, where they would otherwise wait for each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard._errors import refusal
from regard.ops.random import draw_seed

EXCHANGES = ("ring", "gather")
_NOTE_BYTES = 2048


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks of one axis of a mesh, in the order of their slices."""

    group: dist.ProcessGroup
    rank: int
    size: int
    device: torch.device
    exchange: str = "ring"

    def agree(self, what: str, same: dict[str, Any], own: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank says of its `own`; all must be doing the same, and hold the `same`.

        Args:
            what: the ranks are doing, in words.
            same: what must not differ, by the name of the argument that it comes from.
            own: what may.
        """
        same = {"exchange": self.exchange, **same}
        text = json.dumps([what, same, own]).encode()
        if len(text) > _NOTE_BYTES:
            raise ValueError(refusal(what, f"a description of {len(text)} bytes", f"at most {_NOTE_BYTES}"))
        note = torch.frombuffer(bytearray(text.ljust(_NOTE_BYTES)), dtype=torch.uint8).to(self.device)
        notes = [torch.empty_like(note) for _ in range(self.size)]
        with self._in_touch(what):
            dist.all_gather(notes, note, group=self.group)
        read = [json.loads(bytes(each.tolist())) for each in notes]
        if any(each[0] != what for each in read):
            doing = "; ".join(f"rank {r}: {each[0]}" for r, each in enumerate(read))
            fix = "Fix: run the same modules with the same kind of arguments on every rank, in the same order."
            raise RuntimeError(refusal("parallel.context", doing, "every rank at the same step", fix))
        # What only some have is a difference too, and all must see it, or the others wait for those that stop here.
        for name in dict.fromkeys(name for each in read for name in each[1]):
            found = [each[1].get(name) for each in read]
            if any(x != found[0] for x in found):
                shown = "; ".join(f"rank {r}: {x}" for r, x in enumerate(found))
                raise ValueError(refusal(name, shown, "the same on every rank"))
        return [each[2] for each in read]

    def gathered(self, x: Tensor, axis: int, lengths: Sequence[int]) -> Tensor:
        """The slices of all ranks side by side; without gradient."""
        flags = x.dtype == torch.bool
        mine = (x.to(torch.uint8) if flags else x).movedim(axis, 0)
        most = max(lengths)
        padded = mine.new_zeros(most, *mine.shape[1:])
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in lengths]
        with self._in_touch("gathering keys"):
            dist.all_gather(parts, padded, group=self.group)
        whole = torch.cat([part[:n] for part, n in zip(parts, lengths, strict=True)]).movedim(0, axis)
        return whole.to(torch.bool) if flags else whole

    def summed(self, x: Tensor) -> Tensor:
        """The sum over all ranks; of booleans, whether any is true."""
        flags = x.dtype == torch.bool
        total = (x.to(torch.uint8) if flags else x).contiguous().clone()
        with self._in_touch("summing"):
            dist.all_reduce(total, dist.ReduceOp.MAX if flags else dist.ReduceOp.SUM, group=self.group)
        return total.to(torch.bool) if flags else total

    def owner(self, step: int) -> int:
        """Whose keys this rank holds after so many steps of the ring."""
        return (self.rank - step) % self.size

    def passing(self, parcels: Sequence[Tensor], arriving: Sequence[Sequence[int]]) -> Passing:
        """Begin to send tensors to the next rank, and to receive tensors of these shapes from the one before."""
        sent = [x.contiguous() for x in parcels]
        received = [x.new_empty(tuple(shape)) for x, shape in zip(sent, arriving, strict=True)]
        after, before = (dist.get_global_rank(self.group, (self.rank + d) % self.size) for d in (1, -1))
        # Nothing is sent of what is empty: both sides know the lengths.
        moves = [dist.P2POp(dist.isend, x, after, self.group) for x in sent if x.numel()]
        moves += [dist.P2POp(dist.irecv, x, before, self.group) for x in received if x.numel()]
        with self._in_touch("passing keys on"):
            works = dist.batch_isend_irecv(moves) if moves else []
        return Passing(self, sent, received, works)

    @contextmanager
    def _in_touch(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"parallel.context: rank {self.rank} of {self.size} lost the others while {what}: {error}. "
                "Fix: look for the first error of another rank; one that fails, or leaves early, takes all with it."
            ) from error


@dataclass(frozen=True, eq=False)
class Passing:
    """Tensors on their way round the ring."""

    ranks: Ranks
    sent: list[Tensor]  # kept until they have left
    received: list[Tensor]
    works: list[Any]

    def done(self) -> list[Tensor]:
        """Wait for what arrives."""
        with self.ranks._in_touch("passing keys on"):
            for work in self.works:
                work.wait()
        return self.received


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's slice of the queries and of the keys, and those of the others."""

    ranks: Ranks
    queries: tuple[int, ...]  # how many each rank holds
    keys: tuple[int, ...]
    seed: Tensor | None = None  # of the first rank, where something is drawn

    @property
    def nq(self) -> int:
        """Queries of all ranks."""
        return sum(self.queries)

    @property
    def n(self) -> int:
        """Keys of all ranks."""
        return sum(self.keys)

    @property
    def first_query(self) -> int:
        """Place of this rank's first query among all."""
        return sum(self.queries[: self.ranks.rank])

    @property
    def first_keys(self) -> tuple[int, ...]:
        """Place of each rank's first key among all."""
        return tuple(accumulate(self.keys, initial=0))[:-1]

    @property
    def first_key(self) -> int:
        """Place of this rank's first key among all."""
        return self.first_keys[self.ranks.rank]


_contexts: list[Ranks] = []


def current() -> Ranks | None:
    """The ranks that share the sequences of this moment; None outside of every context."""
    return _contexts[-1] if _contexts else None


def shard_of(
    nq: int,
    n: int,
    lead: tuple[int, ...] = (),
    *,
    what: str = "comparing lengths",
    same: dict[str, Any] | None = None,
    drawn_on: torch.device | None = None,
) -> Shard | None:
    """Where this rank's queries and keys stand among those of all ranks; None outside of every context.

    Every rank must ask, each with its own lengths, and all with the same leading axes.

    Args:
        nq: queries of this rank.
        n: keys of this rank.
        lead: leading axes.
        what: the ranks are about to do, in words.
        same: what else must not differ, by name.
        drawn_on: the device of what is drawn at random, if anything is: then there is a seed.
    """
    ranks = current()
    if ranks is None:
        return None
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        compiled = "attention under torch.compile or torch.func"
        raise NotImplementedError(
            refusal("parallel.context", compiled, "eager execution, since ranks talk to each other")
        )
    # The seed travels with the note: ranks of which only some draw would wait for each other's.
    own = {"queries": nq, "keys": n, "seed": None if drawn_on is None else int(draw_seed(drawn_on))}
    drawn = {"random numbers": "none" if drawn_on is None else "some"}
    said = ranks.agree(what, {"leading axes": lead, **(same or {}), **drawn}, own)
    seed = None if drawn_on is None else torch.tensor([said[0]["seed"]], device=drawn_on)
    return Shard(ranks, tuple(each["queries"] for each in said), tuple(each["keys"] for each in said), seed)


def first_place(n: int) -> int:
    """The place of the first of this rank's n tokens in the whole sequence: 0 outside of every context."""
    shard = shard_of(n, n)
    return 0 if shard is None else shard.first_key


def refuse(what: str, why: str, fix: str = "Fix: leave the context for it.") -> None:
    """Refuse, inside a context, what sees more of a sequence than a rank holds."""
    if _contexts:
        raise NotImplementedError(refusal("parallel.context", what, f"what can be shared over ranks: {why}", fix))


@contextmanager
def entered(ranks: Ranks) -> Iterator[Ranks]:
    """Share the sequences of everything inside."""
    _contexts.append(ranks)
    try:
        yield ranks
    finally:
        # One's own entry, wherever it stands: threads share this list and may leave in any order.
        del _contexts[next(k for k, entry in enumerate(_contexts) if entry is ranks)]
