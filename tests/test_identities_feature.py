"""Equations of the feature-related mechanisms, by number; `docs/identities.md` says what each is and what it catches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from tests.cases import assert_same, scrambled


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def set_to(parameter: Tensor, value: Any) -> None:
    with torch.no_grad():
        parameter.copy_(torch.as_tensor(value, dtype=torch.float64))


def weights(module: torch.nn.Module, *inputs: Any) -> rg.Trace:
    with rg.record(module) as trace:
        module(*inputs)
    return trace


# I16


def test_i16_tied_alternating_co_attention_without_query_weights_repeats_itself():
    m = scrambled(rg.AlternatingCoAttention((5, 3), tie_first_last=True, hidden_dim=7))
    set_to(m.first.score.W1, torch.zeros(7, 3))
    trace = weights(m, normal(2, 11, 5), normal(2, 7, 3))
    summary, last = trace["first"]
    assert_same(last.weights, summary.weights)
    # With query weights they differ, so the query does arrive.
    set_to(m.first.score.W1, normal(7, 3))
    summary, last = weights(m, normal(2, 11, 5), normal(2, 7, 3))["first"]
    assert (last.weights - summary.weights).abs().max() > 1e-3


@pytest.mark.parametrize("options", [{}, {"tie_first_last": True}, {"score": "general"}], ids=str)
def test_i16_an_input_of_one_feature_is_that_feature(options):
    m = scrambled(rg.AlternatingCoAttention((5, 3), **options))
    first, second = normal(2, 11, 5), normal(2, 7, 3)
    assert_same(m(first, second[:, :1])[:, 5:], second[:, 0])
    assert_same(m(first[:, :1], second)[:, :5], first[:, 0])
    assert_same(m(first[:, :1], second[:, :1]), torch.cat([first[:, 0], second[:, 0]], -1))


# I17


def test_i17_interactive_co_attention_is_symmetric():
    m = scrambled(rg.InteractiveCoAttention((5, 3)))
    swapped = scrambled(rg.InteractiveCoAttention((3, 5)))
    swapped.first, swapped.second = m.second, m.first
    first, second = normal(2, 11, 5), normal(2, 7, 3)
    c1, c2 = m(first, second).split([5, 3], -1)
    assert_same(swapped(second, first), torch.cat([c2, c1], -1))


def test_i17_under_the_dot_score_the_mean_query_scores_the_mean_of_the_pairs():
    m = rg.InteractiveCoAttention(5, score="dot")
    first, second = normal(2, 11, 5), normal(2, 7, 5, seed=1)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    trace = weights(m, first, second, (None, mask))
    for b, n in enumerate((7, 4)):
        pairs = torch.einsum("id,jd->ij", first[b], second[b, :n])
        assert_same(trace["first"].scores[b], pairs.mean(1))
        assert_same(trace["second"].scores[b, :n], torch.einsum("id,jd->ij", first[b], second[b, :n]).mean(0))


# I18


def parallel_of_one_key(affinity: float) -> tuple[rg.ParallelCoAttention, Tensor, Tensor]:
    m = scrambled(rg.ParallelCoAttention((5, 3), affinity=lambda q, k: Constant(affinity), hidden_dim=7))
    return m, normal(2, 11, 5), normal(2, 1, 3)


class Constant(rg.Score):
    """The same affinity for every pair."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def check_widths(self, query, key):
        """Any two widths."""

    def reduce(self, query, key):
        from regard.ops.forms import BilinearForm

        one = key.new_ones(*key.shape[:-1], 1)
        return BilinearForm(query.new_full((*query.shape[:-1], 1), self.value), one)


def additive_of(m: rg.ParallelCoAttention) -> rg.Attention:
    """Additive attention of the first input with the parameters of a parallel one, queries from the second."""
    score = scrambled(rg.Additive(3, 5, 7))
    for parameter, value in ((score.W1, m.W2), (score.W2, m.W1), (score.b, torch.zeros(7)), (score.w, m.first.score.w)):
        set_to(parameter, value)
    return rg.Attention(score)


def test_i18_one_key_with_affinity_one_is_additive_attention():
    m, first, second = parallel_of_one_key(1.0)
    assert_same(m(first, second)[:, :5], additive_of(m)(second[:, 0], first))


def test_i18_equal_rows_of_the_affinity_are_additive_attention_with_the_weighted_query():
    m, first, _ = parallel_of_one_key(0.3)
    second = normal(2, 7, 3, seed=1)
    assert_same(m(first, second)[:, :5], additive_of(m)(0.3 * second.sum(1), first))


def test_i18_unequal_rows_are_not():
    """The claim that additive attention is a special case needs equal rows; one query cannot serve unequal ones."""
    m = scrambled(rg.ParallelCoAttention((5, 3), hidden_dim=7))
    first, second = normal(2, 11, 5), normal(2, 7, 3)
    found = m(first, second)[:, :5]
    queries = [second.mean(1), *(second[:, j] for j in range(7))]
    assert all((found - additive_of(m)(query, first)).abs().max() > 1e-3 for query in queries)


def test_i18_a_zero_affinity_makes_both_sides_query_free():
    m, first, _ = parallel_of_one_key(0.0)
    assert_same(m(first, normal(2, 7, 3))[:, :5], m(first, normal(2, 13, 3, seed=2))[:, :5])


def test_i18_the_split_trilinear_score_is_the_concatenated_one():
    score = scrambled(rg.Trilinear(5))
    q, k = normal(2, 7, 5), normal(2, 11, 5, seed=1)
    pairs = q[:, :, None].expand(2, 7, 11, 5), k[:, None].expand(2, 7, 11, 5)
    assert_same(score(q, k), torch.cat([*pairs, pairs[0] * pairs[1]], -1) @ score.w)


@pytest.mark.parametrize("scoring", ["aggregated", "max"])
def test_i18_exchanging_the_inputs_with_their_parameters_exchanges_the_outputs(scoring):
    m = scrambled(rg.ParallelCoAttention((5, 3), scoring=scoring, hidden_dim=7))
    swapped = scrambled(rg.ParallelCoAttention((3, 5), scoring=scoring, hidden_dim=7))
    set_to(swapped.affinity.score.W, m.affinity.score.W.mT)
    set_to(swapped.affinity.score.b, m.affinity.score.b)
    swapped.first, swapped.second = m.second, m.first
    if scoring == "aggregated":
        set_to(swapped.W1, m.W2)
        set_to(swapped.W2, m.W1)
    first, second = normal(2, 11, 5), normal(2, 7, 3)
    c1, c2 = m(first, second).split([5, 3], -1)
    assert_same(swapped(second, first), torch.cat([c2, c1], -1))


# I19


@pytest.mark.parametrize("order", ["target-first", "context-first"])
@pytest.mark.parametrize("hops", [1, 3])
def test_i19_a_target_of_one_word_is_that_word(order, hops):
    m = scrambled(rg.RotatoryAttention(5, hops, order=order))
    target, left, right = normal(2, 1, 5), normal(2, 7, 5), normal(2, 11, 5)
    out = m(target, left, right)
    assert_same(out[:, 10:], torch.cat([target[:, 0], target[:, 0]], -1))


@pytest.mark.parametrize("options", [{}, {"hops": 3}, {"order": "context-first"}], ids=str)
def test_i19_zero_scores_are_means(options):
    m = rg.RotatoryAttention(5, score="general", **options).double()
    for parameter in m.parameters():
        set_to(parameter, torch.zeros_like(parameter))
    target, left, right = normal(2, 3, 5), normal(2, 7, 5), normal(2, 11, 5)
    assert_same(m(target, left, right), torch.cat([x.mean(1) for x in (left, right, target, target)], -1))


def test_i19_one_hop_is_the_plain_mechanism():
    m = scrambled(rg.RotatoryAttention(5))
    target, left, right = normal(2, 3, 5), normal(2, 7, 5), normal(2, 11, 5)
    pooled = target.mean(1)
    r_l, r_r = m.left(pooled, left), m.right(pooled, right)
    expected = torch.cat([r_l, r_r, m.target_left(r_l, target), m.target_right(r_r, target)], -1)
    assert_same(m(target, left, right), expected)


def test_i19_later_hops_ask_with_the_target_vectors():
    one, two = (scrambled(rg.RotatoryAttention(5, hops)) for hops in (1, 2))
    two.load_state_dict(one.state_dict())
    target, left, right = normal(2, 3, 5), normal(2, 7, 5), normal(2, 11, 5)
    _, _, r_lt, r_rt = one(target, left, right).chunk(4, -1)
    r_l, r_r = one.left(r_lt, left), one.right(r_rt, right)
    expected = torch.cat([r_l, r_r, one.target_left(r_l, target), one.target_right(r_r, target)], -1)
    assert_same(two(target, left, right), expected)


# I20


@pytest.mark.parametrize("score", ["additive", "general"])
def test_i20_without_its_word_slice_the_character_level_is_flat(score):
    m = scrambled(rg.AttentionViaAttention(2, (5, 3), score=score))
    of_query = m.characters.score.W1 if score == "additive" else m.characters.score.W
    with torch.no_grad():
        of_query[:, 2:] = 0.0
    flat_score = scrambled(rg.Additive(2, 3, 3) if score == "additive" else rg.General(2, 3))
    flat_score.load_state_dict(
        {name: p[:, :2] if p is of_query else p for name, p in m.characters.score.named_parameters()}
    )
    query, words, characters = normal(7, 2), normal(7, 4, 5), normal(7, 6, 3)
    assert_same(m(query, words, characters)[:, 5:], rg.Attention(flat_score)(query, characters))


# I21


def test_i21_one_sentence_is_flat():
    m = scrambled(rg.HierarchicalAttention(5))
    words = normal(2, 1, 11, 5)
    assert_same(m(words), m.levels["word"](None, words[:, 0]))


def test_i21_log_sum_exps_as_sentence_scores_are_flat_attention_over_all_words():
    attend, over = rg.Attention(scrambled(rg.QueryFree(5, 7))), rg.Attention("general", query_dim=1, key_dim=5).double()
    for parameter in over.parameters():
        set_to(parameter, torch.zeros_like(parameter))
    words = normal(2, 3, 11, 5)
    mask = torch.rand(2, 3, 11, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[1, 2] = False
    with rg.record(attend) as trace:
        sentences = attend(None, words, mask=mask)
    whole = over(torch.zeros(2, 1).double(), sentences, mask=mask.any(-1), bias=trace.log_sum_exp())
    assert_same(whole, attend(None, words.flatten(1, 2), mask=mask.flatten(1)))


@pytest.mark.parametrize("features", [False, True], ids=["single", "multi"])
def test_i21_joint_weights_sum_to_one(features):
    m = scrambled(rg.HierarchicalAttention(5, ("letter", "word", "sentence"), features=features or None))
    x, mask = normal(2, 3, 4, 7, 5), torch.rand(2, 3, 4, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[0, 1] = False
    joint = m.leaf_weights(weights(m, x, mask))
    assert_same(joint.sum((1, 2, 3)), torch.ones(2, *([5] if features else [])).double())
    assert not joint[~mask].any()


# I22


def test_i22_one_embedding_is_the_linear_map():
    m = scrambled(rg.MetaEmbedding((5,), 3))
    x = normal(2, 7, 5)
    assert_same(m([x]), m.maps[0](x))


def test_i22_equal_embeddings_are_returned_whatever_the_weights():
    m = scrambled(rg.MetaEmbedding((5, 5, 5), 3))
    for embed in m.maps[1:]:
        embed.load_state_dict(m.maps[0].state_dict())
    x = normal(2, 7, 5)
    assert_same(m([x, x, x]), m.maps[0](x))
