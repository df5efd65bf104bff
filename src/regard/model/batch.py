"""Examples and batches of a task: named inputs with masks, a target, and where it is known what should be looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regard._errors import refusal

# A link between an output and an input, as `gold` has it.
POSSIBLE, SURE = 1, 2


@dataclass(frozen=True)
class Example:
    """One example, without padding.

    Attributes:
        inputs: by name, what has a length: token numbers (N,), features (N, d), or several levels of either.
        target: a class (), a sequence of classes (M,), or numbers.
        variables: by name, what has no length, such as a user's covariates (d,).
        masks: by name, True for what is real, where an input of several levels is ragged.
        gold: known links (M, N) between outputs and the first input: 2 sure, 1 possible, 0 none.
        words: by name, what the tokens of an input are called in figures; "target" names those of the output,
            "predicted" those of an answer.
    """

    inputs: Mapping[str, Tensor]
    target: Tensor | None = None
    variables: Mapping[str, Tensor] = field(default_factory=dict)
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    gold: Tensor | None = None
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass
class Batch:
    """Several examples, padded. Nothing changes one; it is not frozen since engines that convert a batch copy it field by field.

    Attributes:
        inputs: by name, (B, N, ...).
        masks: by name, True for what is real, (B, N) or with more levels.
        target: (B,), or (B, M) with -1 after the end of each.
        variables: by name, (B, ...).
        gold: links (B, M, N); None where they are not known.
    """

    inputs: Mapping[str, Tensor]
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    target: Tensor | None = None
    variables: Mapping[str, Tensor] = field(default_factory=dict)
    gold: Tensor | None = None

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same on another device."""

        def moved(x: Any) -> Any:
            if isinstance(x, Tensor):
                return x.to(device, non_blocking=non_blocking)
            return {name: moved(y) for name, y in x.items()} if isinstance(x, Mapping) else x

        return replace(self, **{name: moved(getattr(self, name)) for name in self.__dataclass_fields__})


def collate(examples: Sequence[Example]) -> Batch:
    """Pad examples to one length and put them into a batch.

    Example:
        >>> short, long = (Example({"tokens": torch.arange(n)}, torch.tensor(1)) for n in (2, 3))
        >>> batch = collate([short, long])
        >>> batch.inputs["tokens"].tolist(), batch.masks["tokens"].int().tolist(), batch.target.tolist()
        ([[0, 1, 0], [0, 1, 2]], [[1, 1, 0], [1, 1, 1]], [1, 1])
    """
    if not examples:
        raise ValueError(refusal("examples", "none", "at least one"))
    first = examples[0]
    _check_alike(examples)
    inputs = {name: _padded([example.inputs[name] for example in examples], 0) for name in first.inputs}
    masks = {}
    for name in first.inputs:
        levels = 1 if name not in first.masks else first.masks[name].dim()
        real = [
            example.masks.get(name, torch.ones(example.inputs[name].shape[:levels], dtype=torch.bool))
            for example in examples
        ]
        masks[name] = _padded(real, False)
    target = None if first.target is None else _padded([_known(example.target) for example in examples], -1)
    gold = None if first.gold is None else _padded([_known(example.gold) for example in examples], 0)
    variables = {name: torch.stack([example.variables[name] for example in examples]) for name in first.variables}
    return Batch(inputs, masks, target, variables, gold)


def _check_alike(examples: Sequence[Example]) -> None:
    """Refuse what could only be put together by leaving something out."""
    first = examples[0]
    for example in examples:
        for role in ("inputs", "variables"):
            mine, theirs = getattr(example, role), getattr(first, role)
            if mine.keys() != theirs.keys():
                got = f"{role} {', '.join(mine) or 'none'} beside {', '.join(theirs) or 'none'}"
                raise ValueError(refusal("examples", got, "the same names in all"))
        if (example.target is None) != (first.target is None) or (example.gold is None) != (first.gold is None):
            raise ValueError(refusal("examples", "some with a target or gold links and some without", "all or none"))
        for name, mask in example.masks.items():
            if name not in example.inputs or mask.shape != example.inputs[name].shape[: mask.dim()]:
                raise ValueError(
                    refusal(
                        "examples", f"a mask {name!r} of shape {tuple(mask.shape)}", "the axes of an input of that name"
                    )
                )


def _known(x: Tensor | None) -> Tensor:
    if x is None:
        raise ValueError(refusal("examples", "some with a target or gold links and some without", "all or none"))
    return x


def _padded(tensors: Sequence[Tensor], fill: float | bool) -> Tensor:
    """Stack tensors of different sizes, each in the corner of its place."""
    sizes = [tuple(x.shape) for x in tensors]
    if len({x.dtype for x in tensors}) > 1:
        got = " and ".join(sorted({str(x.dtype) for x in tensors}))
        raise ValueError(refusal("examples", f"tensors of {got}", "one dtype"))
    if all(size == sizes[0] for size in sizes):
        return torch.stack(list(tensors))
    if len({len(size) for size in sizes}) > 1:
        raise ValueError(refusal("examples", f"tensors of shapes {sizes[:3]}", "equally many axes"))
    whole = tensors[0].new_full((len(tensors), *(max(axis) for axis in zip(*sizes, strict=True))), fill)
    for place, x in zip(whole, tensors, strict=True):
        place[tuple(slice(0, size) for size in x.shape)] = x
    return whole
