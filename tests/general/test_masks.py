"""Masks: what a bound mask says of its keys and rows is what its booleans say when they are written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard as rg
from regard.general.bound import Bound, Sizes
from regard.general.masks import Mask, as_mask
from tests import cases
from tests.cases import D_V, assert_same, scrambled

CPU = torch.device("cpu")
SIZES = st.sampled_from([0, 1, 2, 3, 5, 7])


def booleans(draw: Any, *shape: int) -> Tensor:
    count = math.prod(shape)
    return torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=torch.bool).view(shape)


@st.composite
def sizes(draw: Any) -> Sizes:
    lead = draw(st.sampled_from([(), (2,), (2, 3), (1,), (1, 2)]))
    return Sizes(lead, draw(SIZES), draw(SIZES))


def broadcast(draw: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to this one: some axes 1, some leading ones left out."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(1 if draw(st.booleans()) else size for size in kept)


def simple(draw: Any, s: Sizes) -> Mask | Tensor:
    kind = draw(st.sampled_from(["pairs", "keys", "padding", "causal", "window", "directional", "band", "where"]))
    if kind == "pairs":
        return booleans(draw, *broadcast(draw, (*s.lead, s.nq, s.n)))
    if kind == "keys":
        lead = s.lead[: draw(st.integers(0, len(s.lead)))]
        return rg.Keys(booleans(draw, *(1 if draw(st.booleans()) else size for size in lead), s.n))
    if kind == "padding":
        lead = s.lead[: draw(st.integers(0, len(s.lead)))]
        count = math.prod(lead)
        lengths = draw(st.lists(st.integers(0, s.n), min_size=count, max_size=count))
        return rg.Padding(torch.tensor(lengths, dtype=torch.long).view(lead))
    if kind == "causal":
        return rg.Causal()
    if kind == "window":
        return rg.Window(draw(st.integers(0, 8)))
    if kind == "directional":
        return rg.Directional(draw(st.sampled_from(["forward", "backward"])))
    if kind == "band":
        ends = st.one_of(st.integers(-8, 8), st.sampled_from([-math.inf, math.inf, -1.5, 0.5, 2.5]))
        return rg.Band(draw(ends), draw(ends))
    every = draw(st.integers(1, 3))
    return rg.Where(lambda i, j: (i + 2 * j) % every == 0)


@st.composite
def composed(draw: Any, s: Sizes, depth: int = 2) -> Mask:
    if depth == 0 or draw(st.integers(0, 2)) == 0:
        return as_mask(simple(draw, s))
    left, right = draw(composed(s, depth - 1)), draw(composed(s, depth - 1))
    return left & right if draw(st.booleans()) else left | right


def written_out(bound: Bound, s: Sizes) -> Tensor:
    """Booleans of every pair, asked for one pair at a time."""
    whole = torch.zeros(*s.lead, s.nq, s.n, dtype=torch.bool)
    for i in range(s.nq):
        for j in range(s.n):
            whole[..., i, j] = bound.tile(range(i, i + 1), range(j, j + 1), CPU).expand(*s.lead, 1, 1)[..., 0, 0]
    return whole


@settings(max_examples=400)
@given(data=st.data())
def test_keys_rows_and_ends_are_those_of_the_booleans_written_out(data: Any) -> None:
    s = data.draw(sizes())
    mask = data.draw(composed(s))
    bound = mask.bind(s)
    whole = written_out(bound, s)
    keys, rows, ends = bound.keys(CPU), bound.rows(CPU), bound.ends(CPU)
    for name, found, expected in (("keys", keys, whole.any(-2)), ("rows", rows, whole.any(-1))):
        if found is None:
            assert bool(expected.all()), name
            continue
        assert torch.equal(found.expand(expected.shape), expected), f"{name} of {mask!r} at {s}"
    last = (whole * torch.arange(1, s.n + 1)).amax(-1) if s.n else whole.sum(-1)
    assert torch.equal(ends.expand(last.shape), last), f"ends of {mask!r} at {s}"


@settings(max_examples=150)
@given(data=st.data())
def test_tiles_are_cut_from_one_mask(data: Any) -> None:
    s = data.draw(sizes())
    bound = data.draw(composed(s)).bind(s)
    whole = written_out(bound, s)
    ends = [sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))) for size in (s.nq, s.n)]
    i, j = (range(*pair) for pair in ends)
    tile = bound.tile(i, j, CPU).expand(*s.lead, len(i), len(j))
    assert torch.equal(tile, whole[..., i.start : i.stop, j.start : j.stop])
    # The shape is the one it would be written out with, up to what broadcasts.
    assert torch.broadcast_shapes(bound.shape, whole.shape) == whole.shape


@settings(max_examples=150)
@given(data=st.data())
def test_and_and_or_are_those_of_booleans(data: Any) -> None:
    s = data.draw(sizes())
    left, right = data.draw(composed(s)), data.draw(composed(s))
    first, second = (written_out(mask.bind(s), s) for mask in (left, right))
    assert torch.equal(written_out((left & right).bind(s), s), first & second)
    assert torch.equal(written_out((left | right).bind(s), s), first | second)
    assert torch.equal(written_out(left.bind(s).also(right.bind(s)), s), first & second)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_a_tensor_may_stand_on_either_side(lead: tuple[int, ...]) -> None:
    s = Sizes(lead, 3, 5)
    tensor = torch.rand(*lead, 3, 5) > 0.5
    causal = written_out(rg.Causal().bind(s), s)
    for mask in (tensor & rg.Causal(), rg.Causal() & tensor):
        assert torch.equal(written_out(mask.bind(s), s), tensor & causal)
    for mask in (tensor | rg.Causal(), rg.Causal() | tensor):
        assert torch.equal(written_out(mask.bind(s), s), tensor | causal)


@given(nq=SIZES, n=SIZES)
@example(nq=2, n=5)
@example(nq=5, n=2)
def test_bands_align_the_last_query_with_the_last_key(nq: int, n: int) -> None:
    s = Sizes((), nq, n)
    shift = n - nq
    masks = {
        rg.Causal(): lambda i, j: j <= i + shift,
        rg.Window(2): lambda i, j: abs(j - i - shift) <= 2,
        rg.Directional("forward"): lambda i, j: j < i + shift,
        rg.Directional("backward"): lambda i, j: j > i + shift,
        rg.Band(-1.5, 0.5): lambda i, j: -1.5 <= j - i - shift <= 0.5,
        rg.Band(0.5, 1.5): lambda i, j: 0.5 <= j - i - shift <= 1.5,
        rg.Band(0.2, 0.8): lambda i, j: False,
    }
    for mask, rule in masks.items():
        expected = torch.tensor([[rule(i, j) for j in range(n)] for i in range(nq)], dtype=torch.bool).view(nq, n)
        assert torch.equal(written_out(mask.bind(s), s), expected), mask
        # Alone and beside keys, where both are known without looking at every pair.
        short = torch.arange(n) < n - 1
        for bound, whole in ((mask.bind(s), expected), ((mask & rg.Keys(short)).bind(s), expected & short)):
            assert torch.equal(bound.keys(CPU), whole.any(-2)), mask
            assert torch.equal(bound.rows(CPU), whole.any(-1)), mask


@pytest.mark.parametrize("scan", [1, 7, 1 << 22])
def test_a_scan_in_pieces_sees_what_one_look_sees(scan: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.general.bound._SCAN_ELEMENTS", scan)
    s = Sizes((2,), 5, 7)
    bound = (rg.Where(lambda i, j: (i + j) % 3 == 1) & (torch.rand(2, 5, 7) > 0.6)).bind(s)
    whole = written_out(bound, s)
    assert torch.equal(bound.keys(CPU), whole.any(-2))
    assert torch.equal(bound.rows(CPU), whole.any(-1))


def test_a_band_and_keys_are_never_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal with padding, the mask of every decoder, stays linear."""
    monkeypatch.setattr(Bound, "_panels", lambda *_: pytest.fail("looked at every pair"))
    bound = (rg.Causal() & rg.Padding(torch.tensor([3, 5]))).bind(Sizes((2,), 5, 7))
    assert bound.keys(CPU).shape == (2, 7)
    assert bound.rows(CPU).shape == (2, 5)
    assert bound.ends(CPU).tolist() == [[3, 3, 3, 3, 3], [3, 4, 5, 5, 5]]


@settings(max_examples=60)
@given(data=st.data())
def test_attention_under_an_object_is_attention_under_its_booleans(data: Any) -> None:
    s = data.draw(sizes())
    mask = data.draw(composed(s))
    attend = scrambled(rg.Attention(rg.General(3, 5)))
    x = cases.inputs(s.lead, s.nq, s.n, 3, 5, D_V)
    whole = written_out(mask.bind(s), s)
    for impl in ("dense", "blockwise", "fused"):
        with rg.execution(impl, panel=2):
            assert_same(attend(**x, mask=mask), attend(**x, mask=whole), impl)


def test_a_mask_of_one_query_has_no_query_axis() -> None:
    attend = scrambled(rg.Attention(rg.General(3, 5)))
    x = cases.inputs((2,), 1, 7, 3, 5, 11)
    mask = torch.rand(2, 7) > 0.4
    one = attend(x["query"][:, 0], x["key"], x["value"], mask=mask)
    assert_same(one, attend(**x, mask=mask[:, None])[:, 0])
    assert_same(attend(x["query"][:, 0], x["key"], x["value"], mask=rg.Keys(mask)), one)


@pytest.mark.parametrize("allowed", [True, False])
def test_a_mask_without_axes_is_for_everything(allowed: bool) -> None:
    attend = scrambled(rg.Attention(rg.General(3, 5)))
    x = cases.inputs((2,), 3, 7, 3, 5, 11)
    expected = attend(**x) if allowed else torch.zeros(2, 3, 11, dtype=torch.float64)
    for impl in ("dense", "blockwise", "fused"):
        with rg.execution(impl):
            assert_same(attend(**x, mask=torch.tensor(allowed)), expected)


def test_masks_say_what_they_are() -> None:
    assert repr(rg.Causal() & rg.Padding(torch.tensor([3, 5]))) == "Causal() & Padding(lengths=[3, 5])"
    assert repr(rg.Window(2) | rg.Directional("backward")) == "(Window(2) | Directional('backward'))"
    assert repr(rg.Keys(torch.ones(2, 7, dtype=torch.bool))) == "Keys(2, 7)"
    assert repr(torch.ones(3, 5, dtype=torch.bool) & rg.Band(-1, 2)) == "Pairs(3, 5) & Band(low=-1, high=2)"


def test_a_distance_beyond_every_index_is_no_limit() -> None:
    s = Sizes((), 3, 5)
    for mask in (rg.Window(10**30), rg.Band(-(10**30), 1e300)):
        bound = mask.bind(s)
        assert bound.tile(range(3), range(5), CPU).all()
        assert bound.keys(CPU).all()
        assert bound.rows(CPU).all()
    assert not rg.Band(10**30, math.inf).bind(s).tile(range(3), range(5), CPU).any()
    assert repr(rg.Window(10**30)) == f"Window({10**30})"


def test_a_function_is_asked_for_leading_axes_too() -> None:
    table = torch.rand(2, 3, 5) > 0.5
    mask = rg.Where(lambda i, j: table[:, i, j])
    assert torch.equal(mask.bind(Sizes((2,), 3, 5)).tile(range(1, 3), range(4), CPU), table[:, 1:, :4])


@pytest.mark.parametrize("impl", ["auto", "dense", "blockwise", "fused"])
def test_a_query_without_keys_may_hold_anything_where_keys_are_filled(impl: str) -> None:
    query, key = torch.full((2, 3, 4), math.nan, requires_grad=True), torch.zeros(2, 5, 4, requires_grad=True)
    with rg.execution(impl):
        context = rg.Attention("dot")(query, key, mask=rg.Keys(torch.zeros(2, 5, dtype=torch.bool), filled=True))
    assert (context == 0).all()
    for gradient in torch.autograd.grad(context.sum(), (query, key)):
        assert (gradient == 0).all()


def test_lengths_of_padding_are_a_tensor_or_whole_numbers():
    x = torch.randn(2, 5, 4)
    attend = rg.Attention("dot")
    assert torch.equal(attend(x, x, mask=rg.Padding([3, 5])), attend(x, x, mask=rg.Padding(torch.tensor([3, 5]))))
    assert repr(rg.Padding((3, 5))) == "Padding(lengths=[3, 5])"
    assert attend(x[:0], x[:0], mask=rg.Padding([])).shape == (0, 5, 4)
    for wrong in ([1.5], [True], [[1]], ["3"], 3, "35"):
        with pytest.raises(
            TypeError, match="lengths: got .*, expected a tensor of integers, or a list of whole numbers"
        ):
            rg.Padding(wrong)
    with pytest.raises(ValueError, match="lengths: got .*-1"):
        rg.Padding([3, -1])
