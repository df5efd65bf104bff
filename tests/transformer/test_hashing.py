"""Hashing of directions: one hash or several, what falls together, and what it costs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import regard as rg
from regard.bench.measure import cpu_peak_mib, exponent
from regard.ops.buckets import HOLE
from regard.transformer import hashing
from regard.transformer.hashing import MOST_DIRECTIONS, bucket_ids, directions, own_directions
from tests.cases import assert_same, scrambled
from tests.transformer.common import tokens


def one_by_one(x: Tensor, rotations: Tensor, counts: tuple[int, ...]) -> list[int]:
    """Buckets of vectors (N, d) by the equation, directions (d, sum of counts)."""
    found = []
    for vector in x:
        bucket, size, first = 0, 1, 0
        for count in counts:
            sides = [float(vector @ rotations[:, first + c]) for c in range(count)]
            both = sides + [-s for s in sides]
            bucket, size, first = bucket + size * both.index(max(both)), size * 2 * count, first + count
        found.append(bucket)
    return found


@pytest.mark.parametrize("counts", [(5,), (2, 3), (3, 1), (2, 1, 3)])
def test_buckets_are_those_of_the_equation(counts):
    query, rotations = tokens(2, 3, 13, 5), tokens(3, 5, 2, sum(counts), seed=1)
    ids = bucket_ids(query, rotations, counts)
    assert ids.shape == (2, 3, 2, 13)
    assert ids.dtype == torch.int16
    for b, h, r in itertools.product(range(2), range(3), range(2)):
        assert ids[b, h, r].tolist() == one_by_one(query[b, h], rotations[h, :, r], counts)


@pytest.mark.parametrize("buckets", [6, (6,), (4, 2), (2, 4, 2)])
def test_every_bucket_is_reached_and_none_beyond(buckets):
    attend = rg.LSHAttention(8, 1, rounds=3, buckets=buckets).eval()
    total = buckets if isinstance(buckets, int) else math.prod(buckets)
    ids = attend.hash(torch.randn(1, 1, 4000, 8, generator=torch.Generator().manual_seed(0)))
    for r in range(3):
        assert set(ids[0, 0, r].tolist()) == set(range(total))


@pytest.mark.parametrize("buckets", [64, (8, 8), (4, 4, 4)])
def test_neighbours_fall_together_more_often_the_nearer_they_are(buckets):
    torch.manual_seed(0)
    attend, x = rg.LSHAttention(16, 1, rounds=8, buckets=buckets).eval(), torch.randn(1, 1, 1000, 16)
    ids, shares = attend.hash(x), []
    for apart in (0.05, 0.2, 0.6):
        near = attend.hash(x + apart * torch.randn_like(x))
        shares.append(float((ids == near).float().mean()))
    shares.append(float((ids == attend.hash(torch.randn_like(x))).float().mean()))
    print(f"share of pairs in one of {buckets} buckets, near to far: {[round(s, 3) for s in shares]}")
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.7
    # Strangers meet by chance: a little more often than in buckets of one size.
    assert shares[-1] < 2.5 / 64


def test_many_buckets_are_pairs_of_few():
    assert directions(None, 4096, 64, padded=False) == (64,)
    assert directions(200, 4096, 64, padded=False) == (100,)
    assert directions((8, 6), 4096, 64, padded=False) == (4, 3)
    for n in (4097, 10_000, 65_536, 1_000_000):
        first, second = directions(None, n, 64, padded=False)
        wanted = 2 * math.ceil(n / 64)
        assert wanted <= 4 * first * second <= 1.2 * wanted
        assert first + second <= 1.1 * math.sqrt(wanted) + 1


def test_a_sequence_has_the_buckets_that_it_has_without_padding():
    lengths = torch.arange(1500)
    first, second = own_directions(lengths[:, None] > torch.arange(1500), 3)
    most = directions(None, 1500, 3, padded=True)
    for n in range(1, 1500):
        own = directions(None, n, 3, padded=False)
        assert (int(first[n]), int(second[n])) == (*own, 0)[:2]
        assert all(one <= other for one, other in zip(own, most, strict=False))


@pytest.mark.parametrize("n", [5, MOST_DIRECTIONS, MOST_DIRECTIONS + 1, 130])
def test_padding_changes_nothing_however_many_hashes_it_takes(n):
    torch.manual_seed(3)
    attend, x = scrambled(rg.LSHAttention(6, 2, rounds=2, chunk=1)).eval(), tokens(1, n, 6)
    expected = attend(x)
    for longer in (n + 1, 150):
        padded = torch.full((1, longer, 6), math.nan, dtype=torch.float64)
        padded[:, :n] = x
        assert_same(attend(padded, mask=rg.Keys(torch.arange(longer)[None] < n))[:, :n], expected)


@pytest.mark.parametrize("buckets", [None, (4, 6)])
def test_panels_change_nothing(buckets, monkeypatch):
    attend, query = rg.LSHAttention(10, 2, chunk=1, buckets=buckets).double().eval(), tokens(3, 2, 131, 5)
    real = torch.arange(131) < torch.tensor([[131], [70], [9]])
    expected = [attend.hash(query), attend.hash(query, real)]
    assert (expected[1][~real[:, None, None].expand_as(expected[1])] == HOLE).all()
    for elements in (1, 5000):
        monkeypatch.setattr(hashing, "CPU_PANEL_ELEMENTS", elements)
        for one, other in zip([attend.hash(query), attend.hash(query, real)], expected, strict=True):
            assert torch.equal(one, other)


def test_attention_with_pairs_of_hashes_is_the_same_in_every_execution():
    torch.manual_seed(3)
    attend, x = scrambled(rg.LSHAttention(6, 2, rounds=2, chunk=4, buckets=(4, 2))).eval(), tokens(2, 29, 6)
    with rg.execution("dense"):
        expected = attend(x, mask=rg.Causal())
    assert_same(attend(x, mask=rg.Causal()), expected)


_SCRIPT = """
import torch
from regard.transformer import LSHAttention
attend, n = LSHAttention(64, 2, rounds=2, chunk=16).eval(), int(argv[0])
query = torch.randn(1, 2, n, 32)
attend.hash(query[..., :64, :])
ready()
attend.hash(query)
"""


class Largest(TorchDispatchMode):
    """The size of the largest tensor that anything gives."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = result if isinstance(result, tuple | list) else [result]
        self.elements = max(
            [self.elements, *(x.untyped_storage().nbytes() // 4 for x in given if isinstance(x, Tensor))]
        )
        return result


def test_no_tensor_grows_faster_than_the_sequence():
    attend, found, lengths = rg.LSHAttention(16, 2, rounds=2, chunk=16).eval(), [], [4096, 8192, 16_384]
    for n in lengths:
        query = torch.randn(1, 2, n, 8)
        with Largest() as seen:
            attend.hash(query)
        found.append(seen.elements)
    print(f"hashing {lengths} tokens: tensors of up to {found} numbers, N^{exponent(lengths, found):.2f}")
    assert exponent(lengths, found) <= 1.1
    # By one hash there would be as many products as tokens times buckets.
    assert found[-1] < attend.heads * attend.rounds * lengths[-1] * (2 * lengths[-1] // 16) / 50


@pytest.mark.slow
def test_memory_of_hashing_is_linear():
    lengths = [16_384, 65_536]
    peaks = [cpu_peak_mib(_SCRIPT, n) for n in lengths]
    print(f"hashing {lengths} tokens: {[round(p, 1) for p in peaks]} MiB, N^{exponent(lengths, peaks):.2f}")
    assert exponent(lengths, peaks) <= 1.1


@pytest.mark.parametrize("buckets", [3, (4, 3), (), (4, 0), (256, 256), 40_000])
def test_refusals(buckets):
    with pytest.raises(ValueError, match="buckets: got"):
        rg.LSHAttention(6, 2, buckets=buckets)
