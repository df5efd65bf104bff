"""Every alignment against its formula, one row at a time: weights, gradients, what is sampled, and the edges."""

from __future__ import annotations

import math
from typing import Any

import entmax as published
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import regard as rg
from regard.general.alignments.hard import GRADIENTS
from regard.general.alignments.sparse import entmax
from regard.ops.call import Call
from regard.ops.forms import BilinearForm
from regard.ops.random import SAMPLE, gumbel
from tests import cases, oracles
from tests.cases import D_K, D_Q, NQ, N, assert_same, scrambled

# Those that share one unit of weight among the keys.
SHARING = sorted(oracles.ALIGNMENTS.keys() - set(cases.SELECTIONS))

FEATURES = 3
DIMENSIONS = pytest.mark.parametrize("features", [None, FEATURES], ids=["single", "multi"])


class Given(rg.Score):
    """Scores from outside, (Nq, N) or (F, Nq, N)."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.features = scores.shape[0] if scores.dim() == 3 else None
        self.key_dim, self.query_dim = D_K, D_Q
        self.E = nn.Parameter(scores)

    def reduce(self, query: Tensor | None, key: Tensor) -> BilinearForm:
        keys = torch.eye(key.shape[-2], dtype=self.E.dtype)
        return BilinearForm(self.E, keys, multi=self.features is not None)


class Rows:
    """An alignment at work on given scores, and what its oracle needs to know."""

    def __init__(
        self,
        align: rg.Alignment,
        features: int | None = None,
        *,
        scores: Tensor | None = None,
        mask: Tensor | None = None,
        nq: int = NQ,
        **more: Any,
    ) -> None:
        n = N if scores is None else scores.shape[-1]
        nq = nq if scores is None else scores.shape[-2]
        shape = (nq, n) if features is None else (features, nq, n)
        e = 2 * torch.randn(shape, dtype=torch.float64) if scores is None else scores
        self.attend = rg.Attention(Given(e.clone()), align).double()
        x = cases.inputs((), nq, n, D_Q, D_K, features or 11)
        self.query, self.key, self.value = x["query"], x["key"], x["value"]
        self.mask = torch.ones(nq, n, dtype=torch.bool) if mask is None else mask
        self.call: Call = self.attend.call(self.query, self.key, self.value, mask=mask, **more)
        self.weights = self.call.weights()
        self.e = self.attend.score.E
        self.noise = None
        if self.call.seed is not None:
            self.noise = gumbel(self.call.tile().uniform(SAMPLE)).double()
        self.cotangent = torch.randn_like(self.weights)

    def rows(self) -> list[tuple[int, tuple[int, ...]]]:
        """Query index, and where its row is in the scores."""
        places = [()] if self.e.dim() == 2 else [(f,) for f in range(self.e.shape[0])]
        return [(i, (*place, i)) for place in places for i in range(self.e.shape[-2])]

    def expected(self, name: str) -> Tensor:
        """The weights by the oracle."""
        align, result = self.attend.align, []
        for i, at in self.rows():
            seen = self.mask[i].nonzero()
            x = oracles.Facts(
                i=i + self.call.start,
                query=self.query[i],
                noise=None if self.noise is None else list(self.noise[at]),
                selected=self.call.prepared.get("selected", torch.ones(0)).tolist(),
                length=int(seen.max()) + 1 if len(seen) else 0,
            )
            row = oracles.ALIGNMENTS[name](align, list(self.e[at]), self.mask[i].tolist(), x)
            result.append(torch.stack(row) if row else self.e[at] * 0)
        return torch.stack(result).view(self.weights.shape)

    def gradients(self, weights: Tensor) -> list[Tensor]:
        wanted = [self.e, *self.attend.align.parameters()]
        if not weights.requires_grad:
            return [torch.zeros_like(x) for x in wanted]
        found = torch.autograd.grad(weights, wanted, self.cotangent, allow_unused=True, retain_graph=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]

    def check(self, name: str) -> None:
        """Weights and, by autograd through the oracle, gradients; masked weights are exactly zero."""
        expected = self.expected(name)
        assert_same(self.weights, expected, "weights")
        assert bool((self.weights[..., ~self.mask] == 0).all()), "masked weights are exactly zero"
        for actual, wanted in zip(self.gradients(self.weights), self.gradients(expected), strict=True):
            assert_same(actual, wanted, "gradient")


def holes() -> Tensor:
    """Some keys of some rows forbidden, one row wholly, the last two keys for everybody."""
    mask = torch.ones(NQ, N, dtype=torch.bool)
    mask[0, ::2], mask[3], mask[:, N - 2 :] = False, False, False
    return mask


def only(j: int, n: int = N) -> Tensor:
    mask = torch.zeros(NQ, n, dtype=torch.bool)
    mask[:, j] = True
    return mask


MASKS = pytest.mark.parametrize("mask", [None, holes(), only(4)], ids=["open", "holes", "one key"])


def test_every_alignment_of_the_catalog_has_an_oracle() -> None:
    assert {entry.name for entry in cases.alignments()} == set(oracles.ALIGNMENTS)


# Soft


@MASKS
@DIMENSIONS
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
@pytest.mark.parametrize("learnable", [False, True])
def test_soft_is_its_formula(temperature: float, learnable: bool, features: int | None, mask: Tensor | None) -> None:
    Rows(rg.Soft(temperature, learnable), features, mask=mask).check("soft")


def test_a_learnable_temperature_learns_from_its_start() -> None:
    for start in (1.0, 0.5):
        rows = Rows(rg.Soft(start, learnable=True))
        assert bool(rows.gradients(rows.weights)[1] != 0)


def test_soft_becomes_argmax_when_cold_and_the_mean_when_hot() -> None:
    scores = torch.stack([torch.randperm(N) for _ in range(NQ)]).double()
    cold, hot = (Rows(rg.Soft(t), scores=scores, mask=holes()).weights for t in (1e-2, 1e12))
    best = scores.masked_fill(~holes(), -math.inf).argmax(-1)
    onehot = torch.nn.functional.one_hot(best, N).double() * holes()
    assert_same(cold, onehot.double())
    assert_same(hot, holes() / holes().sum(-1, keepdim=True).clamp(min=1).double())


# Hard


@MASKS
@DIMENSIONS
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("training", [True, False])
def test_hard_reads_what_the_noise_says(
    gradient: str, training: bool, features: int | None, mask: Tensor | None
) -> None:
    align = rg.Hard(gradient, temperature=0.7 if "gumbel" in gradient else 1.0).train(training)
    attend_rows = Rows(align, features, mask=mask) if training else evaluated(align, features, mask)
    assert_same(attend_rows.weights, attend_rows.expected("hard"), "weights")


def evaluated(align: rg.Alignment, features: int | None, mask: Tensor | None, **more: Any) -> Rows:
    """Rows of a module in evaluation."""
    rows = Rows(align, features, mask=mask, **more)
    rows.attend.eval()
    rows.call = rows.attend.call(rows.query, rows.key, rows.value, mask=mask)
    rows.noise = None if rows.call.seed is None else gumbel(rows.call.tile().uniform(SAMPLE)).double()
    rows.weights = rows.call.weights()
    return rows


@MASKS
@DIMENSIONS
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_hard_scores_learn_what_their_estimator_says(gradient: str, features: int | None, mask: Tensor | None) -> None:
    tau = 0.7 if "gumbel" in gradient else 1.0
    rows = Rows(rg.Hard(gradient, tau), features, mask=mask)
    (actual,) = rows.gradients(rows.weights)
    for i, at in rows.rows():
        allowed, g = rows.mask[i].tolist(), list(rows.cotangent[at])
        e, noise = [x.detach() for x in rows.e[at]], list(rows.noise[at])
        if gradient == "reinforce" or not any(allowed):
            expected = [torch.zeros(())] * N
        elif gradient == "straight-through":
            expected = oracles.softmax_pullback(oracles.soft(e, allowed), g)
        else:
            relaxed = oracles.gumbel_softmax(e, allowed, noise, tau)
            expected = [x / tau for x in oracles.softmax_pullback(relaxed, g)]
        assert_same(actual[at], torch.stack(expected).double(), gradient)


@DIMENSIONS
def test_hard_draws_in_evaluation_when_asked_to(features: int | None) -> None:
    rows = evaluated(rg.Hard(evaluation="sample"), features, holes())
    assert rows.noise is not None
    assert_same(rows.weights, rows.expected("hard"))


@pytest.mark.parametrize("training", [True, False])
@DIMENSIONS
def test_hard_knows_what_it_chose_and_how_likely_that_was(features: int | None, training: bool) -> None:
    align = rg.Hard("reinforce")
    rows = Rows(align, features, mask=holes()) if training else evaluated(align, features, holes())
    with torch.no_grad():
        choice, log_prob = align.choice(rows.call), align.log_prob(rows.call)
        entropy = align.policy_entropy(rows.call)
    assert choice.shape == log_prob.shape == entropy.shape == rows.e.shape[:-1]
    for i, at in rows.rows():
        allowed, e = rows.mask[i].tolist(), list(rows.e[at])
        if not any(allowed):
            assert (int(choice[at]), float(log_prob[at]), float(entropy[at])) == (-1, 0.0, 0.0)
            continue
        perturbed = e if rows.noise is None else [x + g for x, g in zip(e, rows.noise[at], strict=True)]
        m = oracles.argmax(perturbed, allowed)
        p = oracles.soft(e, allowed)
        assert int(choice[at]) == m
        assert_same(log_prob[at], p[m].log())
        assert_same(entropy[at], -sum(x * x.log() for x in p if x > 0))


def test_hard_log_probabilities_have_the_leading_axes_of_the_call() -> None:
    attend = rg.Attention(rg.Dot(), rg.Hard("reinforce")).double()
    x = cases.inputs((), NQ, N, D_K, D_K, 11)
    call = attend.call(x["query"], x["key"], torch.randn(2, N, 11, dtype=torch.float64))
    for found in (attend.align.choice(call), attend.align.log_prob(call), attend.align.policy_entropy(call)):
        assert found.shape == (2, NQ)


def test_ties_go_to_the_lowest_index() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]], dtype=torch.float64)
    rows = Rows(rg.Hard(), scores=scores)
    rows.attend.eval()
    call = rows.attend.call(rows.query, rows.key, rows.value)
    assert rows.attend.align.choice(call).tolist() == [1]
    masked = torch.tensor([[True, False, True, True, True]])
    assert rows.attend.align.choice(rows.attend.call(rows.query, rows.key, rows.value, mask=masked)).tolist() == [2]


def test_a_single_key_is_read_whatever_the_alignment_and_teaches_the_scores_nothing() -> None:
    for name in SHARING:
        case = next(c for c in cases.supported() if c.align.name == name and c.score.name == "general")
        attend = case.build()
        x = cases.inputs((), 3, 1, D_Q, D_K, 5, grad=True)
        call = attend.call(x["query"], x["key"], x["value"])
        context, gradients = cases.run(attend, x)
        gaussian = getattr(attend.align, "gaussian", False)
        if not gaussian:
            assert_same(call.weights(), torch.ones(3, 1, dtype=torch.float64), name)
            assert_same(context, x["value"].expand(3, 5).detach(), name)
        assert_same(gradients["parameter score.W"], torch.zeros_like(attend.score.W), name)


# Local


def place(p: float, length: int, align: rg.Local) -> Tensor:
    """The query for which a predictive alignment with W_p = e_0 and w_p = 1000 e_0 predicts the position p."""
    with torch.no_grad():
        align.W_p.zero_(), align.w_p.zero_()
        align.W_p[0, 0], align.w_p[0] = 1.0, 1000.0
    logit = -900.0 if p == 0 else 900.0 if p == length else math.log(p / (length - p))
    query = torch.zeros(D_Q, dtype=torch.float64)
    query[0] = math.atanh(logit / 1000)
    return query


SHAPES_OF_LOCAL = [(True, False), (True, True), (False, False), (False, True)]


@MASKS
@DIMENSIONS
@pytest.mark.parametrize(("gaussian", "renormalize"), SHAPES_OF_LOCAL)
@pytest.mark.parametrize("window", [0, 0.3, 0.5, 1, 1.5, 2, 3.7, N, 23])
def test_monotonic_local_is_its_formula(
    window: float, gaussian: bool, renormalize: bool, features: int | None, mask: Tensor | None
) -> None:
    Rows(rg.Local(window, gaussian=gaussian, renormalize=renormalize), features, mask=mask).check("local-monotonic")


@pytest.mark.parametrize("start", [0, 1, 4, N, 19])
@pytest.mark.parametrize("window", [0, 0.3, 2])
def test_monotonic_local_begins_where_it_is_told_and_falls_back_to_the_nearest_key(start: int, window: float) -> None:
    rows = Rows(rg.Local(window), nq=11, start=start)
    rows.check("local-monotonic")
    beyond = start + 10 - window > N - 1
    if beyond:
        assert bool((rows.weights[-1, :-1] == 0).all()), "beyond the end, the last key"


@MASKS
@DIMENSIONS
@pytest.mark.parametrize(("gaussian", "renormalize"), SHAPES_OF_LOCAL)
@pytest.mark.parametrize("window", [0, 0.3, 0.5, 1.5, 2, 3.7, 23])
def test_predictive_local_is_its_formula(
    window: float, gaussian: bool, renormalize: bool, features: int | None, mask: Tensor | None
) -> None:
    align = rg.Local(window, "predictive", gaussian, renormalize, query_dim=D_Q, position_dim=5)
    Rows(align, features, mask=mask).check("local-predictive")


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("gaussian", [True, False])
def test_positions_learn_through_the_gaussian_alone(gaussian: bool, renormalize: bool) -> None:
    rows = Rows(scrambled(rg.Local(2.3, "predictive", gaussian, renormalize, query_dim=D_Q)))
    _, *gradients = rows.gradients(rows.weights)
    assert len(gradients) == 2
    for g in gradients:
        assert bool((g != 0).any()) == gaussian


@pytest.mark.parametrize("p", [0.0, 0.2, 2.25, 3.9, 6.99, 7.0])
@pytest.mark.parametrize("window", [0, 0.4, 0.5, 1, 2.6, 7, 23])
@pytest.mark.parametrize("gaussian", [True, False])
def test_predicted_positions_from_end_to_end(p: float, window: float, gaussian: bool) -> None:
    align = rg.Local(window, "predictive", gaussian, query_dim=D_Q).double()
    query = place(p, N, align)
    scores = torch.randn(1, N, dtype=torch.float64)
    attend = rg.Attention(Given(scores), align).double()
    call = attend.call(query[None], torch.randn(N, D_K, dtype=torch.float64))
    assert_same(call.prepared["position"], torch.tensor([p], dtype=torch.float64))
    expected = oracles.local(list(scores[0]), [True] * N, call.prepared["position"][0], window, gaussian)
    assert_same(call.weights()[0], torch.stack(expected))


@pytest.mark.parametrize("lengths", [(3, 7), (1, 5), (0, 6)])
def test_predicted_positions_scale_with_the_true_length(lengths: tuple[int, int]) -> None:
    align = scrambled(rg.Local(1.5, "predictive", query_dim=D_Q))
    attend = rg.Attention(scrambled(rg.General(D_Q, D_K)), align)
    x = cases.inputs((2,), NQ, N, D_Q, D_K, 11)
    call = attend.call(**x, mask=rg.Padding(torch.tensor(lengths)))
    for b, length in enumerate(lengths):
        for i in range(NQ):
            query = x["query"][b, i] if length else torch.zeros(D_Q, dtype=torch.float64)
            expected = oracles.predicted_position(query, align.W_p, align.w_p, length)
            assert_same(call.prepared["position"][b, i], expected, f"length {length}")


def test_local_looks_past_keys_that_a_bias_forbids() -> None:
    bias = torch.zeros(NQ, N, dtype=torch.float64)
    bias[:, 2:5] = -math.inf
    mask = bias == 0
    for window in (0, 0.3, 1.5):
        by_bias = Rows(rg.Local(window), bias=bias)
        assert_same(by_bias.weights, Rows(rg.Local(window), scores=by_bias.e.detach(), mask=mask).weights)


# Reinforced


def selection(rows: Rows, name: str = "policy") -> tuple[list[Tensor], list[bool]]:
    valid = rows.mask.any(0).tolist()
    keys = torch.where(rows.mask.any(0)[:, None], rows.key, 0.0)
    policy = getattr(rows.attend.align, name)
    return [oracles.log_odds(policy, keys, j, valid) for j in range(N)], valid


@MASKS
@DIMENSIONS
@pytest.mark.parametrize("context", [False, True])
def test_reinforced_is_soft_on_its_subset(context: bool, features: int | None, mask: Tensor | None) -> None:
    rows = Rows(scrambled(rg.Reinforced(D_K, 5, context)), features, mask=mask)
    rows.check("reinforced")


@pytest.mark.parametrize("mask", [None, holes()], ids=["open", "holes"])
def test_an_empty_subset_reads_the_mean_of_what_may_be_read(mask: Tensor | None) -> None:
    align = rg.Reinforced(D_K).double()
    with torch.no_grad():
        align.policy.c.fill_(-1e6)
    rows = Rows(align, mask=mask)
    assert not bool(rows.call.prepared["selected"].any())
    assert_same(rows.weights, rows.mask / rows.mask.sum(-1, keepdim=True).clamp(min=1).double())


@MASKS
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("context", [False, True])
def test_reinforced_log_probability_and_entropy_are_those_of_its_policy(
    context: bool, training: bool, mask: Tensor | None
) -> None:
    align = scrambled(rg.Reinforced(D_K, 5, context))
    rows = Rows(align, mask=mask) if training else evaluated(align, None, mask)
    odds, valid = selection(rows)
    selected = rows.call.prepared["selected"].tolist()
    if not training:
        assert [z for z, ok in zip(selected, valid, strict=True) if ok] == [
            bool(x > 0) for x, ok in zip(odds, valid, strict=True) if ok
        ]
    each = [oracles.log_bernoulli(x, z) for x, z, ok in zip(odds, selected, valid, strict=True) if ok]
    assert_same(align.log_prob(rows.call), sum(each))
    chances = [1 / (1 + (-x).exp()) for x, ok in zip(odds, valid, strict=True) if ok]
    assert_same(align.policy_entropy(rows.call), sum(-p * p.log() - (1 - p) * (1 - p).log() for p in chances))


def test_reinforced_selects_as_often_as_its_policy_says() -> None:
    align = scrambled(rg.Reinforced(D_K))
    attend = rg.Attention(rg.Dot(), align)
    key = torch.randn(N, D_K, dtype=torch.float64)
    draws = 4001
    call = attend.call(key[:1].expand(draws, 1, D_K), key.expand(draws, N, D_K))
    chance = align.policy(key, None).sigmoid().detach()
    count = call.prepared["selected"].double().sum(0)
    deviations = (count - draws * chance) / (draws * chance * (1 - chance)).sqrt()
    assert float(deviations.abs().max()) < 4, "four standard deviations"


def test_reinforced_with_everything_selected_draws_nothing() -> None:
    align = scrambled(rg.Reinforced(D_K))
    align.selecting = False
    rows = Rows(align, mask=holes())
    assert rows.call.seed is None
    assert_same(rows.weights, Rows(rg.Soft(), scores=rows.e.detach(), mask=holes()).weights)


def test_reinforced_ignores_keys_that_a_bias_forbids() -> None:
    bias = torch.zeros(NQ, N, dtype=torch.float64)
    bias[:, 2:5] = -math.inf
    bias[1] = -math.inf
    align = scrambled(rg.Reinforced(D_K))
    with torch.no_grad():
        align.policy.c.fill_(-1e6)
    weights = Rows(align, bias=bias).weights
    allowed = bias == 0
    assert_same(weights, allowed / allowed.sum(-1, keepdim=True).clamp(min=1).double())


@pytest.mark.parametrize("pad", [0, 3])
def test_a_policy_that_sees_the_mean_does_not_see_the_padding(pad: int) -> None:
    """Also behind a map of the keys, which writes its bias into the padding."""
    align = scrambled(rg.Reinforced(5, context=True))
    attend = rg.Attention(rg.Dot(), align, key_map=scrambled(nn.Linear(D_K, 5))).eval()
    key, query = torch.randn(N, D_K, dtype=torch.float64), torch.randn(NQ, 5, dtype=torch.float64)
    padded = torch.cat([key, torch.randn(pad, D_K, dtype=torch.float64)])
    alone = attend.call(query, key)
    together = attend.call(query, padded, mask=rg.Padding(torch.tensor(N)))
    assert_same(align.log_prob(together), align.log_prob(alone))


# Sparse


ALPHAS = [1.0, 1.05, 1.3, 1.5, 1.9, 2.0, 2.5, 3.0]


@MASKS
@DIMENSIONS
@pytest.mark.parametrize("alpha", ALPHAS)
def test_entmax_is_its_definition(alpha: float, features: int | None, mask: Tensor | None) -> None:
    rows = Rows(rg.Entmax(alpha), features, mask=mask)
    assert_same(rows.weights, rows.expected("entmax"), "weights")
    assert bool((rows.weights[..., ~rows.mask] == 0).all())
    (actual,) = rows.gradients(rows.weights)
    for i, at in rows.rows():
        weights, g = rows.weights[at].tolist(), rows.cotangent[at].tolist()
        if alpha == 1:
            allowed = rows.mask[i].tolist()
            p = oracles.soft([x.detach() for x in rows.e[at]], allowed) if any(allowed) else [oracles.zero()] * N
            expected = [float(x) for x in oracles.softmax_pullback(p, list(rows.cotangent[at]))]
        else:
            expected = oracles.entmax_pullback(weights, g, alpha)
        assert_same(actual[at], torch.tensor(expected, dtype=torch.float64), "gradient")


@MASKS
@DIMENSIONS
def test_sparsemax_is_the_nearest_point_of_the_simplex(features: int | None, mask: Tensor | None) -> None:
    Rows(rg.Sparsemax(), features, mask=mask).check("sparsemax")


@MASKS
@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 1.9])
def test_a_learned_alpha_gets_its_gradient(alpha: float, mask: Tensor | None) -> None:
    rows = Rows(rg.Entmax(alpha, learnable=True), mask=mask)
    used = rows.attend.align.alpha.item()
    assert_same(rows.weights, rows.expected("entmax"), "weights")
    slope = sum(
        oracles.entmax_alpha_pullback(rows.weights[at].tolist(), rows.cotangent[at].tolist(), used)
        for _, at in rows.rows()
    )
    (_, actual) = rows.gradients(rows.weights)
    inner = (used - 1) * (2 - used)
    assert_same(actual, torch.tensor([slope * inner], dtype=torch.float64))


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, 2.4])
def test_entmax_agrees_with_the_published_package(alpha: float) -> None:
    x = (3 * torch.randn(NQ, 13, dtype=torch.float64)).requires_grad_()
    theirs = {1.5: published.entmax15, 2.0: published.sparsemax}.get(
        alpha, lambda e, dim: published.entmax_bisect(e, alpha, dim=dim, n_iter=100)
    )(x, dim=-1)
    ours = entmax(x, None, alpha)
    assert_same(ours, theirs)
    cotangent = torch.randn_like(x)
    assert_same(*(torch.autograd.grad(y, x, cotangent)[0] for y in (ours, theirs)))


def test_a_learned_alpha_agrees_with_the_published_package() -> None:
    x = 3 * torch.randn(NQ, 13, dtype=torch.float64)
    cotangent = torch.randn_like(x)
    alpha = torch.tensor(1.35, dtype=torch.float64, requires_grad=True)
    ours, theirs = entmax(x, None, alpha), published.entmax_bisect(x, alpha, n_iter=100)
    assert_same(*(torch.autograd.grad(y, alpha, cotangent)[0] for y in (ours, theirs)))


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0, 2.5])
def test_entmax_gradients_are_those_of_finite_differences_twice_over(alpha: float) -> None:
    x = torch.tensor([[0.3, -0.4, 0.1, -2.0], [1.0, 0.9, 0.2, 0.7]], dtype=torch.float64, requires_grad=True)
    allowed = torch.tensor([[True, True, True, True], [True, True, False, True]])
    assert torch.autograd.gradcheck(lambda e: entmax(e, allowed, alpha), x)
    assert torch.autograd.gradgradcheck(lambda e: entmax(e, allowed, alpha), x)


@settings(max_examples=60)
@given(
    scores=st.lists(st.sampled_from([-1e4, -3.0, -1.0, -0.25, 0.0, 0.25, 1.0, 1e4]), min_size=1, max_size=8),
    alpha=st.sampled_from([1.5, 2.0, 1.25, 2.5]),
    data=st.data(),
)
def test_entmax_of_any_scores_sums_to_one_with_ties_sharing(scores: list[float], alpha: float, data: Any) -> None:
    x = torch.tensor(scores, dtype=torch.float64)
    allowed = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores))))
    weights = entmax(x, allowed, alpha)
    assert_same(weights, torch.tensor(oracles.entmax(list(x), allowed.tolist(), alpha), dtype=torch.float64))
    assert_same(weights.sum(), torch.tensor(float(allowed.any()), dtype=torch.float64))
    for j in range(len(scores)):
        for k in range(len(scores)):
            if scores[j] == scores[k] and allowed[j] and allowed[k]:
                assert float(weights[j]) == float(weights[k])


def test_larger_alphas_read_fewer_keys() -> None:
    x = torch.randn(101, N, dtype=torch.float64)
    support = [int((entmax(x, None, alpha) > 0).sum()) for alpha in (1.0, 1.2, 1.5, 2.0, 3.0)]
    assert support == sorted(support, reverse=True)
    assert support[0] == 101 * N
    assert support[-1] < support[0]


# All of them

# Those whose weights share a row out. Marginals of selections are chances of separate events, and a score of 0 means one half.


@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("name", SHARING)
def test_large_scores_are_only_scores(name: str, size: float) -> None:
    """Shifting a row by a large number changes nothing that matters: statistics are taken after the maximum."""
    case = next(c for c in cases.supported() if c.align.name == name and c.score.name == "general")
    align = case.build().align.eval()
    # Whole numbers, whose sums with the shift are exact.
    scores = torch.randint(-5, 5, (NQ, N)).double()
    plain, shifted = (evaluated(align, None, holes(), scores=e) for e in (scores, scores + size))
    assert_same(shifted.weights, plain.weights)
    for x in shifted.gradients(shifted.weights):
        assert bool(x.isfinite().all())


@pytest.mark.parametrize("name", SHARING)
def test_equal_scores_weigh_the_same(name: str) -> None:
    case = next(c for c in cases.supported() if c.align.name == name and c.score.name == "general")
    align = case.build().align
    if name.startswith("local"):
        align.gaussian, align.window = False, 23
    if name == "reinforced":
        align.selecting = False
    rows = evaluated(align, None, holes(), scores=torch.full((NQ, N), 1.7, dtype=torch.float64))
    expected = holes() / holes().sum(-1, keepdim=True).clamp(min=1).double()
    if name == "hard":
        first = holes() & (holes().cumsum(-1) == 1)
        expected = first.double()
    assert_same(rows.weights, expected)


@pytest.mark.parametrize("name", sorted(oracles.ALIGNMENTS))
def test_no_keys_no_weights(name: str) -> None:
    case = next(c for c in cases.supported() if c.align.name == name and c.score.name == "general")
    attend = case.build()
    x = cases.inputs((2,), 3, 0, D_Q, D_K, 5, grad=True)
    context, gradients = cases.run(attend, x)
    assert_same(context, torch.zeros(2, 3, 5, dtype=torch.float64))
    assert all(bool((g == 0).all()) for g in gradients.values())


EXTREMES = {
    "cold": (lambda: rg.Soft(learnable=True), -200.0),
    "hot": (lambda: rg.Soft(learnable=True), 200.0),
    "almost soft": (lambda: rg.Entmax(1.5, learnable=True), -30.0),
    "almost sparse": (lambda: rg.Entmax(1.5, learnable=True), 200.0),
}


@pytest.mark.parametrize("impl", ["dense", "blockwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", EXTREMES)
def test_what_is_learned_stays_a_number_however_far_it_went(case: str, dtype: torch.dtype, impl: str) -> None:
    make, far = EXTREMES[case]
    attend = rg.Attention("dot", make(), impl=impl).to(dtype)
    (learned,) = attend.parameters()
    with torch.no_grad():
        learned.fill_(far)
    query = torch.randn(2, 3, 5, dtype=dtype, requires_grad=True)
    context = attend(query, torch.randn(2, 7, 5, dtype=dtype))
    context.square().sum().backward()
    assert learned.grad is not None
    assert query.grad is not None
    for x in (context, learned.grad, query.grad):
        assert x.isfinite().all()


@pytest.mark.parametrize("above", [1e-5, 1e-7, 1e-12])
@pytest.mark.parametrize("learnable", [False, True])
def test_entmax_close_to_softmax_is_close_to_softmax(above: float, learnable: bool) -> None:
    scores = torch.randn(50, 20, generator=torch.Generator().manual_seed(0)) * 3
    alpha = torch.tensor(1 + above) if learnable else 1 + above
    assert torch.allclose(entmax(scores, None, alpha), scores.softmax(-1), atol=1e-3)
