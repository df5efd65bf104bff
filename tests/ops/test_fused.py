"""The library's scaled dot-product attention in place of the equation: where it is taken, and that nothing changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.ops import fused
from tests import cases
from tests.cases import assert_within_budget, compare, run, scrambled

NQ, N, D = 5, 7, 3
PLAIN = {
    "dot": lambda: rg.Dot(),
    "scaled-dot": lambda: rg.ScaledDot(),
    "general": lambda: rg.General(D, D),
    "general, other width": lambda: rg.General(2, D),
    "low-rank-general": lambda: rg.LowRankGeneral(D, D, rank=2),
    "biased-general": lambda: rg.BiasedGeneral(D, D),
    "activated-general without activation": lambda: rg.ActivatedGeneral(D, D, activation="identity"),
    "cosine": lambda: rg.Cosine(1.7),
    "cosine, learned": lambda: rg.Cosine(1.7, learnable=True),
    "negative-l2": lambda: rg.NegativeL2(1.3),
}
EVERY_SCORE = pytest.mark.parametrize("score", PLAIN)


def some_rows_dead(*lead: int) -> Tensor:
    mask = torch.rand(*lead, NQ, N) > 0.4
    mask[..., 2, :] = False
    return mask


MASKS: dict[str, Any] = {
    "none": lambda: None,
    "pairs": lambda: some_rows_dead(2),
    "pairs without batch": lambda: some_rows_dead(),
    "one row for all queries": lambda: torch.rand(2, 1, N) > 0.4,
    "one column for all keys": lambda: torch.rand(2, NQ, 1) > 0.4,
    "keys": lambda: rg.Keys(torch.rand(2, N) > 0.4),
    "padding": lambda: rg.Padding(torch.tensor([4, 0])),
    "causal": lambda: rg.Causal(),
    "causal and padding": lambda: rg.Causal() & rg.Padding(torch.tensor([4, 7])),
    "window": lambda: rg.Window(1),
    "directional": lambda: rg.Directional("forward"),
    "where": lambda: rg.Where(lambda i, j: (i + j) % 3 == 0),
    "where of rows": lambda: rg.Where(lambda i, j: i != 1),
    "either": lambda: rg.Window(0) | some_rows_dead(2),
    "nothing at all": lambda: torch.tensor(False),
}


class Library:
    """Counts the library calls, and whether the causal flag was used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[bool] = []
        original = torch.nn.functional.scaled_dot_product_attention

        def counting(*args: Any, is_causal: bool = False, **kwargs: Any) -> Tensor:
            self.calls.append(is_causal)
            return original(*args, is_causal=is_causal, **kwargs)

        monkeypatch.setattr(fused.F, "scaled_dot_product_attention", counting)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return Library(monkeypatch)


def inputs(score: rg.Score, *lead: int, d_v: int = 11, nq: int = NQ) -> dict[str, Tensor]:
    return cases.inputs(lead, nq, N, 2 if score.query_dim == 2 else D, D, d_v, grad=True)


def taken(attend: rg.Attention, x: dict[str, Tensor], **rest: Any) -> str:
    return rg.explain_dispatch(attend, *x.values(), **rest).path


def agree(attend: rg.Attention, x: dict[str, Tensor], library: Library, **rest: Any) -> None:
    """Auto takes one library call, whose result and gradients are those of the equation."""
    assert taken(attend, x, **rest) == "fused"
    with rg.execution("dense"):
        expected = run(attend, x, **rest)
    assert not library.calls
    compare(run(attend, x, **rest), expected)
    assert len(library.calls) == 1
    library.calls.clear()


@EVERY_SCORE
@pytest.mark.parametrize("mask", MASKS)
def test_every_plain_score_under_every_mask(score: str, mask: str, library: Library) -> None:
    attend = scrambled(rg.Attention(PLAIN[score]()))
    agree(attend, inputs(attend.score, 2), library, mask=MASKS[mask]())


@EVERY_SCORE
@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 3, 2)], ids=str)
def test_any_number_of_leading_axes(score: str, lead: tuple[int, ...], library: Library) -> None:
    attend = scrambled(rg.Attention(PLAIN[score]()))
    x = inputs(attend.score, *lead)
    for shape in ((NQ, N), (*lead, NQ, N), (*(1 for _ in lead), 1, N), (*lead[:-1], 1, NQ, N) if lead else (NQ, N)):
        mask = torch.rand(shape) > 0.4
        agree(attend, x, library, mask=mask)
        agree(attend, x, library, mask=mask, bias=torch.randn(shape, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 3, 1), (2, 1, 1), (1, 1, 2), (2, 3, 2)], ids=str)
def test_masks_that_skip_leading_axes(shape: tuple[int, ...], library: Library) -> None:
    attend = rg.Attention(rg.Dot())
    agree(attend, inputs(attend.score, 2, 3, 2), library, mask=torch.rand(*shape, NQ, N) > 0.4)


def test_inputs_that_share_leading_axes(library: Library) -> None:
    attend = scrambled(rg.Attention(rg.General(D, D, heads=3)))
    x = inputs(attend.score, 2, 1)
    x["key"], x["value"] = (x[name].detach()[:1].requires_grad_() for name in ("key", "value"))
    agree(attend, x, library, mask=torch.rand(2, 1, NQ, N) > 0.4)


@pytest.mark.parametrize("d_v", [1, 2, D, 11])
@EVERY_SCORE
def test_values_of_any_width(score: str, d_v: int, library: Library) -> None:
    attend = scrambled(rg.Attention(PLAIN[score]()))
    agree(attend, inputs(attend.score, 2, d_v=d_v), library, mask=some_rows_dead(2))


@EVERY_SCORE
@pytest.mark.parametrize("temperature", [0.4, 2.5])
@pytest.mark.parametrize("learnable", [False, True])
def test_temperatures(score: str, temperature: float, learnable: bool, library: Library) -> None:
    attend = rg.Attention(scrambled(PLAIN[score]()), rg.Soft(temperature, learnable)).double()
    agree(attend, inputs(attend.score, 2), library, mask=some_rows_dead(2))


@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("mask", ["none", "pairs", "causal", "padding"])
def test_a_bias_is_a_score_and_divided_like_one(temperature: float, mask: str, library: Library) -> None:
    attend = rg.Attention(scrambled(rg.General(D, D)), rg.Soft(temperature)).double()
    bias = torch.randn(2, NQ, N, dtype=torch.float64)
    bias[:, 1], bias[:, :, 3] = -math.inf, -math.inf
    agree(attend, inputs(attend.score, 2), library, mask=MASKS[mask](), bias=bias)


@pytest.mark.parametrize("shape", [(NQ, N), (1, N), (NQ, 1), (N,), (), (2, 1, N)], ids=str)
def test_a_bias_of_any_shape_that_broadcasts(shape: tuple[int, ...], library: Library) -> None:
    attend = scrambled(rg.Attention(rg.General(D, D)))
    bias = torch.randn(shape, dtype=torch.float64)
    agree(attend, inputs(attend.score, 2), library, bias=bias, mask=some_rows_dead(2))


def test_a_bias_function_without_gradients(library: Library) -> None:
    attend, x = scrambled(rg.Attention(rg.General(D, D))), inputs(rg.Dot(), 2)
    with torch.no_grad():
        agree(attend, x, library, bias=lambda i, j: -(i - j).abs().double())


@pytest.mark.parametrize("nq", [NQ, N])
def test_the_causal_flag_is_used_only_where_the_library_means_the_same(nq: int, library: Library) -> None:
    """The library aligns the first query with the first key; here the last is aligned with the last."""
    attend = rg.Attention(rg.Dot())
    x = inputs(attend.score, 2, nq=nq)
    attend(**x, mask=rg.Causal())
    assert library.calls == [nq == N]
    library.calls.clear()
    agree(attend, x, library, mask=rg.Causal())
    attend(**x, mask=rg.Causal(), bias=torch.zeros(nq, N, dtype=torch.float64))
    assert library.calls == [False]


def test_a_single_query(library: Library) -> None:
    attend = scrambled(rg.Attention(rg.General(D, D)))
    x = inputs(attend.score, 2)
    x["query"] = x["query"].detach()[:, 0].requires_grad_()
    agree(attend, x, library, mask=torch.rand(2, N) > 0.4)


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_junk_in_padding_is_not_read(junk: float, library: Library) -> None:
    attend, x = scrambled(rg.Attention(rg.General(D, D))), inputs(rg.Dot(), 2)
    mask = rg.Padding(torch.tensor([4, 0]))
    plain = run(attend, x, mask=mask)
    other = {name: t.detach().clone() for name, t in x.items()}
    for b, length in enumerate((4, 0)):
        other["key"][b, length:], other["value"][b, length:] = junk, junk
    other["query"][1] = junk
    compare(run(attend, {k: t.requires_grad_() for k, t in other.items()}, mask=mask), plain)
    assert len(library.calls) == 2


@pytest.mark.parametrize("sizes", [(0, N, 2), (NQ, 0, 2), (NQ, N, 0)], ids=str)
def test_empty_axes(sizes: tuple[int, int, int], library: Library) -> None:
    nq, n, b = sizes
    attend = rg.Attention(rg.Dot())
    x = cases.inputs((b,), nq, n, D, D, 11, grad=True)
    for impl in ("auto", "fused"):
        with rg.execution(impl):
            context = attend(**x)
        assert context.shape == (b, nq, 11)
        assert bool((context == 0).all())
        for gradient in torch.autograd.grad(context.sum(), list(x.values())):
            assert bool((gradient == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", ["none", "pairs", "causal", "padding"])
@EVERY_SCORE
def test_low_precision_stays_within_the_budget_of_the_equation(
    score: str, mask: str, dtype: torch.dtype, library: Library
) -> None:
    module = scrambled(PLAIN[score]())
    nq, n, d_v = 13, 17, 11
    low = rg.Attention(module).to(dtype)
    width = 2 if module.query_dim == 2 else D
    x = {k: t.detach().to(dtype).requires_grad_() for k, t in cases.inputs((2,), nq, n, width, D, d_v).items()}
    masks = {"pairs": torch.rand(2, nq, n) > 0.3, "causal": rg.Causal(), "padding": rg.Padding(torch.tensor([9, 0]))}
    rest = {"mask": masks.get(mask), "bias": torch.randn(2, nq, n) * 4 if mask == "pairs" else None}
    mine = run(low, x, **rest)
    # The square of a key may be more than float16 holds, so that one is left to the panels.
    assert len(library.calls) == (0 if (score, dtype) == ("negative-l2", torch.float16) else 1)
    with rg.execution("dense"):
        same = run(low, x, **rest)
    wide = rg.Attention(module.double())
    rest["bias"] = None if rest["bias"] is None else rest["bias"].double()
    with rg.execution("dense"):
        exact = run(wide, {k: t.detach().double().requires_grad_() for k, t in x.items()}, **rest)
    assert_within_budget(mine[0], same[0], exact[0], "context")
    # In float32 the library's backward takes a quicker, less exact exponential than the equation does.
    if dtype != torch.float32:
        for name in ("input query", "input key", "input value"):
            assert_within_budget(mine[1][name], same[1][name], exact[1][name], f"gradient of {name}")


REFUSED = {
    "additive": (lambda: rg.Attention(rg.Additive(D, D, 2)), {}, "the additive form has no fused execution"),
    "activation": (lambda: rg.Attention(rg.ActivatedGeneral(D, D)), {}, "activation 'tanh' on the scores"),
    "alignment": (lambda: rg.Attention(rg.Dot(), rg.Sparsemax()), {}, "alignment Sparsemax is not a plain softmax"),
    "hard": (lambda: rg.Attention(rg.Dot(), rg.Hard()), {}, "alignment Hard is not a plain softmax"),
    "features": (lambda: rg.Attention(rg.General(D, D, features=11)), {}, "multi-dimensional weights"),
    "dropout": (lambda: rg.Attention(rg.Dot(), dropout=0.1), {}, "dropout is drawn by position"),
    "bias": (
        lambda: rg.Attention(rg.Dot()),
        {"bias": torch.zeros(NQ, N, dtype=torch.float64, requires_grad=True)},
        "the bias needs a gradient",
    ),
    "bias over a learned temperature": (
        lambda: rg.Attention(rg.Dot(), rg.Soft(learnable=True)),
        {"bias": torch.zeros(NQ, N, dtype=torch.float64)},
        "the bias needs a gradient",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_fused_execution_is_refused_by_name_and_not_chosen(case: str, library: Library) -> None:
    make, rest, reason = REFUSED[case]
    attend = make().double()
    x = cases.inputs((2,), NQ, N, D, D, 11)
    dispatch = rg.explain_dispatch(attend, *x.values(), **rest)
    assert dispatch.path != "fused"
    assert reason in dispatch.reason
    attend.impl = "fused"
    with pytest.raises(NotImplementedError, match=rf"impl='fused' is not available here: {reason}.*Fix: use impl="):
        attend(**x, **rest)
    assert not library.calls


def test_a_mask_too_large_to_write_out_goes_blockwise(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    monkeypatch.setattr(fused, "WRITTEN_MASK_ELEMENTS", NQ * N - 1)
    monkeypatch.setattr("regard.ops.dispatch.SMALL_HIDDEN_ELEMENTS", 1)
    attend, x = rg.Attention(rg.Dot()), inputs(rg.Dot(), 2)
    for rest in ({"mask": rg.Window(1)}, {"bias": torch.zeros(NQ, N, dtype=torch.float64)}):
        dispatch = rg.explain_dispatch(attend, *x.values(), **rest)
        assert dispatch.path == "blockwise"
        assert f"of {NQ * N} elements would have to be written out" in dispatch.reason
    square = inputs(rg.Dot(), 2, nq=N)
    assert taken(attend, square, mask=rg.Causal()) == "fused", "the causal flag writes nothing"
    assert taken(attend, x, mask=rg.Keys(torch.ones(2, N, dtype=torch.bool))) == "fused", "keys alone are short"
