"""A call that ranks share: this rank's queries, and this rank's keys and values, of an attention over the keys of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from regard._errors import refusal
from regard.ops.call import Bias, Call, Tile
from regard.ops.forms import AdditiveForm, BilinearForm, wide
from regard.ops.parallel.ranks import Ranks, Shard

# Which operands of a form have rows of queries or of keys, and on which axis.
_ROWS: dict[type, dict[str, tuple[str, int]]] = {
    BilinearForm: {
        "query": ("query", -2),
        "key": ("key", -2),
        "query_bias": ("query", -1),
        "key_bias": ("key", -1),
        "offset": ("all", 0),
    },
    AdditiveForm: {"a": ("query", -2), "u": ("key", -2), "weight": ("all", 0)},
}


class Operand(NamedTuple):
    """A tensor that a call is computed from."""

    name: str
    tensor: Tensor
    side: str  # whose rows it has: "query", "key", "pair" for both, or "all" for none
    axis: int = 0

    def cut(self, i: range, tensor: Tensor | None = None) -> Tensor:
        """What belongs to some queries of this rank."""
        tensor = self.tensor if tensor is None else tensor
        if self.side == "query":
            return tensor.narrow(self.axis, i.start, len(i))
        if self.side == "pair" and tensor.shape[-2] != 1:
            return tensor.narrow(-2, i.start, len(i))
        return tensor


@dataclass(frozen=True)
class ShardedCall(Call):
    """The part of a call that one rank holds. Complete rows are nowhere: what needs them asks for `whole`, on every rank."""

    shard: Shard = field(kw_only=True)

    @property
    def all_keys(self) -> int:
        return self.shard.n

    def seen(self) -> Call:
        self.shard.ranks.agree("recording", {}, {})
        return replace(self.whole(), query=self.query, key=gathered(self.key, -2, self.shard))

    def whole(self) -> Call:
        """This rank's queries beside the keys of all ranks, whose gradients go back to where they came from."""
        given = {operand.name: gathered(operand.tensor, operand.axis, self.shard) for operand in self.key_side()}
        return rebuilt(self, given, range(self.nq), range(self.shard.n))

    def key_side(self) -> list[Operand]:
        """The operands that go round."""
        return [operand for operand in self.operands() if operand.side == "key"]

    def operands(self) -> Iterator[Operand]:
        """Every tensor that the result depends on."""
        for name, (side, axis) in _ROWS[type(self.form)].items():
            tensor = getattr(self.form, name)
            if tensor is not None:
                yield Operand(f"form.{name}", tensor, side, axis)
        yield Operand("value", self.value, "key", -2)
        for name in getattr(self.align, "of_queries", ()):
            yield Operand(f"prepared.{name}", self.prepared[name], "query", -1)
        for name in getattr(self.align, "of_keys", ()):
            yield Operand(f"prepared.{name}", self.prepared[name], "key", -1)
        temperature = self.align.temperature_of_softmax
        if isinstance(temperature, Tensor):
            yield Operand("temperature", temperature, "all")
        if isinstance(self.bias, Tensor):
            yield Operand("bias", self.bias, "pair")
        for k, tensor in enumerate(getattr(self.bias, "tensors", ())):
            yield Operand(f"bias.{k}", tensor, "all")

    def tile(self, i: range | None = None, j: range | None = None) -> Tile:
        self._incomplete()

    def scores(self, i: range | None = None, *, tiled: bool = False) -> Tensor:
        self._incomplete()

    def weights(self, i: range | None = None, *, tiled: bool = False) -> Tensor:
        self._incomplete()

    def read(self, weights: Tensor, i: range | None = None, *, drop: bool = True) -> Tensor:
        self._incomplete()

    def _incomplete(self) -> NoReturn:
        got = f"{type(self.align).__name__}, or a mechanism, that looks at all weights of an attention at once"
        fix = "Fix: leave the context for it; what only reads a context can be shared."
        raise NotImplementedError(refusal("parallel.context", got, "an attention whose rows are on several ranks", fix))


def sharded(call: Call, shard: Shard) -> ShardedCall:
    """The part of a shared call: its places are those of the whole, and all ranks draw from one seed."""
    check_splits(call)
    first = shard.first_query
    return ShardedCall(
        **{
            **vars(call),
            "start": call.start + first,
            "seed": None if call.seed is None else shard.ranks.from_first(call.seed),
            "first_query": first,
            "first_key": shard.first_key,
        },
        shard=shard,
    )


def check_splits(call: Call) -> None:
    """Refuse an alignment that prepares more than a rank can."""
    if not getattr(call.align, "splits", False):
        got = f"alignment {type(call.align).__name__}, which prepares from all queries or keys"
        fix = "Fix: leave the context for it."
        raise NotImplementedError(refusal("parallel.context", got, "one that needs no more than a slice", fix))


def rebuilt(call: ShardedCall, given: dict[str, Tensor], i: range, j: range) -> Call:
    """Some queries of this rank beside some keys of all, from operands that are given; others are the call's own.

    Args:
        call: that of this rank.
        given: operands by name, cut to these queries and keys.
        i: the queries, counted from this rank's first.
        j: the keys, counted from the first of all.
    """
    form: dict[str, Any] = {name[5:]: x for name, x in given.items() if name.startswith("form.")}
    prepared = {name[9:]: x for name, x in given.items() if name.startswith("prepared.")}
    return Call(
        form=replace(call.form, **form),
        value=given["value"],
        align=call.align,
        query=None,
        key=given["form.key"] if "form.key" in given else given["form.u"],
        mask=None if call.mask is None else call.mask.part(i, j),  # type: ignore[attr-defined]
        bias=bias_beside(call, given, j),
        dropout=call.dropout,
        training=call.training,
        start=call.start + i.start,
        seed=call.seed,
        prepared={**call.prepared, **prepared},
        single=call.single,
        first_query=call.first_query + i.start,
        first_key=j.start,
    )


def bias_beside(call: ShardedCall, given: dict[str, Tensor], j: range) -> Bias | None:
    """The bias of some keys of all, from tensors that are given."""
    if isinstance(call.bias, Tensor):
        bias = given.get("bias", call.bias)
        return bias if bias.shape[-1] == 1 else bias[..., j.start : j.stop]
    tensors = tuple(x for name, x in given.items() if name.startswith("bias."))
    if call.bias is None or not tensors:
        return call.bias
    bias_of: Bias = replace(call.bias, tensors=tensors)  # type: ignore[type-var]
    return bias_of


def with_columns(bias: Bias | None, shard: Shard, single: bool) -> Bias | None:
    """A bias over the keys of all ranks: one that each rank gives for its own keys, (..., 1, N), is put together.

    Args:
        bias: as it was given.
        shard: of the call.
        single: whether it comes without an axis of queries.
    """
    if not isinstance(bias, Tensor) or bias.dim() == 0:
        return bias
    bias = bias.unsqueeze(-2) if single or bias.dim() == 1 else bias
    own = {"rows": bias.shape[-2], "columns": bias.shape[-1]}
    said = shard.ranks.agree("sharing a bias", {"bias": list(bias.shape[:-2])}, own)
    if all(each["rows"] == 1 and each["columns"] == n for each, n in zip(said, shard.keys, strict=True)):
        return gathered(bias, -1, shard)
    return bias


class _Gathered(torch.autograd.Function):
    """The slices of all ranks; each gets back the sum of what every rank learned of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, ranks: Ranks, lengths: Sequence[int]) -> Tensor:
        ctx.axis, ctx.ranks, ctx.lengths, ctx.dtype = axis, ranks, lengths, x.dtype
        return ranks.gathered(x, axis, lengths)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        total = ctx.ranks.summed(wide(grad))
        mine = total.split(list(ctx.lengths), ctx.axis)[ctx.ranks.rank]
        return mine.to(ctx.dtype), None, None, None


def gathered(x: Tensor, axis: int, shard: Shard) -> Tensor:
    """The rows of all ranks' keys, side by side."""
    whole: Tensor = _Gathered.apply(x, axis, shard.ranks, shard.keys)  # type: ignore[no-untyped-call]
    return whole


def facts(call: ShardedCall) -> dict[str, Any]:
    """What must not differ between ranks, by the argument that it comes from."""

    def described(operand: Operand) -> list[Any]:
        shape: list[Any] = list(operand.tensor.shape)
        if operand.side == "key":
            shape[operand.axis] = "N"
        learns = torch.is_grad_enabled() and operand.tensor.requires_grad
        return [shape, str(operand.tensor.dtype).removeprefix("torch."), learns]

    names = {"form.key": "key", "form.u": "key", "value": "value"}
    same: dict[str, Any] = {names.get(x.name, x.name): described(x) for x in call.key_side()}
    same["score"] = [type(call.form).__name__, call.form.features]
    same["align"] = type(call.align).__name__
    same["lead"], same["dropout"] = list(call.lead), call.dropout
    same["gradients"] = torch.is_grad_enabled()
    return same
