"""Accuracy, precision, recall, F1, and with them IoU and Dice: beside scikit-learn, and where a class is absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.evaluate.outer import ClassCounts, Score, accuracy, dice, f1, iou, precision, recall

pairs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12)
binary_pairs = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=9)
AVERAGED: list[Callable[..., Score]] = [precision, recall, f1, iou, dice]


def columns(drawn: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [p for p, _ in drawn], [t for _, t in drawn]


@settings(max_examples=30)
@given(pairs)
def test_they_are_scikit_learns(drawn: list[tuple[int, int]]) -> None:
    theirs = pytest.importorskip("sklearn.metrics")
    found, right = columns(drawn)
    assert float(accuracy(found, right)) == pytest.approx(theirs.accuracy_score(right, found))
    for average in ("macro", "micro"):
        options: dict[str, Any] = {"average": average}
        for ours, name in ((precision, "precision_score"), (recall, "recall_score"), (f1, "f1_score")):
            expected = getattr(theirs, name)(right, found, zero_division=0, **options)
            assert float(ours(found, right, **options)) == pytest.approx(expected)
        expected = theirs.jaccard_score(right, found, zero_division=0, **options)
        assert float(iou(found, right, **options)) == pytest.approx(expected)


@settings(max_examples=30)
@given(binary_pairs)
def test_the_class_of_interest_alone_is_scikit_learns(drawn: list[tuple[int, int]]) -> None:
    theirs = pytest.importorskip("sklearn.metrics")
    found, right = columns(drawn)
    for ours, name in ((precision, "precision_score"), (recall, "recall_score"), (f1, "f1_score")):
        for positive in (0, 1):
            expected = getattr(theirs, name)(right, found, labels=[positive], average="macro", zero_division=0)
            assert float(ours(found, right, average="binary", positive=positive)) == pytest.approx(expected)


@given(pairs, st.integers(0, 11))
def test_counts_of_parts_are_those_of_the_whole(drawn: list[tuple[int, int]], cut: int) -> None:
    found, right = columns(drawn)
    first, second = (ClassCounts.of(found[part], right[part]) for part in (slice(cut), slice(cut, None)))
    whole = ClassCounts.of(found, right)
    assert first + second == whole == second + first
    assert sum([first, second], ClassCounts()) == whole
    for name in ("precision", "recall", "f1", "iou", "dice"):
        assert (first + second).score(name).value == float(globals()[name](found, right))


@given(pairs)
def test_bounds_and_identities(drawn: list[tuple[int, int]]) -> None:
    found, right = columns(drawn)
    for metric in AVERAGED:
        for average in ("macro", "micro", "binary"):
            assert 0.0 <= float(metric(found, right, average=average, positive=1)) <= 1.0
        assert float(metric(found, found)) == 1.0
    right_share = float(accuracy(found, right))
    for metric in (precision, recall, f1, dice):
        assert float(metric(found, right, average="micro")) == pytest.approx(right_share)
    assert float(precision(found, right)) <= 1.0
    for metric in (f1, iou, dice):
        assert float(metric(found, right)) == pytest.approx(float(metric(right, found)))
    union, double = iou(found, right).details, dice(found, right).details
    for key, area in union.items():
        assert double[key] == pytest.approx(2 * area / (1 + area))


def test_a_class_that_is_nowhere_changes_nothing() -> None:
    found, right = [0, 1, 1, 4], [0, 1, 0, 4]
    for metric in AVERAGED:
        assert float(metric(found, right, classes=9)) == float(metric(found, right))


def test_what_is_ignored_is_not_judged() -> None:
    found, right = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 255, 255])
    assert float(accuracy(found, right, ignore=255)) == 1.0
    assert iou(found, right, ignore=255).details == {"class 0": 1.0, "class 1": 1.0}
    assert "ignore:255" in iou(found, right, ignore=255).signature


def test_details_of_accuracy() -> None:
    score = accuracy([0, 1, 1], [0, 1, 0])
    assert dict(score.details) == {"correct": 2.0, "total": 3.0}


@pytest.mark.parametrize("metric", [accuracy, *AVERAGED])
def test_what_is_refused(metric: Callable[..., Score]) -> None:
    with pytest.raises(ValueError, match=r"truth: got shape \(3,\), expected that of what was predicted, \(2,\)"):
        metric([0, 1], [0, 1, 1])
    with pytest.raises(TypeError, match="predicted: got dtype torch.float32, expected classes.*Fix: take the argmax"):
        metric(torch.rand(3), torch.zeros(3, dtype=torch.long))
    with pytest.raises(TypeError, match="predicted: got 'cats', expected a tensor or list of classes"):
        metric("cats", "dogs")
    with pytest.raises(ValueError, match="truth: got -1, expected classes from 0. Fix: ignore=-1 leaves it out"):
        metric([0, 1], [0, -1])
    with pytest.raises(ValueError, match="truth: got 255, expected classes from 0 to 4. Fix: ignore=255"):
        metric([0, 1], [0, 255], classes=5)
    with pytest.raises(ValueError, match="predicted: got 5, expected classes from 0 to 4"):
        metric([0, 5], [0, 1], classes=5)
    with pytest.raises(ValueError, match="truth: got nothing to judge, expected at least one entry"):
        metric(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))


def test_binary_asks_which_class_of_many_is_meant() -> None:
    for metric in AVERAGED:
        for found, right in (([0, 2], [0, 1]), ([0, 1], [0, 2])):
            with pytest.raises(
                ValueError, match="average: got 'binary' for class 2, .* class of interest. Fix: positive=1"
            ):
                metric(found, right, average="binary")
            assert "binary, class 1" in metric(found, right, average="binary", positive=1).signature
    assert float(f1([1, 2, 2], [1, 2, 1], average="binary", positive=2)) == 2 / 3
    # Two classes leave no question, and one may be missing.
    for found, right in (([0, 1], [1, 1]), ([0, 0], [0, 0])):
        assert f1(found, right, average="binary") == f1(found, right, average="binary", positive=1)


def test_names_of_classes_are_refused_with_what_to_do() -> None:
    for names in (["a", "b"], [["a"], ["b"]], np.array(["a", "b"]), [1, "a"]):
        with pytest.raises(
            TypeError, match="predicted: got 'a' among them, expected .* classes. Fix: number the names"
        ):
            f1(names, [0, 1])
    with pytest.raises(TypeError, match="truth: got 'b' among them"):
        accuracy([0, 1], ["b", "b"])


def test_other_averages_are_refused() -> None:
    with pytest.raises(ValueError, match="average: got 'weighted', expected one of 'macro', 'micro', 'binary'"):
        f1([0], [0], average="weighted")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="positive: got -1, expected a whole number >= 0"):
        f1([0], [0], average="binary", positive=-1)
    with pytest.raises(ValueError, match="name: got 'both', expected one of 'accuracy', 'precision'"):
        ClassCounts.of([0], [0]).score("both")
    with pytest.raises(TypeError):
        ClassCounts() + 1
