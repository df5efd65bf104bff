"""What can be asked of a recorded call, each as a function of complete rows, so that one pass serves several."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

import torch
from torch import Tensor

from regard._errors import nearest, refusal
from regard.ops.asked import answered, is_summed
from regard.ops.blockwise import over_rows
from regard.ops.call import Asked, Call, Tile
from regard.ops.dispatch import autocasting, rows_of_panel, wants_dense
from regard.ops.edges import EdgeCall, EdgeTile
from regard.ops.fill import where
from regard.ops.near import beside, span, span_of_mask
from regard.ops.summaries import can_summarise, summarised


@dataclass(frozen=True)
class Rows:
    """Complete rows of a call, but for keys that none of them may attend: scores before the mask, the mask, and the weights."""

    tile: Tile
    scores: Tensor  # (..., [F], rows, keys)
    mask: Tensor | None
    weights: Tensor  # (..., [F], rows, keys)

    def of_all_keys(self, x: Tensor) -> Tensor:
        """What is said of the keys here, (..., keys), with zeros for the others."""
        j, n = self.tile.j, self.tile.call.n
        beyond = (j.start, n - j.stop)
        return torch.nn.functional.pad(x, beyond) if any(beyond) and not isinstance(self.tile, EdgeTile) else x


@dataclass(frozen=True)
class Field:
    """How a field is computed from rows, and on which axis it has the rows (None: they are summed over)."""

    of_rows: Callable[[Rows, Any], Tensor]
    axis: int | None
    argument: Any = None  # the default of what it takes
    by_edge: bool = False  # whether its last axis are edges, sorted by query


def entropy(rows: Rows, _: Any) -> Tensor:
    """Entropy of the weights of each query, in nats."""
    a = rows.weights
    # NaN is no weight of zero: it is seen in the result.
    counts = ~(a <= 0)
    return -where(counts, a * where(counts, a, 1.0).log(), 0.0).sum(-1)


def log_sum_exp(rows: Rows, _: Any) -> Tensor:
    """Log-sum-exp of the allowed scores of each query; minus infinity where there are none."""
    scores = rows.scores if rows.mask is None else where(rows.mask, rows.scores, -math.inf)
    return scores.logsumexp(-1)


def expected_position(rows: Rows, _: Any) -> Tensor:
    """Mean index of the key that is read, by weight; NaN where nothing is."""
    j = rows.tile.j
    position = torch.arange(j.start, j.stop, device=rows.weights.device, dtype=rows.weights.dtype)
    return (rows.weights * position).sum(-1) / rows.weights.sum(-1)


def mass_on(rows: Rows, region: Tensor | None) -> Tensor:
    """Weight that falls on a region of the keys, booleans (..., N) whose leading axes are the first ones of the call."""
    return (rows.weights * rows.tile.per_key(_region(rows.tile.call, region))).sum(-1)


def _region(call: Call, region: Tensor | None) -> Tensor:
    """A region with all leading axes of a call, or a refusal."""
    if not isinstance(region, Tensor) or region.dtype != torch.bool:
        kind = f"a tensor of {region.dtype}" if isinstance(region, Tensor) else type(region).__name__
        raise TypeError(refusal("region", kind, "booleans over the keys, (..., N)"))
    lead, n, axes = call.lead, call.n, region.shape[:-1]
    fits = all(size in (1, full) for size, full in zip(axes, lead, strict=False))
    if len(axes) > len(lead) or region.shape[-1:] != (n,) or not fits:
        raise ValueError(refusal("region", f"shape {tuple(region.shape)}", f"booleans over the keys, {(*lead, n)}"))
    return region.reshape(*axes, *(1,) * (len(lead) - len(axes)), n)


def topk(rows: Rows, k: int) -> Tensor:
    """The k largest weights of each query and their keys, stacked: (..., rows, k, 2); missing ones are 0 at -1."""
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ValueError(refusal("k", repr(k), "a whole number >= 1"))
    found = rows.weights.topk(min(k, rows.weights.shape[-1]), -1)
    short = k - found.values.shape[-1]
    values = torch.nn.functional.pad(found.values, (0, short))
    index = torch.nn.functional.pad(rows.tile.key_of(found.indices), (0, short), value=-1)
    # A float32 holds whole numbers up to 2^24.
    dtype = torch.float64 if rows.tile.call.n > 1 << 24 else values.dtype
    return torch.stack([values.to(dtype), index.to(dtype)], -1)


def mass_received(rows: Rows, _: Any) -> Tensor:
    """Weight that each key receives from these queries."""
    return rows.of_all_keys(rows.weights.sum(-2))


# What is asked of a call itself, and is no field.
OF_THE_CALL = ("weights_of", "log_prob", "expected_loss")
# Of scores nobody may leave any out.
OF_ALL_PAIRS = ("scores",)
# They count every key that the mask allows, also those that an alignment does not read.
OF_ALLOWED_PAIRS = ("log_sum_exp",)
FIELDS: Mapping[str, Field] = {
    "weights": Field(lambda rows, _: rows.of_all_keys(rows.weights), -2),
    "scores": Field(lambda rows, _: rows.scores, -2),
    "entropy": Field(entropy, -1),
    "log_sum_exp": Field(log_sum_exp, -1),
    "expected_position": Field(expected_position, -1),
    "mass_on": Field(mass_on, -1),
    "topk": Field(topk, -3, 5),
    "mass_received": Field(mass_received, None),
}


def _no_positions(rows: Rows, _: Any) -> Tensor:
    raise ValueError(refusal("fields", "'expected_position' of attention along edges", "keys that have positions"))


# Each edge is read by one query: there is one weight an edge, and that is all the mass it receives.
OF_EDGES: Mapping[str, Field] = {
    **FIELDS,
    "weights": Field(lambda rows, _: _edge_tile(rows).by_key(rows.weights), -1, by_edge=True),
    "scores": Field(lambda rows, _: _edge_tile(rows).by_key(rows.scores), -1, by_edge=True),
    "mass_received": Field(lambda rows, _: _edge_tile(rows).by_key(rows.weights), -1, by_edge=True),
    "expected_position": Field(_no_positions, -1),
}


def _edge_tile(rows: Rows) -> EdgeTile:
    assert isinstance(rows.tile, EdgeTile)
    return rows.tile


def check_fields(names: Mapping[str, Any]) -> None:
    """Refuse what is not a field."""
    for name in names:
        if name in OF_THE_CALL:
            fix = f"Fix: {name}(…) is a method of a trace without named fields; torch.save keeps what it gives."
            raise ValueError(refusal("fields", repr(name), f"some of {', '.join(FIELDS)}", fix))
        if name not in FIELDS:
            raise ValueError(
                refusal("fields", repr(name), f"some of {', '.join(FIELDS)}", nearest(name, FIELDS, listed=True))
            )


def ask(call: Call, wanted: Mapping[str, Any]) -> Call:
    """A call of which some fields, name to argument, are asked before it is executed; where they can be found on the way at all."""
    arguments = {name: FIELDS[name].argument if x is None else x for name, x in wanted.items()}
    if not is_summed(call, arguments):
        return call
    region = _region(call, arguments["mass_on"]) if "mass_on" in arguments else None
    return call.with_(asked=Asked(arguments, region))


def compute(call: Call, wanted: Mapping[str, Any]) -> dict[str, Tensor]:
    """The wanted fields, name to argument, in one pass over the rows; laid out as (..., [Nq], [...], [F])."""
    check_fields(wanted)
    known = OF_EDGES if isinstance(call, EdgeCall) else FIELDS
    fields = {name: (known[name], known[name].argument if arg is None else arg) for name, arg in wanted.items()}

    tiled = not wants_dense()
    arguments = {name: argument for name, (_, argument) in fields.items()}
    summed = answered(call, arguments)
    if summed is None and tiled and can_summarise(call, arguments):
        if "mass_on" in arguments:
            arguments["mass_on"] = _region(call, arguments["mass_on"])
        with asking(call):
            summed = summarised(call, arguments)
    if summed is not None:
        return {name: shown(call, x, fields[name][0].axis) for name, x in summed.items()}

    all_keys = not tiled or any(name in fields for name in OF_ALL_PAIRS)
    allowed = any(name in fields for name in OF_ALLOWED_PAIRS)
    reach = span_of_mask if allowed else span
    # Where the mask alone reaches farther, panels have no more rows than beside all keys.
    near_rows = not all_keys and not (allowed and hasattr(call.align, "span"))
    least = max((k for name, (_, k) in fields.items() if name == "topk"), default=0)

    def panel(i: range) -> tuple[Tensor, ...]:
        j = range(call.n) if all_keys else with_least(reach(call, i), least, call.n)
        near = beside(call, j)
        scores, tile_there = near.scores(i, tiled=tiled), near.tile(i)
        mask = tile_there.mask()
        weights = near.align.weights(scores, mask, tile_there)
        # What is asked of them counts keys from the first of all.
        tile = call.tile(i) if near is call else call.tile(i, j)
        # Every field has the leading axes of the call, also where its operands only broadcast to them.
        features = () if call.form.features is None else (call.form.features,)
        shape = (*call.lead, *features, len(i), len(tile.j))
        rows = Rows(tile, scores.expand(shape), mask, weights.expand(shape))
        return tuple(field.of_rows(rows, argument) for field, argument in fields.values())

    with asking(call):
        parts = over_rows(call, panel, rows_of_panel(call, near=near_rows) if tiled else call.nq)
    results = {}
    for (name, (field, _)), found in zip(fields.items(), zip(*parts, strict=True), strict=True):
        whole = sum(found[1:], found[0]) if field.axis is None else torch.cat(found, field.axis)
        if isinstance(call, EdgeCall) and field.by_edge:
            whole = call.in_order(whole)
        results[name] = shown(call, whole, field.axis)
    return results


def with_least(j: range, least: int, n: int) -> range:
    """Keys and some beside them, so that there are at least so many, if there are."""
    stop = min(max(j.stop, j.start + least), n)
    return range(max(min(j.start, stop - least), 0), stop)


@contextmanager
def asking(call: Call) -> Iterator[None]:
    """Compute as widely as the call was computed, also inside autocast; and differentiably, if the call was."""
    with ExitStack() as stack:
        if autocasting(call.device):
            stack.enter_context(torch.autocast(call.device.type, enabled=False))
        operands = [call.value, *(getattr(call.form, f.name) for f in dataclass_fields(call.form))]
        if any(isinstance(x, Tensor) and x.is_inference() for x in operands):
            stack.enter_context(torch.no_grad())
        yield


def shown(call: Call, x: Tensor, axis: int | None) -> Tensor:
    """Features last, the axis of a single query dropped."""
    if call.form.multi:
        x = x.movedim(len(call.lead), -1)
    if call.single and axis is not None:
        x = x.squeeze(len(call.lead))
    return x
