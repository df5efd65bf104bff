"""Attention gates: one key a query."""

import math

import pytest
import torch

import regard as rg
from tests.cases import scrambled


def oracle(m, x, g):
    """One place at a time, from the paper's equation."""
    W_g, W_x, b, psi, b_psi = (
        p.tolist()
        for p in (
            m.attention.score.W1,
            m.attention.score.W2,
            m.attention.score.b,
            m.attention.score.w,
            m.attention.align.c,
        )
    )
    rows = []
    for fine, coarse in zip(x.tolist(), g.tolist(), strict=True):
        total = b_psi[0]
        for h in range(len(psi)):
            inner = (
                b[h]
                + sum(w * v for w, v in zip(W_x[h], fine, strict=True))
                + sum(w * v for w, v in zip(W_g[h], coarse, strict=True))
            )
            total += psi[h] * max(inner, 0.0)
        alpha = 1 / (1 + math.exp(-total))
        rows.append([alpha * v for v in fine])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("impl", ["auto", "dense", "blockwise"])
def test_oracle(impl):
    m = scrambled(rg.AttentionGate((5, 3), hidden_dim=7, impl=impl))
    x, g = torch.randn(2, 11, 5, dtype=torch.float64), torch.randn(2, 11, 3, dtype=torch.float64)
    found = m(x, g)
    assert found.shape == (2, 11, 5)
    for k in range(2):
        torch.testing.assert_close(found[k], oracle(m, x[k], g[k]), rtol=1e-10, atol=1e-12)


def test_gradients():
    m = scrambled(rg.AttentionGate((5, 3), hidden_dim=7))
    x, g = (torch.randn(2, 4, d, dtype=torch.float64, requires_grad=True) for d in (5, 3))
    assert torch.autograd.gradcheck(lambda x, g: m(x, g), (x, g))


def test_a_place_sees_itself_alone():
    m = scrambled(rg.AttentionGate((5, 3)))
    x, g = torch.randn(1, 7, 5, dtype=torch.float64), torch.randn(1, 7, 3, dtype=torch.float64)
    order = torch.randperm(7)
    torch.testing.assert_close(m(x[:, order], g[:, order]), m(x, g)[:, order])


def test_the_weights_are_the_gate_and_lie_between_nothing_and_all():
    m = scrambled(rg.AttentionGate((5, 3)))
    x, g = torch.randn(2, 7, 5, dtype=torch.float64), torch.randn(2, 7, 3, dtype=torch.float64)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    x[1, 4:] = math.nan
    with rg.record(m) as trace:
        found = m(x, g, mask)
    alpha = trace["attention"].weights
    assert alpha.shape == (2, 7, 1, 1)
    assert bool(((alpha >= 0) & (alpha < 1)).all())
    assert not alpha[1, 4:].any()
    assert not found[1, 4:].any()
    torch.testing.assert_close(found[0], alpha[0, :, 0] * x[0])
    with rg.intervene(m, "uniform", at="attention"):
        torch.testing.assert_close(m(x, g, mask)[0], x[0])


def test_what_does_not_fit_is_refused():
    m = rg.AttentionGate((5, 3))
    with pytest.raises(
        ValueError, match=r"gate: got shape \(2, 4, 3\), expected the places \(2, 7\) of x.*interpolate"
    ):
        m(torch.randn(2, 7, 5), torch.randn(2, 4, 3))
    with pytest.raises(ValueError, match="gate"):
        m(torch.randn(2, 7, 5), torch.randn(2, 7, 5))
