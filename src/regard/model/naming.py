"""Which input of a task goes to which argument of a module: by name.

A module asks for its inputs by the names of its `forward`: `rotate(target, left, right, masks)` gets the inputs called target,
left and right. Where a task has one input, it also goes by the names that modules have for a single one (`MAIN`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard._errors import refusal
from regard.general.masks import Keys

# What modules call their only input.
MAIN = ("features", "tokens", "key", "document", "nodes", "x")


class UnknownInput(ValueError):
    """A module asks for an input that a task does not have.

    Attributes:
        role: what the module is in the task model.
        wanted: the name of the input.
        at_hand: the names that there are.
    """

    def __init__(self, role: str, wanted: str, at_hand: list[str]) -> None:
        fix = f"Fix: name the input so, or wrap the module: On(module, {wanted}='…')."
        super().__init__(refusal(role, f"a module that asks for {wanted!r}", f"one of {', '.join(at_hand)}", fix))
        self.role, self.wanted, self.at_hand = role, wanted, at_hand


class On(nn.Module):
    """A module that finds some of its inputs under other names.

    Args:
        module: what is called.
        **names: argument of its forward = name of the input.

    Example:
        >>> import regard as rg
        >>> ask = On(rg.PooledQuery(), features="question")
    """

    def __init__(self, module: nn.Module, **names: str) -> None:
        super().__init__()
        self.module, self.names = module, dict(names)
        unknown = set(names) - set(inspect.signature(module.forward).parameters)
        if unknown:
            known = ", ".join(inspect.signature(module.forward).parameters)
            raise TypeError(refusal("names", ", ".join(sorted(unknown)), f"arguments of its forward: {known}"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class _Asked(NamedTuple):
    """What a forward asks for.

    Attributes:
        arguments: inputs and values by name, and whether it cannot do without each.
        mask: whether it asks for a mask.
        pairs: whether pairs may be forbidden by it.
        masks: whether it asks for those of all its inputs.
    """

    arguments: tuple[tuple[str, bool], ...]
    mask: bool
    pairs: bool
    masks: bool

    @staticmethod
    def by(parameters: Iterable[inspect.Parameter]) -> _Asked:
        named = {p.name: p for p in parameters}
        arguments = tuple(
            (name, p.default is p.empty)
            for name, p in named.items()
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and name not in ("mask", "masks")
        )
        pairs = "mask" in named and "Mask" in str(named["mask"].annotation)
        return _Asked(arguments, "mask" in named, pairs, "masks" in named)


def _asked(module: nn.Module) -> _Asked:
    """What a module asks for, which a class does once; to look costs as much as a small layer."""
    if "forward" in vars(module):  # put there by hand
        return _Asked.by(inspect.signature(module.forward).parameters.values())
    return _asked_by(type(module).forward)


@cache
def _asked_by(forward: Callable[..., Any]) -> _Asked:
    return _Asked.by(list(inspect.signature(forward).parameters.values())[1:])


@dataclass(frozen=True, repr=False)
class Available:
    """What modules may ask for: features with masks, and values without. Printed, it names them with their shapes.

    `reads` names the inputs whose tokens the contexts of an attention stand for, one context each; None where that is not known.
    `filled` names those that are zero where they are not real.
    """

    inputs: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]
    values: Mapping[str, Any]
    reads: tuple[str, ...] | None = None
    filled: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        fields = [(name, getattr(self, name)) for name in ("inputs", "masks", "values")]
        told = [
            f"{name}={{{', '.join(f'{k}: {_shape(x)}' for k, x in some.items())}}}" for name, some in fields if some
        ]
        told += [f"reads={self.reads}"] if self.reads is not None else []
        told += [f"filled={sorted(self.filled)}"] if self.filled else []
        return f"Available({', '.join(told)})"

    def with_values(self, values: Mapping[str, Any]) -> Available:
        """The same with other values."""
        return Available(self.inputs, self.masks, values, self.reads, self.filled)

    def arguments(self, module: nn.Module, role: str) -> dict[str, Any]:
        """The arguments of a call; an argument that has no default and is not at hand is an error."""
        return self.matched(module, role)[0]

    def matched(self, module: nn.Module, role: str) -> tuple[dict[str, Any], list[str]]:
        """The arguments of a call, and the names of the inputs among them."""
        names = module.names if isinstance(module, On) else {}
        inner = module.module if isinstance(module, On) else module
        found: dict[str, Any] = {}
        given: list[str] = []
        asked = _asked(inner)
        for name, needed in asked.arguments:
            source = names.get(name, name)
            if source not in self.inputs and source not in self.values and name in MAIN and not given:
                source = self._only(source)
            if source in self.inputs:
                found[name] = self.inputs[source]
                given.append(source)
            elif source in self.values:
                found[name] = self.values[source]
            elif needed:
                raise UnknownInput(role, name, [*self.inputs, *self.values])
        if asked.mask and given:
            mask = self.masks.get(given[0])
            # Where pairs may be forbidden, a mask of keys is said to be one.
            found["mask"] = Keys(mask, given[0] in self.filled) if asked.pairs and mask is not None else mask
        if asked.masks:
            found["masks"] = tuple(self.masks.get(source) for source in given)
        return found, given

    def _only(self, name: str) -> str:
        """The only input, under whatever name."""
        return next(iter(self.inputs)) if len(self.inputs) == 1 else name


def _shape(value: Any) -> str:
    """A tensor in short; of what else there is, its type."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    where = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{where}"
