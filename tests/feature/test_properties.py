"""What holds for whatever lengths are drawn: an example in a padded batch is the example alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import regard as rg
from tests.cases import assert_same, scrambled
from tests.feature.common import normal

# Widths of the inputs, and the mechanism.
MECHANISMS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "alternating": ((5, 3), lambda: rg.AlternatingCoAttention((5, 3))),
    "alternating, tied": ((5, 3), lambda: rg.AlternatingCoAttention((5, 3), tie_first_last=True)),
    "interactive": ((5, 3), lambda: rg.InteractiveCoAttention((5, 3))),
    "parallel": ((5, 3), lambda: rg.ParallelCoAttention((5, 3))),
    "parallel, max": ((5, 3), lambda: rg.ParallelCoAttention((5, 3), scoring="max")),
    "multi-grained": ((5, 3), lambda: rg.MultiGrainedCoAttention((5, 3))),
    "rotatory": ((5, 3, 3), lambda: rg.RotatoryAttention((5, 3), hops=2)),
    "rotatory, weighted": ((5, 3, 3), lambda: rg.RotatoryAttention((5, 3), order="context-first", weighting=True)),
}
every_mechanism = pytest.mark.parametrize("name", MECHANISMS)


def padded(lengths: list[int], width: int, seed: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Sequences of these lengths; all of them in one tensor, NaN where they end; and the mask."""
    alone = [normal(n, width, seed=seed + b) for b, n in enumerate(lengths)]
    whole = torch.full((len(lengths), max(lengths), width), math.nan, dtype=torch.float64)
    for b, x in enumerate(alone):
        whole[b, : len(x)] = x
    return alone, whole, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


@every_mechanism
@settings(max_examples=12)
@given(data=st.data())
def test_an_example_in_a_padded_batch_is_the_example_alone(name, data):
    widths, make = MECHANISMS[name]
    m = scrambled(make())
    lengths = [data.draw(st.lists(st.integers(0, 4), min_size=3, max_size=3)) for _ in widths]
    parts = [padded(each, width, 10 * k) for k, (each, width) in enumerate(zip(lengths, widths, strict=True))]
    together = m(*(whole for _, whole, _ in parts), tuple(mask for _, _, mask in parts))
    for b in range(3):
        assert_same(together[b], m(*(alone[b] for alone, _, _ in parts)))


@every_mechanism
@settings(max_examples=6)
@given(seed=st.integers(0, 99))
def test_tokens_are_a_set(name, seed):
    widths, make = MECHANISMS[name]
    m, generator = scrambled(make()), torch.Generator().manual_seed(seed)
    inputs = [normal(2, n, d, seed=seed) for n, d in zip((4, 3, 5), widths, strict=False)]
    masks = [torch.rand(x.shape[:2], generator=generator) < 0.7 for x in inputs]
    orders = [torch.randperm(x.shape[1], generator=generator) for x in inputs]
    shuffled = [x[:, order] for x, order in zip(inputs, orders, strict=True)]
    moved = tuple(mask[:, order] for mask, order in zip(masks, orders, strict=True))
    assert_same(m(*shuffled, moved), m(*inputs, tuple(masks)))
