"""Positions: each is its formula, in every execution, and refuses what it is not defined for."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from regard.transformer.positions import StreamedBias, build_position, rotated, sinusoids
from tests.cases import assert_same, scrambled
from tests.feature.common import normal
from tests.transformer.common import EXECUTIONS, RELATIVE

B, H, NQ, N, D = 2, 3, 3, 5, 4


def test_sinusoids_one_by_one():
    found = rg.SinusoidalPosition()(torch.zeros(2, 5, 7, dtype=torch.float64), start=3)
    for p in range(5):
        for c in range(7):
            angle = (p + 3) / 10000 ** (2 * (c // 2) / 7)
            expected = math.sin(angle) if c % 2 == 0 else math.cos(angle)
            assert abs(float(found[1, p, c]) - expected) < 1e-12


def test_learned_positions_are_added_from_where_the_tokens_start():
    m, x = scrambled(rg.LearnedPosition(7, length=11)), normal(2, 5, 7)
    assert_same(m(x, start=6), x + m.P[6:11])
    with pytest.raises(ValueError, match="tokens: got 12 places, expected at most length=11"):
        m(x, start=7)


def test_rotation_turns_neighbouring_coordinates_by_place_and_frequency():
    x = normal(2, 5, 6)
    found = rotated(x, start=2)
    for p in range(5):
        for t in range(3):
            angle = (p + 2) * 10000 ** (-2 * t / 6)
            a, b = x[..., p, 2 * t], x[..., p, 2 * t + 1]
            assert_same(found[..., p, 2 * t], a * math.cos(angle) - b * math.sin(angle))
            assert_same(found[..., p, 2 * t + 1], a * math.sin(angle) + b * math.cos(angle))


@pytest.mark.parametrize(
    "score", ["dot", "scaled-dot", "general", "biased-general", "activated-general", "cosine", "negative-l2"]
)
def test_rotated_scores_depend_on_distances_only(score):
    """Through every score that is a product; the whole sequence may be shifted."""
    options = {"query_dim": D, "key_dim": D} if "general" in score else {}
    attend = scrambled(rg.Attention(score, **options))
    attend.score = rg.RotaryPosition().score(attend.score)
    q, k = normal(1, D).expand(N, D), normal(1, D, seed=1).expand(N, D)
    e = attend.score(q, k)
    for i in range(N - 1):
        for j in range(N - 1):
            assert_same(e[i, j], e[i + 1, j + 1])
    assert not torch.allclose(e[0, 0], e[0, 1])


def alibi(m, q, h, distance):
    return -(2.0 ** (-8 * (h + 1) / H)) * abs(distance)


def shaw(m, q, h, distance):
    return sum(q[c] * m.r[min(2, max(-2, -distance)) + 2, c] for c in range(D)) / math.sqrt(D)


def xl(m, q, h, distance):
    angle = [distance / 10000 ** (2 * t / 10) for t in range(5)]
    R = torch.tensor([math.sin(a) for a in angle] + [math.cos(a) for a in angle], dtype=torch.float64)
    r = m.W_R[h] @ R
    return ((q + m.v[h]) * r).sum() / math.sqrt(D)


BIASES = {
    "alibi": (lambda: rg.AlibiPosition(H), alibi),
    "shaw": (lambda: rg.ShawPosition(D, reach=2), shaw),
    "xl": (lambda: rg.TransformerXLPosition(H, D, dim=10), xl),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_is_its_formula_pair_by_pair_and_in_every_tile(name):
    make, oracle = BIASES[name]
    m = scrambled(make())
    q, k = normal(B, H, NQ, D), normal(B, H, N, D, seed=1)
    bias, first = m.bias(q, k), N - NQ
    whole = bias(torch.arange(first, N)[:, None], torch.arange(N)[None]).expand(B, H, NQ, N)
    for b in range(B):
        for h in range(H):
            for i in range(NQ):
                for j in range(N):
                    expected = oracle(m, q[b, h, i], h, first + i - j)
                    assert_same(whole[b, h, i, j], torch.as_tensor(expected, dtype=torch.float64))
    part = bias(torch.arange(first + 1, N)[:, None], torch.arange(1, 4)[None])
    assert_same(part.expand(B, H, 2, 3), whole[..., 1:, 1:4])


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("score", ["scaled-dot", "additive"])
def test_a_bias_of_either_form_and_its_gradients(score, name, execution):
    """Streamed equals written out: the result, and gradients of queries and of the position's own parameters."""
    m = scrambled(BIASES[name][0]())
    attend = scrambled(
        rg.Attention(score, **({"query_dim": D, "key_dim": D, "hidden_dim": 7} if score == "additive" else {}))
    )
    q, k, v = normal(B, H, NQ, D).requires_grad_(), normal(B, H, N, D, seed=1), normal(B, H, N, 2, seed=2)
    wanted = [q, *m.parameters()]

    def outcome(written):
        bias = m.bias(q, k)
        bias = bias(torch.arange(N - NQ, N)[:, None], torch.arange(N)[None]) if written else bias
        out = attend(m.query(q), k, v, bias=bias, start=N - NQ)
        return [out, *torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)]

    with rg.execution("dense"):
        expected = outcome(written=True)
    with EXECUTIONS[execution]():
        found = outcome(written=False)
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert_same(x, y)


def test_shaw_is_the_papers_score_of_shifted_keys():
    m, q, k = scrambled(rg.ShawPosition(D, reach=2)), normal(N, D), normal(N, D, seed=1)
    e = rg.ScaledDot()(q, k) + m.bias(q, k)(torch.arange(N)[:, None], torch.arange(N)[None])
    for i in range(N):
        for j in range(N):
            r = m.r[max(-2, min(2, j - i)) + 2]
            assert_same(e[i, j], q[i] @ (k[j] + r) / math.sqrt(D))


def test_beyond_its_clamp_a_distance_counts_as_the_clamp():
    m = scrambled(rg.TransformerXLPosition(H, D, clamp=2))
    far, near = m.of(torch.tensor([7, -9]), torch.float64), m.of(torch.tensor([2, -2]), torch.float64)
    assert_same(far, near)


def test_a_bias_without_gradients_goes_to_the_library_call_and_one_with_does_not():
    attend, q = rg.Attention("scaled-dot"), torch.randn(B, H, 200, D, requires_grad=True)
    alibi, shaw = rg.AlibiPosition(H).bias(q, q), rg.ShawPosition(D).bias(q, q)
    assert rg.explain_dispatch(attend, q, q, bias=alibi).path == "fused"
    assert rg.explain_dispatch(attend, q, q, bias=shaw).path == "blockwise"
    with torch.no_grad():
        assert rg.explain_dispatch(attend, q, q, bias=rg.ShawPosition(D).bias(q, q)).path == "fused"
    rotary = rg.Attention(rg.RotaryPosition().score(rg.ScaledDot()))
    assert rg.explain_dispatch(rotary, q, q).path == "fused"


def test_the_size_of_a_written_bias_counts_its_heads_and_batch():
    attend, q = rg.Attention("scaled-dot"), torch.zeros(64, 16, 300, D)
    small, large = StreamedBias(lambda i, j: 0.0 * (i - j)), StreamedBias(lambda i, j: 0.0 * (i - j), lead=(64, 16))
    assert rg.explain_dispatch(attend, q, q, bias=small).path == "fused"
    assert "would have to be written out" in rg.explain_dispatch(attend, q, q, bias=large).reason


@pytest.mark.parametrize("name", RELATIVE)
def test_by_name(name):
    m = rg.TransformerAttention(8, 2, position=name)
    assert isinstance(m.position, rg.transformer.RelativePosition)
    assert build_position(m.position) is m.position
    assert type(build_position(lambda: m.position)) is type(m.position)


def test_refusals():
    x = torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match="position: got rotary with Additive, expected a score that is a product. Fix"):
        rg.TransformerAttention(8, 2, position="rotary", score="additive")
    with pytest.raises(ValueError, match="position: got rotary with Additive, expected a score that is a product. Fix"):
        rg.TransformerEncoder(8, 2, 1, position="rotary", score="additive")
    # What a score of one's own is made of, its first call tells.
    own = type("Own", (rg.general.scores.Score,), {"reduce": lambda self, q, k: rg.Additive(4, 4, 3).reduce(q, k)})()
    with pytest.raises(ValueError, match="position: got rotary with Own, expected a score that is a product. Fix"):
        rg.RotaryPosition().score(own)(torch.randn(5, 4), torch.randn(5, 4))
    with pytest.raises(ValueError, match="rotary with queries and keys 3 wide, expected an even width"):
        rg.TransformerAttention(6, 2, position="rotary")(torch.randn(2, 5, 6))
    with pytest.raises(ValueError, match="'rotatory', expected one of sinusoidal, alibi, .*Did you mean 'rotary'"):
        rg.TransformerAttention(8, 2, position="rotatory")
    with pytest.raises(
        ValueError, match="position: got SinusoidalPosition, expected a position of scores. Fix: add it to the tokens"
    ):
        rg.TransformerAttention(8, 2, position="sinusoidal")
    with pytest.raises(ValueError, match="position: got queries 4 wide, expected head_dim=3"):
        rg.TransformerAttention(8, 2, position=rg.ShawPosition(3))(x)
    with pytest.raises(
        ValueError, match="key: got other tokens, expected none: AlibiPosition knows the places of one sequence"
    ):
        rg.TransformerAttention(8, 2, position="alibi")(x, x)
    with pytest.raises(ValueError, match="dim: got 9, expected an even number"):
        rg.TransformerXLPosition(3, 3)
    with pytest.raises(TypeError, match="position: got int"):
        build_position(3)
    with pytest.raises(TypeError, match="position: got a function that gives int"):
        build_position(lambda: 3)
    for cls in (rg.RotaryPosition, rg.SinusoidalPosition):
        with pytest.raises(ValueError, match="base: got 0"):
            cls(base=0)
    assert sinusoids(torch.arange(3), 5).shape == (3, 5)
