"""What a metric returns: a number that says how it was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, Self

from regard._version import __version__


@dataclass(frozen=True, eq=False)
class Score(float):
    """A number, and everything that one must know to compare it with another.

    It is computed with, compared, rounded, formatted and stored as any other float; what comes of that is a plain number, which knows
    nothing of where it is from. Two scores are equal where all that they say is; a score and a plain number, where the numbers are.
    Two scores are comparable where their signatures are equal.

    Attributes:
        name: of the metric.
        value: the number.
        signature: library, version, and every choice that changes the number, as `key:value|key:value`.
        higher: whether more is better.
        details: the parts that it is made of, by name.

    Example:
        >>> score = Score("wer", 0.25, "regard:0.1.0|unit:word", higher=False, details={"insertions": 1.0})
        >>> 1 - score, score < 0.5, f"{score:.1%}"
        (0.75, True, '25.0%')
        >>> print(score)
        wer 0.25, lower is better [regard:0.1.0|unit:word]
    """

    name: str
    value: float
    signature: str
    higher: bool = True
    details: Mapping[str, float] = field(default_factory=dict)

    def __new__(cls, *given: Any, **named: Any) -> Self:
        if len(given) == 1 and not named and isinstance(given[0], Number):
            # So does `statistics` give back what it computed of things of a type: a plain number, as of all arithmetic.
            return float(given[0])  # type: ignore[arg-type,return-value]
        # What is missing is told by the constructor.
        return super().__new__(cls, named.get("value", given[1] if len(given) > 1 else 0.0))

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", float(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.value, self.signature, self.higher, dict(self.details))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Score):
            return self._said() == other._said()
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        # That of float would compare the numbers alone.
        return not self == other

    # Equal things have equal hashes, and a plain number may be one of them.
    __hash__ = float.__hash__

    def __str__(self) -> str:
        return f"{self.name} {self.value:.6g}, {'higher' if self.higher else 'lower'} is better [{self.signature}]"

    def _said(self) -> tuple[object, ...]:
        return self.name, self.value, self.signature, self.higher, dict(self.details)


def signed(**choices: object) -> str:
    """The signature of what is computed here.

    Example:
        >>> signed(unit="word").split("|")[1]
        'unit:word'
    """
    return "|".join([f"regard:{__version__}", *(f"{key}:{value}" for key, value in choices.items())])
