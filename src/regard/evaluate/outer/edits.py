r"""Error rates of sequences: of words, of characters, of phones.

$$\mathrm{rate} = \frac{S + D + I}{N}$$

with the fewest substitutions $S$, deletions $D$ and insertions $I$ that make the truth, of length $N$, into the prediction
(Levenshtein). Of a corpus: edits and lengths of all sentences are added first. It may exceed one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from regard._errors import refusal
from regard.evaluate.outer.inputs import one_of, same_count, several, texts
from regard.evaluate.outer.phones import folded
from regard.evaluate.outer.result import Score, signed

Array: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

# Time grows with the length times the edits: of texts that are alike, only what lies near the diagonal is counted.
_BAND = 32


@dataclass(frozen=True)
class EditCounts:
    """What an error rate is made of; counts of parts of a corpus are added.

    Where several sets of edits are equally short, the one with most substitutions counts.

    Example:
        >>> EditCounts.of("the cat sat".split(), "the black cat sits".split())
        EditCounts(substitutions=1, deletions=1, insertions=0, hits=2)
    """

    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    hits: int = 0

    @staticmethod
    def of(predicted: Sequence[Hashable], truth: Sequence[Hashable]) -> EditCounts:
        """Of one sequence of units and the true one."""
        for argument, units in (("predicted", predicted), ("truth", truth)):
            if not isinstance(units, Sequence) or not all(isinstance(unit, Hashable) for unit in units):
                raise TypeError(refusal(argument, f"a {type(units).__name__}", "a sequence of units, such as words"))
        n, m = len(truth), len(predicted)
        numbers: dict[Hashable, int] = {}
        right = np.array([numbers.setdefault(unit, len(numbers)) for unit in truth], dtype=np.int64)
        found = np.array([numbers.setdefault(unit, len(numbers)) for unit in predicted], dtype=np.int64)
        # No way with so few edits leaves the band; where more are needed, a wider one is tried.
        width = _BAND + abs(n - m)
        edits, gaps = _fewest(right, found, width)
        while edits > width:
            width = 2 * width + 1
            edits, gaps = _fewest(right, found, width)
        deletions = (gaps + n - m) // 2
        substitutions = edits - gaps
        return EditCounts(substitutions, deletions, gaps - deletions, n - substitutions - deletions)

    def __add__(self, other: Any) -> EditCounts:
        if not isinstance(other, EditCounts):
            return NotImplemented
        return EditCounts(
            self.substitutions + other.substitutions,
            self.deletions + other.deletions,
            self.insertions + other.insertions,
            self.hits + other.hits,
        )

    @property
    def edits(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def length(self) -> int:
        """Of the truth."""
        return self.hits + self.substitutions + self.deletions

    @property
    def error_rate(self) -> float:
        """Edits per unit of the truth; where the truth is empty, the number of insertions."""
        return self.edits / self.length if self.length else float(self.insertions)

    def score(self, name: str, **choices: object) -> Score:
        """As a metric gives it, with the choices that made the units."""
        details = {
            "substitutions": float(self.substitutions),
            "deletions": float(self.deletions),
            "insertions": float(self.insertions),
            "hits": float(self.hits),
        }
        signature = signed(**choices, level="corpus", empty="insertions")
        return Score(name, self.error_rate, signature, higher=False, details=details)


def _fewest(right: Array, found: Array, width: int) -> tuple[int, int]:
    """Edits, and how many of them insert or delete, on the best way whose places in both never differ by more than the width."""
    n, m = len(right), len(found)
    # One number carries both aims: edits count `heavy` each, and of them insertions and deletions one more.
    heavy = n + m + 1
    gap = heavy + 1
    steps = gap * np.arange(m + 1)
    costs = steps.copy()
    costs[width + 1 :] = 2 * gap * (n + m + 1)
    for i, unit in enumerate(right, 1):
        first, last = max(i - width, 0), min(i + width, m) + 1
        best = costs[first:last] + gap
        start = max(first, 1)
        diagonal = costs[start - 1 : last - 1] + heavy * (found[start - 1 : last - 1] != unit)
        best[start - first :] = np.minimum(best[start - first :], diagonal)
        # Insertions run along the row: the least of best[k] + gap * (j - k) over k <= j.
        costs[first:last] = np.minimum.accumulate(best - steps[first:last]) + steps[first:last]
    edits, gaps = divmod(int(costs[-1]), heavy)
    return edits, gaps


def wer(predicted: Sequence[str], truth: Sequence[str]) -> Score:
    """Word error rate: words are what blanks separate, with their case and punctuation.

    Example:
        >>> float(wer(["the cat sat"], ["the black cat sat"]))
        0.25
    """
    return _counted(texts("predicted", predicted), texts("truth", truth), str.split).score(
        "wer", unit="word", case="kept"
    )


def cer(predicted: Sequence[str], truth: Sequence[str]) -> Score:
    """Character error rate: characters are code points, blanks inside a text among them.

    Example:
        >>> float(cer(["kitten"], ["sitting"])) == 3 / 7
        True
    """
    counts = _counted(texts("predicted", predicted), texts("truth", truth), str.strip)
    return counts.score("cer", unit="code point", blanks="inner", case="kept")


def per(
    predicted: Sequence[str | Sequence[str]],
    truth: Sequence[str | Sequence[str]],
    *,
    fold: Literal["none", "timit39"] = "none",
) -> Score:
    """Phone error rate.

    Args:
        predicted: for each utterance its phones, in a list or separated by blanks.
        truth: likewise.
        fold: "timit39" turns the 61 phones of TIMIT into the 39 that error rates are usually told of (see `phones`).

    Example:
        >>> float(per(["sh ix hv"], [["sh", "ih", "hv", "ae"]], fold="timit39"))
        0.25
    """
    one_of("fold", fold, ("none", "timit39"))

    def units(utterance: str | Sequence[str]) -> list[str]:
        phones = utterance.split() if isinstance(utterance, str) else list(utterance)
        return folded(phones) if fold == "timit39" else phones

    return _counted(_utterances("predicted", predicted), _utterances("truth", truth), units).score(
        "per", unit="phone", fold=fold
    )


def _utterances(argument: str, given: Any) -> list[Any]:
    found = several(argument, given)
    for k, utterance in enumerate(found):
        if not isinstance(utterance, str | Sequence) or not all(isinstance(phone, str) for phone in utterance):
            got = f"a {type(utterance).__name__}"
            raise TypeError(refusal(f"{argument}[{k}]", got, "phones (str), in a list or separated by blanks"))
    return found


def _counted(predicted: list[Any], truth: list[Any], units: Callable[[Any], Sequence[Hashable]]) -> EditCounts:
    same_count(predicted, truth)
    pairs = zip(predicted, truth, strict=True)
    return sum((EditCounts.of(units(found), units(right)) for found, right in pairs), EditCounts())
