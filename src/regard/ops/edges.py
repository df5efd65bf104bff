"""Attention along edges, as a call: the keys are edges, and each is read by one query.

A query's edges stand side by side in the slots 0, 1, … of its row, so that an alignment sees complete rows as always:
scores of some queries are (..., [F], rows, slots), with as many slots as the longest of these rows needs. What is said of keys
from outside, an edge mask, weights that are given, edges to erase, is said by edge, and so is what is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from regard._errors import refusal
from regard.ops.blockwise import blockwise
from regard.ops.call import Call, Tile
from regard.ops.fill import where
from regard.ops.forms import AdditiveForm, BilinearForm, Form, wide
from regard.ops.segment import PRODUCT, edge_attention, spare_slots
from regard.ops.segment_layout import Layout, laid_out

# Slots of a panel that cost less than another panel would.
FEW_SLOTS = 1 << 11


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges from sources to targets, and where those of each target are once they are sorted by it."""

    source: Tensor  # (E,), row of the values
    target: Tensor  # (E,)
    n_targets: int
    order: Tensor  # (E,), the edges sorted by target, those of one target as they came
    bounds: Tensor  # (targets + 1,), where the edges of each target begin and end
    types: int = 1  # a source has a row for each type, side by side

    @staticmethod
    def of(source: Tensor, target: Tensor, n_targets: int, types: int = 1) -> Edges:
        """Sort edges. Those to a target beyond the last belong to nobody."""
        counts = target.new_zeros(n_targets + 1).scatter_add(0, target, torch.ones_like(target))
        bounds = torch.cat([counts.new_zeros(1), counts[:n_targets].cumsum(0)])
        return Edges(source, target, n_targets, target.argsort(stable=True), bounds, types)

    @property
    def edge_index(self) -> Tensor:
        """Sources, whatever the type, and targets, (2, E)."""
        return torch.stack([self.source // self.types, self.target])

    @cached_property
    def degrees(self) -> list[int]:
        """The number of edges of each target. On the meta device nobody knows: one."""
        return [1] * self.n_targets if self.target.device.type == "meta" else self.bounds.diff().tolist()

    @cached_property
    def places(self) -> Tensor:
        """Where each edge stands in the sorted order."""
        return lasting(lambda: inverse(self.order))

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        """Source and target of each edge in the sorted order; what belongs to nobody has some target, too."""
        return lasting(self.sorted_ends)

    def sorted_ends(self) -> tuple[Tensor, Tensor]:
        """The same, found anew."""
        return self.source[self.order], self.target[self.order].clamp(max=max(self.n_targets - 1, 0))

    def readers(self, n_sources: int) -> tuple[Tensor, Tensor]:
        """The places of the edges sorted by source, and where those of each source begin and end."""
        if n_sources not in self._readers:
            self._readers[n_sources] = lasting(lambda: by_row(self.ends[0], n_sources))
        return self._readers[n_sources]

    @cached_property
    def by_degree(self) -> tuple[Edges, Tensor, Tensor]:
        """The same with targets in the order of their degrees; which target stands where, and where each stands."""

        def found() -> tuple[Edges, Tensor, Tensor]:
            rows = self.bounds.diff().argsort(stable=True)
            places = inverse(rows)
            # What belongs to nobody still does.
            target = torch.cat([places, places.new_full((1,), self.n_targets)])[self.target]
            return Edges.of(self.source, target, self.n_targets, self.types), rows, places

        return lasting(found)

    def layout(self, spare: int) -> Layout:
        """Queries of about one degree side by side, with at most so many slots too many."""
        if spare not in self._layouts:
            self._layouts[spare] = lasting(lambda: laid_out(self.bounds, spare))
        return self._layouts[spare]

    @cached_property
    def _layouts(self) -> dict[int, Layout]:
        return {}

    @cached_property
    def _readers(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}

    @property
    def count(self) -> int:
        """How many edges there are. A size may be a symbol, which `len` would make a number."""
        return self.target.shape[0]

    def __len__(self) -> int:
        return self.count

    def slots(self, i: range) -> tuple[Tensor, Tensor]:
        """The edges of some targets, (rows, slots), and whether there is one in a slot."""
        count = max(self.degrees[i.start : i.stop], default=0) if len(self) else 0
        place = self.bounds[i.start : i.stop, None] + torch.arange(count, device=self.target.device)
        filled = place < self.bounds[i.start + 1 : i.stop + 1, None]
        return self.order[place.clamp(max=max(len(self) - 1, 0))], filled

    def only(self, allowed: Tensor) -> Edges:
        """The same without some edges; no size depends on which."""
        return Edges.of(self.source, torch.where(allowed, self.target, self.n_targets), self.n_targets, self.types)


Found = TypeVar("Found")


def lasting(find: Callable[[], Found]) -> Found:
    """What is found for good: a training step may read it, even where it was first asked for in inference."""
    with torch.inference_mode(False):
        return find()


def inverse(order: Tensor) -> Tensor:
    """Where each of a permutation stands in it."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


def by_row(index: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The places of an index sorted by what stands there, and where those of each row begin and end."""
    order = index.argsort(stable=True)
    return order, torch.searchsorted(index[order], torch.arange(rows + 1, device=index.device))


@dataclass(frozen=True, eq=False)
class EdgeMask:
    """Which edges may be read."""

    allowed: Tensor | None  # (..., E)
    edges: Edges

    def kept(self) -> Edges:
        """The edges that may be read."""
        if self.allowed is None:
            return self.edges
        return self.edges.only(self.allowed) if torch.compiler.is_compiling() else self._kept

    @cached_property
    def _kept(self) -> Edges:
        allowed = self.allowed
        assert allowed is not None
        return lasting(lambda: self.edges.only(allowed))

    def layout(self, spare: int) -> Layout:
        """That of all edges, where the slots of those that may not be read are empty."""
        allowed = self.allowed
        assert allowed is not None
        if spare not in self._layouts:
            self._layouts[spare] = lasting(lambda: laid_out(self.edges.bounds, spare, allowed[self.edges.order]))
        return self._layouts[spare]

    @cached_property
    def _layouts(self) -> dict[int, Layout]:
        return {}

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.edges.count,) if self.allowed is None else tuple(self.allowed.shape)

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        """Booleans that broadcast to (..., len(i), slots)."""
        ids, filled = self.edges.slots(i)
        return filled if self.allowed is None else filled & self.allowed[..., ids]

    def keys(self, device: torch.device) -> Tensor | None:
        return self.allowed

    def rows(self, device: torch.device) -> Tensor | None:
        """Targets that may read at least one edge."""
        return reached(self.edges.target, self.edges.n_targets, self.allowed)

    def also(self, other: EdgeMask) -> EdgeMask:
        """Allowed by both; the other may be any mask of edges."""
        keys = other.keys(self.edges.target.device)
        if self.allowed is not None and keys is not None:
            keys = self.allowed & keys
        return EdgeMask(self.allowed if keys is None else keys, self.edges)


def reached(index: Tensor, n: int, allowed: Tensor | None) -> Tensor:
    """Which of n are the index of at least one allowed edge."""
    # In one dtype, whatever the default is.
    ones = torch.ones_like(index, dtype=torch.float32) if allowed is None else allowed.float()
    return ones.new_zeros(*ones.shape[:-1], n).index_add(-1, index, ones) > 0


@dataclass(frozen=True)
class EdgeTile(Tile):
    """Some queries and the slots of their edges."""

    call: EdgeCall

    @cached_property
    def slots(self) -> tuple[Tensor, Tensor]:
        return self.call.edges.slots(self.i)

    @cached_property
    def readable(self) -> Tensor:
        """Which slots hold an edge that may be read, (..., rows, slots) without features."""
        assert self.call.mask is not None
        return self.call.mask.tile(self.i, self.j, self.call.device)

    def mask(self) -> Tensor | None:
        return self.over_features(self.readable)

    def queries(self) -> range | Tensor:
        rows = self.call.rows
        return super().queries() if rows is None else rows[self.i.start : self.i.stop]

    def per_key(self, x: Tensor) -> Tensor:
        """What is said of each edge, (..., E), slot by slot; zero where there is none."""
        ids, filled = self.slots
        return self.over_features(torch.where(filled, x[..., ids], torch.zeros((), dtype=x.dtype, device=x.device)))

    def given(self, weights: Tensor) -> Tensor:
        """Weights of edges (..., E), features last when there are any, in the layout of the scores."""
        call = self.call
        whole = (*call.lead, call.n, *([] if call.form.features is None else [call.form.features]))
        try:
            fits = torch.broadcast_shapes(weights.shape, whole) == whole and weights.shape[-1] == whole[-1]
        except RuntimeError:
            fits = False
        if not fits:
            raise ValueError(refusal("how", f"weights of shape {tuple(weights.shape)}", f"a shape that fits {whole}"))
        ids, filled = self.slots
        if call.form.multi:
            weights = weights.expand(whole).movedim(-1, -2)
        return torch.where(filled, weights[..., ids], torch.zeros((), dtype=weights.dtype, device=weights.device))

    def key_of(self, slot: Tensor) -> Tensor:
        """The edges in some slots (..., rows, k) of each row; -1 stays."""
        ids = self.slots[0].expand(*slot.shape[:-1], -1)
        return where(slot >= 0, ids.gather(-1, slot.clamp(min=0)), -1) if ids.shape[-1] else slot

    def by_key(self, x: Tensor) -> Tensor:
        """Slots (..., rows, slots) as one row of edges, sorted by target."""
        return x[..., self.slots[1]]


@dataclass(frozen=True)
class EdgeCall(Call):
    """An attention whose keys are edges.

    The form and the values are those of nodes: what an edge has is taken where it is needed, since there are many more edges. With
    `by_edge` every edge has a key of its own.
    """

    edges: Edges = field(kw_only=True)
    by_edge: bool = field(default=False, kw_only=True)
    rows: Tensor | None = field(default=None, kw_only=True)  # which query stands where, if not in their order

    def __post_init__(self) -> None:
        if self.prepared:
            got = type(self.align).__name__
            raise ValueError(refusal("align", got, "an alignment that needs no positions: neighbours have none"))

    @property
    def n(self) -> int:
        return self.edges.count

    @property
    def pairs(self) -> int:
        return self.nq * max(self.edges.degrees, default=0)

    @property
    def row_elements(self) -> int:
        hidden = self.form.a.shape[-1] if isinstance(self.form, AdditiveForm) else self.form.query.shape[-1]
        return max(self.edges.degrees, default=0) * max(hidden, self.value.shape[-1])

    def panels(self, rows: int) -> list[range]:
        """Panels of so many of the longest rows, and of more where rows are shorter."""
        found, begin, longest, filled = [], 0, 0, 0
        most = rows * max(self.edges.degrees, default=0)
        for i, degree in enumerate(self.edges.degrees):
            slots = (i - begin + 1) * max(longest, degree)
            # Where queries stand by degree, a few panels more spare most of the empty slots.
            is_empty = self.rows is not None and slots > FEW_SLOTS and slots - filled > slots // 4
            if i > begin and (slots > most or is_empty):
                found.append(range(begin, i))
                begin, longest, filled = i, 0, 0
            longest, filled = max(longest, degree), filled + degree
        return [*found, range(begin, self.nq)]

    def tile(self, i: range | None = None, j: range | None = None) -> Tile:
        i = range(self.nq) if i is None else i
        return EdgeTile(self, i, range(max(self.edges.degrees[i.start : i.stop], default=0) if self.n else 0))

    def scores(self, i: range | None = None, *, tiled: bool = False) -> Tensor:
        """Scores (..., [F], rows, slots): the form's own equation, for one query and its keys at a time."""
        tile = self.tile(i)
        assert isinstance(tile, EdgeTile)
        ids, rows = tile.slots[0], slice(tile.i.start, tile.i.stop)
        keys = ids if self.by_edge else self.edges.source[ids]
        if isinstance(self.form, AdditiveForm):
            return _additive(self.form, rows, keys, tile.readable)
        return _bilinear(self.form, rows, keys, tile.over_features(tile.readable))

    def read(self, weights: Tensor, i: range | None = None, *, drop: bool = True) -> Tensor:
        tile = self.tile(i)
        assert isinstance(tile, EdgeTile)
        if drop and self.dropout > 0.0:
            weights = weights * tile.keep(weights.dtype)
        value = _taken(self.value.to(weights.dtype), self.edges.source[tile.slots[0]], tile.readable)
        if self.form.multi:
            context = (weights.movedim(-3, -1) * value).sum(-2)
        else:
            context = (weights.unsqueeze(-2) @ value).squeeze(-2)
        return context.expand(*self.lead, *context.shape[-2:])

    def in_order(self, x: Tensor) -> Tensor:
        """Edges sorted by target (..., E) in the order in which they were given."""
        return x.index_select(-1, self.edges.places)

    def why_not_segment(self) -> str | None:
        """The reason why the operator for soft attention does not compute this call, or None."""
        reason = self.why_not_weighed()
        if reason is not None:
            return reason
        if isinstance(self.form, AdditiveForm) and self.form.activation.derivative is None:
            return f"activation {self.form.activation.spec!r} has no known derivative"
        if self.align.temperature_of_softmax is None:
            return f"alignment {type(self.align).__name__} is not a plain softmax"
        allowed = None if self.mask is None else self.mask.keys(self.device)
        if allowed is not None and allowed.dim() > 1:
            return "a mask of each head"
        if allowed is not None and self.dropout > 0.0 and torch.compiler.is_compiling():
            return "dropout under a mask"
        return None

    def segment(self, panel: int) -> Tensor:
        """Soft attention by one operator, (..., Nq, d_v)."""
        assert isinstance(self.mask, EdgeMask)
        # Dropout is drawn by place: edges that may not be read keep theirs then, and are empty.
        in_place = self.dropout > 0.0 and self.mask.allowed is not None
        edges, heads = self.edges if in_place else self.mask.kept(), self.lead
        a, u, weight, act = self.weighed()
        dtype = torch.promote_types(a.dtype, u.dtype)
        dtype = torch.float64 if weight.dtype == torch.float64 else dtype
        # Where keys are values they are gathered once.
        same = self.value is u and not self.by_edge
        a, u, value = (nodes_first(x.to(dtype), heads) for x in (a, u, self.value))
        weight = weight.to(dtype).expand(*heads, -1).flatten(0, -2)
        traced = torch.compiler.is_compiling()
        source = edges.source[edges.order] if traced else edges.ends[0]
        # How many panels there are is known only by looking, which the operator does by itself inside of a graph.
        spare = spare_slots(weight.numel())
        unknown = traced or self.device_type == "meta"
        layout = (None,) * 4 if unknown else self.mask.layout(spare) if in_place else edges.layout(spare)
        context: Tensor = edge_attention(
            a,
            u,
            None if same else value,
            weight,
            act,
            edges.order if self.by_edge else source,
            source,
            edges.bounds,
            panel,
            self.seed if self.dropout > 0.0 else None,
            self.dropout,
            *layout,
        )
        return context.movedim(0, -2).reshape(*heads, self.nq, self.value.shape[-1])

    def why_not_weighed(self) -> str | None:
        """The reason why the scores are not a weighed sum over a hidden layer, or None."""
        form = self.form
        if form.multi:
            return "multi-dimensional weights"
        if isinstance(form, AdditiveForm):
            return None
        plain = form.is_plain and all(x is None for x in (form.offset, form.query_bias, form.key_bias))
        return None if plain else "the scores along edges are neither additive nor dot products"

    def weighed(self) -> tuple[Tensor, Tensor, Tensor, str]:
        """The tempered scores as w · act(a + u), or as w · (a ⊙ u): a, u, w in float32 or wider, and which."""
        form, temperature = self.form, self.align.temperature_of_softmax
        assert temperature is not None
        if isinstance(form, AdditiveForm):
            assert form.weight is not None
            a, u, weight, act = form.a, form.u, wide(form.weight), form.activation.spec
        else:
            a, u, act = form.query, form.key, PRODUCT
            dtype = torch.promote_types(a.dtype, torch.float32)
            weight = torch.full((*a.shape[:-2], a.shape[-1]), form.scale, dtype=dtype, device=a.device)
        if isinstance(temperature, Tensor) or temperature != 1.0:
            weight = weight / temperature
        return a, u, weight, act

    def by_degree(self) -> tuple[EdgeCall, Tensor]:
        """The same with queries in the order of their degrees, and where each stands: rows of a panel are of about one length then."""
        edges, rows, places = self.edges.by_degree
        mask = self.mask
        assert isinstance(mask, EdgeMask)
        form: Form
        if isinstance(self.form, AdditiveForm):
            form = replace(self.form, a=rows_at(self.form.a, rows))
        else:
            bias = self.form.query_bias
            bias = None if bias is None else rows_at(bias.unsqueeze(-1), rows).squeeze(-1)
            form = replace(self.form, query=rows_at(self.form.query, rows), query_bias=bias)
        query = None if self.query is None else rows_at(self.query, rows)
        return replace(self, form=form, query=query, mask=EdgeMask(mask.allowed, edges), edges=edges, rows=rows), places


def panel_by_panel(call: EdgeCall, rows: int) -> Tensor:
    """The blockwise execution, in panels of so many of the longest rows, and of more where rows are shorter."""
    if rows >= call.nq or torch.compiler.is_compiling():
        return blockwise(call, rows)
    turned, places = call.by_degree()
    return rows_at(blockwise(turned, rows), places)


def nodes_first(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """(..., N, d) to (N, H, d)."""
    return x.expand(*heads, *x.shape[-2:]).reshape(math.prod(heads), *x.shape[-2:]).movedim(-2, 0)


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (..., N, d) by index: (..., rows, d)."""
    # On a GPU the backward of `index_select` adds in an order of its own each time.
    return x[..., index, :] if x.device.type == "cuda" else x.index_select(-2, index)


def _taken(x: Tensor, index: Tensor, readable: Tensor) -> Tensor:
    """Rows of x (..., N, d) by index (rows, slots): (..., rows, slots, d); zeros where nothing may be read, whatever is there."""
    if x.shape[-2] == 0:
        return x.new_zeros(*x.shape[:-2], *index.shape, x.shape[-1])
    # Nodes first, as they lie in memory: whole rows of all heads are copied, and added up in the backward.
    found = x.movedim(-2, 0).index_select(0, index.flatten()).unflatten(0, index.shape).movedim((0, 1), (-3, -2))
    return torch.where(readable[..., None], found, torch.zeros((), dtype=x.dtype, device=x.device))


def _additive(form: AdditiveForm, rows: slice, keys: Tensor, readable: Tensor) -> Tensor:
    weight = form.weight
    if weight is not None and weight.dim() > 1 + form.multi:
        weight = weight.unsqueeze(-3 if form.multi else -2)
    of_rows = replace(form, a=form.a[..., rows, None, :], u=_taken(form.u, keys, readable), weight=weight)
    scores = of_rows.scores(range(1)).squeeze(-2)
    return scores.movedim(-2, -3) if form.multi else scores


def _bilinear(form: BilinearForm, rows: slice, keys: Tensor, readable: Tensor) -> Tensor:
    def per_row(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[..., rows, None]

    of_rows = replace(
        form,
        query=form.query[..., rows, None, :],
        key=_taken(form.key, keys, readable),
        offset=None if form.offset is None else form.offset.unsqueeze(-1),
        query_bias=per_row(form.query_bias),
        key_bias=None if form.key_bias is None else form.key_bias[..., keys],
    )
    return of_rows.scores(range(1)).squeeze(-2)
