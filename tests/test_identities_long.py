"""Identities of Transformer-XL, Linformer and Synthesizer, by number."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from tests.cases import assert_same, scrambled
from tests.feature.common import normal

D, H = 8, 2


def in_segments(m, x, sizes):
    outputs, memory = [], None
    for part in x.split(sizes, -2):
        output, memory = m(part, memory)
        outputs.append(output)
    return torch.cat(outputs, -2)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_i31_memory_and_segment_are_the_tail_of_the_whole(norm):
    """One layer: its memory is the text itself."""
    m, x = scrambled(rg.TransformerXL(D, H, 1, memory=4, norm=norm)), normal(2, 11, D)
    memory = m(x[:, :4]).memory
    assert_same(m(x[:, 4:], memory).output, m(x).output[:, 4:])


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("sizes", [(4, 7), (1,) * 11, (2, 5, 3, 1)], ids=str)
def test_i31_with_all_in_memory_segments_are_the_whole(sizes, norm):
    """Any depth: what a causal layer was given at a token does not depend on later ones."""
    m, x = scrambled(rg.TransformerXL(D, H, 3, memory=11, norm=norm)), normal(2, 11, D)
    assert_same(in_segments(m, x, sizes), m(x).output)


@pytest.mark.parametrize("sizes", [(4, 7), (1,) * 11, (2, 5, 3, 1)], ids=str)
def test_i31_with_one_reach_for_all_segments_are_the_whole(sizes):
    """Any depth and any memory, where each token reads as many before it: then none needs more than is remembered."""
    m, x = scrambled(rg.TransformerXL(D, H, 3, memory=2, same_length=True)), normal(2, 11, D)
    assert_same(in_segments(m, x, sizes), m(x).output)
    # Without it the later ones of a segment see more than they would after a cut.
    m.same_length = False
    assert not torch.allclose(in_segments(m, x, sizes), m(x).output)


def test_i31_the_whole_is_a_causal_encoder_with_relative_positions():
    m, x = scrambled(rg.TransformerXL(D, H, 2, memory=5)), normal(2, 7, D)
    encoder = rg.TransformerEncoder(D, H, 2, position="transformer-xl").double()
    encoder.load_state_dict(m.state_dict())
    assert_same(m(x).output, encoder(x, pairs=rg.Causal()))


def test_i31_without_positions_it_is_plain_attention_to_memory_and_segment():
    m, x = scrambled(rg.TransformerXL(D, H, 1, memory=4)), normal(2, 7, D)
    attend = m.layers[0].attention
    with torch.no_grad():
        for p in (attend.position.u, attend.position.v, attend.position.W_R):
            p.zero_()
    memory = m(x[:, :4]).memory
    with rg.record(m) as trace:
        m(x[:, 4:], memory)
    q, k, _ = attend.project(x, x, x)
    scores = (q @ k.mT / math.sqrt(D // H)).masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -math.inf)
    assert_same(trace["layers.0.attention.attention"].weights, scores.softmax(-1)[..., 4:, :])


def test_i31_the_memory_gets_no_gradient():
    m, x = scrambled(rg.TransformerXL(D, H, 2, memory=4)), normal(1, 8, D).requires_grad_()
    (gradient,) = torch.autograd.grad(in_segments(m, x, (4, 4))[:, 4:].square().sum(), x)
    assert not gradient[:, :4].any()
    (gradient,) = torch.autograd.grad(m(x).output[:, 4:].square().sum(), x)
    assert gradient[:, :4].any()


@pytest.mark.parametrize("order", [range(7), (3, 0, 6, 2, 5, 1, 4)], ids=["identity", "permutation"])
@pytest.mark.parametrize("share", ["none", "headwise", "key-value"])
def test_i33_identity_or_permutation_is_full_attention(share, order):
    m, x = scrambled(rg.LinformerAttention(D, H, 7, 7, share=share)), normal(2, 7, D)
    full = rg.MultiHeadAttention(D, H, bias=True).double()
    full.load_state_dict({name: p for name, p in m.state_dict().items() if not name.startswith("shorten")})
    with torch.no_grad():
        for projection in set(m.projections):
            projection.E.copy_(torch.eye(7, dtype=x.dtype)[list(order)])
    assert_same(m(x), full(x))
    assert not torch.allclose(rg.LinformerAttention(D, H, 7, 7).double()(x), full(x))


def test_i33_what_padding_holds_never_matters():
    m, x = scrambled(rg.Linformer(D, H, 2, length=9, rank=3, share="none")), normal(2, 7, D)
    real = torch.tensor([[True] * 7, [True, False, True, True, False, False, True]])
    outcomes = []
    for garbage in (0.0, math.nan, 1e30):
        filled = torch.where(real.unsqueeze(-1), x, garbage).requires_grad_()
        output = m(filled, real)
        outcomes.append([output, *torch.autograd.grad(output.square().sum(), list(m.parameters()))])
    for others in outcomes[1:]:
        assert all(torch.equal(x, y) for x, y in zip(outcomes[0], others, strict=True))


def test_i34_zero_scores_are_the_masked_mean():
    m, x = scrambled(rg.SynthesizerAttention(D, H, 9, "random")), normal(2, 7, D)
    with torch.no_grad():
        m.syntheses[0].R.zero_()
    value = (x @ m.W_V.flatten(0, 1).mT + m.b_V.flatten()).cumsum(1) / torch.arange(1, 8)[:, None]
    assert_same(m(x, mask=rg.Causal()), value @ m.W_O.mT + m.b_O)


@pytest.mark.parametrize("synthesis", ["dense", "factorized-dense"])
def test_i34_a_row_of_weights_depends_on_its_own_token(synthesis):
    m, x = scrambled(rg.SynthesizerAttention(D, H, 12, synthesis)), normal(1, 7, D)
    y = x.clone()
    y[:, 3] += 1
    with rg.record(m) as trace:
        m(x)
        m(y)
    one, two = (call.weights for call in trace["attention"])
    others = [i for i in range(7) if i != 3]
    assert torch.equal(one[..., others, :], two[..., others, :])
    assert not torch.allclose(one[..., 3, :], two[..., 3, :])


@pytest.mark.parametrize("synthesis", ["random", "fixed-random", "factorized-random"])
def test_i34_random_weights_do_not_depend_on_the_tokens(synthesis):
    m = scrambled(rg.SynthesizerAttention(D, H, 12, synthesis))
    with rg.record(m) as trace:
        m(normal(1, 7, D))
        m(normal(1, 7, D, seed=1))
    one, two = (call.weights for call in trace["attention"])
    assert torch.equal(one, two)


def test_i34_the_scores_of_pairs_as_random_ones_are_plain_attention():
    x = normal(1, 7, D)
    dot = scrambled(rg.SynthesizerAttention(D, H, 7, "dot"))
    vanilla = rg.MultiHeadAttention(D, H, bias=True).double()
    state = {name: p for name, p in dot.state_dict().items() if "." not in name}
    part = dot.syntheses[0]
    zeros = {"b_Q": torch.zeros(H, D // H), "b_K": torch.zeros(H, D // H)}
    vanilla.load_state_dict(state | zeros | {"W_Q": part.W_Q, "W_K": part.W_K})
    assert_same(dot(x), vanilla(x))
    random = scrambled(rg.SynthesizerAttention(D, H, 7, "random"))
    q, k, _ = vanilla.project(x, x, x)
    random.load_state_dict(state | {"syntheses.0.R": (q @ k.mT / math.sqrt(D // H))[0]})
    assert_same(random(x), vanilla(x))


def test_i34_a_mixture_with_all_on_the_pairs_is_plain_attention():
    x = normal(2, 7, D)
    mixture = scrambled(rg.SynthesizerAttention(D, H, 12, ["random", "dot", "factorized-dense"]))
    with torch.no_grad():
        mixture.a.copy_(torch.tensor([-800.0, 0.0, -800.0]))
    dot = rg.SynthesizerAttention(D, H, 12, "dot").double()
    state = mixture.state_dict()
    dot.load_state_dict(
        {name: state[name] for name in ("W_V", "W_O", "b_V", "b_O")}
        | {f"syntheses.0.{name}": state[f"syntheses.1.{name}"] for name in ("W_Q", "W_K")}
    )
    assert_same(mixture(x), dot(x))
