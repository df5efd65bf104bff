"""Numbers, noise, dropout factors and windows of a tile by the kernels' own functions, beside those of torch."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import regard as rg
from regard.ops import random
from regard.ops.triton import align

SEED = torch.tensor([0x7123456789ABCDEF])


@triton.jit
def draw(SEED, EACH, FOURS, lead, feature, i, start, PURPOSE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    i = i + tl.arange(0, BM)
    j = start + tl.arange(0, BN)
    lead = (tl.program_id(0) + lead).to(tl.int64)
    at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(EACH + at, align.uniform(SEED, lead, feature, i[:, None], j[None, :], PURPOSE))
    tl.store(FOURS + at, align.uniform_tile(SEED, lead, feature, i, start, PURPOSE, BN))


@triton.jit
def derived(X, OUT, P, dropout, window, BM: tl.constexpr, BN: tl.constexpr):
    at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    x, position, j = tl.load(X + at), tl.load(P + tl.arange(0, BM))[:, None], tl.arange(0, BN)[None, :]
    tl.store(OUT + at, align.gumbel(x))
    tl.store(OUT + BM * BN + at, align.keep(x, dropout))
    tl.store(OUT + 2 * BM * BN + at, align.inside(position, j, window).to(tl.float32))
    tl.store(OUT + 3 * BM * BN + at, align.log_gaussian(position, j, window))
    tl.store(OUT + 4 * BM * BN + at, align.log_gaussian_slope(position, j, window))


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, math.nan)


@pytest.mark.parametrize("purpose", [random.SAMPLE, random.DROPOUT])
@pytest.mark.parametrize(("lead", "feature", "i", "start"), [(0, 0, 0, 0), (2, 5, 3, 8), (1, 0, 1000, 44)])
def test_a_tile_draws_the_same_numbers_as_the_other_executions(
    lead: int, feature: int, i: int, start: int, purpose: int
) -> None:
    each, fours = poisoned(16, 32), poisoned(16, 32)
    draw[(1,)](SEED, each, fours, lead, feature, i, start, PURPOSE=purpose, BM=16, BN=32)
    expected = random.uniform(SEED, (lead + 1,), feature + 1, range(i, i + 16), range(start, start + 32), purpose)
    assert torch.equal(each, expected[lead, feature])
    assert torch.equal(fours, expected[lead, feature])


@pytest.mark.parametrize(("dropout", "window"), [(0.3, 2.5), (0.9, 4.0)])
def test_noise_dropout_and_window_of_a_tile(dropout: float, window: float) -> None:
    x = random.uniform(SEED, (), None, range(16), range(32), random.SAMPLE)
    position = torch.rand(16) * 32
    position[0], position[1] = 5.0, 4.5
    out = poisoned(5, 16, 32)
    derived[(1,)](x, out, position, dropout, window, BM=16, BN=32)
    noise, kept, inside, bump, slope = out
    local = rg.Local(window)
    j, centre = torch.arange(32)[None], position[:, None].double().requires_grad_()
    exponent = -0.5 * ((j - centre) / (window / 2)) ** 2
    (by_position,) = torch.autograd.grad(exponent.sum(1).sum(), centre)
    assert torch.equal(inside.bool(), local.inside(position[:, None], j))
    assert torch.equal(kept > 0, x >= dropout)
    torch.testing.assert_close(kept[kept > 0], torch.full_like(kept[kept > 0], 1 / (1 - dropout)))
    torch.testing.assert_close(noise, random.gumbel(x))
    torch.testing.assert_close(bump, exponent.float())
    torch.testing.assert_close(slope.sum(1, keepdim=True), by_position.float(), rtol=1e-5, atol=1e-4)


def test_everything_dropped() -> None:
    x = random.uniform(SEED, (), None, range(16), range(32), random.SAMPLE)
    out = poisoned(5, 16, 32)
    derived[(1,)](x, out, torch.zeros(16), 1.0, 1.0, BM=16, BN=32)
    assert (out[1] == 0).all()


def test_an_alignment_survives_the_way_through_an_operator() -> None:
    whole = align.Align(SEED, torch.rand(2, 3), 0.5, 2.5, 0.1, 7, True, align.SAMPLED, False, align.SCALED)
    assert align.Align.unflat(*whole.flat()) == whole
    assert align.Align.unflat(*align.Align().flat()).is_plain


def test_an_order_holds_every_query_of_a_row_once_and_goes_by_position() -> None:
    position = torch.rand(3, 70) * 50
    position[0, :4] = torch.tensor([math.nan, -7.0, 1e9, math.inf])
    order = align.Align(position=position, window=2.0, scattered=True).order(50)
    assert order is not None
    assert order.dtype == torch.int32
    assert torch.equal(order.sort(-1).values, torch.arange(70, dtype=torch.int32).expand(3, 70))
    sorted_by = position.nan_to_num(0.0).clamp(0.0, 50.0).gather(1, order.long())
    assert (sorted_by.diff(dim=-1) > -align.TOGETHER).all()
    assert torch.equal(order, align.Align(position=position, window=2.0, scattered=True).order(50))
    assert align.Align(position=position, window=2.0).order(50) is None
