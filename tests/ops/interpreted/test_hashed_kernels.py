"""Hashed attention by the kernels against the equation in float64, under the mask that the other executions use."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.ops.buckets import HOLE, Buckets, HashedMask
from regard.ops.chunks import _places
from regard.ops.triton import hashed


def operands(rounds: int, n: int, chunk: int, across: bool, low: float, high: float) -> tuple[HashedMask, list[Tensor]]:
    """Two rows; half of the first takes no part."""
    torch.manual_seed(n + rounds)
    ids = torch.randint(0, 4, (2, rounds, n))
    ids[0, :, n // 2 :] = HOLE
    mask = HashedMask(Buckets.of(ids, chunk, across), low, high)
    q, k, v, g = (torch.randn(2, n, d, dtype=torch.float64) for d in (5, 5, 7, 7))
    return mask, [q, F.normalize(k, dim=-1), v, g]


def equation(mask: HashedMask, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
    """The result and its gradients, from all scores at once."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    seen = mask.tile(range(q.shape[1]), range(q.shape[1]), q.device)
    alive = seen.any(-1, keepdim=True)
    scores = (q @ k.mT).masked_fill(~seen & alive, -math.inf)
    result = torch.where(alive, scores.softmax(-1), 0.0) @ v
    return [result.detach(), *torch.autograd.grad((result * g).sum(), (q, k, v))]


def kernels(mask: HashedMask, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
    places = _places(mask)
    assert (places.spots is None) == (mask.buckets.rounds == 1)
    out, total = hashed.forward(q, k, v, places)
    return [out, *hashed.backward(g, q, k, v, out, total, places)]


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize(("n", "chunk"), [(13, 4), (37, 17), (32, 16)])
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize(("low", "high"), [(-math.inf, 0), (-math.inf, math.inf), (-5, -1)])
def test_the_kernels_are_the_equation(rounds, n, chunk, across, low, high):
    mask, given = operands(rounds, n, chunk, across, low, high)
    single = [x.float() for x in given]
    expected = equation(mask, *given)
    budget = [2 * (a.double() - b).abs().max() for a, b in zip(equation(mask, *single), expected, strict=True)]
    for found, exact, allowed in zip(kernels(mask, *single), expected, budget, strict=True):
        rounding = 8 * torch.finfo(torch.float32).eps * exact.abs().max()
        assert (found.double() - exact).abs().max() <= allowed + rounding


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("high", [0, math.inf])
def test_what_is_not_finite_is_seen_in_the_rows_of_the_equation(rounds, bad, high):
    """Also by a token that sees nobody but itself, and where no other round has anything to say."""
    mask, given = operands(rounds, 17, 5, False, -math.inf, high)
    ids, alone, single = mask.buckets.ids, 11, [x.float() for x in given]
    ids[1, :, alone] = 9
    mask = HashedMask(Buckets.of(ids, 5), high=high)
    expected, seen = kernels(mask, *single), mask.tile(range(17), range(17), torch.device("cpu"))
    assert seen[1, alone, alone]
    for token in (alone, 14):
        # A key is its query, normalised.
        q, k, v, g = (x.clone() for x in single)
        q[1, token], k[1, token] = bad, math.nan
        exact, found = (by(mask, q, k, v, g) for by in (equation, kernels))
        assert torch.equal(found[0].isnan(), exact[0].isnan())
        assert found[0][1, seen[1, :, token]].isnan().all()
        assert all(torch.equal(one[0], other[0]) for one, other in zip(found, expected, strict=True)), "the other row"
        assert found[1][1, token].isnan().all()
        v[1, token] = bad
        assert not kernels(mask, *single[:2], v, g)[0][1, seen[1, :, token]].isfinite().any()


def test_what_they_do_not_take():
    q = torch.empty(1, 5, 64)
    assert hashed.why_not(q, q, 64) is None
    assert "float64" in hashed.why_not(q.double(), q.double(), 64)
    assert "tokens" in hashed.why_not(q, q, 256)
    assert "float32" in hashed.why_not(q, q, 128)
    assert hashed.why_not(q.bfloat16(), q.bfloat16(), 128) is None
