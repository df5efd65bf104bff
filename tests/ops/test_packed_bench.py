"""The benchmark of packed sequences measures one function in several ways."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.bench.packed import by_hand, lengths, ways
from tests.cases import assert_same


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("score", [rg.ScaledDot(), rg.Additive(3, 3, 2)], ids=["dot", "additive"])
def test_all_ways_are_one_function(score, causal):
    torch.manual_seed(0)
    attend, sizes = rg.Attention(score).double(), [4, 1, 9]
    x = torch.randn(sum(sizes), 3, dtype=torch.float64)
    expected = by_hand(attend, sizes, causal)(x)
    found = ways(attend, sizes, causal, "cpu")
    assert len(found) == 4
    for run in found.values():
        assert_same(run(x), expected)


def test_lengths_are_drawn_once_and_for_all():
    assert lengths(24, 100) == lengths(24, 100)
    assert min(lengths(24, 100)) >= 1
