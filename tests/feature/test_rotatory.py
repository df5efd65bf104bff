"""Rotatory attention: target, left and right, in hops."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.recipes.planted import Classifier, TargetSentiment, accuracy, fit
from tests import oracles
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, Tokens, attend, check, holes, mean, normal, weights_of

OPTIONS = {
    "one hop": {},
    "three hops": {"hops": 3},
    "inverse": {"order": "context-first"},
    "inverse, two hops": {"order": "context-first", "hops": 2},
    "weighted": {"weighting": True, "hops": 2},
    "inverse, weighted": {"weighting": True, "order": "context-first", "hops": 2},
    "additive": {"score": "additive", "hidden_dim": 7},
    "multi-dimensional": {"score": "additive", "features": True},
    "four scores": {"score": ("general", "additive", "activated-general", "general")},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def weigh(
    m: rg.Attention | None, left: torch.Tensor, right: torch.Tensor, both: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if m is None or not both:
        return left, right
    s = m.score
    e = [torch.tanh(oracles.dot(s.W[:, 0], r) + s.b) for r in (left, right)]
    a = oracles.soft(e, [True, True])
    return a[0] * left, a[1] * right


def oracle(m: rg.RotatoryAttention, inputs: list[Tokens]) -> torch.Tensor:
    target, left, right = inputs
    d = len((left or right)[0])
    nothing = torch.zeros(d, dtype=torch.float64)
    both = bool(left) and bool(right)
    lt = rt = mean(target)
    if m.order == "context-first":
        l, r = (mean(x) if x else nothing for x in (left, right))  # noqa: E741
    for hop in range(m.hops):
        if m.order == "target-first" or hop > 0:
            l = attend(m.left, lt, left) if left else nothing  # noqa: E741
            r = attend(m.right, rt, right) if right else nothing
            l, r = weigh(m.weigh_contexts, l, r, both)  # noqa: E741
        lt = attend(m.target_left, l, target) if left else mean(target)
        rt = attend(m.target_right, r, target) if right else mean(target)
        lt, rt = weigh(m.weigh_targets, lt, rt, both)
    if m.order == "context-first":
        l = attend(m.left, lt, left) if left else nothing  # noqa: E741
        r = attend(m.right, rt, right) if right else nothing
        l, r = weigh(m.weigh_contexts, l, r, both)  # noqa: E741
    return torch.cat([l, r, lt, rt])


@every_option
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(options, lead):
    m = rg.RotatoryAttention((5, 3), **options)
    target, left, right = torch.randn(*lead, 2, 5), torch.randn(*lead, 7, 3), torch.randn(*lead, 11, 3)
    assert m(target, left, right).shape == (*lead, 16)


@pytest.mark.parametrize("execution", EXECUTIONS, ids=str)
@every_option
def test_oracle_with_empty_contexts(options, execution):
    """The second example has nothing to its left, the third nothing to its right."""
    m = rg.RotatoryAttention((5, 3), **options)
    inputs = [normal(3, 2, 5), normal(3, 4, 3, seed=1), normal(3, 3, 3, seed=2)]
    masks = [holes(3, 2), holes(3, 4, seed=1, empty=[1]), holes(3, 3, seed=2, empty=[2])]
    check(m, oracle, inputs, masks, execution)


@every_option
def test_gradients(options):
    m = scrambled(rg.RotatoryAttention((5, 3), **options))
    masks = (holes(3, 2), holes(3, 4, seed=1, empty=[1]), holes(3, 3, seed=2, empty=[2]))
    leaves = [x.requires_grad_() for x in (normal(3, 2, 5), normal(3, 4, 3, seed=1), normal(3, 3, 3, seed=2))]
    assert torch.autograd.gradcheck(lambda *x: m(*x, masks), leaves, fast_mode=True)


@pytest.mark.parametrize("order", ["target-first", "context-first"])
@pytest.mark.parametrize("score", ["activated-general", "additive", "general"])
def test_an_empty_context_leaves_the_pooled_target(score, order):
    """An explicit rule: only the activated general score would give it by itself."""
    m = scrambled(rg.RotatoryAttention(5, hops=2, score=score, order=order))
    target, left, right = normal(2, 3, 5), normal(2, 4, 5, seed=1), normal(2, 3, 5, seed=2)
    out = m(target, left, right, (None, torch.zeros(2, 4, dtype=torch.bool), None))
    assert not out[:, :5].any()
    assert_same(out[:, 10:15], target.mean(1))
    assert_same(m(target, left[:, :0], right), out)


@pytest.mark.parametrize("options", [{}, {"order": "context-first", "hops": 2}, {"weighting": True}], ids=str)
def test_exchanging_left_and_right_with_their_parameters_exchanges_the_slices(options):
    m = scrambled(rg.RotatoryAttention(5, **options))
    target, left, right = normal(2, 3, 5), normal(2, 4, 5, seed=1), normal(2, 7, 5, seed=2)
    before = m(target, left, right)
    m.left, m.right, m.target_left, m.target_right = m.right, m.left, m.target_right, m.target_left
    a, b, c, d = m(target, right, left).chunk(4, -1)
    assert_same(torch.cat([b, a, d, c], -1), before)


def test_parameters_do_not_grow_with_hops():
    one, five = (sum(p.numel() for p in rg.RotatoryAttention(5, hops=hops).parameters()) for hops in (1, 5))
    assert one == five == 4 * (25 + 1)


def test_hops_are_calls_of_the_same_attentions():
    m = rg.RotatoryAttention(5, hops=3)
    model = torch.nn.ModuleDict({"attention": m})
    target, left, right = torch.randn(2, 3, 5), torch.randn(2, 4, 5), torch.randn(2, 7, 5)
    with rg.record(model) as trace:
        model["attention"](target, left, right)
    paths = ["attention.left", "attention.right", "attention.target_left", "attention.target_right"]
    assert sorted(trace) == sorted(paths)
    assert [len(trace[path]) for path in paths] == [3] * 4
    assert trace["attention.left"][2].weights.shape == (2, 4)
    assert trace["attention.target_right"][0].weights.shape == (2, 3)


def test_weighting_shows_its_two_weights():
    trace = weights_of(rg.RotatoryAttention(5, weighting=True), *(torch.randn(2, n, 5) for n in (3, 4, 7)))
    assert trace["weigh_contexts"].weights.shape == (2, 2)
    assert torch.allclose(trace["weigh_targets"].weights.sum(-1), torch.ones(2))


def test_refusals():
    with pytest.raises(ValueError, match="order: got 'both'"):
        rg.RotatoryAttention(5, order="both")
    with pytest.raises(ValueError, match="hops: got 0"):
        rg.RotatoryAttention(5, hops=0)
    with pytest.raises(
        ValueError, match="masks: got 2 masks, expected one mask, or None, for each of target, left, right"
    ):
        rg.RotatoryAttention(5)(*(torch.randn(2, 3, 5),) * 3, masks=(None, None))


@pytest.mark.parametrize("options", [{"hops": 2}, {"hops": 2, "weighting": True}], ids=["hops", "weighted"])
def test_hops_solve_what_mean_pooling_cannot(options):
    """The sign of the opinion on the target; both signs are equally frequent on each side."""
    task = TargetSentiment()
    torch.manual_seed(0)
    model = Classifier(rg.RotatoryAttention(task.dim, **options), 4 * task.dim, task.classes, task.readout)
    fit(model, task, lr=0.03)
    found = accuracy(model, task)
    torch.manual_seed(0)
    pooling = Classifier(rg.RotatoryAttention(task.dim), 4 * task.dim, task.classes, task.readout)
    with rg.intervene(pooling, "uniform"):
        fit(pooling, task, lr=0.03)
        pooled = accuracy(pooling, task)
    print(f"rotatory {found:.3f}, mean pooling {pooled:.3f}")
    assert found >= 0.95
    assert abs(pooled - 0.5) < 0.04
    batch = task.draw(256, torch.Generator().manual_seed(2))
    trace = weights_of(model, **batch.inputs)
    for side in ("left", "right"):
        here = batch.truth[side] >= 0
        looked = trace[f"attention.{side}"][-1].weights.argmax(-1)
        assert (looked[here] == batch.truth[side][here]).float().mean() >= 0.9
