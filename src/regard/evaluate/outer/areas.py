"""Metrics of areas, which are sets of pixels with a class: intersection over union, and Dice (see `classes` for the formulas)."""

from __future__ import annotations

from regard.evaluate.outer.classes import Average, ClassCounts, Classes
from regard.evaluate.outer.result import Score


def iou(
    predicted: Classes,
    truth: Classes,
    *,
    average: Average = "macro",
    positive: int | None = None,
    classes: int | None = None,
    ignore: int | None = None,
) -> Score:
    """Intersection over union of areas, counted over all images together; "macro" is the mean IoU of segmentation.

    Args:
        predicted: maps of classes, or masks.
        truth: the true ones, in the same shape.
        average: "macro", the mean over the classes that are predicted or true somewhere; "micro", the areas of all classes added first;
            "binary", the area of class `positive` alone, as of a mask.
        positive: the class of interest of "binary"; None for class 1 of classes 0 and 1: of more, it must be said which.
        classes: how many there are, to refuse what is beyond; None for those that come.
        ignore: what stands in `truth` where nothing is to be judged, such as 255.

    Example:
        >>> score = iou([[0, 0], [1, 1]], [[0, 1], [1, 255]], ignore=255)
        >>> float(score), dict(score.details)
        (0.5, {'class 0': 0.5, 'class 1': 0.5})
    """
    counts = ClassCounts.of(predicted, truth, classes=classes, ignore=ignore)
    return counts.score("iou", average, positive, ignore)


def dice(
    predicted: Classes,
    truth: Classes,
    *,
    average: Average = "macro",
    positive: int | None = None,
    classes: int | None = None,
    ignore: int | None = None,
) -> Score:
    """Twice the intersection over the sum of both areas. Arguments as of `iou`.

    Example:
        >>> float(dice([0, 1, 1, 0], [0, 1, 0, 0], average="binary")) == 2 / 3
        True
    """
    counts = ClassCounts.of(predicted, truth, classes=classes, ignore=ignore)
    return counts.score("dice", average, positive, ignore)
