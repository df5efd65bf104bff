"""What the mechanisms of queries share: refusals that name the argument."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.query.parts import in_range, operand
from tests.feature.common import normal

WEIGHT = torch.zeros(3, 5)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (None, TypeError, "key: got NoneType, expected a floating-point tensor"),
        (torch.zeros(2, 5, dtype=torch.long), TypeError, "key: got a tensor of torch.int64, expected a floating-point"),
        (torch.zeros(2, 4), ValueError, r"key: got shape \(2, 4\), expected width 5: \(..., 5\)"),
        (torch.zeros(()), ValueError, r"key: got shape \(\), expected width 5"),
        (torch.zeros(2, 5).double(), TypeError, "key: got a tensor of torch.float64, expected the module's dtype"),
    ],
)
def test_what_a_weight_cannot_multiply_is_refused(x, error, message):
    with pytest.raises(error, match=message):
        operand("key", x, WEIGHT)


def test_what_fits_passes_and_autocast_may_change_the_dtype():
    operand("key", torch.zeros(2, 5), WEIGHT)
    operand("key", torch.zeros(2, 3), WEIGHT, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        operand("key", torch.zeros(2, 5).bfloat16(), WEIGHT)


def test_indices_out_of_range_are_refused():
    in_range("index", torch.tensor([-1, 2]), -1, 3, "any")
    in_range("index", torch.zeros(0, dtype=torch.long), 0, 0, "any")
    for index in (torch.tensor([0, 3]), torch.tensor([-2, 0])):
        with pytest.raises(IndexError, match="index: got indices from .* to ., expected any"):
            in_range("index", index, -1, 3, "any")


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: rg.MultiHeadAttention(4, heads=2), "query"),
        (lambda: rg.AgreementAttention(4, heads=2), "query"),
        (lambda: rg.QueryRouting(4, experts=2), "query"),
        (lambda: rg.MultiHopAttention(4), "query"),
        (lambda: rg.KeyValueMemory(4, hops=2), "query"),
        (lambda: rg.CrossModalAttention(4, shared_dim=3), "first"),
    ],
)
def test_the_argument_is_named(make, name):
    mechanism, key = make(), normal(2, 7, 4).float()
    with pytest.raises(ValueError, match=rf"{name}: got shape \(2, 7, 3\), expected width 4"):
        mechanism(key[..., :3], key)
    with pytest.raises(TypeError, match=rf"{name}: got a tensor of torch.float64, expected the module's dtype"):
        mechanism(key.double(), key.double())
    with pytest.raises(TypeError, match=rf"{name}: got NoneType, expected a floating-point tensor"):
        mechanism(None, key)
    with pytest.raises(ValueError, match="(key|second|query): got"):
        mechanism(key, key[..., :3])
