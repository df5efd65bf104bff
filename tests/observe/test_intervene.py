"""`intervene` changes the attention inside a model, and nothing else."""

import math
import threading
from contextlib import ExitStack
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import regard as rg
from tests.cases import assert_same, scrambled
from tests.observe.models import DIM, PATHS, batch, model

B, NQ, N, DV = 3, 5, 7, 4
KINDS = ["single", "multi", "bilinear", "one query"]
SUMS = {"multi": "...ijd,...jd->...id", "one query": "...j,...jd->...d"}
every_kind = pytest.mark.parametrize("kind", KINDS)


def setting(kind, align=None, **more):
    """A module, its arguments, and its mask: some rows short, one with one key, one with none."""
    score = "scaled-dot" if kind == "bilinear" else rg.Additive(DIM, DIM, 3, features=DV if kind == "multi" else None)
    attend = scrambled(rg.Attention(score, align, **more))
    generator = torch.Generator().manual_seed(4)
    rows = () if kind == "one query" else (NQ,)
    query = torch.randn(B, *rows, DIM, generator=generator, dtype=torch.float64)
    key = torch.randn(B, N, DIM, generator=generator, dtype=torch.float64)
    value = torch.randn(B, N, DV, generator=generator, dtype=torch.float64)
    mask = torch.rand(B, *rows, N, generator=generator) < 0.6
    mask[2] = torch.arange(N) == 3
    if rows:
        mask[0, 1] = False
    return attend, (query, key, value), mask


class Seen(NamedTuple):
    """Weights with the keys last, without and with interventions, the mask in their layout, and what was read."""

    plain: Tensor
    changed: Tensor
    allowed: Tensor
    context: Tensor


def seen(kind, *how, align=None, training=False, **more) -> Seen:
    attend, tensors, mask = setting(kind, align)
    attend.train(training)
    keys = -2 if kind == "multi" else -1
    with rg.record(attend) as trace:
        attend(*tensors, mask=mask)
    plain = trace.weights
    torch.manual_seed(9)
    with ExitStack() as stack, rg.record(attend) as trace:
        for one in how:
            stack.enter_context(rg.intervene(attend, one, **more))
        context = attend(*tensors, mask=mask)
    changed = trace.weights
    assert_same(context, torch.einsum(SUMS.get(kind, "...ij,...jd->...id"), changed, tensors[2]))
    allowed = (mask.unsqueeze(-1) if kind == "multi" else mask).expand(plain.shape)
    return Seen(*(x.detach().movedim(keys, -1) for x in (plain, changed, allowed)), context)


@every_kind
def test_uniform_is_the_mean_of_what_may_be_read(kind):
    found = seen(kind, "uniform")
    assert_same(found.changed, evenly(found.allowed))


def evenly(allowed: Tensor) -> Tensor:
    """The same weight for every allowed key."""
    return allowed.double() / allowed.sum(-1, keepdim=True).clamp(min=1)


@every_kind
def test_permuted_weights_are_the_same_weights_elsewhere(kind):
    found = seen(kind, "permuted")
    assert not found.changed[~found.allowed].any()
    assert torch.equal(found.changed.sort(-1).values, found.plain.sort(-1).values)
    assert not torch.equal(found.changed, found.plain)


def test_every_order_is_as_likely():
    attend = scrambled(rg.Attention("dot"))
    key = torch.eye(3, dtype=torch.float64)
    orders = {}
    with rg.intervene(attend, "permuted"):
        for _ in range(300):
            order = tuple(attend(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), key).argsort().tolist())
            orders[order] = orders.get(order, 0) + 1
    assert len(orders) == 6
    # Six cells of 50: beyond 30 either way is a chance of about one in a million.
    assert all(20 < count < 80 for count in orders.values())


@every_kind
def test_random_weights_sum_to_one_over_what_may_be_read(kind):
    found = seen(kind, "random")
    assert not found.changed[~found.allowed].any()
    assert (found.changed >= 0).all()
    assert_same(found.changed.sum(-1), found.allowed.any(-1).double())
    assert (found.changed - found.plain).abs().max() > 0.1


def test_random_weights_are_uniform_on_the_simplex():
    attend = rg.Attention("dot")
    x = torch.zeros(4000, 3, 2)
    with rg.intervene(attend, "random"), rg.record(attend) as trace:
        attend(x[:, 0], x)
    weights = trace.weights
    # The mean of a coordinate is 1/3, its variance 1/18; one standard error is 0.0037 and 0.0012.
    assert torch.allclose(weights.mean(0), torch.full((3,), 1 / 3), atol=0.02)
    assert torch.allclose(weights.var(0), torch.full((3,), 1 / 18), atol=0.006)


@every_kind
def test_frozen_weights_teach_the_values_and_not_the_scores(kind):
    attend, (query, key, value), mask = setting(kind)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    with rg.intervene(attend, "frozen"):
        frozen = attend(query, key, value, mask=mask)
    plain = attend(query, key, value, mask=mask)
    assert_same(frozen, plain)
    found = torch.autograd.grad(frozen.square().sum(), [*leaves, *attend.parameters()], allow_unused=True)
    expected = torch.autograd.grad(plain.square().sum(), value)
    assert_same(found[2], expected[0])
    for g in (*found[:2], *found[3:]):
        assert g is None or not g.any()


@pytest.mark.parametrize("keys", [2, [0, 2], torch.tensor([0, 2]), torch.tensor([1, -1])], ids=str)
@every_kind
@pytest.mark.parametrize("align", ["soft", "sparsemax", "hard"])
def test_erased_is_the_same_as_masked(kind, keys, align):
    attend, tensors, mask = setting(kind, align)
    attend.eval()
    with rg.intervene(attend, "erased", keys=keys):
        found = attend(*tensors, mask=mask)
    kept = torch.ones(N, dtype=torch.bool)
    kept[keys] = False
    assert_same(found, attend(*tensors, mask=mask & kept))


@pytest.mark.parametrize(
    "align", [rg.Local(1.5, "predictive", query_dim=DIM), rg.Reinforced(DIM), rg.ReinforcedPairs(DIM)]
)
def test_erased_keys_are_gone_for_alignments_that_prepare(align):
    attend, tensors, mask = setting("single", align)
    torch.manual_seed(1)
    with rg.intervene(attend, "erased", keys=[0, N - 1]), rg.record(attend) as trace:
        found = attend(*tensors, mask=mask)
    assert not trace.weights[..., [0, N - 1]].any()
    mask[..., [0, N - 1]] = False
    torch.manual_seed(1)
    assert_same(found, attend(*tensors, mask=mask))


def test_erased_indices_are_erased_everywhere_whatever_their_axes():
    attend, tensors, _ = setting("single")
    found = []
    for keys in ([1, 4, 6], torch.tensor([1, 4, 6]), torch.tensor([[1], [4], [6]])):
        with rg.intervene(attend, "erased", keys=keys), rg.record(attend) as trace:
            attend(*tensors)
        found.append(trace.weights)
        assert not trace.weights[..., [1, 4, 6]].any()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    one_each = torch.nn.functional.one_hot(torch.tensor([1, 4, 6]), N).bool()
    with rg.intervene(attend, "erased", keys=one_each), rg.record(attend) as trace:
        attend(*tensors)
    assert torch.equal(trace.weights == 0, one_each[:, None].expand(B, NQ, N))


def test_uniform_reaches_beyond_a_window():
    attend, tensors, _ = setting("single", rg.Local(1))
    with rg.intervene(attend, "uniform"), rg.record(attend) as trace:
        attend(*tensors)
    assert_same(trace.weights, torch.full((B, NQ, N), 1 / N, dtype=torch.float64))


def test_erased_keys_may_differ_within_the_batch_and_need_no_mask():
    attend, tensors, _ = setting("single")
    gone = torch.rand(B, N, generator=torch.Generator().manual_seed(3)) < 0.4
    with rg.intervene(attend, "erased", keys=gone):
        found = attend(*tensors)
    assert_same(found, attend(*tensors, mask=~gone[:, None, :]))
    with rg.intervene(attend, rg.erase(gone)):
        assert_same(attend(*tensors), found)


@every_kind
def test_a_given_tensor_is_what_is_read(kind):
    attend, tensors, mask = setting(kind)
    shape = {"multi": (B, NQ, N, DV), "one query": (B, N)}.get(kind, (B, NQ, N))
    weights = torch.rand(shape, dtype=torch.float64)
    with rg.intervene(attend, weights), rg.record(attend) as trace:
        attend(*tensors)
    assert_same(trace.weights, weights)
    for part in (weights[0], weights[0, 0] if kind != "one query" else weights[:1]):
        with rg.intervene(attend, part), rg.record(attend) as trace:
            attend(*tensors)
        assert_same(trace.weights, part.expand(shape))


def test_a_given_tensor_is_cut_into_panels():
    attend, tensors, _ = setting("single")
    weights = torch.rand(B, NQ, N, dtype=torch.float64)
    with rg.intervene(attend, weights), rg.execution("blockwise", panel=2):
        assert_same(attend(*tensors), weights @ tensors[2])


def test_a_given_tensor_has_a_gradient():
    attend, tensors, _ = setting("single")
    weights = torch.rand(B, NQ, N, dtype=torch.float64, requires_grad=True)
    with rg.intervene(attend, weights):
        attend(*tensors).sum().backward()
    assert_same(weights.grad, tensors[2].sum(-1)[:, None, :].expand(B, NQ, N))


@every_kind
@pytest.mark.parametrize(
    "align", [rg.Sparsemax(), rg.Hard(), rg.Local(1.0), rg.Reinforced(DIM)], ids=lambda a: type(a).__name__
)
def test_another_alignment(kind, align):
    attend, tensors, mask = setting(kind)
    align = scrambled(align)
    other, *_ = setting(kind, align)
    other.load_state_dict(attend.state_dict() | other.state_dict())
    other.score = attend.score
    for training in (False, True):
        attend.train(training)
        other.train(training)
        torch.manual_seed(1)
        with rg.intervene(attend, align):
            found = attend(*tensors, mask=mask)
        torch.manual_seed(1)
        assert_same(found, other(*tensors, mask=mask))


@every_kind
def test_a_function_from_call_to_call(kind):
    attend, tensors, mask = setting(kind)

    def doubled(call):
        return call.with_(value=2 * call.value)

    with rg.intervene(attend, doubled):
        assert_same(attend(*tensors, mask=mask), 2 * attend_plainly(attend, tensors, mask))


def attend_plainly(attend, tensors, mask):
    interventions = rg.ops.hooks.interventions[:]
    rg.ops.hooks.interventions.clear()
    try:
        return attend(*tensors, mask=mask)
    finally:
        rg.ops.hooks.interventions.extend(interventions)


@pytest.mark.parametrize("how", ["uniform", "permuted", "random", "frozen"])
@pytest.mark.parametrize("align", ["hard", "soft", "entmax"])
@every_kind
def test_interventions_are_the_same_in_every_execution(kind, align, how):
    results = []
    for execution in ({"impl": "dense"}, {"impl": "blockwise", "panel": 2}, {"impl": "auto"}):
        attend, tensors, mask = setting(kind, align, dropout=0.3)
        torch.manual_seed(7)
        with rg.execution(**execution), rg.intervene(attend.train(), how):
            results.append(attend(*tensors, mask=mask))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.parametrize("how", ["uniform", "permuted", "random"])
def test_a_bias_of_minus_infinity_is_a_mask_too(how):
    attend, tensors, mask = setting("single")
    bias = torch.where(mask, 0.0, -math.inf).double()
    with rg.intervene(attend, how), rg.record(attend) as trace:
        attend(*tensors, bias=bias)
    assert not trace.weights[~mask].any()
    assert_same(trace.weights.sum(-1), mask.any(-1).double())


def test_at_some_paths():
    m, x = model(), batch()

    def changed(at):
        with rg.intervene(m, rg.Local(1.0), at=at), rg.record(m) as trace:
            m(x)
        return {path for path in PATHS if all(isinstance(call.call.align, rg.Local) for call in trace[path])}

    assert changed(None) == changed("") == set(PATHS)
    assert changed("pool") == {"pool"}
    assert changed("encoder") == {"encoder.0.attention", "encoder.1.attention"}
    assert changed(["encoder.1", "pool"]) == {"encoder.1.attention", "pool"}


def test_nested_interventions_apply_in_order_and_before_any_record():
    attend, tensors, mask = setting("single")

    def shift(call):
        return call.with_(value=call.value + 1)

    def double(call):
        return call.with_(value=2 * call.value)

    value = tensors[2]
    with rg.record(attend) as trace, rg.intervene(attend, shift), rg.intervene(attend, double):
        attend(*tensors, mask=mask)
    unread = ~mask.any(-2)
    expected = torch.where(unread.unsqueeze(-1), 0.0, value)
    assert_same(trace.call.value, 2 * (expected + 1))


def test_a_permutation_of_random_weights_is_not_sorted():
    found = seen("single", "random", "permuted")
    alone = seen("single", "random")
    assert_same(found.changed.sum(-1), found.allowed.any(-1).double())
    assert not found.changed[~found.allowed].any()
    several = found.allowed.sum(-1) > 3
    rows = found.changed[several]
    steps = [row[row > 0].diff() for row in rows]
    assert not all((step < 0).all() for step in steps)
    assert not torch.equal(found.changed, alone.changed)


def test_uniform_over_what_is_left():
    attend, tensors, mask = setting("single")
    with rg.intervene(attend, "erased", keys=[1, 2]), rg.intervene(attend, "uniform"), rg.record(attend) as trace:
        attend(*tensors, mask=mask)
    kept = mask.clone()
    kept[..., [1, 2]] = False
    assert_same(trace.weights, evenly(kept))
    with rg.intervene(attend, "uniform"), rg.intervene(attend, "erased", keys=[1, 2]), rg.record(attend) as other:
        attend(*tensors, mask=mask)
    assert_same(other.weights, trace.weights)


def test_every_call_is_permuted_anew_and_a_seed_brings_it_back():
    attend, tensors, mask = setting("single")
    with rg.intervene(attend, "permuted"):
        first, second = attend(*tensors, mask=mask), attend(*tensors, mask=mask)
    assert not torch.equal(first, second)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        with rg.intervene(attend, "permuted"):
            results.append(attend(*tensors, mask=mask))
    assert torch.equal(*results)


def test_nothing_stays_changed():
    m, x = model(), batch()
    before = m(x)
    with rg.intervene(m, "uniform"):
        assert not torch.equal(m(x), before)
    assert torch.equal(m(x), before)


def test_an_intervention_that_reaches_nothing_says_so():
    m = torch.nn.Sequential(torch.nn.Linear(3, 3), rg.Attention("dot"))
    with pytest.warns(UserWarning, match=r"intervene\('uniform'\): no attention ran, so nothing was changed.*adopt"):
        with rg.intervene(m, "uniform", at="0"):
            m[0](torch.randn(2, 3))


def test_refusals():
    attend, tensors, _ = setting("single")
    m = model()
    with pytest.raises(ValueError, match=r"how: got 'unifrom', expected one of .*Did you mean 'uniform'"):
        rg.intervene(m, "unifrom").__enter__()
    with pytest.raises(ValueError, match=r"at: got 'encodr', expected a path of the model. Did you mean 'encoder"):
        rg.intervene(m, "uniform", at="encodr").__enter__()
    with pytest.raises(ValueError, match=r"keys: got None, expected which keys to erase"):
        rg.intervene(m, "erased").__enter__()
    with pytest.raises(TypeError, match=r"how: got int, expected a name, weights, an alignment, or a function"):
        rg.intervene(m, 3).__enter__()
    with pytest.raises(TypeError, match=r"weights: got a tensor of torch\.bool, expected a floating-point tensor"):
        rg.intervene(m, torch.ones(2, 3, dtype=torch.bool)).__enter__()
    expected = rf"expected a shape that broadcasts to \({B}, {NQ}, {N}\): \(…, queries, keys\)"
    with pytest.raises(ValueError, match=rf"how: got weights of shape \(2, 2\), {expected}"):
        with rg.intervene(attend, torch.ones(2, 2)):
            attend(*tensors)
    one, inputs, _ = setting("one query")
    with pytest.raises(ValueError, match=rf"expected a shape that broadcasts to \({B}, {N}\): \(…, keys\)"):
        with rg.intervene(one, torch.ones(2, 2)):
            one(*inputs)
    with pytest.raises(TypeError, match=r"how: got the class Hard, expected an alignment. Fix: make one, Hard\(…\)"):
        rg.intervene(m, rg.Hard).__enter__()
    with pytest.raises(TypeError, match="at: got int, expected a path, or several"):
        rg.intervene(m, "uniform", at=3).__enter__()
    with pytest.raises(ValueError, match=r"at: got 'qqqq', expected a path of the model. Known: '', "):
        rg.intervene(attend, "uniform", at="qqqq").__enter__()
    for keys in ("a", slice(2)):
        with pytest.raises(TypeError, match=r"keys: got .*, expected indices, or booleans"):
            rg.erase(keys)
    with pytest.raises(TypeError, match=r"keys: got a tensor of torch\.float32, expected indices"):
        rg.erase(torch.tensor([0.5]))
    with pytest.raises(ValueError, match=rf"keys: got booleans of shape \(2,\), expected .* \({B}, {N}\)"):
        with rg.intervene(attend, "erased", keys=torch.ones(2, dtype=torch.bool)):
            attend(*tensors)
    with pytest.raises(IndexError, match=rf"keys: got \[{N}\], expected indices of {N} keys"):
        with rg.intervene(attend, "erased", keys=N):
            attend(*tensors)


@pytest.mark.parametrize("align", [rg.Sinkhorn, rg.DependencyTree])
def test_a_changed_call_is_prepared_anew(align):
    attend, x = rg.Attention("dot", align()), torch.randn(2, 5, 4)
    sharper = torch.randn(5, 5) * 3
    with rg.intervene(attend, lambda call: call.with_(bias=sharper)):
        changed = attend(x, x)
    torch.testing.assert_close(changed, attend(x, x, bias=sharper))


def test_a_backward_in_one_thread_leaves_the_interventions_of_another_alone():
    other, x = rg.Attention("dot"), torch.randn(1, 4, 4)
    plain = other(x, x)
    inside, left, entered = threading.Event(), threading.Event(), threading.Event()
    seen, errors = [], []

    class Slow(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            if torch._C._current_graph_task_id() != -1:
                inside.set()
                left.wait(5)
            return self.inner(x)

    model = rg.Reformer(8, 2, 1, chunk=4)
    model.layers[0].feedforward = Slow(model.layers[0].feedforward)

    def altering():
        try:
            with rg.intervene(other, "uniform"):
                entered.set()
                inside.wait(5)
                seen.append(other(x, x))
        except ValueError as error:
            errors.append(error)
        left.set()

    loss, thread = model(torch.randn(1, 8, 8)).sum(), threading.Thread(target=altering)
    thread.start()
    entered.wait(5)
    loss.backward()
    thread.join()
    assert not errors
    assert torch.allclose(seen[0], x.mean(-2, keepdim=True).expand_as(x), atol=1e-6), "in force during the backward"
    assert torch.equal(other(x, x), plain), "and gone afterwards"
