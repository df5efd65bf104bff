"""Padded sequences side by side are computed beside their own keys, and give what they give beside all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.ops import dispatch, padded
from regard.ops.call import Call
from tests.cases import assert_same
from tests.feature.common import normal

B, H, NQ, N, D = 5, 2, 6, 24, 4
LENGTHS = torch.tensor([5, 24, 0, 7, 6])


@pytest.fixture(autouse=True)
def nothing_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded, "WORTH_A_GROUP", 0)


def real() -> Tensor:
    return torch.arange(N) < LENGTHS[:, None]


def holes() -> Tensor:
    """Padding before, after and between."""
    allowed = torch.zeros(B, N, dtype=torch.bool)
    allowed[0] = True
    for b, places in enumerate(([3, 9], [20, 21, 23], [], [22]), 1):
        allowed[b, places] = True
    return allowed


MASKS: dict[str, Callable[[], object]] = {
    "padding": lambda: rg.Padding(LENGTHS),
    "keys": lambda: rg.Keys(holes()),
    "causal": lambda: rg.Padding(LENGTHS) & rg.Causal(),
    "window": lambda: rg.Window(2) & rg.Keys(holes()),
    "shared": lambda: rg.Keys(torch.arange(N) < 7),
}
ATTENTIONS: dict[str, Callable[[], rg.Attention]] = {
    "additive": lambda: rg.Attention("additive", query_dim=D, key_dim=D, hidden_dim=3),
    "scaled dot": lambda: rg.Attention("scaled-dot"),
    "negative l2": lambda: rg.Attention("negative-l2"),
    "biased general": lambda: rg.Attention("biased-general", query_dim=D, key_dim=D),
    "sparsemax": lambda: rg.Attention("dot", "sparsemax"),
    "features": lambda: rg.Attention("additive", query_dim=D, key_dim=D, hidden_dim=3, features=D),
    "hard": lambda: rg.Attention("dot", "hard").eval(),
    "local, predicted": lambda: rg.Attention(rg.Dot(), rg.Local(3, "predictive", query_dim=D)),
    "local": lambda: rg.Attention(rg.Dot(), rg.Local(2)),
    "selected": lambda: rg.Attention(rg.Dot(), rg.Reinforced(D)).eval(),
}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The execution and the scores of every call from now on."""
    seen, run = [], dispatch._run

    def noted(call: Call, path: str) -> Tensor:
        seen.append((path, call.lead[0] * call.pairs))
        return run(call, path)

    monkeypatch.setattr(dispatch, "_run", noted)
    return seen


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("make", ATTENTIONS.values(), ids=ATTENTIONS)
def test_it_is_the_equation(make: Callable[[], rg.Attention], mask: Callable[[], object]) -> None:
    attend = make().double()
    inputs = [normal(B, size, D).requires_grad_() for size in (NQ, N, N)]
    wanted = [*inputs, *attend.parameters()]
    found, theirs = [], []
    for impl in ("auto", "dense"):
        with rg.execution(impl):
            # What was prepared for a choice by reinforcement is of all entries.
            if impl == "auto" and mask is not MASKS["window"] and not isinstance(attend.align, rg.Reinforced):
                assert rg.explain_dispatch(attend, *inputs, mask=mask()).path == "padded"
            out = attend(*inputs, mask=mask())
        found.append(out)
        grads = torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)
        theirs.append([torch.zeros_like(w) if g is None else g for w, g in zip(wanted, grads, strict=True)])
    assert_same(*found)
    for ours, dense in zip(*theirs, strict=True):
        assert_same(ours + 1, dense + 1)


def test_no_more_keys_are_read_than_waste_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(monkeypatch)
    rg.Attention("dot")(normal(B, NQ, D), normal(B, N, D), mask=rg.Padding(LENGTHS))
    (path, _), *parts = seen
    assert path == "padded"
    assert sum(pairs for _, pairs in parts) <= NQ * padded.WASTE * int(LENGTHS.sum())


@pytest.mark.parametrize("position", ["rotary", "none"])
def test_heads_and_layers_share_a_mask(monkeypatch: pytest.MonkeyPatch, position: str) -> None:
    options = {} if position == "none" else {"position": position}
    encode = rg.TransformerEncoder(8, H, 2, **options).double().eval()
    x, seen = normal(B, N, 8), counted(monkeypatch)
    found = encode(x, mask=real())
    assert [path for path, _ in seen].count("padded") == 2
    with rg.execution("dense"):
        assert_same(found, encode(x, mask=real()))


@pytest.mark.parametrize("size", [1, B])
def test_a_bias_is_of_its_entry(size: int) -> None:
    x, bias = [normal(B, m, D) for m in (NQ, N)], normal(size, NQ, N).requires_grad_()
    attend, grads = rg.Attention("dot"), []
    for impl in ("auto", "dense"):
        with rg.execution(impl):
            grads.append(torch.autograd.grad(attend(*x, mask=rg.Padding(LENGTHS), bias=bias).square().sum(), bias)[0])
    assert_same(*grads)


def test_what_entries_share_is_not_taken_apart() -> None:
    """A query for all, keys for all, and what looks like entries but is heads."""
    attend, mask = rg.Attention("dot"), rg.Keys(real())
    for query, key in ((normal(1, NQ, D), normal(B, N, D)), (normal(B, NQ, D), normal(1, N, D))):
        with rg.execution("dense"):
            expected = attend(query, key, mask=mask)
        assert_same(attend(query, key, mask=mask), expected)
    heads = rg.Attention(rg.Additive(D, D, 3, heads=B)).double()
    x = normal(B, N, D)
    assert rg.explain_dispatch(heads, x, x, mask=mask).path != "padded"
    with rg.execution("dense"):
        expected = heads(x, x, mask=mask)
    assert_same(heads(x, x, mask=mask), expected)


def test_draws_and_functions_of_places_are_of_all_entries() -> None:
    x, mask = normal(B, N, D), rg.Padding(LENGTHS)
    dropping = rg.Attention("dot", dropout=0.5)
    assert rg.explain_dispatch(dropping, x, x, mask=mask).path != "padded"
    assert rg.explain_dispatch(dropping.eval(), x, x, mask=mask).path == "padded"

    def bias(i: Tensor, j: Tensor) -> Tensor:
        return torch.arange(B)[:, None, None] * (i - j).double()

    with rg.execution("dense"):
        expected = rg.Attention("dot")(x, x, mask=mask, bias=bias)
    assert_same(rg.Attention("dot")(x, x, mask=mask, bias=bias), expected)


@pytest.mark.parametrize("lead", [(0,), (0, 2), (3, 0)])
def test_no_entries_have_no_keys(lead: tuple[int, ...]) -> None:
    x, mask = normal(*lead, N, D), rg.Keys(torch.ones(*lead, N, dtype=torch.bool))
    for impl in ("auto", "blockwise"):
        with rg.execution(impl, panel=5 if impl == "blockwise" else None):
            assert rg.Attention("dot")(x, x, mask=mask).shape == (*lead, N, D)


def test_padding_alone_sends_back_zero_gradients() -> None:
    x = normal(B, N, D).requires_grad_()
    rg.Attention("dot")(x, x, mask=rg.Padding(torch.zeros(B, dtype=torch.long))).sum().backward()
    assert not x.grad.any()


def test_little_padding_and_other_devices_are_left_alone() -> None:
    x = normal(B, N, D)
    full = rg.Padding(torch.tensor([N, N, N - 1, N, N]))
    assert rg.explain_dispatch(rg.Attention("dot"), x, x, mask=full).path == "fused"
    on_gpu = rg.explain_dispatch(rg.Attention("dot"), x, x, mask=rg.Padding(LENGTHS), device="cuda")
    assert on_gpu.path != "padded"


def test_transforms_and_graphs_do_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, x = rg.Attention("dot"), normal(B, N, D)

    def one(x: Tensor, allowed: Tensor) -> Tensor:
        return attend(x, x, mask=rg.Keys(allowed))

    expected = one(x, real())
    assert_same(torch.func.vmap(one)(x, real()), expected)
    assert_same(torch.compile(one, fullgraph=True, backend="eager")(x, real()), expected)


def test_panels_under_dropout_stop_where_the_longest_does(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, x = rg.Attention("dot", dropout=0.5), normal(2, N, D)
    mask = rg.Padding(torch.tensor([7, 3]))
    with rg.execution("blockwise", panel=5), rg.record(attend, "entropy"):
        torch.manual_seed(0)
        found = attend(x, x, mask=mask)
    with rg.execution("dense"):
        torch.manual_seed(0)
        assert_same(found, attend(x, x, mask=mask))
