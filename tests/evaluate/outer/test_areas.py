"""IoU and Dice by hand: absent classes, empty areas, several images."""

from __future__ import annotations

import pytest
import torch

from regard.evaluate.outer import dice, f1, iou


def test_iou_by_hand() -> None:
    predicted = torch.tensor([[[0, 0, 1], [0, 1, 1]]])
    truth = torch.tensor([[[0, 1, 1], [0, 1, 3]]])
    score = iou(predicted, truth, classes=5)
    # Class 2 and 4 are nowhere and left out; class 3 was missed.
    assert score.details == {"class 0": 2 / 3, "class 1": 2 / 4, "class 3": 0.0}
    assert float(score) == pytest.approx((2 / 3 + 2 / 4 + 0.0) / 3)
    assert "absent:skipped" in score.signature
    assert float(iou(predicted, truth, average="micro")) == 4 / (6 + 6 - 4)
    assert float(dice(predicted, truth)) == pytest.approx((4 / 5 + 4 / 6 + 0.0) / 3)


def test_an_empty_area_that_was_predicted_empty_is_a_full_match() -> None:
    nothing = torch.zeros(3, 5, dtype=torch.bool)
    assert float(iou(nothing, nothing, average="binary")) == 1.0
    assert float(dice(nothing, nothing, average="binary")) == 1.0
    assert float(f1(nothing, nothing, average="binary")) == 0.0
    assert float(iou(~nothing, nothing, average="binary")) == 0.0
    assert "absent:1" in iou(nothing, nothing, average="binary").signature
    assert "absent:0" in f1(nothing, nothing, average="binary").signature


def test_areas_are_added_over_images() -> None:
    first, second = ([1, 1, 1, 1], [1, 1, 1, 1]), ([1, 0, 0, 0], [0, 0, 0, 1])
    both = [first[0], second[0]], [first[1], second[1]]
    assert float(iou(*both, average="binary")) == 4 / 6
    assert (float(iou(*first, average="binary")) + float(iou(*second, average="binary"))) / 2 == 0.5
