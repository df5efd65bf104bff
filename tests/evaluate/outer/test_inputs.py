"""Whatever a metric cannot judge is refused by the name of its argument, never by an error from further down."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from regard.evaluate.outer import (
    METRICS,
    ClassCounts,
    EditCounts,
    PerplexityCounts,
    RankCounts,
    accuracy,
    score,
)

pytest.importorskip("sacrebleu")
pytest.importorskip("nltk")
pytest.importorskip("torchmetrics")

TEXTS = (["a b", "c"], ["a c", "c"])
CLASSES = ([0, 1, 1], [0, 1, 0])
PICTURES = (torch.rand(1, 1, 12, 12), torch.rand(1, 1, 12, 12))
CANDIDATES = ([0.1, 0.5, 0.2], [0, 1, 0])
ITEMS = (torch.rand(3, 7), torch.tensor([1, 2, 3]))
TOKENS = (torch.rand(2, 3, 5), torch.zeros(2, 3, dtype=torch.long))
RIGHT: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    **dict.fromkeys(("bleu", "chrf", "meteor", "wer", "cer", "per"), (*TEXTS, {})),
    **dict.fromkeys(("iou", "dice", "accuracy", "precision", "recall", "f1"), (*CLASSES, {})),
    **dict.fromkeys(("psnr", "ssim"), (*PICTURES, {"data_range": 1.0})),
    **dict.fromkeys(("map", "mrr"), (*CANDIDATES, {"groups": [0, 0, 0]})),
    **dict.fromkeys(("hit_rate", "ndcg"), (*ITEMS, {"k": 2})),
    "perplexity": (*TOKENS, {}),
}
# What no metric can read, whichever of its arguments it is.
WRONG: dict[str, Any] = {
    "nothing": None,
    "a fraction": 1.5,
    "a text": "cat",
    "bytes": b"cat",
    "a list of nothings": [None, None, None],
    "a ragged list": [[1, 2], [3]],
    "a list of many things": [1, "a", 2],
    "a dictionary": {"a": 1},
    "a set": {1, 2},
    "an object": object(),
    "a generator": (k for k in range(3)),
    "an empty list": [],
    "an empty tensor": torch.empty(0),
    "complex numbers": torch.zeros(3, dtype=torch.complex64),
    "complex pictures": torch.zeros(1, 1, 12, 12, dtype=torch.complex64),
    "an array of objects": np.array([None, 1, "a"], dtype=object),
    "numbers beyond all bounds": [2**70, 1, 2],
    "tensors in a list": [torch.tensor([1, 2]), torch.tensor([3])],
    "a tensor without values": torch.empty(3, device="meta"),
    "a sparse tensor": torch.eye(3).to_sparse(),
    "not a number": [float("nan")] * 3,
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", METRICS)
def test_wrong_inputs_are_refused_by_name(name: str, wrong: str) -> None:
    predicted, truth, options = RIGHT[name]
    with pytest.raises((TypeError, ValueError), match=r"^(predicted|truth|groups)(\[\d\])*: got .*, expected "):
        METRICS[name](WRONG[wrong], truth, **options)
    with pytest.raises((TypeError, ValueError), match=r"^(predicted|truth|groups)(\[\d\])*: got .*, expected "):
        METRICS[name](predicted, WRONG[wrong], **options)


@pytest.mark.parametrize("name", METRICS)
def test_what_is_right_is_judged(name: str) -> None:
    predicted, truth, options = RIGHT[name]
    assert math.isfinite(METRICS[name](predicted, truth, **options))


@pytest.mark.parametrize(
    ("names", "option", "given"),
    [
        ("accuracy f1 iou", "classes", 1.5),
        ("accuracy f1 iou", "classes", "3"),
        ("accuracy f1 iou", "classes", True),
        ("accuracy f1 iou", "classes", 0),
        ("accuracy f1 iou perplexity", "ignore", "x"),
        ("accuracy f1 iou perplexity", "ignore", [1]),
        ("accuracy f1 iou perplexity", "ignore", 1.5),
        ("precision recall f1 iou dice", "positive", "1"),
        ("precision recall f1 iou dice", "positive", 1.5),
        ("precision recall f1 iou dice", "average", [1]),
        ("hit_rate ndcg", "k", None),
        ("hit_rate ndcg", "k", 1.5),
        ("hit_rate ndcg", "k", True),
        ("bleu", "max_order", None),
        ("bleu", "max_order", 1.5),
        ("chrf", "char_order", "a"),
        ("chrf", "beta", None),
        ("psnr ssim", "data_range", float("inf")),
        ("psnr ssim", "data_range", float("nan")),
        ("psnr ssim", "data_range", 10**400),
        ("psnr ssim", "data_range", 1e-299),
        ("accuracy f1 iou perplexity", "ignore", 2**70),
        ("map mrr", "groups", None),
        ("map mrr", "groups", 3),
        ("map mrr", "groups", "abc"),
        ("map mrr", "groups", [0, 0]),
        ("map mrr", "groups", [[1], [2], [3]]),
    ],
)
def test_wrong_options_are_refused_by_name(names: str, option: str, given: object) -> None:
    for name in names.split():
        predicted, truth, options = RIGHT[name]
        with pytest.raises((TypeError, ValueError), match=rf"^{option}(\[\d\])*: got .*, expected "):
            METRICS[name](predicted, truth, **{**options, option: given})


def test_numbers_of_numpy_are_whole_numbers_too() -> None:
    assert float(accuracy(np.array([0, 1]), [0, 255], classes=np.int64(2), ignore=np.uint8(255))) == 1.0


def test_questions_may_be_numbered_by_an_array() -> None:
    for groups in (np.array([0, 0, 1]), torch.tensor([0, 0, 1]), (0, 0, 1), ["a", "a", "b"]):
        assert float(score("mrr", [0.1, 0.5, 0.2], [0, 1, 1], groups=groups)) == 1.0


def test_questions_in_a_list_of_tensors_are_told_by_their_numbers() -> None:
    groups = [torch.tensor(0), torch.tensor(0), torch.tensor(1)]
    scored = ([0.1, 0.5, 0.2], [1, 0, 1])
    assert float(score("mrr", *scored, groups=groups)) == float(score("mrr", *scored, groups=[0, 0, 1])) == 0.75
    with pytest.raises(ValueError, match=r"groups\[1\]: got NaN"):
        score("mrr", *scored, groups=[0, float("nan"), float("nan")])


def test_an_array_may_be_read_backwards() -> None:
    assert float(accuracy(np.array([0, 1, 2])[::-1], [2, 1, 0])) == 1.0


def test_a_class_beyond_all_bounds_is_not_counted() -> None:
    with pytest.raises(ValueError, match="predicted: got 1099511627776, expected classes from 0 to 16777215"):
        accuracy([1 << 40], [1])
    # However many there might be, those that come are counted.
    assert float(accuracy([1], [1], classes=1 << 50)) == 1.0


def test_counts_refuse_what_they_cannot_count() -> None:
    for predicted, truth in ((None, "a"), (3, "a"), ([[1]], ["a"])):
        with pytest.raises(TypeError, match=r"predicted: got a .*, expected a sequence of units"):
            EditCounts.of(predicted, truth)  # type: ignore[arg-type]
    for counts in (ClassCounts, PerplexityCounts):
        with pytest.raises(TypeError, match="predicted: got None, expected a tensor or list of"):
            counts.of(None, [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="k: got None, expected a whole number >= 1"):
        RankCounts.of(*ITEMS, k=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [None, 3, ["wer"]])
def test_a_metric_has_a_name(name: object) -> None:
    with pytest.raises(TypeError, match="name: got a .*, expected the name of a metric"):
        score(name, ["a"], ["a"])  # type: ignore[arg-type]
