"""Positional information: added to the tokens, turned into queries and keys, or a bias or mask of the scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from regard import catalog
from regard._errors import nearest, refusal
from regard.transformer.positions.absolute import LearnedPosition, SinusoidalPosition, sinusoids
from regard.transformer.positions.base import AbsolutePosition, Position, RelativePosition, StreamedBias
from regard.transformer.positions.relative import (
    AlibiPosition,
    DirectionalPosition,
    ShawPosition,
    TransformerXLPosition,
)
from regard.transformer.positions.rotary import RotaryPosition, rotated

# A name, a ready-made one, a class or function without arguments that makes one, or none.
PositionLike: TypeAlias = str | AbsolutePosition | RelativePosition | Callable[[], Position] | None

_SHORT = {"sinusoidal": "positional-encoding"}


def build_position(position: PositionLike, **widths: Any) -> Position | None:
    """A position from its name (`"rotary"` or `"rotary-position"`), with the widths that it asks for; or as given."""
    if position is None or isinstance(position, AbsolutePosition | RelativePosition):
        return position
    if isinstance(position, str):
        plain = catalog.canonical(position)
        known = {entry.name for entry in catalog.entries("query/position")}
        plain = _SHORT.get(plain, plain)
        name = f"{plain}-position" if f"{plain}-position" in known else plain
        if name not in known:
            short = [*_SHORT, *sorted(entry.removesuffix("-position") for entry in known - set(_SHORT.values()))]
            fix = nearest(position, short, listed=True)
            raise ValueError(refusal("position", repr(position), f"one of {', '.join(short)}", fix))
        made, _ = catalog.build(name, "query/position", "position", widths)
    elif callable(position):
        made = position()
    else:
        raise TypeError(
            refusal("position", type(position).__name__, "a position, its name, or a function that makes one")
        )
    if not isinstance(made, AbsolutePosition | RelativePosition):
        raise TypeError(
            refusal("position", f"a function that gives {type(made).__name__}", "one that makes a position")
        )
    return made


__all__ = [
    "AbsolutePosition",
    "AlibiPosition",
    "DirectionalPosition",
    "LearnedPosition",
    "Position",
    "PositionLike",
    "RelativePosition",
    "RotaryPosition",
    "ShawPosition",
    "SinusoidalPosition",
    "StreamedBias",
    "TransformerXLPosition",
    "build_position",
    "rotated",
    "sinusoids",
]
