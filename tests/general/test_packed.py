"""The mask of sequences end to end: what it says, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard as rg
from regard.general.alignments.reinforced import ReinforcedPairs
from regard.general.bound import Sizes

CPU = torch.device("cpu")
SEQUENCES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6)
DISTANCES = st.one_of(st.integers(-4, 4), st.sampled_from([-math.inf, math.inf]))
BANDS = st.one_of(st.none(), st.tuples(DISTANCES, DISTANCES))


def written_out(queries: list[int], keys: list[int], band: rg.Band | None = None) -> torch.Tensor:
    """Pair by pair; a band as each sequence has it that stands alone."""
    of_query = [(s, i) for s, count in enumerate(queries) for i in range(count)]
    of_key = [(s, j) for s, count in enumerate(keys) for j in range(count)]
    band = band or rg.Band(-math.inf, math.inf)
    alone = [band.bind(Sizes((), q, k)).tile(range(q), range(k), CPU) for q, k in zip(queries, keys, strict=True)]
    pairs = [[s == t and bool(alone[s][i, j]) for t, j in of_key] for s, i in of_query]
    return torch.tensor(pairs, dtype=torch.bool).reshape(len(of_query), len(of_key))


def said(mask: rg.Mask, sizes: Sizes) -> torch.Tensor:
    return mask.bind(sizes).tile(range(sizes.nq), range(sizes.n), CPU).expand(sizes.nq, sizes.n)


@given(SEQUENCES, BANDS, st.booleans())
def test_it_says_pair_by_pair_what_it_says_at_once(sequences, band, alike):
    queries, keys = [q for q, _ in sequences], [k for _, k in sequences]
    queries = keys if alike else queries
    mask, expected = rg.Packed(keys, queries), written_out(queries, keys)
    sizes = Sizes((2,), sum(queries), sum(keys))
    if band is not None:
        expected = written_out(queries, keys, rg.Band(*band))
        mask = mask & rg.Band(*band)
    bound = mask.bind(sizes)
    assert torch.equal(bound.tile(range(sizes.nq), range(sizes.n), CPU).expand_as(expected), expected)
    assert torch.equal(bound.keys(CPU).expand(sizes.n), expected.any(-2))
    assert torch.equal(bound.rows(CPU).expand(sizes.nq), expected.any(-1))
    last = (expected * torch.arange(1, sizes.n + 1)).amax(-1) if sizes.n else torch.zeros(sizes.nq, dtype=torch.long)
    assert torch.equal(bound.ends(CPU).expand(sizes.nq), last)
    for i in (range(0, sizes.nq // 2), range(sizes.nq // 3, sizes.nq)):
        for j in (range(0, sizes.n // 2), range(sizes.n // 3, sizes.n)):
            seen = bool(expected[i.start : i.stop, j.start : j.stop].any())
            assert bound.meets(i, j) or not seen
            assert torch.equal(
                bound.tile(i, j, CPU).expand(len(i), len(j)), expected[i.start : i.stop, j.start : j.stop]
            )


def test_bands_hold_within_each_sequence_without_being_written_out():
    bound = (rg.Causal() & rg.Packed([3, 4]) & rg.Window(1)).bind(Sizes((), 7, 7))
    assert bound.pieces is not None
    assert (bound.pieces.low, bound.pieces.high) == (-1, 0)
    assert (rg.Packed([3, 4], [2, 5]) & rg.Causal()).bind(Sizes((), 7, 7)).pieces == ((2, 5), (3, 4), -math.inf, 0)
    assert (rg.Packed([3, 4]) & rg.Keys(torch.ones(7, dtype=torch.bool))).bind(Sizes((), 7, 7)).pieces is None


def test_a_sequence_of_other_numbers_of_queries_never_sees_its_future():
    allowed = said(rg.Packed([3, 4], queries=[3, 1]) & rg.Causal(), Sizes((), 4, 7))
    assert allowed.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 1, 1],
    ]


@given(SEQUENCES, st.tuples(DISTANCES, DISTANCES), st.lists(st.booleans(), min_size=30, max_size=30))
def test_bands_hold_within_each_sequence_however_they_are_joined(sequences, distances, real):
    queries, keys = [q for q, _ in sequences], [k for _, k in sequences]
    sizes, band = Sizes((), sum(queries), sum(keys)), rg.Band(*distances)
    packed, some = rg.Packed(keys, queries), rg.Keys(torch.tensor(real)[: sizes.n])
    first = rg.Where(lambda i, j: j == 0)
    apart, near = written_out(queries, keys), written_out(queries, keys, band)
    far = said(band, sizes)
    is_first = torch.arange(sizes.n).expand(sizes.nq, -1) == 0
    for mask, expected in (
        (packed & some & band, near & some.allowed),
        (band & (some & packed), near & some.allowed),
        ((some & band) & packed, near & some.allowed),
        (packed & (band | some), near | apart & some.allowed),
        ((first | packed) & band, is_first & far | near),
        (band & packed & packed, near),
        (packed & some & (packed & band), near & some.allowed),
    ):
        assert torch.equal(said(mask, sizes), expected), mask


def test_lengths_may_be_a_tensor():
    assert repr(rg.Packed(torch.tensor([2, 3]), queries=[1, 1])) == "Packed([2, 3], queries=[1, 1])"
    assert repr(rg.Packed((2, 0))) == "Packed([2, 0])"


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([2, -1], ValueError, r"lengths: got \[2, -1\], expected whole numbers >= 0"),
        ([2, 1.5], ValueError, r"lengths: got \[2, 1.5\]"),
        ([True], ValueError, r"lengths: got \[True\]"),
        (7, TypeError, "lengths: got int, expected whole numbers >= 0, one for each sequence"),
        ("21", TypeError, "lengths: got str"),
        (torch.tensor([1.0]), TypeError, "lengths: got a tensor of torch.float32 with 1 axes"),
        (torch.tensor([[1]]), TypeError, "with 2 axes"),
        (torch.tensor([-1]), ValueError, r"lengths: got \[-1\]"),
        (
            torch.ones(1, dtype=torch.int64, device="meta"),
            ValueError,
            "lengths: got a tensor on meta.*Fix: keep them on the host",
        ),
    ],
)
def test_what_is_no_list_of_lengths_is_refused(lengths, error, message):
    with pytest.raises(error, match=message):
        rg.Packed(lengths)


def test_lengths_that_do_not_add_up_are_refused():
    attend, x = rg.Attention("dot"), torch.randn(7, 3)
    with pytest.raises(ValueError, match="lengths: got numbers that add up to 5, expected 7, as there are keys"):
        attend(x, x, mask=rg.Packed([2, 3]))
    with pytest.raises(ValueError, match=r"Fix: give the number of keys of every sequence; padding .* is Padding"):
        attend(x[:3], x[:3], mask=rg.Packed([2]))
    with pytest.raises(ValueError, match=r"lengths: got .* 4, expected 7.*Fix: these are of the queries, queries=…"):
        attend(x[:4], x, mask=rg.Packed([3, 1]))
    with pytest.raises(ValueError, match=r"queries: got numbers that add up to 7, expected 4.*Fix: pass queries="):
        attend(x[:4], x, mask=rg.Packed([4, 3]))
    with pytest.raises(ValueError, match="queries: got 1 numbers, expected one for each sequence, 2"):
        rg.Packed([2, 3], queries=[5])


@pytest.mark.parametrize(
    ("align", "since"),
    [
        (rg.Reinforced(key_dim=3, context=True), "the policy sees the mean of the keys"),
        (ReinforcedPairs(key_dim=3), "a query that is not selected reads the mean of all"),
        (rg.DependencyTree(single_root=True), "a tree has a single root"),
    ],
)
def test_what_all_sequences_would_decide_together_is_refused(align, since):
    attend, x = rg.Attention("dot", align), torch.randn(7, 3)
    for mask in (rg.Packed([3, 4]), rg.Packed([3, 4]) & rg.Keys(torch.ones(7, dtype=torch.bool))):
        with pytest.raises(
            ValueError, match=f"mask: got Packed, several sequences, expected one sequence, since {since}"
        ):
            attend(x, x, mask=mask)
