"""What the benchmark compares is the same arithmetic."""

from __future__ import annotations

import pytest
import torch

from regard.bench import feature_cpu
from regard.bench.paired import paired_seconds
from tests.cases import assert_same, scrambled

SUBJECTS = feature_cpu.subjects(5)


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masks"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_by_hand_is_the_mechanism(name, masked):
    module, by_hand, count = SUBJECTS[name]
    scrambled(module)
    shape = (3, 2, 7) if count == 0 else (3, 7)
    inputs = tuple(torch.randn(*shape, 5, dtype=torch.float64) for _ in range(max(count, 1)))
    masks = None
    if masked:
        masks = tuple(torch.rand(shape) < 0.6 for _ in inputs)
        for mask in masks:
            mask[..., 0] = True
    of_module = masks if masks is None or count else masks[0]
    assert_same(module(*inputs, of_module), by_hand(module, inputs, masks))


def test_times_are_of_the_two_in_turns():
    seen = []
    first, second = paired_seconds(lambda: seen.append(0), lambda: seen.append(1), budget=0.0, least=3)
    assert seen == [0, 1] * 5
    assert first >= 0
    assert second >= 0
