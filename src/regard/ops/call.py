"""One attention, as data: everything that decides its result, before any execution is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from regard._errors import refusal
from regard.ops import drawn as drawn  # registers what graphs draw by
from regard.ops.forms import Form, common_shape, product, wide
from regard.ops.places import indices, places, taken
from regard.ops.random import DROPOUT, at_least, uniform
from regard.ops.rule import Rule

Bias = Tensor | Callable[[Tensor, Tensor], Tensor]

_assumed: list[str] = []


@dataclass(frozen=True)
class Asked:
    """What somebody who watches wants to know of a call, name to argument; an execution that comes by it writes down what it found."""

    wanted: Mapping[str, Any]
    region: Tensor | None = None  # booleans over the keys, with all leading axes of the call
    found: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def assuming(device: str) -> Iterator[None]:
    """Decide about calls inside as if they were on a type of device, which need not be there."""
    _assumed.append(device)
    try:
        yield
    finally:
        _assumed.pop()


@runtime_checkable
class Mask(Protocol):
    """A mask bound to the sizes of a call: which of the queries i may attend which of the keys j."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole mask, were it written out."""
        ...

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        """Booleans that broadcast to (..., len(i), len(j))."""
        ...

    def keys(self, device: torch.device) -> Tensor | None:
        """Which keys at least one query may attend, (..., N); None for all."""
        ...

    def rows(self, device: torch.device) -> Tensor | None:
        """Which queries may attend at least one key, (..., Nq); None for all."""
        ...


@runtime_checkable
class Align(Protocol):
    """What an execution needs of an alignment."""

    @property
    def temperature_of_softmax(self) -> float | Tensor | None:
        """Of a plain softmax over the allowed keys; None for anything else."""
        ...

    def prepare(self, call: Call) -> Mapping[str, Any]:
        """What it needs beside the scores, once a call."""
        ...

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        """Weights of complete rows."""
        ...

    def rule(self, call: Call) -> Rule | None:
        """The same as what a kernel can read; None where no kernel can."""
        ...

    @property
    def reads_panels(self) -> bool:
        """Whether its fused execution is by panels of rows whose scores a kernel wrote."""
        ...

    @property
    def learns_by_reward(self) -> bool:
        """Whether what it samples is taught by REINFORCE."""
        ...

    def log_prob(self, call: Call) -> Tensor | None:
        """Log-probability of what was sampled; None where nothing is."""
        ...

    def policy_entropy(self, call: Call) -> Tensor | None:
        """Entropy of the distribution that was sampled from."""
        ...


@dataclass(frozen=True)
class Call:
    """Everything that decides one attention. Executions, recording and interventions are functions of it."""

    form: Form
    value: Tensor  # (..., N, d_v), keys that nobody attends zero-filled
    align: Align
    query: Tensor | None  # (..., Nq, d_q) as given; alignments may look at it
    key: Tensor  # (..., N, d_k) as given, zero-filled like the value
    mask: Mask | None = None
    bias: Bias | None = None
    dropout: float = 0.0  # already 0 outside training
    training: bool = False
    start: int = 0  # position of the first query
    seed: Tensor | None = None  # drawn only when something is random
    prepared: Mapping[str, Any] = field(default_factory=dict)
    single: bool = False  # the caller gave one query without its axis
    first_query: int = 0  # places of the first query and key among those of all ranks, where ranks share them
    first_key: int = 0
    asked: Asked | None = None

    def with_(self, **changes: Any) -> Call:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def seen(self) -> Call:
        """The call as observers see it: complete rows, and zeros where a query may attend nothing."""
        if not getattr(self.mask, "is_cleared", False):
            return self
        return self.with_(mask=replace(self.mask, is_cleared=False))  # type: ignore[type-var]

    @property
    def lead(self) -> tuple[int, ...]:
        lead, other = self.form.lead, self.value.shape[:-2]
        return lead if lead == other else common_shape(lead, other)

    @property
    def nq(self) -> int:
        return self.form.sizes[0]

    @property
    def n(self) -> int:
        return self.form.sizes[1]

    @property
    def device(self) -> torch.device:
        return self.value.device

    @property
    def device_type(self) -> str:
        """Type of the device that an execution is chosen for."""
        return _assumed[-1] if _assumed else self.value.device.type

    @property
    def all_keys(self) -> int:
        """Keys of all ranks, where ranks share them."""
        return self.n

    @property
    def pairs(self) -> int:
        """Scores of one leading index, as many as are computed."""
        return self.nq * self.n

    @property
    def row_elements(self) -> int:
        """Numbers that one query row needs at once, per leading index."""
        return self.form.row_elements

    def panels(self, rows: int) -> list[range]:
        """The queries in panels of so many rows."""
        return [range(i, min(i + rows, self.nq)) for i in range(0, self.nq, rows)]

    def tile(self, i: range | None = None, j: range | None = None) -> Tile:
        """The part of the call for some queries and keys; all of them by default."""
        nq, n = self.form.sizes
        return Tile(self, places(0, nq) if i is None else i, places(0, n) if j is None else j)

    def scores(self, i: range | None = None, *, tiled: bool = False) -> Tensor:
        """Scores (..., [F], len(i), N) of complete rows, bias included, mask not applied."""
        i = places(0, self.nq) if i is None else i
        e = self.form.tiled(i) if tiled else self.form.scores(i)
        if self.bias is None:
            return e
        bias = self.tile(i).bias()
        assert bias is not None
        return e + bias

    def weights(self, i: range | None = None, *, tiled: bool = False) -> Tensor:
        """Weights (..., [F], len(i), N) of complete rows, before dropout."""
        tile = replace(self.tile(i), tiled=True) if tiled else self.tile(i)
        mask = None if self.mask is None else tile.mask()
        return self.align.weights(self.scores(tile.i, tiled=tiled), mask, tile)

    def read(self, weights: Tensor, i: range | None = None, *, drop: bool = True) -> Tensor:
        """Sum the values by these weights of the queries i: (..., len(i), d_v) in the dtype of the values."""
        if drop and self.dropout > 0.0:
            weights = weights * self.tile(i).keep(weights.dtype)
        value = self.value if self.value.dtype == weights.dtype else self.value.to(weights.dtype)
        if self.form.multi:
            context = (weights @ value.mT[..., None]).squeeze(-1).mT
        else:
            context = product(weights, value)
        lead = self.lead
        return context if context.shape[:-2] == lead else context.expand(*lead, *context.shape[-2:])


@dataclass(frozen=True)
class Tile:
    """Some queries and some keys of a call, and what belongs to them."""

    call: Call
    i: range
    j: range
    tiled: bool = False  # whether kernels may do what the equation says

    def mask(self) -> Tensor | None:
        """Booleans that broadcast to the scores of the tile, or None when everything is allowed."""
        if self.call.mask is None:
            return None
        allowed = self.call.mask.tile(self.i, self.j, self.call.device)
        return self.over_features(allowed)

    def bias(self) -> Tensor | None:
        """The b_ij of the tile, or None."""
        bias = self.call.bias
        if bias is None:
            return None
        if isinstance(bias, Tensor):
            rows = bias if bias.shape[-2] == 1 else taken(bias, self.i, -2)
            return self.over_features(wide(rows if bias.shape[-1] == 1 else taken(rows, self.j, -1)))
        i, j = self.positions()
        found = bias(i + self.call.start, j)
        if not isinstance(found, Tensor) or not found.dtype.is_floating_point:
            kind = f"a tensor of {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
            raise TypeError(refusal("bias", f"a function that gives {kind}", "one that gives a floating-point tensor"))
        whole = (*self.call.lead, self.i.stop - self.i.start, self.j.stop - self.j.start)
        try:
            fits = torch.broadcast_shapes(found.shape, whole) == whole
        except RuntimeError:
            fits = False
        if not fits:
            got = f"a function that gives shape {tuple(found.shape)} for {len(self.i)} queries and {len(self.j)} keys"
            fix = "Fix: compute it from i and j, which may be some of all indices: table[i, j]."
            raise ValueError(refusal("bias", got, f"a shape that broadcasts to {whole}", fix))
        return self.over_features(wide(found))

    def positions(self) -> tuple[Tensor, Tensor]:
        """Indices i (len(i), 1), from the first query of the call, and j (1, len(j)), from the first key of all."""
        device, first = self.call.device, self.call.first_key
        i = indices(self.i, device)[:, None]
        j = torch.arange(first + self.j.start, first + self.j.stop, device=device)[None, :]
        return i, j

    def over_features(self, x: Tensor) -> Tensor:
        """Insert the feature axis into something shaped (..., Nq, N), where there is one."""
        return x.unsqueeze(-3) if self.call.form.multi and x.dim() > 2 else x

    def per_row(self, x: Tensor) -> Tensor:
        """Cut (..., Nq) to the queries of the tile, shaped to broadcast over its scores."""
        return self.over_features(taken(x, self.i, -1)[..., None])

    def per_key(self, x: Tensor) -> Tensor:
        """Cut (..., N) to the keys of the tile, shaped to broadcast over its scores."""
        return self.over_features(x[..., None, self.j.start : self.j.stop])

    def key_of(self, column: Tensor) -> Tensor:
        """The keys in some columns (..., len(i), k) of the tile."""
        return column + self.j.start if self.j.start else column

    def uniform(self, purpose: int) -> Tensor:
        """Numbers in (0, 1), one for each weight of the tile, the same in whatever tile they are asked for."""
        return uniform(self._seed(), *self.places(), purpose)

    def places(self) -> tuple[tuple[int, ...], int | None, range | Tensor, range]:
        """What random numbers are a function of, beside a seed: leading axes, features, queries and keys, among those of all ranks."""
        call = self.call
        j = places(call.first_key + self.j.start, call.first_key + self.j.stop)
        return call.lead, call.form.features, self.queries(), j

    def queries(self) -> range | Tensor:
        """The numbers of the tile's queries among those of all ranks."""
        return places(self.call.first_query + self.i.start, self.call.first_query + self.i.stop)

    def _seed(self) -> Tensor:
        seed = self.call.seed
        if seed is None:
            raise RuntimeError("this call has no seed, but its alignment is random: prepare() must ask for one")
        return seed

    def keep(self, dtype: torch.dtype) -> Tensor:
        """Dropout factors of the tile: 0 or 1 / (1 - p)."""
        p = self.call.dropout
        kept = at_least(p, self._seed(), *self.places(), DROPOUT).to(dtype)
        return kept / (1.0 - p) if p < 1.0 else kept
