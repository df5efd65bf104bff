"""Identities of query-related mechanisms, by number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import regard as rg
from tests import oracles
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


@pytest.mark.parametrize("score", ["general", "additive"])
def test_i36_marginals_are_those_of_all_selections_and_the_slope_of_the_normaliser(score):
    more = {"hidden_dim": 4} if score == "additive" else {}
    m = scrambled(rg.Attention(score, "structured", query_dim=3, key_dim=5, **more))
    query, key, real = normal(2, 4, 3), normal(2, 10, 5, seed=1), torch.ones(2, 4, 10, dtype=torch.bool)
    real[1, ..., 6:] = False
    with rg.record(m) as trace:
        m(query, key, mask=real)
    scores = trace.scores.detach().requires_grad_()
    for b, i in ((0, 0), (1, 3)):
        row = oracles.structured(list(scores[b, i]), real[b, i].tolist(), m.align.T)
        assert_same(trace.weights[b, i], torch.stack(row))
    (slope,) = torch.autograd.grad(m.align.structure(scores, real).log_partition().sum(), scores)
    assert_same(trace.weights, slope)


def test_i36_without_pairs_a_chain_is_independent_sigmoids():
    m = rg.Attention("dot", "structured").double()
    query, key = normal(2, 3, 5), normal(2, 7, 5, seed=1)
    with rg.record(m) as trace:
        m(query, key)
    assert_same(trace.weights, trace.scores.sigmoid())
    one = rg.Attention("dot", rg.LinearChain()).double()
    with torch.no_grad():
        one.align.T.copy_(normal(2, 2))
    with rg.record(one) as trace:
        one(query, key[:, :1])
    assert_same(trace.weights, trace.scores.sigmoid())


def test_i36_exactly_one_is_softmax():
    query, key, real = normal(2, 3, 5), normal(2, 7, 5, seed=1), torch.arange(7) < torch.tensor([7, 4])[:, None, None]
    exactly = rg.Attention("dot", rg.Budget(1, exact=True))(query, key, mask=real)
    assert_same(exactly, rg.Attention("dot")(query, key, mask=real))


@pytest.mark.parametrize("execution", ["auto", "dense", "blockwise"])
def test_i28_capsules_are_dot_product_attention_with_a_query_for_each_class(execution):
    m, x = scrambled(rg.CapsuleAttention(5, 3)), normal(2, 7, 5)
    real = torch.rand(2, 7, generator=torch.Generator().manual_seed(0)) < 0.7
    q = m.q.expand(2, 3, 5)
    with rg.execution(execution):
        found = m(x, real)
    theirs = nn.functional.scaled_dot_product_attention(q, x, x, attn_mask=real[:, None], scale=1.0)
    assert_same(found.context, theirs)
    scaled = nn.functional.scaled_dot_product_attention(q, x, x, attn_mask=real[:, None])
    assert not torch.allclose(found.context, scaled)


def test_i28_one_class_is_a_learnable_query():
    m, x, ask = scrambled(rg.CapsuleAttention(5, 1)), normal(2, 7, 5), rg.LearnableQuery(5).double()
    with torch.no_grad():
        ask.query.copy_(m.q[0])
    assert_same(m(x).context[:, 0], rg.Attention("dot")(ask(x), x))


def test_i28_cross_entropy_of_sigmoids_teaches_wrong_classes_nothing():
    target = torch.tensor([1, 0])
    for name, taught in (("cross-entropy", False), ("bce", True), ("multi-margin", True), ("hinge", True)):
        p = torch.full((2, 3), 0.4, dtype=torch.float64, requires_grad=True)
        empty = torch.zeros(2, 3, 1, dtype=torch.float64)
        rg.CapsuleLoss(name, weight=0.0)(rg.Capsules(empty, p, empty, empty[:, 0]), target).backward()
        wrong = ~nn.functional.one_hot(target, 3).bool()
        assert bool((p.grad[wrong] != 0).all()) is taught, name
        assert (p.grad[~wrong] < 0).all()


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_i29_routing_to_one_output_does_nothing(iterations):
    m, u = scrambled(rg.DynamicRouting((3, 2), 1, 5, iterations=iterations)), normal(2, 5, 3)
    assert_same(m(u), rg.squash(m.predictions(u).sum(1)))


def test_i29_one_iteration_couples_evenly():
    m, u = scrambled(rg.DynamicRouting((3, 2), 4, 5, iterations=1)), normal(2, 5, 3)
    assert_same(m(u), rg.squash(m.predictions(u).sum(1) / 4))


def test_i29_couplings_sum_to_one_over_outputs_and_outputs_are_short():
    m, u = scrambled(rg.DynamicRouting((3, 2), 4, 5)), 5 * normal(2, 5, 3)
    with rg.record(m) as trace:
        v = m(u)
    assert (v.norm(dim=-1) < 1).all()
    for call in trace["routing"]:
        assert_same(call.weights.sum(-1), torch.ones(2, 5, dtype=torch.float64))
    last = trace["routing"][-1].weights
    assert (last.sum(-2) - 1).abs().min() > 1e-3


def test_i30_one_head_and_one_level_are_capsules():
    one, x = scrambled(rg.CapsuleAttention(5, 3)), normal(2, 7, 5)
    heads, level = rg.MultiHeadCapsules(5, 3, 1).double(), rg.HierarchicalCapsules(5, (3,)).double()
    with torch.no_grad():
        heads.q.copy_(one.q[None])
        heads.w.copy_(one.w)
        heads.b.copy_(one.b)
    level.levels[0].load_state_dict(one.state_dict())
    real = torch.rand(2, 7, generator=torch.Generator().manual_seed(0)) < 0.7
    for a, b, c in zip(one(x, real), heads(x, real), level(x, real), strict=True):
        assert_same(b, a)
        assert_same(c, a)


def test_i30_heads_share_their_probability():
    m, x = scrambled(rg.MultiHeadCapsules(5, 3, 2)), normal(2, 7, 5)
    found = m(x)
    p = found.reconstruction / found.context
    assert_same(p[..., :5], p[..., 5:])
    each = scrambled(rg.MultiHeadCapsules(5, 3, 2, judge="head"))(x)
    p = each.reconstruction / each.context
    assert (p[..., :5] - p[..., 5:]).abs().max() > 1e-3


@pytest.mark.parametrize("mix", ["query", "context"])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_i39_identical_experts_are_plain_attention_whatever_the_gates(mix, top_k):
    m, x, key = scrambled(rg.QueryRouting((3, 5, 5), 3, top_k=top_k, mix=mix)), normal(2, 4, 3), normal(2, 7, 5, seed=1)
    one = scrambled(rg.QueryRouting((3, 5, 5), 1, mix=mix))
    with torch.no_grad():
        m.W_Q.copy_(m.W_Q[:1].clone().expand_as(m.W_Q))
        one.W_Q.copy_(m.W_Q[:1])
    plain = rg.Attention("scaled-dot")(x @ m.W_Q[0].mT, key)
    assert_same(m(x, key), plain)
    assert_same(one(x, key), plain)


def test_i39_mixed_queries_mix_scores():
    m, x, key = scrambled(rg.QueryRouting(5, 3, score="dot")), normal(2, 4, 5), normal(2, 7, 5, seed=1)
    with rg.record(m) as trace:
        m(x, key)
    each = torch.einsum("bix,mkx,bjk->bmij", x, m.W_Q, key)
    assert_same(trace["attention"].scores, torch.einsum("bim,bmij->bij", trace["router"].weights, each))


def test_i39_even_routing_has_a_balance_of_one():
    x = torch.eye(4, dtype=torch.float64).repeat(3, 1)[None]
    for top_k in (1, 2, 4):
        m = rg.QueryRouting(4, 4, top_k=top_k).double()
        with torch.no_grad():
            # Tokens in turn: those of a kind prefer the same experts, and there are as many of each kind.
            m.W_r.copy_(sum(torch.eye(4).roll(s, 0) * (4 - s) for s in range(4)))
        with rg.record(m) as trace:
            m(x, x)
        assert_same(rg.load_balance(trace["router"].call), torch.ones((), dtype=torch.float64))


def test_i39_a_condition_of_zero_changes_nothing_and_a_constant_one_is_a_learnable_query():
    x, z, key = normal(2, 4, 3), normal(2, 5), normal(2, 7, 3, seed=1)
    film, hyper, latent = (m.double() for m in (rg.FiLMQuery(3, 5), rg.HyperQuery(3, 5), rg.LatentQueries(3, 2, 5)))
    assert_same(film(x, z), x)
    assert_same(hyper(x, z), x @ hyper.W_0.mT)
    assert_same(latent(z), latent.Q_0.expand(2, 2, 3))
    latent = scrambled(latent)
    constant, ask = latent(z[:1].expand(2, 5)), rg.LearnableQuery(3, count=2).double()
    with torch.no_grad():
        ask.query.copy_(constant[0])
    assert_same(rg.Attention("dot")(constant, key), rg.Attention("dot")(ask(key), key))


def test_i39_a_conditioned_shift_is_a_bias_on_keys():
    film, x, z, key = scrambled(rg.FiLMQuery(3, 5)), normal(2, 3), normal(2, 5), normal(2, 7, 3, seed=1)
    with torch.no_grad():
        film.W_gamma.zero_()
        film.b_gamma.zero_()
    shift = z @ film.W_beta.mT + film.b_beta
    biased = rg.Attention("dot")(x, key, bias=torch.einsum("bd,bjd->bj", shift, key))
    assert_same(rg.Attention("dot")(film(x, z), key), biased)


def test_i39_the_contrast_is_symmetric_and_knows_its_ends():
    a, b = normal(5, 7), normal(5, 7, seed=1)
    assert_same(rg.info_nce(a, b), rg.info_nce(b, a))
    turn = torch.linalg.qr(normal(7, 7, seed=2)).Q
    assert_same(rg.info_nce(a @ turn, b @ turn), rg.info_nce(a, b))
    assert abs(float(rg.info_nce(a, b, 1e12)) - math.log(5)) < 1e-10
    assert float(rg.info_nce(turn[:5], turn[:5], 1e-3)) < 1e-12


@pytest.mark.parametrize("beta", [0.3, 1.0, 4.0])
def test_i39_the_slope_of_the_energy_is_the_query_minus_what_it_reads_and_steps_go_down(beta):
    query, key = normal(2, 4, 5).requires_grad_(), normal(2, 7, 5, seed=1)
    real = torch.arange(7) < torch.tensor([7, 4])[:, None]
    read = rg.Attention("dot", rg.Soft(1 / beta))(query, key, mask=rg.Keys(real))
    (slope,) = torch.autograd.grad(rg.hopfield_energy(query, key, beta, real).sum(), query)
    assert_same(slope, query - read)
    for rate in (0.3, 1.0):
        before = rg.hopfield_energy(query, key, beta, real)
        for steps in range(1, 6):
            m = rg.EnergySelection(5, beta=beta, steps=steps, rate=rate)
            with rg.record(m) as trace:
                m(query, key, mask=real)
            after = -trace["select"].scores
            assert (after <= before + 1e-12).all()
            before = after
    m = rg.EnergySelection(5, beta=beta, steps=1)
    with rg.record(m) as trace:
        m(query, key, mask=real)
    assert_same(trace["attention"].call.query, read)


def test_i39_the_choice_does_not_feel_a_shift_of_all_energies_and_one_candidate_is_chosen():
    m, query, key = rg.EnergySelection(5, temperature=0.7), normal(2, 4, 5), normal(2, 7, 5, seed=1)
    with rg.record(m) as trace:
        m(query, key)
    assert_same((trace["select"].scores / 0.7 + 3.0).softmax(-1), trace["select"].weights)
    alone = rg.Attention("scaled-dot")(query[:, :1], key).squeeze(1)
    assert_same(m(query[:, :1], key), alone)
