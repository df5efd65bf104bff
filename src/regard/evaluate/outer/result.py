"""What a metric returns: a number that says how it was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from regard._version import __version__


@dataclass(frozen=True)
class Score:
    """A number, and everything that one must know to compare it with another.

    Two scores are comparable where their signatures are equal.

    Attributes:
        name: of the metric.
        value: the number.
        signature: library, version, and every choice that changes the number, as `key:value|key:value`.
        higher: whether more is better.
        details: the parts that it is made of, by name.

    Example:
        >>> score = Score("wer", 0.25, "regard:0.1.0|unit:word", higher=False, details={"insertions": 1.0})
        >>> float(score)
        0.25
        >>> print(score)
        wer 0.25, lower is better [regard:0.1.0|unit:word]
    """

    name: str
    value: float
    signature: str
    higher: bool = True
    details: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.name} {self.value:.6g}, {'higher' if self.higher else 'lower'} is better [{self.signature}]"


def signed(**choices: object) -> str:
    """The signature of what is computed here.

    Example:
        >>> signed(unit="word").split("|")[1]
        'unit:word'
    """
    return "|".join([f"regard:{__version__}", *(f"{key}:{value}" for key, value in choices.items())])
