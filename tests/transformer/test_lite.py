"""Lite Transformer: two halves that do not see each other."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from tests.cases import assert_same, scrambled
from tests.feature.common import normal
from tests.transformer.common import REAL


@pytest.mark.parametrize(("kernel", "causal"), [(3, False), (5, False), (4, True), (1, False)])
def test_a_lightweight_convolution_channel_by_channel(kernel, causal):
    m, x = scrambled(rg.LightweightConvolution(6, 2, kernel, causal)), normal(7, 6)
    gated = []
    for t in x:
        z = m.W_I @ t + m.b_I
        gated.append(z[:6] * torch.sigmoid(z[6:]))
    rows = []
    for i in range(7):
        mixed = []
        for c in range(6):
            weights = m.W[c // 3].exp() / m.W[c // 3].exp().sum()
            total = torch.zeros((), dtype=torch.float64)
            for t in range(kernel):
                j = i + t - (kernel - 1 if causal else kernel // 2)
                if 0 <= j < 7:
                    total = total + weights[t] * gated[j][c]
            mixed.append(total)
        rows.append(m.W_O @ torch.stack(mixed) + m.b_O)
    assert_same(m(x), torch.stack(rows))


def test_the_halves_are_independent():
    m, x = scrambled(rg.LongShortAttention(12, 2)), normal(2, 7, 12)
    before = m(x)
    for half, other in ((slice(0, 6), slice(6, 12)), (slice(6, 12), slice(0, 6))):
        changed = x.clone()
        changed[..., half] += 1
        after = m(changed)
        assert_same(after[..., other], before[..., other])
        assert not torch.allclose(after[..., half], before[..., half])
    assert_same(before[..., :6], m.far(x[..., :6]))
    assert_same(before[..., 6:], m.near(x[..., 6:]))


def test_one_half_reaches_far_and_the_other_only_near():
    m, x = scrambled(rg.LongShortAttention(12, 2, kernel=3)), normal(1, 7, 12)
    changed = x.clone()
    changed[:, 6] += 1
    moved = (m(changed) - m(x)).abs().amax(0)
    assert (moved[:, :6].amax(-1) > 0).all()
    assert (moved[:, 6:].amax(-1) > 0).tolist() == [False] * 5 + [True] * 2


@pytest.mark.parametrize("as_object", [True, False])
def test_padding_is_a_border(as_object):
    m, x = scrambled(rg.LongShortAttention(12, 2)), normal(2, 7, 12)
    mask = rg.Keys(REAL) if as_object else REAL[:, None, None, :].expand(2, 2, 7, 7)
    found = m(x, mask=mask)
    assert_same(found[1, :4], m(x[1:, :4])[0])
    stack = scrambled(rg.TransformerEncoder(12, 2, 2, attention=rg.LongShortAttention))
    dirty = torch.where(REAL[..., None], x, math.nan)
    assert_same(stack(dirty, REAL)[1, :4], stack(x[1:, :4])[0])


def test_a_causal_one_sees_nothing_later():
    causal = lambda dim, heads: rg.LongShortAttention(dim, heads, kernel=3, causal=True)  # noqa: E731
    m, x = scrambled(rg.TransformerDecoder(12, 2, 2, cross=False, attention=causal)), normal(2, 7, 12)
    changed = x.clone()
    changed[:, 4] += 1
    assert_same(m(changed)[:, :4], m(x)[:, :4])


def test_refusals():
    with pytest.raises(ValueError, match="dim: got 7, expected an even number"):
        rg.LongShortAttention(7, 1)
    with pytest.raises(ValueError, match="kernel: got 4, expected an odd number"):
        rg.LightweightConvolution(6, 2, 4)
    with pytest.raises(ValueError, match="heads: got 4, expected a divisor of the width 6"):
        rg.LightweightConvolution(6, 4)


@pytest.mark.parametrize("pairs", [None, rg.Window(2), torch.ones(7, 7, dtype=torch.bool)])
def test_a_convolution_that_would_look_ahead_is_refused_beside_a_causal_mask(pairs):
    ahead = rg.TransformerDecoder(12, 2, 1, cross=False, attention=rg.LongShortAttention)
    with pytest.raises(
        ValueError, match="causal: got False, expected True beside a mask that hides what is later. Fix"
    ):
        ahead(torch.randn(2, 7, 12), None, REAL, pairs=pairs)
    with pytest.raises(ValueError, match="causal: got False"):
        rg.LongShortAttention(12, 2)(torch.randn(2, 7, 12), mask=rg.Causal())
    alone = rg.TransformerDecoder(12, 2, 1, cross=False, attention=lambda d, h: rg.LongShortAttention(d, h, kernel=1))
    assert alone(torch.randn(2, 7, 12), None, REAL, pairs=pairs).shape == (2, 7, 12)
    assert rg.LongShortAttention(12, 2)(torch.randn(2, 7, 12), mask=rg.Window(1)).shape == (2, 7, 12)


def test_a_convolution_across_sequences_that_stand_end_to_end_is_refused():
    mask = rg.Packed([3, 4]) & rg.Causal()
    for causal in (False, True):
        encode = rg.TransformerEncoder(8, 2, 1, attention=lambda d, h, c=causal: rg.LongShortAttention(d, h, causal=c))
        with pytest.raises(
            ValueError, match="mask: got Packed, several sequences, expected one sequence, since the conv"
        ):
            encode(torch.randn(1, 7, 8), pairs=mask)
    alone = scrambled(rg.LongShortAttention(8, 2, kernel=1)).double()
    x = normal(7, 8)
    assert_same(alone(x, mask=mask), torch.cat([alone(part, mask=rg.Causal()) for part in x.split([3, 4])]))
