"""The attention of a layer: multi-head attention, with positions and a cache."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from regard.general.bound import Sizes
from regard.transformer import Slot
from regard.transformer.sharing import Shared, share
from tests.cases import assert_same, scrambled
from tests.feature.common import normal
from tests.transformer.common import REAL, RELATIVE


def copied(options=None, **more):
    ours = scrambled(rg.TransformerAttention(8, 2, **(options or {}), **more))
    plain = rg.MultiHeadAttention(8, 2, bias=True, **(options or {})).double()
    plain.load_state_dict(ours.state_dict(), strict=False)
    return ours, plain


OPTIONS = {
    "plain": {},
    "additive": {"score": "additive", "align": "sparsemax"},
    "grouped": {"key_heads": 1},
    "different": {"score": ["additive", "dot"]},
    "wide values": {"head_dim": (3, 5)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_without_positions_it_is_multi_head_attention(options):
    ours, plain = copied(options)
    x, memory = normal(2, 7, 8), normal(2, 5, 8, seed=1)
    assert_same(ours(x), plain(x))
    assert_same(ours(x, memory), plain(x, memory))
    for mask in (rg.Causal() & rg.Keys(REAL), REAL[:, None, None] & torch.ones(2, 2, 7, 7, dtype=torch.bool).tril()):
        dirty = torch.where(REAL[..., None], x, math.nan) if isinstance(mask, rg.Mask) else x
        assert_same(ours(dirty, mask=mask)[REAL], plain(dirty, mask=mask)[REAL])
    pairs = torch.where(REAL[:, None], 0.0, -math.inf).double()
    assert_same(ours(x, bias=pairs), plain(x, mask=rg.Keys(REAL)))
    assert_same(ours(x, bias=lambda i, j: -((i - j) ** 2.0)), plain(x, bias=lambda i, j: -((i - j) ** 2.0)))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("n", [3, 50])
def test_one_product_projects_as_three_do(n, options):
    attend, x = scrambled(rg.TransformerAttention(8, 2, **options)), normal(2, n, 8)
    for together, apart in zip(attend.project(x, x, x), attend.project(x, x.clone(), x), strict=True):
        assert_same(together, apart)


def test_a_shared_mask_is_the_mask():
    ours, plain = copied()
    x = torch.where(REAL[..., None], normal(2, 7, 8), 0.0)
    sizes = Sizes((2,), 7, 7)
    for pairs in (None, rg.Causal(), rg.Window(1), rg.Directional("forward")):
        mask = rg.Keys(REAL) if pairs is None else rg.Keys(REAL) & pairs
        assert_same(ours(x, mask=share(REAL, pairs, sizes, x.device))[REAL], plain(x, mask=mask)[REAL])
    assert share(None, None, sizes, x.device) is None
    assert isinstance(share(REAL, None, sizes, x.device).also(rg.Causal(), x.device), Shared)


def test_a_token_that_may_look_nowhere_reads_zero_in_spite_of_the_biases():
    ours = scrambled(rg.TransformerAttention(8, 2, position="directional"))
    x = normal(2, 7, 8)
    for mask in (None, rg.Keys(REAL), share(REAL, None, Sizes((2,), 7, 7), x.device)):
        found = ours(x, mask=mask)
        assert not found[:, 0].any()
        assert found[:, 1].any()


@pytest.mark.parametrize("position", [None, *RELATIVE])
@pytest.mark.parametrize("grad", [True, False])
def test_portions_with_a_cache_are_the_whole(position, grad):
    attend, x, slot = scrambled(rg.TransformerAttention(8, 2, position=position)), normal(2, 7, 8), Slot()
    with torch.set_grad_enabled(grad):
        parts = [attend(x[:, a:b], mask=rg.Causal(), cache=slot) for a, b in ((0, 2), (2, 3), (3, 4), (4, 7))]
    assert slot.length == 7
    assert_same(torch.cat(parts, 1), attend(x, mask=rg.Causal()))


def test_what_is_read_beside_is_projected_once():
    attend, x, memory, slot = scrambled(rg.TransformerAttention(8, 2)), normal(2, 3, 8), normal(2, 5, 8, seed=1), Slot()
    first = attend(x[:, :1], memory, cache=slot)
    kept = slot.kept[0]
    assert_same(torch.cat([first, attend(x[:, 1:], memory, cache=slot)], 1), attend(x, memory))
    assert slot.kept[0].data_ptr() == kept.data_ptr()
    assert slot.length == 5


def test_a_slot_copies_no_row_twice_for_each_step():
    """Buffers double: a hundred steps allocate a handful of times."""
    slot, places = Slot(), set()
    with torch.no_grad():
        for t in range(100):
            key, _ = slot.extend(torch.full((1, 1, 3), float(t)), torch.zeros(1, 1, 3))
            places.add(key.data_ptr())
    assert key[0, :, 0].tolist() == [float(t) for t in range(100)]
    assert len(places) < 10


def test_a_slot_never_writes_into_what_it_was_given():
    slot, first = Slot(), torch.zeros(1, 2, 3)
    with torch.no_grad():
        slot.extend(first, first)
        slot.extend(torch.ones(1, 1, 3), torch.ones(1, 1, 3))
    assert not first.any()


@pytest.mark.parametrize("position", ["alibi", "relative"])
def test_a_bias_is_added_to_that_of_the_position(position):
    attend, x = scrambled(rg.TransformerAttention(8, 2, position=position)), normal(2, 7, 8)
    hidden = torch.rand(2, 7, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    hidden[..., 0] = True
    as_bias = torch.where(hidden, 0.0, -math.inf).double()
    expected = attend(x, mask=hidden)
    for given in (as_bias, as_bias[:, None].expand(2, 2, 7, 7)):
        assert_same(attend(x, bias=given), expected)
    row = torch.where(hidden[0, 0], 0.0, -math.inf).double()
    assert_same(attend(x, bias=row), attend(x, mask=rg.Keys(hidden[0, 0])))
    function = attend(x, bias=lambda i, j: -0.5 * (i - j).abs())
    assert_same(function, attend(x, bias=-0.5 * (torch.arange(7)[:, None] - torch.arange(7)).abs()))


@pytest.mark.parametrize("position", RELATIVE[1:])
def test_each_head_has_its_own_part_of_a_position(position):
    """Heads one by one read what they read together."""
    together = scrambled(rg.TransformerAttention(8, 2, position=position, score="scaled-dot"))
    apart = rg.TransformerAttention(8, 2, position=position, score=["scaled-dot", "scaled-dot"]).double()
    apart.load_state_dict(together.state_dict())
    x = normal(2, 7, 8)
    assert_same(apart(x, mask=rg.Causal()), together(x, mask=rg.Causal()))


def test_paths_and_refusals():
    attend, x = rg.TransformerAttention(8, 2, position="rotary"), torch.randn(2, 7, 8)
    with rg.record(attend) as trace:
        attend(x)
    assert trace["attention"].weights.shape == (2, 2, 7, 7)
    with pytest.raises(ValueError, match=r"query: got shape \(8,\) beside a key of shape \(8,\)"):
        attend(x[0, 0])
    with pytest.raises(ValueError, match="cache: got an empty one"):
        _ = Slot().kept


@pytest.mark.parametrize("kind", [rg.MultiHeadAttention, rg.TransformerAttention])
def test_a_head_that_may_look_at_nothing_gives_zeros_beside_one_that_may(kind):
    attend, x = scrambled(kind(6, 2, bias=True)), normal(2, 5, 6)
    mask = torch.rand(2, 2, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[:, 0, 3] = False
    with rg.execution("dense"):
        expected = attend(x, mask=mask)
    assert_same(attend(x, mask=mask), expected)
