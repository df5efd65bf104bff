"""Associative scans: prefixes of any product, and the log-space products."""

from __future__ import annotations

import math
from functools import reduce

import pytest
import torch

from regard.query.scans import followed, log_convolution, log_sum_exp, scan
from tests.cases import assert_same
from tests.feature.common import normal

every_length = pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 7, 8, 13, 31])


@every_length
@pytest.mark.parametrize("reverse", [False, True])
def test_every_prefix_of_a_product_that_does_not_commute(n, reverse):
    x = normal(n, 2, 3, 3)
    found = scan(x, torch.matmul, reverse=reverse)
    assert found.shape == x.shape
    for j in range(n):
        part = list(x[j:] if reverse else x[: j + 1])
        assert_same(found[j], reduce(torch.matmul, part))


def test_the_depth_is_logarithmic():
    depth = {}

    def measured(n: int) -> int:
        calls = []
        scan(torch.ones(n), lambda a, b: calls.append(len(a)) or a + b)
        assert sum(calls) <= 2 * n
        return len([c for c in calls if c])

    for n in (16, 1024, 65536):
        depth[n] = measured(n)
        assert depth[n] <= 2 * math.log2(n)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_log_convolution_is_a_product_of_polynomials(size):
    a, b = normal(3, size, 2), normal(3, size, 2, seed=1)
    found = log_convolution(a, b).exp()
    for row in range(3):
        for n in range(size):
            expected = sum(a[row, i].exp() * b[row, n - i].exp() for i in range(n + 1))
            assert_same(found[row, n], expected)


def test_nothing_has_a_zero_gradient():
    x = torch.tensor([[-math.inf, -math.inf], [0.5, -math.inf]], dtype=torch.float64, requires_grad=True)
    found = log_sum_exp(x, -1)
    assert found.tolist() == [-math.inf, 0.5]
    (first,) = torch.autograd.grad(torch.where(found > -math.inf, found, 0.0).square().sum(), x, create_graph=True)
    assert first.tolist() == [[0.0, 0.0], [1.0, 0.0]]
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [[0.0, 0.0], [2.0, 0.0]]


@every_length
def test_states_are_handed_down(n):
    maps = torch.randint(5, (n, 3, 5), generator=torch.Generator().manual_seed(n))
    last = torch.tensor([0, 4, 2])
    found = followed(maps, last)
    assert found.shape == (n, 3)
    for row in range(3):
        state = int(last[row])
        for j in reversed(range(n)):
            assert int(found[j, row]) == state
            state = int(maps[j, row, state])
