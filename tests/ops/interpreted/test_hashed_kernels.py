"""Hashed attention by the kernels against the equation in float64, under the mask that the other executions use."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.ops.hashed import HOLE, Buckets, HashedMask
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
    buckets = mask.buckets
    spots = torch.where(buckets.ids == HOLE, -100, buckets.spots)
    order, spots = (x.movedim(-2, 0).int().contiguous() for x in (buckets.order, spots))
    sizes = buckets.chunk, int(max(mask.low, -(2**30))), int(min(mask.high, 2**30))
    out, total = hashed.forward(q, k, v, order, spots, *sizes)
    return [out, *hashed.backward(g, q, k, v, out, total, order, spots, *sizes)]


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


def test_what_they_do_not_take():
    q = torch.empty(1, 5, 64)
    assert hashed.why_not(q, q, 64) is None
    assert "float64" in hashed.why_not(q.double(), q.double(), 64)
    assert "tokens" in hashed.why_not(q, q, 256)
    assert "float32" in hashed.why_not(q, q, 128)
    assert hashed.why_not(q.bfloat16(), q.bfloat16(), 128) is None
