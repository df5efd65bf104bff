"""Panels beside the keys that they may attend: what is left out is never read, and nothing else changes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard as rg
from regard.general.bound import Sizes
from regard.observe import fields as fields_module
from regard.ops import blockwise, near
from regard.ops.dispatch import choose
from tests.cases import assert_same, scrambled
from tests.feature.common import normal

CPU = torch.device("cpu")
N = 23
BANDS = st.builds(
    lambda low, high: rg.Band(min(low, high), max(low, high)),
    st.sampled_from([-math.inf, -30, -3, -1, 0, 2, 40]),
    st.sampled_from([-40, -2, 0, 1, 4, 30, math.inf]),
)


@st.composite
def masks(draw) -> tuple[rg.Mask, int, int]:
    """A mask of one or two kinds, and the sizes it is for."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    queries = draw(st.lists(st.integers(0, 6), min_size=len(lengths), max_size=len(lengths)))
    n, nq = sum(lengths), sum(queries)
    kinds = [draw(BANDS), rg.Packed(lengths, queries=queries), torch.rand(nq, n) < 0.5, rg.Keys(torch.rand(n) < 0.7)]
    one, other = draw(st.sampled_from(kinds)), draw(st.sampled_from(kinds))
    how = draw(st.sampled_from(["alone", "and", "or"]))
    mask = rg.Packed(lengths, queries=queries) if isinstance(one, Tensor) else one
    return (mask if how == "alone" else mask & other if how == "and" else mask | other), nq, n


@given(masks(), st.data())
def test_no_query_may_attend_a_key_outside_of_the_span(case, data):
    mask, nq, n = case
    bound = mask.bind(Sizes((), nq, n))
    first = data.draw(st.integers(0, nq))
    i = range(first, data.draw(st.integers(first, nq)))
    j = bound.span(i)
    assert 0 <= j.start <= j.stop <= n
    allowed = bound.tile(i, range(n), CPU).expand(len(i), n)
    assert not allowed[:, : j.start].any()
    assert not allowed[:, j.stop :].any()


def test_spans_of_windows_and_sequences_are_no_wider_than_they_must_be():
    def spans(mask, nq=N, n=N):
        bound = mask.bind(Sizes((), nq, n))
        return [bound.span(range(i, min(i + 5, nq))) for i in range(0, nq, 5)]

    assert spans(rg.Window(2))[:2] == [range(7), range(3, 12)]
    assert spans(rg.Causal())[-1] == range(N)
    assert spans(rg.Causal(), nq=5)[0] == range(N)
    assert spans(rg.Causal() & rg.Window(1))[1] == range(4, 10)
    assert spans(rg.Window(1) | rg.Band(3, 4))[1] == range(4, 14)
    assert spans(rg.Packed([5, 10, 8]))[:3] == [range(5), range(5, 15), range(5, 15)]
    assert spans(rg.Packed([5, 10, 8]) & rg.Window(1))[1] == range(5, 11)


MASKS = {
    "window": rg.Window(2),
    "causal": rg.Causal(),
    "strictly before": rg.Directional("forward"),
    "sequences": rg.Packed([5, 0, 11, 7]),
    "causal sequences, real keys": rg.Packed([5, 0, 11, 7]) & rg.Causal() & rg.Keys(torch.arange(N) % 5 != 2),
    "window, some pairs": rg.Window(3) & (torch.rand(N, N, generator=torch.Generator().manual_seed(0)) < 0.7),
}
ALIGNMENTS = {
    "soft": {},
    "soft, dropout": {"dropout": 0.3},
    "sparsemax": {"align": "sparsemax"},
    "hard": {"align": rg.Hard()},
    "gumbel": {"align": rg.Hard(gradient="gumbel")},
    "local": {"align": rg.Local(3)},
    "predictive": {"align": rg.Local(2, "predictive", query_dim=4)},
}
SCORES = {
    "additive": {"score": "additive", "query_dim": 4, "key_dim": 4, "hidden_dim": 3},
    "multi-dimensional": {"score": rg.Additive(4, 4, 3, features=4)},
    "negative L2": {"score": "negative-l2"},
}
BIASES = {"": None, "function": lambda i, j: -(i - j).abs() / 3.0, "tensor": normal(N, N, seed=5)}


def run(attend, x, impl, panel, **given) -> tuple[Tensor, ...]:
    torch.manual_seed(3)
    leaf = x.clone().requires_grad_()
    with rg.execution(impl, panel=panel):
        result = attend(leaf, leaf, **given)
    return result, *torch.autograd.grad(result.square().sum(), [leaf, *attend.parameters()], allow_unused=True)


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("align", ALIGNMENTS.values(), ids=ALIGNMENTS)
@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_panels_beside_few_keys_give_what_the_equation_gives(mask, score, align, bias, monkeypatch):
    attend = scrambled(rg.Attention(**score, **align))
    seen = []
    original = near.beside
    monkeypatch.setattr(blockwise, "beside", lambda call, j: seen.append(len(j)) or original(call, j))
    x = normal(2, N, 4)
    mine = run(attend, x, "blockwise", 4, mask=mask, bias=bias)
    assert len(seen) >= 6
    assert sum(seen) < 0.8 * N * len(seen), "keys were left out"
    for got, expected in zip(mine, run(attend, x, "dense", None, mask=mask, bias=bias), strict=True):
        assert (got is None) == (expected is None)
        if expected is not None:
            assert_same(got, expected)


@pytest.mark.parametrize("gaussian", [True, False])
@pytest.mark.parametrize("start", [0, 2, 40, -2, -10, -40])
@pytest.mark.parametrize("sizes", [(N, N), (N, 9), (9, N)])
def test_local_windows_without_a_mask(sizes, start, gaussian):
    nq, n = sizes
    attend = rg.Attention("scaled-dot", rg.Local(2, gaussian=gaussian))
    q, k = normal(2, nq, 4), normal(2, n, 4, seed=1)
    with rg.execution("dense"):
        expected = attend(q, k, start=start)
    with rg.execution("blockwise", panel=3):
        assert_same(attend(q, k, start=start), expected)


def test_what_may_read_more_is_beside_all_keys():
    x = normal(1, N, 4)

    def width(attend, **given):
        with rg.record(attend) as trace:
            attend(x, x, **given)
        return len(near.span(trace[""][0].call, range(3)))

    assert width(rg.Attention("dot"), mask=rg.Window(1)) == 4
    assert width(rg.Attention("dot", rg.Local(1))) == 4
    # A window that a mask or a bias empties falls back to the nearest key, wherever that is.
    assert width(rg.Attention("dot", rg.Local(1)), mask=torch.rand(N, N) < 0.5) == N
    assert width(rg.Attention("dot", rg.Local(1)), bias=torch.zeros(N, N)) == N
    assert width(rg.Attention("dot", rg.Local(1, "predictive", query_dim=4).double())) == N
    assert width(rg.Attention("dot", rg.Budget(3)), mask=rg.Window(1)) == N


def test_narrow_panels_have_more_rows(monkeypatch):
    monkeypatch.setattr(blockwise, "CPU_PANEL_ELEMENTS", 4 * 1000)
    attend, x = rg.Attention("scaled-dot", dropout=0.1).train(), torch.randn(1, 1000, 4)

    def call(**given):
        with rg.record(attend) as trace:
            attend(x, x, **given)
        return trace[""][0].call

    assert blockwise.near_rows(call()) == blockwise.panel_rows(call()) == 4
    assert blockwise.near_rows(call(mask=rg.Causal())) == 4
    assert blockwise.near_rows(call(mask=rg.Window(10))) == 32
    assert "32 panel(s) of 32 rows" in str(choose(call(mask=rg.Window(10)), "auto"))


def test_windows_of_positions_before_the_first_key_read_the_nearest():
    attend, x = rg.Attention("dot", rg.Local(2, gaussian=False)), normal(1, N, 4)
    outcomes = []
    for impl, panel in (("dense", None), ("blockwise", 4)):
        with rg.execution(impl, panel=panel):
            outcomes.append(attend(x, x, start=-9))
    assert_same(*outcomes)


def test_windows_of_a_sequence_are_counted_from_its_start_where_one_before_has_no_keys():
    attend, query, key = rg.Attention("dot", rg.Local(2)), normal(1, 5100, 2), normal(1, 4200, 2, seed=1)
    mask = rg.Packed([0, 2100, 2100], queries=[900, 2100, 2100])
    found = attend(query, key, mask=mask)
    alone = attend(query[:, 900:3000], key[:, :2100])
    assert_same(found[:, 900:3000], alone)


def test_long_windows_with_a_bias_are_not_written_out():
    attend, x = rg.Attention("scaled-dot"), torch.randn(1, 2048, 4)
    with torch.no_grad():
        given = {"mask": rg.Window(10), "bias": lambda i, j: -(i - j).abs() / 2.0}
        assert "few keys near each query" in str(rg.explain_dispatch(attend, x, x, **given))
        assert rg.explain_dispatch(attend, x, x, mask=rg.Causal(), bias=given["bias"]).path == "fused"
        near_them = attend(x, x, **given)
        with rg.execution("dense"):
            torch.testing.assert_close(near_them, attend(x, x, **given))


@pytest.mark.parametrize("how", ["on demand", "up front"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_fields_of_panels_beside_few_keys(mask, how, monkeypatch):
    attend, x, region = scrambled(rg.Attention(**SCORES["additive"])), normal(2, N, 4), torch.arange(N) % 3 == 0
    named = {"topk": 4, "mass_on": region}
    names = ("entropy", "log_sum_exp", "mass_received", "expected_position", "weights")

    def fields() -> dict[str, Tensor]:
        with rg.record(attend, *(names if how == "up front" else ()), **(named if how == "up front" else {})) as trace:
            attend(x, x, mask=mask)
        record = trace[""][0]
        return {name: record._get(name, named.get(name)) for name in (*names, *named)}

    with rg.execution("dense"):
        expected = fields()
    seen = []
    monkeypatch.setattr(fields_module, "beside", lambda call, j: seen.append(len(j)) or near.beside(call, j))
    with rg.execution("blockwise", panel=4):
        found = fields()
    assert sum(seen) < 0.8 * N * len(seen), "keys were left out"
    for name, x in found.items():
        theirs = expected[name]
        if name == "topk":
            # Among weights of zero any key will do.
            read = theirs[..., 0] > 0
            assert torch.equal(x[..., 1][read], theirs[..., 1][read])
            x, theirs = x[..., 0], theirs[..., 0]
        assert_same(x.nan_to_num(neginf=0.0), theirs.nan_to_num(neginf=0.0), name)


def test_scores_are_those_of_all_pairs():
    attend, x = rg.Attention("dot"), normal(1, N, 4)
    with rg.execution("blockwise", panel=4), rg.record(attend) as trace:
        attend(x, x, mask=rg.Window(1))
    assert_same(trace[""][0].scores, x @ x.mT)


@pytest.mark.parametrize("how", ["on demand", "up front"])
@pytest.mark.parametrize("mask", [None, rg.Causal()], ids=["", "causal"])
@pytest.mark.parametrize("panel", [None, 1, 4])
def test_the_log_sum_exp_is_over_the_keys_that_the_mask_allows_also_outside_of_a_window(panel, mask, how, monkeypatch):
    monkeypatch.setattr(blockwise, "CPU_PANEL_ELEMENTS", 3 * N)
    attend, x = rg.Attention("scaled-dot", rg.Local(2)), normal(1, N, 4)
    with rg.execution("blockwise", panel=panel):
        with rg.record(attend, *(["log_sum_exp", "entropy"] if how == "up front" else [])) as trace:
            attend(x, x, mask=mask)
        found = trace.log_sum_exp()
    scores = x @ x.mT / 2
    if mask is not None:
        scores = scores.masked_fill(torch.ones(N, N).triu(1).bool(), -math.inf)
    assert_same(found, scores.logsumexp(-1))
    with rg.execution("dense"), rg.record(attend) as trace:
        attend(x, x, mask=mask)
    assert_same(found, trace.log_sum_exp())


@pytest.mark.parametrize("how", ["uniform", "permuted", "random", "frozen"])
@pytest.mark.parametrize("mask", [None, rg.Window(2)], ids=["", "window"])
def test_interventions_are_the_same_beside_few_keys(how, mask):
    attend, x = rg.Attention("dot"), normal(2, N, 4)

    def altered(impl, panel):
        torch.manual_seed(1)
        with rg.execution(impl, panel=panel), rg.intervene(attend, how):
            return attend(x, x, mask=mask)

    assert_same(altered("blockwise", 4), altered("dense", None))


def test_the_benchmark_measures_everyone():
    from regard.bench import QUESTIONS, near_cpu

    assert QUESTIONS["near-cpu"] == ("regard.bench.near_cpu", "cpu")
    for name in near_cpu.KINDS:
        rows = list(near_cpu.compared(name, 200, budget=0.01))
        assert {row.what for row in rows} >= {"regard", "the equation"}
        assert all(row.seconds > 0 for row in rows)
        errors = [row.error for row in rows if row.error is not None]
        assert len(errors) == (0 if "dropout" in name else 3 if "window" in (name, name.split(", bias")[0]) else 2), (
            name
        )
        assert all(error < 1e-5 for error in errors), (name, errors)
