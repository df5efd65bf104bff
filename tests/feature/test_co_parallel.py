"""Parallel co-attention: every feature of one input with every feature of the other."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.feature import affinity
from regard.feature.co_parallel import Trilinear
from regard.general.bound import Sizes
from regard.general.masks import Pairs
from tests import oracles
from tests.cases import assert_same, scrambled
from tests.feature.common import (
    EXECUTIONS,
    NAMES,
    Tokens,
    assert_finds_the_pair,
    check,
    holes,
    mean,
    normal,
    weighted,
    weights_of,
)

OPTIONS = {
    "aggregated": {},
    "max": {"scoring": "max"},
    "max first": {"scoring": ("max", "aggregated")},
    "max second": {"scoring": ("aggregated", "max"), "hidden_dim": 7},
    "additive affinity": {"affinity": "additive", "hidden_dim": 7},
    "additive affinity, max": {"affinity": "additive", "scoring": "max"},
    "bilinear affinity, max": {"affinity": "general", "scoring": "max"},
    "multi-dimensional": {"features": True, "activation": "sigmoid"},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
every_execution = pytest.mark.parametrize("execution", EXECUTIONS, ids=str)


def trilinear(s: Trilinear, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return oracles.dot(s.w, torch.cat([q, k, q * k]))


def oracle(m: rg.ParallelCoAttention, inputs: list[Tokens]) -> torch.Tensor:
    first, second = inputs
    s = m.affinity.score
    pair = trilinear if isinstance(s, Trilinear) else oracles.SCORES[NAMES[type(s)]]
    a = [[pair(s, x, y) for y in second] for x in first]
    transposed = [list(column) for column in zip(*a, strict=True)]
    contexts = []
    for k, (tokens, others, table) in enumerate(((first, second, a), (second, first, transposed))):
        if m.scoring[k] == "max":
            e = [max(row, key=torch.Tensor.item) for row in table]
        else:
            own, other = (m.W1, m.W2) if k == 0 else (m.W2, m.W1)
            reader = (m.first if k == 0 else m.second).score
            act = oracles.ACTIVATIONS[reader.activation.spec]
            e = []
            for token, row in zip(tokens, table, strict=True):
                hidden = oracles.times(own, token)
                for weight, o in zip(row, others, strict=True):
                    hidden = hidden + weight * oracles.times(other, o)
                w, W_d = getattr(reader, "w", None), getattr(reader, "W_d", None)
                e.append(oracles.read_out(oracles.each(act, hidden), w, W_d))
        contexts.append(weighted(e, tokens))
    return contexts[0] + contexts[1] if m.output == "sum" else torch.cat(contexts)


@every_option
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(options, lead):
    m = rg.ParallelCoAttention((5, 3), **options)
    assert m(torch.randn(*lead, 11, 5), torch.randn(*lead, 7, 3)).shape == (*lead, 8)


@every_execution
@every_option
def test_oracle(options, execution):
    m = rg.ParallelCoAttention((5, 3), **options)
    check(m, oracle, [normal(2, 5, 5), normal(2, 3, 3, seed=1)], [holes(2, 5), holes(2, 3, seed=1)], execution)


@every_execution
@pytest.mark.parametrize("scoring", ["aggregated", "max"])
def test_oracle_of_the_trilinear_affinity_and_the_sum(scoring, execution):
    m = rg.ParallelCoAttention(3, affinity="trilinear", scoring=scoring, output="sum")
    check(m, oracle, [normal(2, 5, 3), normal(2, 4, 3, seed=1)], [holes(2, 5), holes(2, 4, seed=1)], execution)


@every_execution
@every_option
def test_gradients(options, execution):
    m = scrambled(rg.ParallelCoAttention((5, 3), **options))
    masks = (holes(2, 4), holes(2, 3, seed=1))
    leaves = [normal(2, 4, 5).requires_grad_(), normal(2, 3, 3).requires_grad_()]
    with rg.execution(execution[0], panel=execution[1]):
        assert torch.autograd.gradcheck(lambda *x: m(*x, masks), leaves, fast_mode=True)


def test_several_panels_are_computed_and_recomputed(monkeypatch):
    """The comparison of executions above would mean nothing if there were one panel."""
    seen: list[range] = []
    scores = rg.ops.call.Call.scores
    monkeypatch.setattr(
        rg.ops.call.Call, "scores", lambda self, i=None, **more: (seen.append(i), scores(self, i, **more))[1]
    )
    x, y = normal(2, 5, 3).requires_grad_(), normal(2, 4, 3)
    with rg.execution("blockwise", panel=2):
        out = rg.ParallelCoAttention(3).double()(x, y)
        panels = [i for i in seen if i is not None and i.stop - i.start < 5 and i != range(1)]
        assert panels == [range(0, 2), range(2, 4), range(4, 5)]
        out.sum().backward()
    assert sorted(i.start for i in seen if i in (range(0, 2), range(2, 4), range(4, 5))) == [0, 0, 2, 2, 4, 4]


@pytest.mark.parametrize("scoring", ["aggregated", "max"])
def test_nothing_as_large_as_the_affinity_is_kept_or_made(scoring):
    """Forward and backward, every tensor that any operation makes."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.untyped_storage().nbytes() // x.element_size())
            return out

    n1, n2 = 97, 101
    x, y = torch.randn(1, n1, 4, requires_grad=True), torch.randn(1, n2, 4, requires_grad=True)
    m = rg.ParallelCoAttention(4, scoring=scoring)
    with Watch(), rg.execution("blockwise", panel=3):
        m(x, y).sum().backward()
    assert 0 < largest < n1 * n2 / 8


def test_the_maximum_sends_its_gradient_to_one_pair():
    m = scrambled(rg.ParallelCoAttention(3, affinity="dot", scoring="max"))
    call = m.affinity.call(normal(5, 3).requires_grad_(), normal(4, 3, seed=1).requires_grad_())
    for panel in (2, 5):
        with rg.execution("blockwise", panel=panel):
            of_first, of_second = affinity.maxima(call, "auto")
        whole = call.scores()
        assert_same(of_first, whole.amax(-1))
        assert_same(of_second, whole.amax(-2))
        (grad,) = torch.autograd.grad(of_first[1], call.form.key, retain_graph=True)
        assert (grad.abs().sum(-1) > 0).sum() == 1


def test_an_input_whose_partner_is_empty_is_averaged_by_maxima():
    m = scrambled(rg.ParallelCoAttention((5, 3), scoring="max"))
    first, second = normal(2, 4, 5), normal(2, 3, 3)
    out = m(first, second, (None, torch.tensor([[True] * 3, [False] * 3])))
    assert not out[1, 5:].any()
    assert_same(out[1, :5], mean(list(first[1])))
    assert_same(out[0], m(first, second)[0])
    assert_same(m(first, second[:, :0])[:, :5], first.mean(1))


@pytest.mark.parametrize("panel", [2, 5])
def test_a_feature_without_a_partner_weighs_nothing_by_maxima(panel):
    m = scrambled(rg.ParallelCoAttention((5, 3), scoring="max"))
    first, second = normal(2, 4, 5), normal(2, 3, 3)
    allowed = torch.ones(4, 3, dtype=torch.bool)
    allowed[1] = False
    mask = Pairs(allowed).bind(Sizes((2,), 4, 3))
    with rg.execution("blockwise", panel=panel), rg.intervene(m, lambda call: call.with_(mask=mask), at="affinity"):
        trace = weights_of(m, first, second)
    assert not trace["first"].weights[:, 1].any()
    assert_same(m(first[:, [0, 2, 3]], second)[:, :5], (trace["first"].weights[:, None] @ first)[:, 0])


def test_what_a_reader_of_hidden_layers_sees_is_zero_in_padding():
    """A policy that looks at the mean of its keys must not see what was summed there."""
    make = lambda: scrambled(rg.ParallelCoAttention(3, align=lambda: rg.Reinforced(3, context=True)))  # noqa: E731
    m, first, second = make().eval(), normal(2, 4, 3), normal(2, 5, 3, seed=1)
    padded = torch.cat([first, normal(2, 2, 3, seed=2)], 1)
    mask = torch.arange(6).expand(2, 6) < 4
    longer, exact = weights_of(m, padded, second, (mask, None)), weights_of(m, first, second)
    for field in ("log_prob", "entropy"):
        assert_same(longer["first"][0].call.prepared[field], exact["first"][0].call.prepared[field])


def test_aggregated_over_an_empty_partner_is_query_free():
    m = scrambled(rg.ParallelCoAttention((5, 3)))
    first, second = normal(2, 4, 5), normal(2, 3, 3)
    nobody = torch.zeros(2, 3, dtype=torch.bool)
    free = rg.Attention(scrambled(rg.QueryFree(5, 5)))
    with torch.no_grad():
        free.score.W.copy_(m.W1), free.score.b.zero_(), free.score.w.copy_(m.first.score.w)
    assert_same(m(first, second, (None, nobody))[:, :5], free(None, first))


@pytest.mark.parametrize("execution", EXECUTIONS, ids=str)
def test_the_affinity_is_recorded_and_can_be_changed(execution):
    m = scrambled(rg.ParallelCoAttention((5, 3)))
    first, second, mask = normal(2, 4, 5), normal(2, 3, 3), holes(2, 3, seed=1)
    plain = m(first, second, (None, mask))
    with rg.execution(execution[0], panel=execution[1]):
        trace = weights_of(m, first, second, (None, mask))
        assert list(trace) == ["affinity", "first", "second"]
        a = m.affinity.score(first, torch.where(mask[..., None], second, 0.0))
        assert_same(trace["affinity"].scores, a)
        shown = trace["affinity"].weights
        assert not shown[~mask[:, None].expand(2, 4, 3)].any()
        # Erased from the affinity, the second input's features are in no sum, but are read by their own scores.
        alone = m(first, second[:, :0])[:, :5]
        with rg.intervene(m, "erased", at="affinity", keys=[0, 1, 2]):
            assert_same(m(first, second, (None, mask))[:, :5], alone)
        with rg.intervene(m, lambda call: call.with_(bias=torch.ones(4, 3).double()), at="affinity"):
            assert (m(first, second, (None, mask)) - plain).abs().max() > 1e-6
    assert_same(m(first, second, (None, mask)), plain)


@pytest.mark.parametrize("panel", [2, 5])
def test_a_bias_on_the_affinity_moves_the_maxima(panel):
    m = scrambled(rg.ParallelCoAttention((5, 3), scoring="max"))
    first, second, bias = normal(2, 4, 5), normal(2, 3, 3), normal(2, 4, 3, seed=4).requires_grad_()
    a = m.affinity.score(first, second) + bias
    expected = [(e.softmax(-1)[:, None] @ x)[:, 0] for e, x in ((a.amax(-1), first), (a.amax(-2), second))]
    tables = {"tensor": bias, "function": lambda i, j: 0.3 * i.double() - 0.7 * j.double()}
    with rg.execution("blockwise", panel=panel):
        with rg.intervene(m, lambda call: call.with_(bias=tables["tensor"]), at="affinity"):
            found = m(first, second)
        assert_same(found, torch.cat(expected, -1))
        ours, theirs = (torch.autograd.grad(x.square().sum(), bias)[0] for x in (found, torch.cat(expected, -1)))
        assert_same(ours, theirs)
        with rg.intervene(m, lambda call: call.with_(bias=tables["function"]), at="affinity"):
            found = m(first, second)
    i, j = torch.arange(4.0)[:, None].double(), torch.arange(3.0)[None].double()
    a = m.affinity.score(first, second) + 0.3 * i - 0.7 * j
    expected = [(e.softmax(-1)[:, None] @ x)[:, 0] for e, x in ((a.amax(-1), first), (a.amax(-2), second))]
    assert_same(found, torch.cat(expected, -1))


def test_context_to_query_of_bidaf_is_what_the_trace_shows():
    m = scrambled(rg.ParallelCoAttention(3, affinity="trilinear", scoring=("max", "aggregated")))
    context, question = normal(2, 5, 3), normal(2, 4, 3, seed=1)
    trace = weights_of(m, context, question)
    assert_same(trace["affinity"].weights, m.affinity.score(context, question).softmax(-1))


@pytest.mark.parametrize("scoring", ["aggregated", "max"])
@pytest.mark.parametrize("how", ["uniform", "permuted", "random", "frozen", torch.ones(4, 3), rg.Sparsemax()], ids=str)
def test_what_would_change_weights_that_nobody_reads_warns(how, scoring):
    m = scrambled(rg.ParallelCoAttention((5, 3), scoring=scoring))
    first, second = normal(2, 4, 5), normal(2, 3, 3)
    plain = m(first, second)
    why = r"nothing was changed: of 'affinity' the scores are read, not the weights\. Fix: "
    with pytest.warns(UserWarning, match=why), rg.intervene(m, how, at="affinity"), rg.record(m) as trace:
        found = m(first, second)
    assert torch.equal(found, plain)
    assert_same(trace["affinity"].weights, m.affinity.score(first, second).softmax(-1))


def test_what_changes_its_scores_as_well_does_not_warn(recwarn):
    m = scrambled(rg.ParallelCoAttention((5, 3)))
    first, second = normal(2, 4, 5), normal(2, 3, 3)
    with rg.intervene(m, "erased", keys=[0], at="affinity"):
        erased = weights_of(m, first, second)
    with rg.intervene(m, lambda call: rg.erase([0])(call.with_(align=rg.Sparsemax())), at="affinity"):
        both = weights_of(m, first, second)
    for path in erased:
        assert_same(both[path].weights, erased[path].weights)
    assert not recwarn.list


def test_uniform_is_mean_pooling():
    m = rg.ParallelCoAttention((5, 3)).double()
    first, second = normal(2, 4, 5), normal(2, 3, 3)
    with rg.intervene(m, "uniform"):
        assert_same(m(first, second), torch.cat([first.mean(1), second.mean(1)], -1))


def test_refusals():
    with pytest.raises(ValueError, match="scoring: got 'mean'"):
        rg.ParallelCoAttention(3, scoring="mean")
    with pytest.raises(ValueError, match="output: got 'sum', expected 'concat', since the widths 5 and 3 differ"):
        rg.ParallelCoAttention((5, 3), output="sum")
    with pytest.raises(ValueError, match="output: got 'product'"):
        rg.ParallelCoAttention(3, output="product")
    with pytest.raises(ValueError, match="features: got True, expected aggregated scores"):
        rg.ParallelCoAttention(3, scoring="max", features=True)
    with pytest.raises(ValueError, match="affinity: got a multi-dimensional score"):
        rg.ParallelCoAttention(3, affinity=lambda q, k: rg.Additive(q, k, 4, features=3))
    with pytest.raises(
        ValueError, match="affinity: got Trilinear of queries of width 3, expected the width .* first .* 5"
    ):
        rg.ParallelCoAttention((5, 3), affinity="trilinear")
    with pytest.raises(NotImplementedError, match="an affinity is summed along both sides"), rg.execution("fused"):
        rg.ParallelCoAttention(3, affinity="general")(torch.randn(4, 3), torch.randn(5, 3))


@pytest.mark.parametrize("options", [{}, {"scoring": "max", "affinity": "general"}], ids=["aggregated", "max"])
def test_finds_the_matching_pair(options):
    assert_finds_the_pair(lambda task: rg.ParallelCoAttention(task.dim, **options))


@pytest.mark.slow
def test_memory_at_16384():
    """A training step on 16,384 x 16,384 pairs, in less than half of what the affinity alone would take."""
    from regard.bench.feature_cpu import memory

    for row in memory(sizes=(16384,)):
        print(row.case, f"{row.peak_mib:.0f} MiB")
        assert row.peak_mib < row.extra["affinity_mib"] / 2
