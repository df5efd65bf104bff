"""Every score against its formula, one pair at a time: values, gradients, heads, activations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import regard as rg
from regard.catalog import Entry
from regard.ops.activations import activation
from tests import cases, oracles
from tests.cases import D_K, D_Q, D_V, NQ, N, assert_same, scrambled

FORMS = [
    pytest.param(entry, multi, id=f"{entry.name}-{'multi' if multi else 'single'}")
    for entry in cases.scores()
    for multi in (False, True)
    if not (multi and cases.is_parameter_free(entry)) and (multi or not cases.is_always_multi(entry))
]


def make(entry: Entry, multi: bool, **more: object) -> rg.Score:
    case = cases.Case(entry, cases.alignments()[0], multi, dict(more))
    options = {k: v for k, v in case.options().items() if k in rg.catalog.arguments(entry)}
    return scrambled(entry.cls(**options))


def pair(score: rg.Score, *lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    d_q = D_Q if score.query_dim == D_Q else D_K
    x = cases.inputs(lead, NQ, N, d_q, D_K, D_V)
    return x["query"], x["key"]


def test_every_score_of_the_catalog_has_an_oracle() -> None:
    assert {entry.name for entry in cases.scores()} == set(oracles.SCORES)


@pytest.mark.parametrize(("entry", "multi"), FORMS)
def test_scores_and_their_gradients_are_those_of_the_formula(entry: Entry, multi: bool) -> None:
    score = make(entry, multi, **({"features": 2} if multi else {}))
    query, key = (x.requires_grad_() for x in pair(score))
    wanted = [query, key, *score.parameters()]
    actual, expected = score(query, key), oracles.scores(entry.name, score, query, key)
    if not score.needs_query:
        wanted, actual = wanted[1:], actual.expand(expected.shape)
    assert_same(actual, expected, "scores")
    cotangent = torch.randn_like(expected)
    for x, y in zip(
        torch.autograd.grad(actual, wanted, cotangent), torch.autograd.grad(expected, wanted, cotangent), strict=True
    ):
        assert_same(x, y, "gradient")


@pytest.mark.parametrize(("entry", "multi"), FORMS)
def test_leading_axes_are_a_loop(entry: Entry, multi: bool) -> None:
    score = make(entry, multi)
    query, key = pair(score, 2, 3)
    together = score(query, key)
    assert together.shape == (2, 3, NQ, N, *([D_V] if multi else []))
    for b in range(2):
        for h in range(3):
            assert_same(together[b, h], score(query[b, h], key[b, h]).expand(together[b, h].shape))


@pytest.mark.parametrize(
    ("entry", "multi"),
    [p for p in FORMS if "heads" in rg.catalog.arguments(p.values[0])],  # type: ignore[arg-type]
)
def test_heads_are_a_loop_over_scores_of_their_own(entry: Entry, multi: bool) -> None:
    score = make(entry, multi, heads=(3,))
    query, key = pair(score, 2, 3)
    together = score(query, key)
    for h in range(3):
        alone = make(entry, multi)
        with torch.no_grad():
            for name, parameter in alone.named_parameters():
                parameter.copy_(score.get_parameter(name)[h])
        assert_same(together[:, h], alone(query[:, h], key[:, h]).expand(together[:, h].shape))
    shared = score(query[:, :1], key[:, :1])
    assert shared.shape == together.shape, "inputs without a head axis of their own are read by every head"


@pytest.mark.parametrize(("entry", "multi"), FORMS)
def test_gradients_are_those_of_finite_differences(entry: Entry, multi: bool) -> None:
    case = cases.Case(entry, cases.alignments()[0], multi)
    options = {"query_dim": 3, "key_dim": 5, "dim": 5, "hidden_dim": 2, "rank": 2, "features": 3}
    known = {k: v for k, v in options.items() if k in case.options() and k in rg.catalog.arguments(entry)}
    score = scrambled(entry.cls(**known))
    query = torch.randn(2, 3 if score.query_dim == 3 else 5, dtype=torch.float64, requires_grad=True)
    key = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in score.named_parameters()]

    def function(query: torch.Tensor, key: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(score, dict(zip(names, parameters, strict=True)), (query, key))

    assert torch.autograd.gradcheck(function, (query, key, *score.parameters()))


@pytest.mark.parametrize("name", sorted(oracles.ACTIVATIONS))
def test_named_activations_and_their_derivatives(name: str) -> None:
    act = activation(name)
    z = torch.linspace(-4.3, 5.1, 23, dtype=torch.float64).requires_grad_()
    assert_same(act(z), oracles.each(oracles.ACTIVATIONS[name], z), "value")
    (slope,) = torch.autograd.grad(oracles.each(oracles.ACTIVATIONS[name], z).sum(), z)
    assert act.derivative is not None
    assert_same(act.derivative(z.detach()), slope, "derivative")
    if act.logistic is not None:
        shift, gain, rate = act.logistic
        assert_same(shift + gain / (1 + (rate * z).exp()), act(z), "as a logistic function")
    assert activation(act.spec).spec == act.spec, "the name of an activation gives it back"


def test_the_logistic_activations_are_known_as_such() -> None:
    logistic = {name for name in oracles.ACTIVATIONS if activation(name).logistic is not None}
    assert logistic == {"tanh", "tanh:5.0", "tanh:1.7", "sigmoid"}


@pytest.mark.parametrize("cls", [rg.Additive, rg.ActivatedGeneral])
def test_any_callable_is_an_activation(cls: type[rg.Score]) -> None:
    hidden = {"hidden_dim": 13} if cls is rg.Additive else {}
    named = scrambled(cls(query_dim=D_Q, key_dim=D_K, activation="tanh", **hidden))
    called = scrambled(cls(query_dim=D_Q, key_dim=D_K, activation=torch.tanh, **hidden))
    query, key = pair(named)
    assert_same(called(query, key), named(query, key))


@pytest.mark.parametrize("impl", ["dense", "blockwise"])
@pytest.mark.parametrize("cls", [rg.Additive, rg.ActivatedGeneral])
def test_a_module_as_activation_keeps_its_parameters(cls: type[rg.Score], impl: str) -> None:
    hidden = {"hidden_dim": 13} if cls is rg.Additive else {}
    score = cls(query_dim=D_Q, key_dim=D_K, activation=nn.PReLU(), **hidden)
    attend = scrambled(rg.Attention(score, impl=impl))
    assert any("activation" in name for name in attend.state_dict())
    x = cases.inputs((), NQ, N, D_Q, D_K, D_V)
    _, gradients = cases.run(attend, x)
    slope = next(g for name, g in gradients.items() if "activation" in name)
    assert bool((slope != 0).any())


def test_cosine_of_a_zero_vector_is_zero_and_its_gradient_finite() -> None:
    query, key = torch.zeros(2, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    query.requires_grad_(), key.requires_grad_()
    scores = rg.Cosine()(query, key)
    assert_same(scores, torch.zeros_like(scores))
    scores.sum().backward()
    assert bool(query.grad.isfinite().all())
    assert bool(key.grad.isfinite().all())


@pytest.mark.parametrize("learnable", [False, True])
def test_cosine_scales_with_its_strength(learnable: bool) -> None:
    query, key = torch.randn(2, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    plain, strong = rg.Cosine().double(), rg.Cosine(2.5, learnable=learnable).double()
    if learnable:
        with torch.no_grad():
            strong.log_beta.fill_(math.log(2.5))
    assert_same(strong(query, key), 2.5 * plain(query, key))
    if learnable:
        strong(query, key).sum().backward()
        assert_same(strong.log_beta.grad[0], strong(query, key).sum().detach())


def test_negative_l2_divides_by_its_temperature() -> None:
    query, key = torch.randn(2, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    assert_same(rg.NegativeL2(tau=1.7)(query, key), oracles.scores("negative-l2", rg.NegativeL2(1.7), query, key))


def test_token_to_token_takes_its_bound() -> None:
    score = scrambled(rg.TokenToToken(D_K, c=1.7))
    query, key = (torch.randn(n, D_K, dtype=torch.float64) for n in (NQ, N))
    z = (query @ score.W1.T)[:, None] + (key @ score.W2.T)[None] + score.b
    assert_same(score(query, key), 1.7 * torch.tanh(z / 1.7))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("entry", "multi"), FORMS)
def test_scores_of_half_precision_inputs_are_float32(entry: Entry, multi: bool, dtype: torch.dtype) -> None:
    score = make(entry, multi).to(dtype)
    query, key = (x.to(dtype) for x in pair(score))
    assert score(query, key).dtype == torch.float32


def test_a_score_by_itself_names_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="key: got width 4, expected key_dim=5"):
        rg.General(3, 5)(torch.randn(2, 7, 3), torch.randn(2, 11, 4))
    with pytest.raises(ValueError, match="query: got width 3, expected the width of the key, 5"):
        rg.Dot()(torch.randn(2, 7, 3), torch.randn(2, 11, 5))
    with pytest.raises(ValueError, match="query: got None, expected a tensor: Dot compares queries with keys"):
        rg.Dot()(None, torch.randn(2, 11, 5))


@pytest.mark.parametrize("name", ["additive", "activated-general"])
def test_b_may_be_kept_in_another_dtype(name: str) -> None:
    options = {"hidden_dim": 3} if name == "additive" else {}
    attend = rg.Attention(name, query_dim=4, key_dim=4, **options).to(torch.bfloat16)
    query, key = (torch.randn(2, n, 4, dtype=torch.bfloat16) for n in (5, 7))
    expected = attend(query, key)
    attend.score.b.data = attend.score.b.data.float()
    torch.testing.assert_close(attend(query, key), expected, atol=0.05, rtol=0.05)
