"""Pointer network: the attention is the answer."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import regard as rg
from regard.recipes.planted import Sorting, fit
from tests import oracles
from tests.cases import assert_same, scrambled
from tests.feature.common import NAMES, normal, weights_of
from tests.query.test_multi_hop import gru

OPTIONS = {
    "additive": {},
    "general, stop": {"score": "general", "stop": True},
    "revisit": {"revisit": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
STEPS, LR = 500, 0.02
LENGTHS = torch.tensor([5, 3])
REAL = torch.arange(5) < LENGTHS[:, None]
# The second sequence is shorter: it ends after its third position.
POSITIONS = torch.tensor([[3, 0, 4, 1], [2, 0, 1, -1]])


def make(**options) -> rg.PointerNetwork:
    return scrambled(rg.PointerNetwork(2, 3, **options))


def encoded(m: rg.PointerNetwork, tokens) -> list[torch.Tensor]:
    """States of a GRU, token by token."""
    net, h, out = m.encoder.network, torch.zeros(3, dtype=torch.float64), []

    class Cell:
        weight_ih, weight_hh, bias_ih, bias_hh = net.weight_ih_l0, net.weight_hh_l0, net.bias_ih_l0, net.bias_hh_l0

    for x in tokens:
        h = gru(Cell, x, h)
        out.append(h)
    return out


def oracle(m: rg.PointerNetwork, tokens: list[torch.Tensor], positions: list[int]) -> list[torch.Tensor]:
    """Probabilities of one sequence, step by step."""
    keys = encoded(m, tokens)
    state = torch.tanh(m.begin.weight @ keys[-1] + m.begin.bias)
    keys = keys if m.stop is None else [*keys, m.stop]
    score, given, seen, found = oracles.SCORES[NAMES[type(m.pointer.score)]], m.start, set(), []
    for c in positions:
        state = gru(m.cell, given, state)
        e = [score(m.pointer.score, state, k) for k in keys]
        found.append(torch.stack(oracles.soft(e, [m.revisit or j not in seen for j in range(len(keys))])))
        seen.add(c)
        given = tokens[c]
    return found


@every_option
def test_shapes(options):
    m = rg.PointerNetwork(7, 11, **options)
    n = 5 + ("stop" in options)
    assert m(torch.randn(2, 5, 7), torch.randint(5, (2, 3))).shape == (2, 3, n)
    assert m(torch.randn(2, 5, 7), torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, n)
    decoded = m.decode(torch.randn(2, 5, 7))
    assert decoded.positions.shape == (2, n)
    assert decoded.log_prob.shape == (2,)
    assert m.decode(torch.randn(2, 5, 7), steps=2, beam=3).positions.shape == (2, 2)


@pytest.mark.parametrize("execution", ["auto", "dense", "blockwise"])
@every_option
def test_oracle(options, execution):
    m, tokens = make(**options), normal(2, 5, 2)
    dirty, clean = torch.where(REAL[..., None], tokens, math.nan).requires_grad_(), tokens.clone().requires_grad_()
    with rg.execution(execution):
        found = m(dirty, POSITIONS, REAL).exp()
    total = torch.zeros((), dtype=torch.float64)
    for b in range(2):
        n, steps = int(LENGTHS[b]), int((POSITIONS[b] >= 0).sum())
        for step, p in enumerate(oracle(m, list(clean[b, :n]), POSITIONS[b, :steps].tolist())):
            assert_same(found[b, step, :n], p[:n])
            if m.stop is not None:
                assert_same(found[b, step, 5:], p[n:])
            assert not found[b, step, n:5].any()
            total = total + p.square().sum()
    valid = (POSITIONS >= 0)[..., None]
    mine = torch.autograd.grad((found.square() * valid).sum(), [dirty, *m.parameters()])
    theirs = torch.autograd.grad(total, [clean, *m.parameters()])
    for a, b in zip(mine, theirs, strict=True):
        assert_same(a + 1, b + 1)


@every_option
def test_gradients(options):
    m = make(**options)
    leaves = [normal(2, 5, 2).requires_grad_()]
    assert torch.autograd.gradcheck(lambda x: m.loss(x, POSITIONS, REAL), leaves, fast_mode=True)
    assert torch.autograd.gradcheck(lambda x: m(x, POSITIONS, REAL).exp(), leaves, fast_mode=True)


def test_the_loss_is_the_mean_of_negative_log_probabilities():
    m, tokens = make(), normal(2, 5, 2)
    found = m(tokens, POSITIONS, REAL)
    each = [-sum(found[b, s, c] for s, c in enumerate(POSITIONS[b].tolist()) if c >= 0) for b in range(2)]
    assert_same(m.loss(tokens, POSITIONS, REAL), sum(each) / 2)


@every_option
def test_greedy_decoding_takes_the_likeliest_and_knows_its_probability(options):
    m, tokens = make(**options), normal(2, 5, 2)
    decoded = m.decode(tokens, REAL)
    for b in range(2):
        path, total = [], 0.0
        for c in decoded.positions[b].tolist():
            if c == -1:
                break
            p = m(tokens[b : b + 1], torch.tensor([[*path, 0]]), REAL[b : b + 1])[0, len(path)]
            assert c == int(p.argmax())
            path.append(c)
            total = total + p[c].item()
            if c == 5:
                break
        assert len(path) >= 1
        assert decoded.positions[b, len(path) :].tolist() == [-1] * (decoded.positions.shape[1] - len(path))
        assert math.isclose(total, float(decoded.log_prob[b]), rel_tol=1e-9)


def test_a_wide_beam_finds_the_best_permutation():
    m, tokens = make(), normal(3, 4, 2)
    found = {c: m.loss(tokens[:1], torch.tensor([c])) for c in itertools.permutations(range(4))}
    best = min(found, key=lambda c: found[c].item())
    wide = m.decode(tokens, beam=24)
    assert tuple(wide.positions[0].tolist()) == best
    assert_same(-wide.log_prob[0], found[best])
    totals = [m.decode(tokens, beam=k).log_prob for k in (1, 24)]
    assert (totals[1] >= totals[0] - 1e-12).all()


def test_a_wide_beam_with_a_stop_symbol_finds_the_best_ending():
    m, tokens = make(stop=True), normal(1, 3, 2)
    every = [(*c, 3) for k in range(4) for c in itertools.permutations(range(3), k)]
    found = {c: m.loss(tokens, torch.tensor([c])).item() for c in every}
    assert math.isclose(sum(math.exp(-x) for x in found.values()), 1.0, rel_tol=1e-9)
    best = min(found, key=found.get)
    decoded = m.decode(tokens, beam=40)
    assert tuple(c for c in decoded.positions[0].tolist() if c >= 0) == best
    assert math.isclose(-float(decoded.log_prob[0]), found[best], rel_tol=1e-9)


def test_a_batch_is_decoded_as_its_sequences_alone():
    m, tokens = make(), normal(2, 5, 2)
    for beam in (1, 3):
        together = m.decode(tokens, REAL, beam=beam)
        for b in range(2):
            n = int(LENGTHS[b])
            alone = m.decode(tokens[b : b + 1, :n], beam=beam)
            assert together.positions[b, :n].tolist() == alone.positions[0].tolist()
            assert (together.positions[b, n:] == -1).all()
            assert_same(together.log_prob[b : b + 1], alone.log_prob)


def test_an_empty_sequence_is_decoded_to_nothing():
    real = torch.tensor([[True] * 5, [False] * 5])
    decoded = make(stop=True).decode(normal(2, 5, 2), real)
    assert (decoded.positions[1] == -1).all()
    assert decoded.log_prob[1] == 0


def test_one_token_is_pointed_at_with_certainty():
    found = make()(normal(2, 1, 2), torch.zeros(2, 1, dtype=torch.long))
    assert_same(found.exp(), torch.ones(2, 1, 1, dtype=torch.float64))


def test_positions_reach_from_the_first_to_the_last_and_copy_what_they_point_at():
    """Index 0 to N - 1, all of them; the next decoder input is the token itself."""
    m, tokens = make(), normal(1, 5, 2)
    assert sorted(m.decode(tokens).positions[0].tolist()) == [0, 1, 2, 3, 4]
    keys, step = m._start(tokens, None)
    state = m.cell(tokens[:, 4], m.cell(step.given, step.state))
    weights = weights_of(m.pointer, state, keys, mask=torch.arange(5) != 4).weights
    assert_same(m(tokens, torch.tensor([[4, 0]]))[:, 1].exp(), weights)


def test_the_trace_holds_the_probabilities_and_interventions_reach_them():
    m, tokens = make(), normal(2, 5, 2)
    trace = weights_of(m, tokens, POSITIONS, REAL)
    assert_same(trace["pointer"].weights, m(tokens, POSITIONS, REAL).exp())
    with rg.intervene(m, "uniform"):
        found = m(tokens, POSITIONS, REAL).exp()
    assert_same(found[1, 0, :3], torch.full((3,), 1 / 3, dtype=torch.float64))


def test_it_sorts_five_numbers():
    task = Sorting(5)
    torch.manual_seed(0)
    m = rg.PointerNetwork(task.dim, 32)
    fit(m, task, steps=STEPS, lr=LR, batch=128, loss=lambda m, b: m.loss(b.inputs["tokens"], b.target))
    batch = task.draw(2048, torch.Generator().manual_seed(1))
    found = {}
    for beam in (1, 3):
        decoded = m.decode(batch.inputs["tokens"], beam=beam)
        found[beam] = float((decoded.positions == batch.target).all(-1).float().mean())
    print("sorted, by beam", found)
    assert min(found.values()) >= 0.95


def test_refusals():
    m = rg.PointerNetwork(2, 3)
    with pytest.raises(ValueError, match=r"tokens: got shape \(5, 2\)"):
        m(torch.randn(5, 2), torch.zeros(5, 1, dtype=torch.long))
    with pytest.raises(ValueError, match=r"positions: got a tensor of torch\.float32"):
        m(torch.randn(1, 5, 2), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="beam: got 0"):
        m.decode(torch.randn(1, 5, 2), beam=0)
    with pytest.raises(ValueError, match="score: got a multi-dimensional score"):
        rg.PointerNetwork(2, 3, score="additive", features=3)


def test_positions_out_of_range_are_refused():
    tokens = torch.zeros(1, 5, 3)
    with pytest.raises(
        IndexError, match="positions: got indices from 0 to 5, expected positions of 5 tokens, -1 after"
    ):
        rg.PointerNetwork(3, 2)(tokens, torch.tensor([[0, 5]]))
    with pytest.raises(IndexError, match="positions: got indices from -2 to 5, expected .* 5 to stop, -1 after"):
        rg.PointerNetwork(3, 2, stop=True)(tokens, torch.tensor([[5, -2]]))
    assert rg.PointerNetwork(3, 2, stop=True)(tokens, torch.tensor([[5, -1]])).shape == (1, 2, 6)


@pytest.mark.parametrize("beam", [1, 3])
def test_no_sequences_are_decoded_to_none(beam):
    found = rg.PointerNetwork(3, 2).decode(torch.zeros(0, 5, 3), beam=beam)
    assert found.positions.shape == (0, 5)
    assert found.log_prob.shape == (0,)
