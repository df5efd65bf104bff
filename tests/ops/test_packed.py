"""Sequences end to end: each as if it stood alone, in time that grows with the pairs within them."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from regard import explain_dispatch
from regard.ops import dispatch
from regard.ops.packed import WASTE, Pieces, _groups
from tests.cases import assert_same, scrambled
from tests.feature.common import normal

LENGTHS = (5, 31, 0, 2, 29, 30, 1, 17)
QUERIES = (3, 7, 4, 0, 8, 29, 1, 2)
BANDS = {
    "all": None,
    "causal": rg.Causal(),
    "window": rg.Window(2),
    "backward": rg.Directional("backward"),
    "far": rg.Band(-9, -4),
}
ALIGNMENTS = {
    "soft": lambda: rg.Soft(temperature=0.7),
    "sparsemax": rg.Sparsemax,
    "hard": rg.Hard,
    "gumbel": lambda: rg.Hard(gradient="gumbel"),
    "local": lambda: rg.Local(2),
    "predictive": lambda: rg.Local(2, position="predictive", query_dim=3),
    "reinforced": lambda: rg.Reinforced(key_dim=3),
}
SCORES = {
    "scaled-dot": lambda: rg.ScaledDot(),
    "negative-l2": lambda: rg.NegativeL2(),
    "additive": lambda: rg.Additive(query_dim=3, key_dim=3, hidden_dim=2),
    "multi-dimensional": lambda: rg.Additive(query_dim=3, key_dim=3, hidden_dim=2, features=3),
    "multi-dimensional general": lambda: rg.General(query_dim=3, key_dim=3, features=3),
}


def both_ways(attend, query, key, value, **given):
    """The result and all gradients, packed and from the equation; the random numbers are the same."""
    inputs = (query, key, value, *attend.parameters())
    weight, outcomes = normal(*query.shape[:-1], value.shape[-1], seed=9), []
    for impl in ("auto", "dense"):
        with rg.execution(impl):
            torch.manual_seed(0)
            context = attend(query, key, value, **given)
            grads = torch.autograd.grad((context * weight).sum(), inputs, allow_unused=True)
        outcomes.append((context, *(x for x in grads if x is not None)))
    return outcomes


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("score", SCORES)
def test_it_is_the_dense_execution(score, band):
    torch.manual_seed(0)
    attend, n = scrambled(rg.Attention(SCORES[score]())).double(), sum(LENGTHS)
    query, key, value = (normal(2, n, 3, seed=k).requires_grad_() for k in range(3))
    mask = rg.Packed(LENGTHS) if BANDS[band] is None else BANDS[band] & rg.Packed(LENGTHS)
    assert explain_dispatch(attend, query, key, value, mask=mask).path == "packed"
    for found, expected in zip(*both_ways(attend, query, key, value, mask=mask), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("align", ALIGNMENTS)
def test_every_alignment_and_every_number_that_it_draws(align, dropout):
    torch.manual_seed(0)
    attend = scrambled(rg.Attention("general", ALIGNMENTS[align](), query_dim=3, key_dim=3, dropout=dropout)).double()
    query, key, value = (
        normal(2, sum(QUERIES), 3),
        normal(2, sum(LENGTHS), 3, seed=1),
        normal(2, sum(LENGTHS), 4, seed=2),
    )
    inputs, mask = [x.requires_grad_() for x in (query, key, value)], rg.Packed(LENGTHS, QUERIES)
    assert explain_dispatch(attend, *inputs, mask=mask).path == "packed"
    for found, expected in zip(*both_ways(attend, *inputs, mask=mask), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("align", ["soft", "sparsemax", "local", "predictive"])
def test_each_sequence_reads_as_if_it_stood_alone(align):
    torch.manual_seed(0)
    attend = scrambled(rg.Attention("general", ALIGNMENTS[align](), query_dim=3, key_dim=3)).double()
    query, key = normal(sum(QUERIES), 3), normal(sum(LENGTHS), 3, seed=1)
    for impl in ("auto", "dense", "blockwise"):
        with rg.execution(impl):
            whole = attend(query, key, mask=rg.Packed(LENGTHS, QUERIES))
        parts = zip(query.split(QUERIES), key.split(LENGTHS), strict=True)
        assert_same(whole, torch.cat([attend(q, k) for q, k in parts]))


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("score", ["scaled-dot", "additive"])
def test_a_band_holds_within_each_sequence_also_where_it_asks_with_fewer_queries(score, band):
    torch.manual_seed(0)
    attend = scrambled(rg.Attention(SCORES[score]())).double()
    lengths, queries = (*LENGTHS, *[6] * 9, *[7] * 9), (*QUERIES, *[2] * 9, *[5] * 9)
    query, key = normal(2, sum(queries), 3), normal(2, sum(lengths), 3, seed=1)
    mask = rg.Packed(lengths, queries) if BANDS[band] is None else rg.Packed(lengths, queries) & BANDS[band]
    parts = zip(query.split(queries, -2), key.split(lengths, -2), strict=True)
    alone = torch.cat([attend(q, k, mask=BANDS[band]) for q, k in parts], -2)
    assert explain_dispatch(attend, query, key, mask=mask).path == "packed"
    for impl in ("auto", "dense", "blockwise", *(["fused"] if score == "scaled-dot" else [])):
        with rg.execution(impl):
            assert_same(attend(query, key, mask=mask), alone)


@pytest.mark.parametrize("bias", ["tensor", "keys", "function"])
def test_a_bias_of_pairs(bias):
    attend, n = rg.Attention("dot"), sum(LENGTHS)
    x = normal(2, n, 3).requires_grad_()
    given = {
        "tensor": normal(2, n, n, seed=3),
        "keys": normal(1, n, seed=3),
        "function": lambda i, j: -0.1 * (i - j).abs().double(),
    }[bias]
    for found, expected in zip(*both_ways(attend, x, x, x, mask=rg.Packed(LENGTHS), bias=given), strict=True):
        assert_same(found, expected)


def test_heads_share_what_they_share():
    n = sum(LENGTHS)
    query, key, value = normal(2, 3, n, 4), normal(1, 3, n, 4, seed=1), normal(1, 1, n, 5, seed=2)
    attend, mask = rg.Attention("dot"), rg.Packed(LENGTHS) & rg.Causal()
    with rg.execution("dense"):
        expected = attend(query, key, value, mask=mask)
    assert_same(attend(query, key, value, mask=mask), expected)


def test_an_encoder_reads_each_sequence_alone():
    torch.manual_seed(0)
    encoder = scrambled(rg.TransformerEncoder(6, 2, 2, position="alibi", feedforward_dim=5)).double()
    lengths = [7, 40, 38, 3]
    x = normal(sum(lengths), 6)
    whole = encoder(x[None], pairs=rg.Packed(lengths) & rg.Causal())[0]
    assert_same(whole, torch.cat([encoder(part[None], pairs=rg.Causal())[0] for part in x.split(lengths)]))


def test_what_nobody_may_read_never_matters():
    query, key = normal(sum(QUERIES), 3), normal(sum(LENGTHS), 3, seed=1)
    key[38 - 2 : 38] = math.nan  # of the sequence that nobody asks
    found = rg.Attention("dot")(query, key, mask=rg.Packed(LENGTHS, QUERIES))
    assert found.isfinite().all()
    first = sum(QUERIES[:2])
    assert (found[first : first + 4] == 0).all()  # of the sequence without keys


def test_a_recorded_packed_call_has_its_weights():
    attend, x = rg.Attention("dot"), normal(sum(LENGTHS), 3)
    with rg.record(attend) as trace:
        context = attend(x, x, mask=rg.Packed(LENGTHS))
    weights = torch.block_diag(*((part @ part.mT).softmax(-1) for part in x.split(LENGTHS)))
    assert_same(trace.weights, weights)
    assert_same(context, weights @ x)


def test_pairs_that_are_computed_are_few(monkeypatch):
    counted, run = [], dispatch._run

    def counting(call, path):
        if path != "packed":
            counted.append(call.lead[0] * call.pairs if len(call.lead) > 1 else call.pairs)
        return run(call, path)

    monkeypatch.setattr(dispatch, "_run", counting)
    lengths = [300, 299, 200, *[40] * 20, *[38] * 9, *[3] * 50]
    x = normal(1, sum(lengths), 3)
    rg.Attention("dot")(x, x, mask=rg.Packed(lengths))
    assert sum(counted) <= WASTE * sum(n * n for n in lengths)
    assert len(counted) < 10


def test_groups_hold_every_sequence_once_and_little_padding():
    generator = torch.Generator().manual_seed(0)
    queries, keys = (torch.randint(40, (60,), generator=generator).tolist() for _ in range(2))
    groups = list(_groups(Pieces(tuple(queries), tuple(keys)), 800))
    asked = sorted(i for group in groups for each in group for i in each.i)
    assert asked == list(range(sum(queries)))
    assert any(len(group) > 1 for group in groups)
    for group in groups:
        assert len(group) == 1 or all(len(each.i) * len(each.j) <= 800 for each in group)
        padded = max(len(each.i) for each in group) * max(len(each.j) for each in group)
        assert all(padded <= WASTE * len(each.i) * len(each.j) for each in group) or not group[0].j


def test_one_long_sequence_is_not_worth_it():
    x = normal(100, 3)
    assert explain_dispatch(rg.Attention("dot"), x, x, mask=rg.Packed([95, 5])).path != "packed"


def test_an_alignment_that_looks_further_reads_the_whole():
    attend, x = rg.Attention("dot", "structured"), normal(40, 3)
    assert explain_dispatch(attend, x, x, mask=rg.Packed([10] * 4)).path != "packed"


def test_nothing_to_attend_to_sends_back_zeros():
    attend = rg.Attention("dot")
    for lengths, queries in (((0, 0), (2, 3)), ((2, 3), (0, 0)), ((), ())):
        query, key = (normal(sum(count), 3).requires_grad_() for count in (queries, lengths))
        context = attend(query, key, mask=rg.Packed(lengths, queries))
        assert (context == 0).all()
        for gradient in torch.autograd.grad(context.sum(), (query, key)):
            assert (gradient == 0).all()


def test_time_does_not_grow_with_the_square_of_the_number_of_sequences():
    x = normal(40_000, 1)  # which would take minutes
    assert_same(rg.Attention("dot")(x, x, mask=rg.Packed([1] * len(x))), x)


@pytest.mark.parametrize("align", ["soft", "sparsemax", "local"])
def test_it_compiles_into_one_graph(align):
    attend, x = rg.Attention("dot", ALIGNMENTS[align]()), normal(9, 3)
    masks = rg.Packed([4, 0, 5]), rg.Packed([3, 6], [5, 4]), rg.Packed([4, 5]) & rg.Causal()
    for mask in (*masks, rg.Packed([3, 6], [5, 4]) & rg.Causal()):
        torch._dynamo.reset()
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        assert_same(compiled(x, x, mask=mask), attend(x, x, mask=mask))
