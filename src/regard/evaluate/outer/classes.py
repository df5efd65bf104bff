r"""Metrics of classes: accuracy, precision, recall, F1; and what those of areas are counted with.

All come from three counts a class $c$: how often it was predicted, how often it was true, how often both.

$$P_c = \frac{\text{both}}{\text{predicted}}, \quad R_c = \frac{\text{both}}{\text{true}}, \quad
  F_c = \mathrm{Dice}_c = \frac{2\, \text{both}}{\text{predicted} + \text{true}}, \quad
  \mathrm{IoU}_c = \frac{\text{both}}{\text{predicted} + \text{true} - \text{both}}$$

"macro" is the mean over classes, "micro" adds the counts of the classes first, "binary" is the one class of interest. A class that is
neither predicted nor true anywhere is left out of the mean; any other 0/0 is 0. An area that is empty and was predicted empty is a
full match: IoU and Dice 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard._errors import refusal
from regard.evaluate.outer.inputs import one_of, same_shape, whole_number, whole_numbers
from regard.evaluate.outer.result import Score, signed

Average: TypeAlias = Literal["macro", "micro", "binary"]
Classes: TypeAlias = Int[Tensor, "..."] | Bool[Tensor, "..."] | Sequence[Any]

# A number beyond this is no class but something else: every class is counted in a place of its own.
_MOST = 1 << 24


@dataclass(frozen=True)
class ClassCounts:
    """How often each class was predicted, was true, and both; counts of batches are added.

    Example:
        >>> first = ClassCounts.of([0, 1, 1], [0, 1, 0])
        >>> both = first + ClassCounts.of([2, 2], [2, 0])
        >>> both.both, both.predicted, both.true
        ((1, 1, 1), (1, 2, 2), (3, 1, 1))
    """

    both: tuple[int, ...] = ()
    predicted: tuple[int, ...] = ()
    true: tuple[int, ...] = ()

    @staticmethod
    def of(predicted: Classes, truth: Classes, *, classes: int | None = None, ignore: int | None = None) -> ClassCounts:
        """Of one batch of any shape.

        Args:
            predicted: classes.
            truth: the true ones, in the same shape.
            classes: how many there are; None for those that come. What is beyond is refused.
            ignore: what stands in `truth` where nothing is to be judged.
        """
        for argument, option, least in (("classes", classes, 1), ("ignore", ignore, None)):
            if option is not None:
                whole_number(argument, option, least)
        found, right = whole_numbers("predicted", predicted), whole_numbers("truth", truth)
        same_shape(found, right)
        if ignore is not None:
            judged = right != ignore
            found, right = found[judged], right[judged]
        found, right = found.flatten(), right.flatten()
        count = 1 + max((int(given.max()) for given in (found, right) if len(given)), default=-1)
        beyond = min(_MOST, _MOST if classes is None else classes)
        for argument, given in (("predicted", found), ("truth", right)):
            wrong = given[(given < 0) | (given >= beyond)]
            if len(wrong):
                bounded = classes is not None or int(wrong[0]) > 0
                expected = "classes from 0" + (f" to {beyond - 1}" if bounded else "")
                fix = f"Fix: ignore={int(wrong[0])} leaves it out." if argument == "truth" else ""
                raise ValueError(refusal(argument, int(wrong[0]), expected, fix))
        numbers = (torch.bincount(x, minlength=count).tolist() for x in (right[found == right], found, right))
        return ClassCounts(*map(tuple, numbers))

    def __add__(self, other: Any) -> ClassCounts:
        if not isinstance(other, ClassCounts):
            return NotImplemented
        pairs = ((self.both, other.both), (self.predicted, other.predicted), (self.true, other.true))
        return ClassCounts(*(tuple(a + b for a, b in zip_longest(x, y, fillvalue=0)) for x, y in pairs))

    @property
    def accuracy(self) -> float:
        self._refuse_nothing()
        return _ratio(sum(self.both), sum(self.true))

    def precision(self, average: Average = "macro", positive: int | None = None) -> float:
        return self._averaged(lambda both, predicted, true: _ratio(both, predicted), average, positive)

    def recall(self, average: Average = "macro", positive: int | None = None) -> float:
        return self._averaged(lambda both, predicted, true: _ratio(both, true), average, positive)

    def f1(self, average: Average = "macro", positive: int | None = None) -> float:
        return self._averaged(lambda both, predicted, true: _ratio(2 * both, predicted + true), average, positive)

    def dice(self, average: Average = "macro", positive: int | None = None) -> float:
        return self._averaged(lambda both, predicted, true: _ratio(2 * both, predicted + true, 1.0), average, positive)

    def iou(self, average: Average = "macro", positive: int | None = None) -> float:
        return self._averaged(
            lambda both, predicted, true: _ratio(both, predicted + true - both, 1.0), average, positive
        )

    def score(
        self, name: str, average: Average = "macro", positive: int | None = None, ignore: int | None = None
    ) -> Score:
        """One of the above, by its name, as the metric gives it."""
        one_of("name", name, ("accuracy", "precision", "recall", "f1", "iou", "dice"))
        choices: dict[str, object] = {"level": "corpus", "ignore": ignore}
        if name == "accuracy":
            value, details = self.accuracy, {"correct": float(sum(self.both)), "total": float(sum(self.true))}
        else:
            measure = getattr(self, name)
            value = measure(average, positive)
            details = {f"class {c}": measure("binary", c) for c in self._present}
            nothing = 1 if name in ("iou", "dice") else 0
            choices |= {"average": f"binary, class {_said(positive)}"} if average == "binary" else {"average": average}
            choices |= {"absent": "skipped" if average != "binary" else nothing, "zero division": 0}
        return Score(name, value, signed(**choices), details=details)

    def _refuse_nothing(self) -> None:
        if not sum(self.true):
            expected = "at least one entry: a metric of nothing has no value"
            raise ValueError(refusal("truth", "nothing to judge", expected))

    @property
    def _present(self) -> list[int]:
        return [c for c, (p, t) in enumerate(zip(self.predicted, self.true, strict=True)) if p + t]

    def _averaged(self, measure: Callable[[int, int, int], float], average: Average, positive: int | None) -> float:
        one_of("average", average, ("macro", "micro", "binary"))
        if positive is not None:
            whole_number("positive", positive, 0)
        self._refuse_nothing()
        if average == "micro":
            return measure(sum(self.both), sum(self.predicted), sum(self.true))
        each = list(zip(self.both, self.predicted, self.true, strict=True))
        if average == "binary":
            if positive is None and len(self._present) and self._present[-1] > 1:
                expected = "of classes 0 and 1 alone, or with the class of interest"
                fix = "Fix: positive=1 judges class 1 against all others; average='macro' judges every class."
                raise ValueError(refusal("average", f"'binary' for class {self._present[-1]}", expected, fix))
            chosen = _said(positive)
            return measure(*each[chosen]) if chosen < len(each) else measure(0, 0, 0)
        return sum(measure(*each[c]) for c in self._present) / len(self._present)


def _said(positive: int | None) -> int:
    return 1 if positive is None else positive


def _ratio(above: int, below: int, nothing: float = 0.0) -> float:
    return above / below if below else nothing


def accuracy(predicted: Classes, truth: Classes, *, classes: int | None = None, ignore: int | None = None) -> Score:
    """The share that is right.

    Args:
        predicted: classes, in any shape.
        truth: the true ones, in the same shape.
        classes: how many there are, to refuse what is beyond; None for those that come.
        ignore: what stands in `truth` where nothing is to be judged.

    Example:
        >>> float(accuracy([0, 1, 2, 2], [0, 1, 1, -1], ignore=-1)) == 2 / 3
        True
    """
    return ClassCounts.of(predicted, truth, classes=classes, ignore=ignore).score("accuracy", ignore=ignore)


def precision(
    predicted: Classes,
    truth: Classes,
    *,
    average: Average = "macro",
    positive: int | None = None,
    classes: int | None = None,
    ignore: int | None = None,
) -> Score:
    """Of what was said to be of a class, the share that is.

    Args:
        predicted: classes, in any shape.
        truth: the true ones, in the same shape.
        average: "macro", the mean over classes; "micro", the counts of all classes added first, which is the accuracy where every entry
            has one class; "binary", class `positive` alone.
        positive: the class of interest of "binary"; None for class 1 of classes 0 and 1: of more, it must be said which.
        classes: how many there are, to refuse what is beyond; None for those that come.
        ignore: what stands in `truth` where nothing is to be judged.

    Example:
        >>> float(precision([1, 1, 0, 1], [1, 0, 0, 1], average="binary")) == 2 / 3
        True
    """
    counts = ClassCounts.of(predicted, truth, classes=classes, ignore=ignore)
    return counts.score("precision", average, positive, ignore)


def recall(
    predicted: Classes,
    truth: Classes,
    *,
    average: Average = "macro",
    positive: int | None = None,
    classes: int | None = None,
    ignore: int | None = None,
) -> Score:
    """Of what is of a class, the share that was said to be. Arguments as of `precision`.

    Example:
        >>> float(recall([1, 0, 0, 0], [1, 0, 0, 1], average="binary"))
        0.5
    """
    counts = ClassCounts.of(predicted, truth, classes=classes, ignore=ignore)
    return counts.score("recall", average, positive, ignore)


def f1(
    predicted: Classes,
    truth: Classes,
    *,
    average: Average = "macro",
    positive: int | None = None,
    classes: int | None = None,
    ignore: int | None = None,
) -> Score:
    """The harmonic mean of precision and recall; "macro" is the mean of the classes' F1. Arguments as of `precision`.

    Example:
        >>> float(f1([1, 1, 0, 0], [1, 0, 0, 1], average="binary"))
        0.5
    """
    counts = ClassCounts.of(predicted, truth, classes=classes, ignore=ignore)
    return counts.score("f1", average, positive, ignore)
