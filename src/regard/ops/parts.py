"""Some queries and some keys of a call, as a call of their own that knows where they stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from regard.ops.call import Bias, Call, Mask
from regard.ops.forms import AdditiveForm, BilinearForm

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
        """What belongs to some queries."""
        tensor = self.tensor if tensor is None else tensor
        if self.side == "query":
            return tensor.narrow(self.axis, i.start, len(i))
        if self.side == "pair" and tensor.shape[-2] != 1:
            return tensor.narrow(-2, i.start, len(i))
        return tensor


def operands(call: Call) -> Iterator[Operand]:
    """Every tensor that the result depends on."""
    for name, (side, axis) in _ROWS[type(call.form)].items():
        tensor = getattr(call.form, name)
        if tensor is not None:
            yield Operand(f"form.{name}", tensor, side, axis)
    yield Operand("value", call.value, "key", -2)
    for name in getattr(call.align, "of_queries", ()):
        yield Operand(f"prepared.{name}", call.prepared[name], "query", -1)
    for name in getattr(call.align, "of_keys", ()):
        yield Operand(f"prepared.{name}", call.prepared[name], "key", -1)
    temperature = call.align.temperature_of_softmax
    if isinstance(temperature, Tensor):
        yield Operand("temperature", temperature, "all")
    if isinstance(call.bias, Tensor):
        yield Operand("bias", call.bias, "pair")
    for k, tensor in enumerate(getattr(call.bias, "tensors", ())):
        yield Operand(f"bias.{k}", tensor, "all")


def split(call: Call, queries: Sequence[int], keys: Sequence[int]) -> list[dict[str, Tensor]]:
    """The operands of slices that follow each other, of so many queries and keys each, as views.

    Each operand is cut once, so that its gradient is put together once, not added to once a slice.
    """
    found: list[dict[str, Tensor]] = [{} for _ in queries]
    for name, tensor, side, axis in operands(call):
        cut: Sequence[Tensor] = [tensor] * len(found)
        if side == "pair" and tensor.shape[-2] != 1:
            cut = tensor.split(list(queries), -2)
        elif side in ("query", "key"):
            cut = tensor.split(list(queries if side == "query" else keys), axis)
        for given, x in zip(found, cut, strict=True):
            given[name] = x
    return found


def rebuilt(call: Call, given: Mapping[str, Tensor], i: range, j: range, mask: Mask | None) -> Call:
    """Some queries beside some keys, from operands that are given; others are the call's own.

    Args:
        call: which they are of.
        given: operands by name, cut to these queries and keys.
        i: the queries, counted from the call's first.
        j: the keys, counted from the first of all.
        mask: for these queries and keys.
    """
    form: dict[str, Any] = {name[5:]: x for name, x in given.items() if name.startswith("form.")}
    prepared = {name[9:]: x for name, x in given.items() if name.startswith("prepared.")}
    return Call(
        form=replace(call.form, **form),
        value=given["value"],
        align=call.align,
        query=None,
        key=given["form.key"] if "form.key" in given else given["form.u"],
        mask=mask,
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


def bias_beside(call: Call, given: Mapping[str, Tensor], j: range) -> Bias | None:
    """The bias of some keys of all, from tensors that are given."""
    if isinstance(call.bias, Tensor):
        bias = given.get("bias", call.bias)
        return bias if bias.shape[-1] == 1 else bias[..., j.start : j.stop]
    tensors = tuple(x for name, x in given.items() if name.startswith("bias."))
    if call.bias is None or not tensors:
        return call.bias
    bias_of: Bias = replace(call.bias, tensors=tensors)  # type: ignore[type-var]
    return bias_of
