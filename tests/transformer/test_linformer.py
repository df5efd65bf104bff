"""Linformer: projections along the sequence, their sharing, and what they cannot do."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from tests.cases import assert_same, scrambled
from tests.transformer.common import EXECUTIONS, REAL, tokens

D, H, L, K = 6, 2, 11, 5


def attention(share: str = "headwise", **options):
    return scrambled(rg.LinformerAttention(D, H, L, K, share=share, **options))


def loop(m, x, real):
    """One sequence (N, d), of which some tokens are real: place by place, head by head."""
    d, N = D // H, len(x)
    of_keys, of_values = m.projections
    rows = []
    for i in range(N):
        heads = []
        for h in range(H):
            E, G = (p.E[min(h, len(p.E) - 1)] for p in (of_keys, of_values))
            keys = [sum(E[t, j] * (m.W_K[h] @ x[j] + m.b_K[h]) for j in range(N) if real[j]) for t in range(K)]
            values = [sum(G[t, j] * (m.W_V[h] @ x[j] + m.b_V[h]) for j in range(N) if real[j]) for t in range(K)]
            q = m.W_Q[h] @ x[i] + m.b_Q[h]
            weights = torch.stack([q @ k / math.sqrt(d) for k in keys]).softmax(0)
            heads.append(sum(w * v for w, v in zip(weights, values, strict=True)))
        rows.append(m.W_O @ torch.cat(heads) + m.b_O)
    return torch.stack(rows)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("share", ["none", "headwise", "key-value"])
def test_it_is_the_equations(share, execution):
    m, x = attention(share), tokens(2, 7, D)
    with EXECUTIONS[execution]():
        found = m(x, mask=rg.Keys(REAL))
    for b in range(2):
        assert_same(found[b, REAL[b]], loop(m, x[b], REAL[b])[REAL[b]])


def test_what_is_shared():
    counts = {
        share: sum(p.numel() for p in rg.Linformer(D, H, 3, length=L, rank=K, share=share).parameters())
        for share in ("none", "headwise", "key-value", "layerwise")
    }
    one = K * L
    assert counts["none"] - counts["headwise"] == 3 * 2 * (H - 1) * one
    assert counts["headwise"] - counts["key-value"] == 3 * one
    assert counts["key-value"] - counts["layerwise"] == 2 * one
    m = rg.Linformer(D, H, 3, length=L, rank=K, share="layerwise")
    assert all(layer.attention.projections == (m.shorten, m.shorten) for layer in m.layers)
    assert [name for name in m.state_dict() if "shorten" in name] == ["shorten.E"]


def test_layerwise_learns_from_every_layer():
    m, x = scrambled(rg.Linformer(D, H, 2, length=L, rank=K, share="layerwise")), tokens(2, 7, D)
    (whole,) = torch.autograd.grad(m(x).square().sum(), m.shorten.E)
    parts = []
    for k in (0, 1):
        own = rg.LengthProjection(L, K).double()
        own.load_state_dict(m.shorten.state_dict())
        attend, m.layers[k].attention._given = m.layers[k].attention, (own,)
        parts.append(torch.autograd.grad(m(x).square().sum(), own.E)[0])
        attend._given = (m.shorten,)
    assert_same(sum(parts), whole)


@pytest.mark.parametrize("share", ["layerwise", "none"])
def test_shorter_inputs_take_the_first_columns(share):
    m, x = scrambled(rg.Linformer(D, H, 2, length=L, rank=K, share=share)), tokens(2, 7, D)
    padded = torch.cat([x, torch.full((2, 4, D), math.nan, dtype=x.dtype)], 1)
    real = (torch.arange(L) < 7).expand(2, -1)
    assert_same(m(padded, real)[:, :7], m(x))
    assert m(tokens(3, 0, D)).shape == (3, 0, D)
    assert m(tokens(1, 1, D)).shape == (1, 1, D)


def test_weights_are_of_projected_keys():
    m, x = scrambled(rg.Linformer(D, H, 1, length=L, rank=K)), tokens(2, 7, D)
    with rg.record(m) as trace:
        before = m(x, REAL)
    weights = trace["layers.0.attention.attention"].weights
    assert weights.shape == (2, H, 7, K)
    assert_same(weights.sum(-1), torch.ones(2, H, 7, dtype=x.dtype))
    with rg.intervene(m, "uniform", at="layers.0.attention.attention"):
        assert not torch.allclose(m(x, REAL), before)


@pytest.mark.parametrize(("score", "align"), [("additive", "entmax"), ("general", "sparsemax")])
def test_other_scores_and_alignments(score, align):
    m = attention(score=score, align=align)
    assert m(tokens(2, 7, D)).shape == (2, 7, D)


def test_averages_of_segments_are_pooled_keys():
    m, x = attention("key-value"), tokens(2, 10, D)
    with torch.no_grad():
        m.shorten.E.zero_()
        for t in range(K):
            m.shorten.E[0, t, 2 * t : 2 * t + 2] = 0.5
    pooled = x.view(2, K, 2, D).mean(2)
    q, k, v = m.project(x, pooled, pooled)
    assert_same(m(x), m.join(torch.softmax(q @ k.mT / math.sqrt(D // H), -1) @ v))


def test_gradients():
    m, x = attention("none"), tokens(1, 4, D).requires_grad_()
    of = m.shorten.E
    assert torch.autograd.gradcheck(
        lambda x, E: torch.func.functional_call(m, {"shorten.E": E}, (x,), {"mask": rg.Keys(REAL[1:, 1:5])}),
        (x, of),
        fast_mode=True,
    )


def test_garbage_under_a_mask_of_its_own_never_matters():
    """Without a stack that has zeroed it before."""
    m, x = attention("none"), tokens(2, 7, D)
    one, two = (m(torch.where(REAL.unsqueeze(-1), x, garbage), mask=rg.Keys(REAL))[REAL] for garbage in (0.0, math.nan))
    assert torch.equal(one, two)


def test_refusals():
    m, x = attention(), tokens(2, 7, D)
    for mask in (rg.Causal(), rg.Window(2), torch.ones(7, 7, dtype=torch.bool).tril(), rg.Causal() & rg.Keys(REAL)):
        with pytest.raises(
            ValueError, match="mask: got one of shape .* expected the same keys for every query.*no causal form"
        ):
            m(x, mask=mask)
    with pytest.raises(ValueError, match="no causal form"):
        rg.Linformer(D, H, 1, length=L)(x, pairs=rg.Causal())
    with pytest.raises(ValueError, match="no causal form"):
        rg.TransformerDecoder(D, H, 1, cross=False, attention=lambda d, h: rg.LinformerAttention(d, h, L))(x)
    with pytest.raises(ValueError, match="tokens: got 12 of them, expected at most length=11"):
        m(tokens(1, 12, D))
    with pytest.raises(ValueError, match="share: got 'all'"):
        rg.Linformer(D, H, 1, length=L, share="all")
    with pytest.raises(ValueError, match="share: got 'layerwise'"):
        rg.LinformerAttention(D, H, L, share="layerwise")
    for given in ({}, {"length": L, "projection": rg.LengthProjection(L, K)}):
        with pytest.raises(ValueError, match="length and projection: got (neither|both), expected one of them"):
            rg.LinformerAttention(D, H, **given)
    with pytest.raises(ValueError, match="rank: got 0"):
        rg.LinformerAttention(D, H, L, 0)
    for position in ("rotary", "alibi", "relative", "transformer-xl", "directional"):
        with pytest.raises(
            ValueError, match="position: got .*Position, expected one of tokens, 'sinusoidal' or 'learned'"
        ):
            rg.Linformer(D, H, 1, length=L, position=position)
    assert "length=11, rank=5, heads=1" in repr(m)
