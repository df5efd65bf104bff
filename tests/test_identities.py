"""Equations that hold whatever the execution, by number; `docs/identities.md` says what each is and what it catches."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import regard as rg
from regard.general import attention
from regard.ops import additive
from regard.ops.additive import additive_scores
from regard.ops.call import Call, Tile
from regard.ops.folds import finish, fold_keys
from tests import cases, oracles
from tests.cases import D_K, D_Q, D_V, LEAD, NQ, Case, N, assert_same, run, scrambled

SUPPORTED = pytest.mark.parametrize("case", cases.supported(), ids=str)
IMPLS = pytest.mark.parametrize("impl", ["dense", "blockwise"])


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def weights(
    score: rg.Score, query: Tensor | None, key: Tensor, align: rg.Alignment | None = None, **more: Any
) -> Tensor:
    """What a recorded attention shows."""
    attend = rg.Attention(score, align)
    with rg.record(attend) as trace:
        attend(query, key, **more)
    return trace.weights


def filled(module: Any, **values: Tensor | float) -> Any:
    """A scrambled module with some of its parameters set."""
    module = scrambled(module)
    with torch.no_grad():
        for name, value in values.items():
            module.get_parameter(name).copy_(torch.as_tensor(value))
    return module


# I01


def test_i01_general_with_the_identity_matrix_is_dot() -> None:
    query, key = normal(NQ, D_K), normal(N, D_K)
    general = filled(rg.General(D_K, D_K), W=torch.eye(D_K))
    assert_same(general(query, key), rg.Dot()(query, key))
    # W is not symmetric in its roles: k W q, with the key on the left.
    shift = filled(rg.General(D_K, D_K), W=torch.eye(D_K).roll(1, 0))
    assert_same(shift(query, key), rg.Dot()(query.roll(1, -1), key))


def test_i01_scaled_dot_of_a_longer_query_is_dot() -> None:
    query, key = normal(NQ, D_K), normal(N, D_K)
    assert_same(rg.ScaledDot()(query * math.sqrt(D_K), key), rg.Dot()(query, key))


def test_i01_low_rank_general_is_general_with_the_product() -> None:
    query, key = normal(NQ, D_Q), normal(N, D_K)
    low = scrambled(rg.LowRankGeneral(D_Q, D_K, rank=2))
    assert_same(filled(rg.General(D_Q, D_K), W=low.U.T @ low.V)(query, key), low(query, key))


# I02


@IMPLS
def test_i02_identity_activation_drops_the_query(impl: str) -> None:
    attend = scrambled(rg.Attention(rg.Additive(D_Q, D_K, 13, activation="identity"), impl=impl))
    x = cases.inputs((LEAD,), NQ, N, D_Q, D_K, D_V, grad=True)
    a = weights(attend.score, x["query"], x["key"])
    assert_same(a, a[:, :1].expand_as(a))
    with rg.execution(impl, panel=2):
        _, gradients = run(attend, x)
    size = float(gradients["parameter score.W2"].abs().max())
    for name in ("parameter score.W1", "parameter score.b", "input query"):
        assert float(gradients[name].abs().max()) <= 1e-10 * size, name


# I03


@pytest.mark.parametrize("b", [-3.0, 0.0, 7.0])
def test_i03_activated_general_without_activation_weighs_like_general(b: float) -> None:
    query, key = normal(NQ, D_Q), normal(N, D_K)
    activated = filled(rg.ActivatedGeneral(D_Q, D_K, activation="identity"), b=b)
    general = filled(rg.General(D_Q, D_K), W=activated.W.detach())
    assert_same(activated(query, key), general(query, key) + b)
    assert_same(weights(activated, query, key), weights(general, query, key))


# I04


def test_i04_biased_general_adds_a_saliency_of_each_key() -> None:
    query, key = normal(NQ, D_Q), normal(N, D_K)
    biased = scrambled(rg.BiasedGeneral(D_Q, D_K))
    general = filled(rg.General(D_Q, D_K), W=biased.W.detach())
    assert_same(biased(query, key) - general(query, key), (key @ biased.b).expand(NQ, N))


def test_i04_biased_general_without_its_matrix_is_a_learned_query() -> None:
    query, key = normal(NQ, D_Q), normal(N, D_K)
    biased = filled(rg.BiasedGeneral(D_Q, D_K), W=0.0)
    learned = rg.Dot()(biased.b.detach()[None], key)
    assert_same(biased(query, key), learned.expand(NQ, N))


# I05


def test_i05_no_weight_exceeds_the_bound_of_activated_general() -> None:
    query, key = 100 * normal(NQ, D_Q), 100 * normal(N, D_K)
    score = scrambled(rg.ActivatedGeneral(D_Q, D_K))
    assert float(score(query, key).detach().abs().max()) <= 1
    bound = math.e**2 / (math.e**2 + N - 1)
    assert float(weights(score, query, key).detach().max()) <= bound * (1 + 1e-10)
    # One key at +1 and all others at -1 reach it.
    sharp = filled(rg.ActivatedGeneral(1, 1), W=1.0, b=0.0)
    keys = torch.tensor([1e3] + [-1e3] * (N - 1), dtype=torch.float64)[:, None]
    assert_same(weights(sharp, torch.ones(1, 1, dtype=torch.float64), keys).max(), oracles.zero() + bound)


@IMPLS
def test_i05_additive_scores_are_bounded_by_the_weights_of_the_hidden_layer(impl: str) -> None:
    score = scrambled(rg.Additive(D_Q, D_K, 13))
    form = score.reduce(100 * normal(NQ, D_Q), 100 * normal(N, D_K))
    scores = form.scores(range(NQ)) if impl == "dense" else form.tiled(range(NQ))
    bound, largest = float(score.w.detach().abs().sum()), float(scores.detach().abs().max())
    assert 0.1 * bound < largest <= bound * (1 + 1e-10)


# I06


def test_i06_negative_distance_weighs_like_a_longer_dot_product() -> None:
    query, key, tau = normal(NQ, D_K), normal(N, D_K), 1.7
    longer = torch.cat([2 * query, torch.ones(NQ, 1, dtype=torch.float64)], -1)
    augmented = torch.cat([key, -key.square().sum(-1, keepdim=True)], -1)
    expected = torch.nn.functional.scaled_dot_product_attention(longer, augmented, key, scale=1 / tau)
    for impl in ("dense", "blockwise", "fused"):
        assert_same(rg.Attention(rg.NegativeL2(tau), impl=impl)(query, key), expected, impl)


def test_i06_cosine_does_not_see_lengths() -> None:
    query, key = normal(NQ, D_K), normal(N, D_K)
    stretch_q, stretch_k = (torch.rand(n, 1, dtype=torch.float64) * 9 + 0.1 for n in (NQ, N))
    assert_same(rg.Cosine()(query * stretch_q, key * stretch_k), rg.Cosine()(query, key))
    assert_same(rg.Cosine()(-query, key), -rg.Cosine()(query, key))


# I07


@pytest.mark.parametrize("align", [rg.Soft(), rg.Soft(0.3), rg.Entmax(1.5), rg.Sparsemax(), rg.Entmax(1.3)])
def test_i07_rows_sum_to_one_over_allowed_keys_and_shifts_do_not_matter(align: rg.Alignment) -> None:
    mask = cases.a_mask()
    score = scrambled(rg.General(D_Q, D_K))
    query, key = normal(LEAD, NQ, D_Q), normal(LEAD, N, D_K)
    a = weights(score, query, key, align, mask=mask)
    assert bool((a[~mask] == 0).all())
    assert_same(a.sum(-1), mask.any(-1).double())
    shift = 1e3 * normal(LEAD, NQ, 1)
    shifted = weights(score, query, key, align, mask=mask, bias=shift)
    assert float((shifted - a).detach().abs().max()) < 1e-10
    equal = weights(filled(rg.General(D_Q, D_K), W=0.0), query, key, align, mask=mask)
    assert_same(equal, mask / mask.sum(-1, keepdim=True).clamp(min=1).double())


@IMPLS
def test_i07_a_constant_score_is_the_masked_mean(impl: str) -> None:
    mask = cases.a_mask()
    attend = rg.Attention(filled(rg.Additive(D_Q, D_K, 13), w=0.0), impl=impl)
    x = cases.inputs((LEAD,), NQ, N, D_Q, D_K, D_V)
    total = mask.double() @ x["value"]
    assert_same(attend(**x, mask=mask), total / mask.sum(-1, keepdim=True).clamp(min=1))


# I08


@SUPPORTED
@IMPLS
def test_i08_a_row_with_nothing_to_attend_to_is_nothing(case: Case, impl: str) -> None:
    attend, x = case.build(dropout=0.3), case.inputs(grad=True)
    mask = torch.ones(LEAD, NQ, N, dtype=torch.bool)
    mask[0, 2], mask[1] = False, False
    with rg.execution(impl, panel=2):
        torch.manual_seed(3)
        context = attend(**x, mask=mask)
        dead = ~mask.any(-1)
        assert bool((context[dead] == 0).all())
        assert bool(context.isfinite().all())
        wanted = [*x.values(), *attend.parameters()]
        # What comes from dead rows alone is exactly zero, and nothing is NaN on the way.
        if context.requires_grad:
            found = torch.autograd.grad(context[dead].sum(), wanted, retain_graph=True, allow_unused=True)
            assert all(g is None or bool((g == 0).all()) for g in found)
        _, gradients = run(attend, x, mask=mask)
    for name, g in gradients.items():
        assert bool(g.isfinite().all()), name
        if name.startswith("input"):
            assert bool((g[1] == 0).all()), name


@SUPPORTED
@IMPLS
def test_i08_a_bias_of_minus_infinity_is_a_mask(case: Case, impl: str) -> None:
    attend, x = case.build(), case.inputs(grad=True)
    mask = torch.rand(LEAD, NQ, N, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[..., -1] = True  # every query sees the last key, so that its sequence is as long as it was
    mask[0, 2] = False
    mask[:, 0] = True
    bias = torch.zeros(LEAD, NQ, N, dtype=torch.float64).masked_fill(~mask, -math.inf).requires_grad_()
    with rg.execution(impl, panel=2):
        masked = run(attend, x, mask=mask)
        context, gradients = run(attend, x, bias=bias)
    assert bool(gradients.pop("bias").isfinite().all())
    # The query of a dead row is not read at all under a mask.
    cases.compare((context, gradients), masked)


# I09


def junk(like: Tensor) -> Tensor:
    """Everything that padding might hold, feature by feature."""
    kinds = torch.tensor([math.nan, math.inf, -math.inf, 1e4, -1e308], dtype=like.dtype)
    return kinds[torch.arange(like.shape[-1]) % len(kinds)]


@SUPPORTED
@IMPLS
def test_i09_padding_never_matters(case: Case, impl: str) -> None:
    attend, x = case.build(dropout=0.3), case.inputs()
    mask = cases.a_mask()
    unread, asking = ~mask.any(-2), mask.any(-1)
    assert bool(unread.any())
    assert not bool(asking.all())
    other = {name: t.clone() for name, t in x.items()}
    for name, where in (("key", unread), ("value", unread), ("query", ~asking)):
        other[name][where] = junk(other[name])
    with rg.execution(impl, panel=2):
        plain = run(attend, {k: t.requires_grad_() for k, t in x.items()}, mask=mask)
        changed = run(attend, {k: t.requires_grad_() for k, t in other.items()}, mask=mask)
    cases.compare(changed, plain)


# I10


@SUPPORTED
def test_i10_a_batch_is_its_elements(case: Case) -> None:
    attend, x = case.build().eval(), case.inputs()
    lengths = torch.tensor([N - 3, N])
    together = attend(**x, mask=rg.Padding(lengths))
    for b, length in enumerate(lengths.tolist()):
        alone = attend(x["query"][b], x["key"][b, :length], x["value"][b, :length])
        assert_same(together[b], alone)


# I11


@pytest.mark.parametrize(
    "case", [c for c in cases.supported() if not c.align.name.startswith(("local", "structured"))], ids=str
)
def test_i11_keys_are_a_set(case: Case) -> None:
    attend, x = case.build().eval(), case.inputs()
    order = torch.randperm(N)
    mask = cases.a_mask()
    moved = {"query": x["query"], "key": x["key"][:, order], "value": x["value"][:, order]}
    assert_same(attend(**moved, mask=mask[..., order]), attend(**x, mask=mask))


@pytest.mark.parametrize("case", [c for c in cases.supported() if c.align.name.startswith("local")], ids=str)
def test_i11_local_alignments_know_positions(case: Case) -> None:
    attend, x = case.build().eval(), case.inputs()
    moved = {"query": x["query"], "key": x["key"].flip(1), "value": x["value"].flip(1)}
    assert float((attend(**moved) - attend(**x)).detach().abs().max()) > 1e-3


# I12


def draws(count: int, gradient: str = "reinforce") -> tuple[rg.Attention, Tensor, Tensor, Tensor]:
    """The same five scores drawn from many times, on two leading entries."""
    attend = rg.Attention(rg.Dot(), rg.Hard(gradient)).double()
    scores, value = normal(5), normal(5, 3)
    query = scores.expand(2, count, 5)
    return attend, query, torch.eye(5, dtype=torch.float64).expand(2, 5, 5), value.expand(2, 5, 3)


def test_i12_frequencies_of_draws_are_those_of_the_softmax() -> None:
    attend, query, key, value = draws(10007)
    choice = attend.align.choice(attend.call(query, key, value))
    p = query[0, 0].softmax(-1).numpy()
    for of_one in choice:
        count = of_one.bincount(minlength=5).numpy()
        assert stats.chisquare(count, p * count.sum()).pvalue > 1e-3
    # No two rows or leading entries share their noise: pairs of choices are independent.
    for first, second in ((choice[0, :-1], choice[0, 1:]), (choice[0], choice[1])):
        table = (5 * first + second).bincount(minlength=25).view(5, 5).numpy()
        assert stats.chi2_contingency(table).pvalue > 1e-3


def test_i12_features_draw_for_themselves() -> None:
    score = filled(rg.General(1, 5, features=2), W=torch.tensor([1.0, 0.0, -1.0, 0.5, 0.2])[None, :, None])
    attend = rg.Attention(score, rg.Hard("reinforce")).double()
    key = torch.eye(5, dtype=torch.float64)
    choice = attend.align.choice(attend.call(torch.ones(10007, 1, dtype=torch.float64), key, normal(5, 2)))
    table = (5 * choice[0] + choice[1]).bincount(minlength=25).view(5, 5).numpy()
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_i12_the_mean_context_is_the_soft_context() -> None:
    attend, query, key, value = draws(10007)
    p = query[0, 0].softmax(-1)
    context, expected = attend(query, key, value)[0], p @ value[0]
    spread = (p @ value[0].square() - expected.square()).sqrt()
    deviations = (context.mean(0) - expected) / (spread / math.sqrt(10007))
    assert float(deviations.abs().max()) < 4, "four standard errors"


@pytest.fixture
def pin(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make the next calls draw from this seed."""

    def to(seed: int) -> None:
        monkeypatch.setattr(attention, "draw_seed", lambda device: torch.tensor([seed], device=device))

    return to


def outcomes(
    attend: rg.Attention, x: dict[str, Tensor], found: Callable[[Call], Any], count: int, pin: Any
) -> Iterator[int]:
    """Seeds under which each of `count` outcomes is drawn once."""
    seen: set[Any] = set()
    for seed in range(20000):
        pin(seed)
        with torch.no_grad():
            outcome = found(attend.call(**x))
        if outcome not in seen:
            seen.add(outcome)
            yield seed
        if len(seen) == count:
            return
    raise AssertionError(f"only {len(seen)} of {count} outcomes were drawn")


@pytest.mark.parametrize("baseline", [0.0, 0.7])
def test_i12_the_expected_reinforce_gradient_is_the_gradient_of_the_expected_reward(baseline: float, pin: Any) -> None:
    attend = scrambled(rg.Attention(rg.Additive(D_Q, D_K, 3), rg.Hard("reinforce")))
    x = cases.inputs((), 1, 5, D_Q, D_K, 2)
    wanted = list(attend.score.parameters())

    def reward(context: Tensor) -> Tensor:
        return (context.sin().sum(-1) + context.square().sum(-1)).squeeze()

    p = oracles.scores("additive", attend.score, x["query"], x["key"])[0].softmax(-1)
    exact = torch.autograd.grad((p * torch.stack([reward(v) for v in x["value"]])).sum(), wanted)
    total = [torch.zeros_like(w) for w in wanted]
    for seed in outcomes(attend, x, lambda call: int(attend.align.choice(call)), 5, pin):
        pin(seed)
        with rg.record(attend) as trace:
            context = attend(**x)
        chance = trace.log_prob().exp().detach()
        loss = rg.reinforce(trace, reward(context), baseline)
        for t, g in zip(total, torch.autograd.grad(loss, wanted), strict=True):
            t -= chance * g
    for actual, expected in zip(total, exact, strict=True):
        assert_same(actual, expected)


def test_i12_the_entropy_term_has_the_gradient_of_the_entropy(pin: Any) -> None:
    attend = scrambled(rg.Attention(rg.General(D_Q, D_K), rg.Hard("reinforce")))
    x = cases.inputs((), 1, 5, D_Q, D_K, 2)
    pin(0)
    with rg.record(attend) as trace:
        attend(**x)
    (actual,) = torch.autograd.grad(rg.reinforce(trace, torch.tensor(0.0).double(), entropy=0.3), attend.score.W)
    scores = attend.score(x["query"], x["key"])[0]
    p = scores.softmax(-1)
    entropy = -(p * p.log()).sum()
    # dH/ds_j = -p_j (s_j - L + H)
    slope = -p * (scores - scores.logsumexp(-1) + entropy)
    (expected,) = torch.autograd.grad(scores, attend.score.W, slope.detach())
    assert_same(actual, -0.3 * expected)


@IMPLS
def test_i12_straight_through_gives_scores_the_soft_gradient_and_values_their_own(impl: str) -> None:
    hard = scrambled(rg.Attention(rg.General(D_Q, D_K), rg.Hard()))
    x = cases.inputs((LEAD,), NQ, N, D_Q, D_K, D_V, grad=True)
    mask = cases.a_mask()
    with rg.execution(impl, panel=2):
        torch.manual_seed(4)
        context = hard(**x, mask=mask)
        torch.manual_seed(4)
        choice = hard.align.choice(hard.call(**x, mask=mask))
    read = torch.where(
        choice[..., None] >= 0, x["value"].gather(1, choice.clamp(min=0)[..., None].expand(-1, -1, D_V)), 0
    )
    assert_same(context, read)
    cotangent = torch.randn_like(context)
    actual = torch.autograd.grad(context, [hard.score.W, x["value"]], cotangent)
    # The soft gradient, in which the value of each key is weighed by how much it would have helped.
    soft = rg.Attention(hard.score, rg.Soft())
    with rg.execution("dense"):
        (expected,) = torch.autograd.grad(soft(**x, mask=mask), hard.score.W, cotangent)
    assert_same(actual[0], expected)
    (only_read,) = torch.autograd.grad(read, x["value"], cotangent)
    assert_same(actual[1], only_read)
    untouched = torch.ones(LEAD, N, dtype=torch.bool).scatter(1, choice.clamp(min=0), False)
    assert bool((actual[1][untouched] == 0).all())


# I13


@IMPLS
@pytest.mark.parametrize("position", ["monotonic", "predictive"])
def test_i13_a_window_over_everything_without_a_gaussian_is_soft(position: str, impl: str) -> None:
    score = scrambled(rg.General(D_Q, D_K))
    align = scrambled(rg.Local(N, position, gaussian=False, query_dim=D_Q))
    x, mask = cases.inputs((LEAD,), NQ, N, D_Q, D_K, D_V, grad=True), cases.a_mask()
    with rg.execution(impl, panel=2):
        local, soft = (run(rg.Attention(score, a), x, mask=mask) for a in (align, rg.Soft()))
    assert_same(local[0], soft[0])
    for name, g in soft[1].items():
        assert_same(local[1][name], g, name)


@pytest.mark.parametrize("position", ["monotonic", "predictive"])
@pytest.mark.parametrize("window", [0.3, 1, 2.5, 23])
def test_i13_the_gaussian_takes_weight_and_the_window_keeps_it(position: str, window: float) -> None:
    score = scrambled(rg.General(D_Q, D_K))
    x, mask = cases.inputs((LEAD,), NQ, N, D_Q, D_K, D_V), cases.a_mask()
    alive = mask.any(-1).double()

    def sums(**more: bool) -> Tensor:
        align = scrambled(rg.Local(window, position, query_dim=D_Q, **more))
        return weights(score, x["query"], x["key"], align, mask=mask).sum(-1)

    assert bool((sums() <= alive * (1 + 1e-12)).all())
    assert_same(sums(gaussian=False), alive)
    assert_same(sums(renormalize=True), alive)


@IMPLS
def test_i13_the_position_gets_the_gradient_of_the_formula(impl: str) -> None:
    window, sigma = 2.5, 1.25
    attend = scrambled(rg.Attention(rg.General(D_Q, D_K), rg.Local(window, "predictive", query_dim=D_Q)))
    x = cases.inputs((LEAD,), NQ, N, D_Q, D_K, D_V)
    cotangent = normal(LEAD, NQ, D_V)
    with rg.execution(impl, panel=2), rg.record(attend) as trace:
        context = attend(**x)
    a, p = trace.weights.detach(), trace[""][0].call.prepared["position"]
    away = torch.arange(N) - p.detach()[..., None]
    slope = (a * (cotangent @ x["value"].mT) * away / sigma**2).sum(-1)
    wanted = [attend.align.W_p, attend.align.w_p]
    expected = torch.autograd.grad(p, wanted, slope, retain_graph=True)
    for actual, e in zip(torch.autograd.grad(context, wanted, cotangent), expected, strict=True):
        assert_same(actual, e)


@IMPLS
def test_i13_renormalised_is_a_softmax_with_a_bias(impl: str) -> None:
    window, sigma = 2.5, 1.25
    score, x = scrambled(rg.General(D_Q, D_K)), cases.inputs((LEAD,), N, N, D_Q, D_K, D_V)
    bias = -((torch.arange(N) - torch.arange(N)[:, None]) ** 2).double() / (2 * sigma**2)
    with rg.execution(impl, panel=2):
        local = rg.Attention(score, rg.Local(window, renormalize=True))(**x)
        soft = rg.Attention(score)(**x, mask=rg.Window(2), bias=bias)
    assert_same(local, soft)


# I14


@IMPLS
def test_i14_with_everything_selected_reinforced_is_soft(impl: str) -> None:
    score, x, mask = scrambled(rg.General(D_Q, D_K)), cases.inputs((LEAD,), NQ, N, D_Q, D_K, D_V), cases.a_mask()
    sure = filled(rg.Reinforced(D_K), **{"policy.c": 1e6})
    with rg.execution(impl, panel=2):
        assert_same(rg.Attention(score, sure)(**x, mask=mask), rg.Attention(score)(**x, mask=mask))


@pytest.mark.parametrize("baseline", [0.0, -0.4])
@pytest.mark.parametrize("context", [False, True])
def test_i14_the_expected_gradient_is_that_of_the_expectation_over_all_subsets(
    baseline: float, context: bool, pin: Any
) -> None:
    n, valid = 5, [True, True, True, True, False]
    attend = scrambled(rg.Attention(rg.General(D_Q, D_K), rg.Reinforced(D_K, 3, context)))
    with torch.no_grad():
        attend.align.policy.w.mul_(0.2), attend.align.policy.c.fill_(0.1)
    x = cases.inputs((), 1, n, D_Q, D_K, 2)
    rest = {**x, "mask": torch.tensor([valid])}
    wanted = dict(attend.named_parameters())

    def cost(c: Tensor) -> Tensor:
        return (c.sin().sum(-1) + c.square().sum(-1)).squeeze()

    # By loops: every subset of the valid keys, its probability and what it costs.
    key = torch.where(torch.tensor(valid)[:, None], x["key"], 0.0)
    e = list(oracles.scores("general", attend.score, x["query"], key)[0])
    odds = [oracles.log_odds(attend.align.policy, key, j, valid) for j in range(n)]
    expected = oracles.zero()
    for z in product([False, True], repeat=n - 1):
        chance = sum((oracles.log_bernoulli(o, taken) for o, taken in zip(odds, z, strict=False)), oracles.zero()).exp()
        row = oracles.reinforced(e, valid, [*z, False])
        expected = expected + chance * cost(oracles.read([row], x["value"]))
    exact = torch.autograd.grad(expected, list(wanted.values()))

    total = {name: torch.zeros_like(p) for name, p in wanted.items()}
    subset = lambda call: tuple(call.prepared["selected"][: n - 1].tolist())  # noqa: E731
    for seed in outcomes(attend, rest, subset, 2 ** (n - 1), pin):
        pin(seed)
        with rg.record(attend) as trace:
            loss = cost(attend(**rest))
        chance = trace.log_prob().exp().detach()
        whole = loss + rg.reinforce(trace, -loss, baseline)
        for name, g in zip(total, torch.autograd.grad(whole, list(wanted.values())), strict=True):
            total[name] += chance * g
    for (name, actual), g in zip(total.items(), exact, strict=True):
        assert_same(actual, g, name)


# I15


@IMPLS
@pytest.mark.parametrize("align", ["soft", "sparsemax", "local-monotonic"])
def test_i15_equal_columns_are_single_dimensional(align: str, impl: str) -> None:
    more = {"window": 2} if align.startswith("local") else {}
    single = scrambled(rg.Attention("additive", align, query_dim=D_Q, key_dim=D_K, hidden_dim=13, **more))
    multi = rg.Attention("additive", align, query_dim=D_Q, key_dim=D_K, hidden_dim=13, features=D_V, **more).double()
    with torch.no_grad():
        for name in ("W1", "W2", "b"):
            multi.score.get_parameter(name).copy_(single.score.get_parameter(name))
        multi.score.W_d.copy_(single.score.w[:, None].expand(13, D_V))
    x, mask = cases.inputs((LEAD,), NQ, N, D_Q, D_K, D_V, grad=True), cases.a_mask()
    with rg.execution(impl, panel=2):
        one, many = run(single, x, mask=mask), run(multi, x, mask=mask)
    assert_same(many[0], one[0])
    for name, g in one[1].items():
        other = many[1]["parameter score.W_d"].sum(-1) if name.endswith("score.w") else many[1][name]
        assert_same(other, g, name)


@pytest.mark.parametrize(
    "case", [c for c in cases.supported() if c.multi and c.align.name not in cases.SELECTIONS], ids=str
)
def test_i15_the_weights_of_each_feature_sum_to_one(case: Case) -> None:
    attend, x, mask = case.build(), case.inputs(), cases.a_mask()
    if case.align.name.startswith("local"):
        attend.align.gaussian = False
    with rg.record(attend) as trace:
        attend(**x, mask=mask)
    assert trace.weights.shape == (LEAD, NQ, N, D_V)
    assert_same(trace.weights.sum(-2), mask.any(-1)[..., None].expand(LEAD, NQ, D_V).double())


def test_i15_scores_that_are_the_values_pool_their_maximum() -> None:
    value, tau = torch.stack([torch.randperm(N) for _ in range(D_V)], -1).double(), 1e-2
    # k_j = v_j, and W_f picks its f-th entry over tau.
    pick = torch.eye(D_V).double()[..., None] / tau
    attend = rg.Attention(filled(rg.General(1, D_V, features=D_V), W=pick))
    context = attend(torch.ones(1, 1, dtype=torch.float64), value, value)
    assert_same(context[0], value.max(0).values)


# I41


FOLDED = [
    pytest.param(case, id=str(case))
    for case in [*cases.supported(), *cases.variants()]
    if case.score.name in ("general", "additive") and case.align.name not in ("entmax", "sparsemax", *cases.SELECTIONS)
]


def a_bias() -> Tensor:
    """One key that no query may read."""
    bias = normal(LEAD, NQ, N)
    bias[:, 1::2, 2] = -math.inf
    return bias


def pieces(n: int, sizes: list[int]) -> list[range]:
    assert sum(sizes) == n
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


BLOCKS = [[7], [1] * 7, [3, 4], [2, 0, 5], [0, 6, 1, 0]]


def gradients(context: Tensor, wanted: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    if not context.requires_grad:
        return [torch.zeros_like(w) for w in wanted]
    found = torch.autograd.grad(context, wanted, cotangent, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]


def test_i41_only_the_sparse_alignments_and_selections_have_no_fold() -> None:
    without = set()
    for case in cases.supported():
        attend = case.build()
        if attend.align.fold(attend.call(**case.inputs()).tile()) is None:
            without.add(case.align.name)
    assert without == {"entmax", "sparsemax", *cases.SELECTIONS}


@pytest.mark.parametrize("case", FOLDED)
@pytest.mark.parametrize("training", [True, False])
def test_i41_keys_folded_in_any_blocks_and_order_are_dense(case: Case, training: bool) -> None:
    attend, x = case.build().train(training), case.inputs(grad=True)
    call = attend.call(**x, mask=cases.a_mask(), bias=a_bias())
    wanted = [*x.values(), *attend.parameters()]
    shuffle = random.Random(0)
    for rows in (range(NQ), range(1, 4)):
        tile, scores = call.tile(rows), call.scores(rows)
        dense = call.read(call.weights(rows), rows)
        cotangent = torch.randn_like(dense)
        expected = gradients(dense, wanted, cotangent)
        for sizes in BLOCKS:
            blocks = pieces(N, sizes)
            shuffle.shuffle(blocks)
            folded = fold_keys(attend.align.fold(tile), tile, blocks, scores)
            assert_same(folded, dense, f"blocks {blocks}")
            for actual, g in zip(gradients(folded, wanted, cotangent), expected, strict=True):
                assert_same(actual, g, f"gradient, blocks {blocks}")


@pytest.mark.parametrize("blocks", [[7], [1] * 7, [4, 3]], ids=str)
def test_i41_ties_go_to_the_lowest_index_in_any_order(blocks: list[int]) -> None:
    attend = rg.Attention(filled(rg.General(D_Q, D_K), W=0.0), rg.Hard()).eval()
    x = cases.inputs((), NQ, N, D_Q, D_K, D_V)
    mask = torch.ones(NQ, N, dtype=torch.bool)
    mask[:, 0] = False
    call = attend.call(**x, mask=mask)
    backwards = pieces(N, blocks)[::-1]
    assert_same(fold_keys(attend.align.fold(call.tile()), call.tile(), backwards, call.scores()), x["value"][[1] * NQ])


# I42


@pytest.mark.parametrize("case", FOLDED)
def test_i42_partial_states_merge_in_any_order_and_an_empty_one_is_neutral(case: Case) -> None:
    attend, x = case.build(), case.inputs(grad=True)
    call = attend.call(**x, mask=cases.a_mask(), bias=a_bias())
    tile, scores, wanted = call.tile(), call.scores(), [*x.values(), *attend.parameters()]
    fold, dense = attend.align.fold(tile), call.read(call.weights())
    cotangent = torch.randn_like(dense)
    expected = gradients(dense, wanted, cotangent)
    shuffle = random.Random(1)
    for sizes in BLOCKS:
        states = [fold.start(tile)]
        for j in pieces(N, sizes):
            states.append(fold.absorb(fold.start(tile), scores[..., j.start : j.stop], Tile(call, tile.i, j)))
        while len(states) > 1:
            shuffle.shuffle(states)
            states.append(fold.merge(states.pop(), states.pop()))
        merged = finish(fold, states[0], tile)
        assert_same(merged, dense, f"parts {sizes}")
        for actual, g in zip(gradients(merged, wanted, cotangent), expected, strict=True):
            assert_same(actual, g, f"gradient, parts {sizes}")


@IMPLS
@pytest.mark.parametrize("multi", [False, True], ids=["single", "multi"])
def test_i42_contexts_merge_by_their_log_sum_exps(multi: bool, impl: str) -> None:
    """Parts that one row may not read at all, one that nobody may, and the rest."""
    attend = scrambled(rg.Attention(rg.Additive(D_Q, D_K, 13, features=D_V if multi else None), impl=impl))
    x, mask = cases.inputs((LEAD,), NQ, N, D_Q, D_K, D_V), cases.a_mask()
    part = torch.tensor([0, 2, 0, 2, 3, 3, 0])
    logs, contexts = [], []
    for number in range(4):
        with rg.record(attend) as trace:
            contexts.append(attend(**x, mask=mask & (part == number)))
        logs.append(trace.log_sum_exp() if multi else trace.log_sum_exp()[..., None])
    assert bool((contexts[1] == 0).all())
    assert bool((logs[1] == -math.inf).all())
    total = torch.stack(logs).logsumexp(0)
    safe = torch.where(total > -math.inf, total, 0.0)
    merged = sum(torch.exp(log - safe) * context for log, context in zip(logs, contexts, strict=True))
    assert_same(merged, attend(**x, mask=mask))


# I43


LEADS = {
    "alone": ((), (), ()),
    "batch": ((2,), (2,), ()),
    "query shared": ((), (2,), (2,)),
    "heads": ((2, 1), (1, 3), (3,)),
    "key shared": ((3,), (1,), (1,)),
}


@pytest.mark.parametrize("act", sorted(oracles.ACTIVATIONS))
@pytest.mark.parametrize("features", [1, 3])
@pytest.mark.parametrize("lead", LEADS)
def test_i43_additive_scores_have_the_gradient_of_finite_differences(
    act: str, features: int, lead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tiles of two pairs: every box of the loop is ragged somewhere.
    monkeypatch.setattr(additive, "CPU_TILE_BYTES", 8 * 2 * 2)
    of_a, of_u, of_weight = LEADS[lead]
    a, u, weight = normal(*of_a, 3, 2), normal(*of_u, 5, 2), normal(*of_weight, 2, features)
    a, u, weight = (x.requires_grad_() for x in (a, u, weight))
    assert torch.autograd.gradcheck(lambda a, u, w: additive_scores(a, u, w, act), (a, u, weight), fast_mode=True)


@pytest.mark.parametrize("act", ["tanh", "tanh:5.0", "sigmoid"])
@pytest.mark.parametrize("features", [1, 3])
def test_i43_also_where_a_tile_is_beyond_the_range_of_factors(
    act: str, features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(additive, "CPU_TILE_BYTES", 8 * 2 * 2)
    a, u, weight = normal(5, 2), normal(7, 2), normal(2, features)
    a[1], u[3] = 5e3, -5e3
    a, u, weight = (x.requires_grad_() for x in (a, u, weight))
    assert torch.autograd.gradcheck(lambda a, u, w: additive_scores(a, u, w, act), (a, u, weight))
