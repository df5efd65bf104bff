"""Counter-based randomness: the published numbers, the same in every tile, and evenly spread."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import regard as rg
from regard.ops import random
from regard.ops.random import DROPOUT, PERMUTE, SAMPLE, SELECT, draw_seed, gumbel, philox, uniform

PURPOSES = [SAMPLE, DROPOUT, SELECT, PERMUTE]

# Known answers of Philox 4x32-10 (Salmon et al. 2011): counter, key, result.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def signed(low: int, high: int) -> int:
    """Two 32-bit words as one int64."""
    word = (high << 32) | low
    return word - (1 << 64) if word >> 63 else word


def looped_philox(counter: list[int], key: list[int]) -> list[int]:
    """The paper's rounds in whole numbers of any length."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 % 2**32, (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_published_numbers(counter: list[int], key: list[int], answer: list[int]) -> None:
    words = philox(torch.tensor([signed(*key)]), tuple(torch.tensor([c]) for c in counter))
    assert [int(word) for word in words] == answer
    assert looped_philox(counter, key) == answer


word32 = st.integers(0, 2**32 - 1)


@given(counter=st.lists(word32, min_size=4, max_size=4), key=st.lists(word32, min_size=2, max_size=2))
def test_philox_of_any_counter_is_that_of_whole_numbers(counter: list[int], key: list[int]) -> None:
    words = philox(torch.tensor([signed(*key)]), tuple(torch.tensor([c]) for c in counter))
    assert [int(word) for word in words] == looped_philox(counter, key)


@pytest.mark.parametrize("features", [None, 3])
def test_numbers_are_those_of_their_position(features: int | None) -> None:
    """Word j mod 4 of the counter (j div 4, i, leading index, feature and purpose); 23 bits and a half step."""
    seed, lead, nq, n = 0x1234_5678_9ABC_DEF0, (2, 3), 2, 7
    drawn = uniform(torch.tensor([seed]), lead, features, range(nq), range(n), DROPOUT)
    assert drawn.shape == (*lead, *([] if features is None else [features]), nq, n)
    key = [seed % 2**32, seed >> 32]
    for b in range(6):
        for f in range(features or 1):
            for i in range(nq):
                for j in range(n):
                    word = looped_philox([j // 4, i, b, f * len(PURPOSES) + DROPOUT], key)[j % 4]
                    at = (b // 3, b % 3, *([] if features is None else [f]), i, j)
                    assert float(drawn[at]) == ((word >> 9) + 0.5) / 2**23


@given(data=st.data())
def test_every_tile_draws_the_same_numbers(data: Any) -> None:
    lead, features = data.draw(st.sampled_from([(), (2,), (2, 3)])), data.draw(st.sampled_from([None, 1, 3]))
    purpose = data.draw(st.sampled_from(PURPOSES))
    nq, n = data.draw(st.integers(0, 7)), data.draw(st.integers(0, 13))
    seed = torch.tensor([data.draw(st.integers(0, 2**63 - 2))])
    whole = uniform(seed, lead, features, range(nq), range(n), purpose)
    i, j = (range(*sorted((data.draw(st.integers(0, m)), data.draw(st.integers(0, m))))) for m in (nq, n))
    tile = uniform(seed, lead, features, i, j, purpose)
    assert torch.equal(tile, whole[..., i.start : i.stop, j.start : j.stop])


def numbers(count: int, purpose: int = SAMPLE, seed: int = 11) -> Tensor:
    return uniform(torch.tensor([seed]), (2,), 3, range(count), range(101), purpose)


def test_numbers_are_evenly_spread_and_never_zero_or_one() -> None:
    drawn = numbers(499)
    assert float(drawn.min()) > 0
    assert float(drawn.max()) < 1
    assert stats.kstest(drawn.flatten().double().numpy(), "uniform").pvalue > 1e-3


def test_the_ends_of_the_range_stay_inside_it() -> None:
    """0 and the largest word map to numbers whose two logarithms are finite."""
    for word in (0, 2**32 - 1):
        number = (torch.tensor(word >> 9).to(torch.float32) + 0.5) * 2.0**-23
        assert 0 < float(number) < 1
        assert bool(gumbel(number).isfinite())


def test_no_two_axes_or_purposes_share_numbers() -> None:
    drawn = torch.cat([numbers(7, purpose).flatten() for purpose in PURPOSES])
    # 23 bits each: of n numbers about n(n-1)/2^24 pairs coincide by chance.
    expected = len(drawn) * (len(drawn) - 1) / 2**24
    assert len(drawn) - len(drawn.unique()) < expected + 4 * expected**0.5
    for axis in range(4):
        x = numbers(7).movedim(axis, 0).double()
        r = torch.corrcoef(torch.stack([x[:-1].flatten(), x[1:].flatten()]))[0, 1]
        assert abs(float(r)) < 4 / x[1:].numel() ** 0.5, f"axis {axis}"


def test_gumbel_noise_has_its_distribution() -> None:
    assert stats.kstest(gumbel(numbers(499).double()).flatten().numpy(), "gumbel_r").pvalue > 1e-3
    u = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    assert torch.allclose(gumbel(u), torch.tensor([-0.834032445247956, 0.366512920581664, 2.25036732731245]).double())


def test_seeds_come_from_torchs_generator_and_only_when_something_is_random() -> None:
    torch.manual_seed(5)
    first = draw_seed(torch.device("cpu"))
    torch.manual_seed(5)
    assert torch.equal(draw_seed(torch.device("cpu")), first)
    x = torch.randn(2, 5, 4)
    before = torch.get_rng_state()
    rg.Attention("dot", dropout=0.5).eval()(x, x)
    rg.Attention("dot", "hard").eval()(x, x)
    rg.Attention("dot")(x, x)
    assert torch.equal(torch.get_rng_state(), before)
    rg.Attention("dot", dropout=0.5)(x, x)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_keeps_the_right_share_and_scales_it(p: float) -> None:
    attend = rg.Attention(rg.Dot(), dropout=p).double()
    query, key = torch.zeros(1009, 3, dtype=torch.float64), torch.zeros(97, 3, dtype=torch.float64)
    value = torch.eye(97, dtype=torch.float64)
    weights = attend(query, key, value) * 97
    kept = weights > 0
    if p == 1.0:
        assert not bool(kept.any())
        return
    assert float((weights[kept] - 1 / (1 - p)).abs().max()) < 1e-10
    share, count = float(kept.double().mean()), kept.numel()
    assert abs(share - (1 - p)) <= 4 * (p * (1 - p) / count) ** 0.5


def test_dropping_everything_leaves_finite_gradients() -> None:
    attend = rg.Attention(rg.General(3, 3), dropout=1.0)
    x = torch.randn(2, 5, 3)
    attend(x, x).sum().backward()
    assert bool((attend.score.W.grad == 0).all())


@pytest.mark.parametrize("p", [0.0, 1e-9, 2.0**-24, 3 * 2.0**-24, 0.1, 1 / 3, 0.5, 0.6, 0.999999, 1.0])
def test_words_are_compared_as_their_numbers_would_be(p):
    least = random.least_word(p)
    words = torch.arange(max(0, least - 1025), min(2**32, least + 1025))
    assert torch.equal(words >= least, random.numbers(words) >= p)
    drawn_at = torch.tensor([5]), (2,), 3, range(1, 4), range(2, 9), random.DROPOUT
    assert torch.equal(random.at_least(p, *drawn_at), random.uniform(*drawn_at) >= p)


def test_queries_may_come_in_any_order():
    whole = random.uniform(torch.tensor([5]), (2,), None, range(6), range(7), random.DROPOUT)
    rows = torch.tensor([4, 0, 5])
    assert torch.equal(random.uniform(torch.tensor([5]), (2,), None, rows, range(7), random.DROPOUT), whole[:, rows])
