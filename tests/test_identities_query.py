"""Identities of query-related mechanisms, by number."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import regard as rg
from tests.cases import assert_same, scrambled
from tests.feature.common import normal


@pytest.mark.parametrize("score", ["scaled-dot", "additive", "general"])
def test_i24_self_attention_follows_a_permutation_unless_a_mask_knows_the_order(score):
    m, tokens = scrambled(rg.SelfAttention(5, score=score)), normal(2, 7, 5)
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    assert_same(m(tokens[:, order]), m(tokens)[:, order])
    m.pairs = rg.Others()
    assert_same(m(tokens[:, order]), m(tokens)[:, order])
    for pairs in (rg.Causal(), rg.Window(1)):
        m.pairs = pairs
        assert not torch.allclose(m(tokens[:, order]), m(tokens)[:, order])
    m.pairs = None
    place = normal(7, 5, seed=9)
    assert not torch.allclose(m(tokens[:, order] + place), m(tokens + place)[:, order])


def test_i26_one_head_with_identities_is_attention():
    m = rg.MultiHeadAttention(5, 1).double()
    with torch.no_grad():
        for W in (m.W_Q, m.W_K, m.W_V, m.W_O):
            W.copy_(torch.eye(5))
    query, key, value = normal(2, 3, 5), normal(2, 7, 5, seed=1), normal(2, 7, 5, seed=2)
    assert_same(m(query, key, value), rg.Attention("scaled-dot")(query, key, value))


def test_i26_a_head_is_a_general_score_of_the_raw_features():
    m, query, key = scrambled(rg.MultiHeadAttention((3, 5, 5), 2, head_dim=4)), normal(2, 3, 3), normal(2, 7, 5)
    with rg.record(m) as trace:
        m(query, key)
    for h in range(2):
        W = m.W_K[h].mT @ m.W_Q[h] / 2.0
        assert_same(trace.scores[:, h], torch.einsum("bjk,kq,biq->bij", key, W, query))
        assert_same(trace.weights[:, h].sum(-1), torch.ones(2, 3, dtype=torch.float64))


def test_i26_heads_and_blocks_of_the_output_may_be_permuted_together():
    m, x, order = scrambled(rg.MultiHeadAttention(6, 3, score="additive")), normal(2, 5, 6), [2, 0, 1]
    before = m(x)
    with torch.no_grad():
        for p in (m.W_Q, m.W_K, m.W_V, *m.attention.parameters()):
            p.copy_(p[order].clone())
    assert not torch.allclose(m(x), before)
    with torch.no_grad():
        m.W_O.copy_(m.W_O.unflatten(1, (3, 2))[:, order].flatten(1).clone())
    assert_same(m(x), before)


def test_i26_identical_heads_are_one_context_through_the_sum_of_blocks():
    m, x = scrambled(rg.MultiHeadAttention(6, 3)), normal(2, 5, 6)
    with torch.no_grad():
        for W in (m.W_Q, m.W_K, m.W_V):
            W.copy_(W[:1].clone().expand_as(W))
    one = rg.Attention("scaled-dot")(x @ m.W_Q[0].mT, x @ m.W_K[0].mT, x @ m.W_V[0].mT)
    assert_same(m(x), one @ m.W_O.unflatten(1, (3, 2)).sum(1).mT)


def test_i26_it_is_torch():
    theirs = scrambled(nn.MultiheadAttention(6, 3, batch_first=True))
    x, y = normal(2, 5, 6), normal(2, 7, 6, seed=1)
    assert_same(rg.MultiHeadAttention.from_torch(theirs)(x, y), theirs(x, y, y)[0])


@pytest.mark.parametrize("score", ["general", "additive"])
def test_i27_one_hop_that_ignores_the_context_is_attention(score):
    more = {"hidden_dim": 4} if score == "additive" else {}
    m = scrambled(rg.MultiHopAttention((3, 5, 7), 1, transform="identity", score=score, **more))
    alone = scrambled(rg.Attention(score, query_dim=3, key_dim=5, **more))
    with torch.no_grad():
        mine, theirs = dict(m.hops[0].score.named_parameters()), dict(alone.score.named_parameters())
        of_query = "W" if score == "general" else "W1"
        for name, p in mine.items():
            if name == of_query:
                p[:, 3:] = 0
                p = p[:, :3]
            theirs[name].copy_(p)
    x = normal(2, 3), normal(2, 11, 5), normal(2, 11, 7)
    assert_same(m(*x), alone(*x))


def test_i27_shared_weights_do_not_grow_with_hops():
    def size(hops: int, share: bool) -> int:
        return sum(p.numel() for p in rg.MultiHopAttention(5, hops, share=share).parameters())

    assert size(1, True) == size(4, True) == size(1, False)
    assert size(4, False) == 4 * size(1, True)


@pytest.mark.parametrize("panel", [None, 2])
def test_i23_attention_over_attention_sums_to_one_and_of_one_word_is_attention(panel):
    document, question = normal(2, 7, 5), normal(2, 3, 5, seed=1)
    m = scrambled(rg.AttentionOverAttention(5, score="general"))
    real = torch.rand(2, 7, generator=torch.Generator().manual_seed(0)) < 0.7
    with rg.execution("blockwise", panel=panel):
        assert_same(m(document, question, (real, None)).sum(-1), torch.ones(2, dtype=torch.float64))
        one = m(document, question[:, :1])
    # The document is the score's query there, and its key here.
    other = rg.Attention(rg.General(5, 5)).double()
    with torch.no_grad():
        other.score.W.copy_(m.attention.score.W.mT)
    with rg.record(other) as trace:
        other(question[:, 0], document)
    assert_same(one, trace.weights)


def test_i37_a_full_decode_without_revisits_is_a_permutation():
    tokens, lengths = normal(50, 7, 2), torch.arange(50) % 7 + 1
    real = torch.arange(7) < lengths[:, None]
    for beam in (1, 4):
        found = scrambled(rg.PointerNetwork(2, 3)).decode(tokens, real, beam=beam).positions
        for row, n in zip(found.tolist(), lengths.tolist(), strict=True):
            assert sorted(row[:n]) == list(range(n))
            assert row[n:] == [-1] * (7 - n)
    revisiting = scrambled(rg.PointerNetwork(2, 3, revisit=True)).decode(tokens).positions
    assert any(len(set(row)) < 7 for row in revisiting.tolist())


def test_i37_probabilities_are_additive_weights():
    m, tokens = scrambled(rg.PointerNetwork(2, 3)), normal(2, 7, 2)
    keys, step = m._start(tokens, None)
    state = m.cell(step.given, step.state)
    with rg.record(m.pointer) as trace:
        m.pointer(state, keys)
    assert_same(m(tokens, torch.zeros(2, 1, dtype=torch.long))[:, 0].exp(), trace.weights)
