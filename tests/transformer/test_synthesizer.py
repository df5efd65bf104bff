"""Synthesizer: scores from one token, from none, and mixtures with pairs."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from regard.recipes.planted import Classifier, Lookup, Mirror, accuracy, fit
from tests.cases import assert_same, scrambled
from tests.transformer.common import EXECUTIONS, REAL, tokens

D, H, L = 6, 2, 12
KINDS = ("dense", "random", "fixed-random", "factorized-dense", "factorized-random", "dot")


def attention(synthesis="dense", **options):
    return scrambled(rg.SynthesizerAttention(D, H, L, synthesis, **options))


def score(s, h, x, i, j):
    """One score, from the formula of its kind."""
    if isinstance(s, rg.DenseSynthesis):
        return (s.W2[h] @ (s.W1[h] @ x[i] + s.b1[h]).relu() + s.b2[h])[j]
    if isinstance(s, rg.RandomSynthesis):
        return s.R[h, i, j]
    if isinstance(s, rg.FactorizedRandomSynthesis):
        return s.R1[h, i] @ s.R2[h, j]
    if isinstance(s, rg.FactorizedDenseSynthesis):
        alpha = s.W2_A[h] @ (s.W1_A[h] @ x[i] + s.b1_A[h]).relu() + s.b2_A[h]
        beta = s.W2_B[h] @ (s.W1_B[h] @ x[i] + s.b1_B[h]).relu() + s.b2_B[h]
        return (alpha.repeat(len(beta)) * beta.repeat_interleave(len(alpha)))[j]
    return (s.W_Q[h] @ x[i]) @ (s.W_K[h] @ x[j]) / math.sqrt(D // H)


def loop(m, x, allowed):
    """One sequence (N, d) under a mask (N, N)."""
    share = [1.0] if m.a is None else (m.a.exp() / m.a.exp().sum()).tolist()
    rows = []
    for i in range(len(x)):
        heads = []
        for h in range(H):
            js = [j for j in range(len(x)) if allowed[i, j]]
            e = [sum(a * score(s, h, x, i, j) for a, s in zip(share, m.syntheses, strict=True)) for j in js]
            weights = torch.stack(e).softmax(0)
            heads.append(sum(w * (m.W_V[h] @ x[j] + m.b_V[h]) for w, j in zip(weights, js, strict=True)))
        rows.append(m.W_O @ torch.cat(heads) + m.b_O)
    return torch.stack(rows)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("synthesis", [*KINDS, ["random", "dot"], list(KINDS)], ids=str)
def test_it_is_the_equations(synthesis, execution):
    m, x = attention(synthesis), tokens(2, 7, D)
    with EXECUTIONS[execution]():
        found = m(x, mask=rg.Causal() & rg.Keys(REAL))
    for b in range(2):
        allowed = torch.ones(7, 7, dtype=torch.bool).tril() & REAL[b]
        assert_same(found[b], loop(m, x[b], allowed))


@pytest.mark.parametrize("synthesis", [*KINDS, ["factorized-dense", "dot", "random"]], ids=str)
def test_padding_never_matters(synthesis):
    m = scrambled(rg.TransformerEncoder(D, H, 1, attention=lambda d, h: rg.SynthesizerAttention(d, h, L, synthesis)))
    x = tokens(2, 7, D)
    found = m(torch.where(REAL.unsqueeze(-1), x, math.nan), REAL)
    assert_same(found[1:, :4], m(x[1:, :4]))
    assert not found[~REAL].any()
    for n in (0, 1, L):
        assert m(tokens(3, n, D)).shape == (3, n, D)


@pytest.mark.parametrize("synthesis", ["dense", "factorized-dense", ["random", "factorized-random", "dot"]], ids=str)
def test_gradients(synthesis):
    m, x = attention(synthesis), tokens(1, 4, D).requires_grad_()
    named = dict(m.syntheses.named_parameters(prefix="syntheses"))

    def call(x, *values):
        return torch.func.functional_call(m, dict(zip(named, values, strict=True)), (x,), {"mask": rg.Causal()})

    assert torch.autograd.gradcheck(call, (x, *named.values()), fast_mode=True)


def test_what_learns():
    assert rg.RandomSynthesis(H, L).R.requires_grad
    fixed = attention("fixed-random")
    assert "syntheses.0.R" in fixed.state_dict()
    assert not [name for name, _ in fixed.named_parameters() if name.startswith("syntheses")]
    assert attention("dense").shares is None
    assert_same(attention(["dot", "random", "dense"]).shares.sum(), torch.tensor(1.0, dtype=torch.float64))


def test_recorded_and_changed_from_outside():
    m, x = attention(["random", "dot"]), tokens(2, 7, D)
    with rg.record(m) as trace:
        before = m(x, mask=rg.Causal())
    weights = trace["attention"].weights
    assert weights.shape == (2, H, 7, 7)
    assert not weights.triu(1).any()
    with rg.intervene(m, "uniform", at="attention"):
        assert not torch.allclose(m(x, mask=rg.Causal()), before)


def test_a_mask_of_each_head():
    m, x = attention("dense"), tokens(2, 5, D)
    allowed = torch.rand(2, H, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.7
    allowed[..., 0] = True
    with rg.record(m) as trace:
        m(x, mask=allowed)
    assert torch.equal(trace["attention"].weights > 0, allowed)


def test_any_alignment():
    m = attention("dense", align=rg.Sparsemax())
    with rg.record(m) as trace:
        m(10 * tokens(1, 7, D))
    assert (trace["attention"].weights == 0).any()


def test_parts_of_ones_own():
    m = attention(
        [rg.FactorizedRandomSynthesis(H, L, rank=3), lambda d, h, n: rg.FactorizedDenseSynthesis(d, h, n, (2, 6))]
    )
    assert m.syntheses[0].R1.shape == (H, L, 3)
    assert m.syntheses[1].factors == (2, 6)
    assert rg.FactorizedDenseSynthesis(D, H, 13).factors == (13, 1)
    assert m(tokens(2, 7, D)).shape == (2, 7, D)


class Asked(torch.nn.Module):
    """The question stands first among the tokens, and is answered there."""

    def __init__(self, attend: torch.nn.Module) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, query, key):
        question = torch.nn.functional.pad(query, (0, 1)).unsqueeze(1)
        return self.attend(torch.cat([question, key], 1))[:, 0]


def test_places_are_enough_for_places_and_not_for_contents():
    """Planted: random scores find what stands elsewhere, and cannot find what resembles the question; dot products the other way."""
    place, content = Mirror(), Lookup()
    width = place.symbols
    inner = content.draw(1, torch.Generator()).inputs["key"].shape[-1]
    found = {}
    for synthesis in ("random", "dot"):
        torch.manual_seed(0)
        looks = rg.SynthesizerAttention(width, 1, place.n, synthesis)
        m = Classifier(looks, width, place.classes)
        fit(m, place, steps=150, lr=3e-2)
        found["place", synthesis] = accuracy(m, place)
        if synthesis == "random":
            batch = place.draw(64, torch.Generator().manual_seed(5))
            with rg.record(looks) as trace:
                looks(**batch.inputs)
            assert torch.equal(trace["attention"].weights[:, 0].argmax(-1), batch.truth["tokens"])
        torch.manual_seed(0)
        m = Classifier(Asked(rg.SynthesizerAttention(inner, 1, 32, synthesis)), inner, content.classes)
        fit(m, content, steps=300, lr=3e-2)
        found["content", synthesis] = accuracy(m, content)
    print(found)
    assert found["place", "random"] > 0.95
    assert found["place", "dot"] < 0.6
    assert found["content", "dot"] > 0.9
    assert found["content", "random"] < 0.65


def test_garbage_under_a_mask_of_its_own_never_matters():
    """Without a stack that has zeroed it before: neither in the result nor in any gradient."""
    m, x = attention(["dense", "dot", "factorized-dense"]), tokens(2, 7, D)
    outcomes = []
    for garbage in (0.0, math.nan):
        filled = torch.where(REAL.unsqueeze(-1), x, garbage)
        real = m(filled, mask=REAL[:, None, :] & REAL[:, :, None])[REAL]
        outcomes.append([real, *torch.autograd.grad(real.square().sum(), list(m.parameters()))])
    for one, two in zip(*outcomes, strict=True):
        assert torch.equal(one, two)


def test_refusals():
    with pytest.raises(ValueError, match="tokens: got 13 of them, expected at most length=12"):
        attention()(tokens(1, 13, D))
    with pytest.raises(ValueError, match="synthesis: got 'dens'.*dense"):
        attention("dens")
    with pytest.raises(ValueError, match=r"synthesis: got 'x', expected one of [^.]*\.$"):
        attention("x")
    with pytest.raises(ValueError, match="synthesis: got an empty list"):
        attention([])
    with pytest.raises(TypeError, match="synthesis: got Linear"):
        attention(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="synthesis: got one of length 5, expected length=12 or more"):
        attention(rg.RandomSynthesis(H, 5))
    with pytest.raises(ValueError, match="factors: got .*product is length=12"):
        rg.FactorizedDenseSynthesis(D, H, L, (5, 2))
    with pytest.raises(ValueError, match="heads: got 4, expected a divisor of the width 6"):
        rg.SynthesizerAttention(D, 4, L)
    assert "length=12" in repr(attention())
