"""A call that ranks share: this rank's queries, and this rank's keys and values, of an attention over the keys of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from regard._errors import refusal
from regard.ops.activations import Activation
from regard.ops.call import Bias, Call, Tile
from regard.ops.forms import BilinearForm, wide
from regard.ops.parallel.ranks import Ranks, Shard
from regard.ops.parts import Operand, operands, rebuilt

# Characters of a description in a note.
_LONGEST = 300


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
        if self.shard.ranks.size == 1:
            own = {name: x for name, x in vars(self).items() if name != "shard"}
            mask = None if self.mask is None else self.mask.part(range(self.nq), range(self.n))  # type: ignore[attr-defined]
            return Call(**{**own, "mask": mask})
        given = {operand.name: gathered(operand.tensor, operand.axis, self.shard) for operand in self.key_side()}
        return beside(self, given, range(self.nq), range(self.shard.n))

    def key_side(self) -> list[Operand]:
        """The operands that go round."""
        return [operand for operand in operands(self) if operand.side == "key"]

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
    """The part of a shared call: its places are those of the whole."""
    check_splits(call)
    first = shard.first_query
    return ShardedCall(
        **{
            **vars(call),
            "start": call.start + first,
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


def beside(call: ShardedCall, given: dict[str, Tensor], i: range, j: range) -> Call:
    """Some queries of this rank, counted from its first, beside some keys of all, from operands that are cut to them."""
    mask = None if call.mask is None else call.mask.part(i, j)  # type: ignore[attr-defined]
    return rebuilt(call, given, i, j, mask)


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
    scale = call.form.scale if isinstance(call.form, BilinearForm) else 1.0
    same["score"] = [type(call.form).__name__, call.form.features, scale, _shown(call.form.activation)]
    same["align"] = settings(call.align)
    same["lead"], same["dropout"] = list(call.lead), call.dropout
    same["gradients"] = torch.is_grad_enabled()
    return same


def settings(part: object) -> str:
    """What a score or an alignment was made with, in words: its numbers and names, nothing of what it learns.

    Example:
        >>> settings(nn.Dropout(0.5))
        'Dropout(p=0.5, inplace=False)'
    """
    known = {name: x for name, x in vars(part).items() if name != "training" and not name.startswith("_")}
    if isinstance(part, nn.Module):
        known |= dict(part.named_children())
    said = ", ".join(f"{name}={text}" for name, x in known.items() if (text := _shown(x)) is not None)
    text = f"{type(part).__name__}({said})"
    if len(text) > _LONGEST:
        # A note is of one size; what is cut off still counts.
        text = f"{text[:_LONGEST]}… #{sha256(text.encode()).hexdigest()[:8]}"
    return text


def _shown(x: object) -> str | None:
    """A setting in words; None for what is none, or cannot be told from another."""
    if isinstance(x, Activation):
        return repr(x.known)
    if isinstance(x, bool | int | float | str):
        return repr(x)
    if isinstance(x, tuple | list):
        each = [_shown(y) for y in x]
        return f"({', '.join(text for text in each if text is not None)})" if any(each) else None
    return settings(x) if isinstance(x, nn.Module) else None
