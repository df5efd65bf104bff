"""Rankings: of the candidates of a question, of one item among all, and who is first when scores are equal."""

from __future__ import annotations

import math
from itertools import pairwise, permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.evaluate.outer import RankCounts, hit_rate, mean_average_precision, mean_reciprocal_rank, ndcg, rank_of

candidates = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 2)), min_size=1, max_size=7
).filter(lambda drawn: any(label for _, label, _ in drawn))


def worst(drawn: list[tuple[int, int, int]]) -> tuple[float, float]:
    """MAP and MRR of the worst order that the scores allow, by trying all."""
    precisions, reciprocals = [], []
    for question in {q for _, _, q in drawn}:
        mine = [(s, label) for s, label, q in drawn if q == question]
        if not any(label for _, label in mine):
            continue
        orders = [o for o in permutations(mine) if all(a[0] >= b[0] for a, b in pairwise(o))]
        aps, rrs = [], []
        for order in orders:
            ranks = [k for k, (_, label) in enumerate(order, 1) if label]
            aps.append(sum((k + 1) / r for k, r in enumerate(ranks)) / len(ranks))
            rrs.append(1 / ranks[0])
        precisions.append(min(aps))
        reciprocals.append(min(rrs))
    return sum(precisions) / len(precisions), sum(reciprocals) / len(reciprocals)


@given(candidates)
def test_of_equal_scores_the_worst_order_counts(drawn: list[tuple[int, int, int]]) -> None:
    scores, labels, questions = (list(column) for column in zip(*drawn, strict=True))
    ap, rr = worst(drawn)
    assert float(mean_average_precision(scores, labels, groups=questions)) == pytest.approx(ap)
    assert float(mean_reciprocal_rank(scores, labels, groups=questions)) == pytest.approx(rr)


@given(candidates, st.randoms())
def test_the_order_of_candidates_never_matters(drawn: list[tuple[int, int, int]], random: object) -> None:
    shuffled = list(drawn)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first, second = (
        mean_average_precision(*(list(column) for column in columns[:2]), groups=list(columns[2]))
        for columns in (list(zip(*some, strict=True)) for some in (drawn, shuffled))
    )
    assert float(first) == pytest.approx(float(second))


def test_average_precision_is_scikit_learns_where_no_scores_are_equal() -> None:
    theirs = pytest.importorskip("sklearn.metrics")
    scores, labels = torch.randn(6, 11), torch.rand(6, 11) < 0.4
    labels[:, 0] = True
    expected = [
        theirs.average_precision_score(label, score)
        for score, label in zip(scores.numpy(), labels.numpy(), strict=True)
    ]
    groups = torch.arange(6)[:, None].expand(6, 11).flatten()
    score = mean_average_precision(scores.flatten(), labels.flatten().long(), groups=groups)
    assert float(score) == pytest.approx(sum(expected) / 6)


def test_questions_without_an_answer_are_left_out_and_counted() -> None:
    score = mean_reciprocal_rank([0.9, 0.1, 0.5, 0.4], [0, 1, 0, 0], groups=[3, 3, 8, 8])
    assert mean_reciprocal_rank([0.9, 0.1, 0.5, 0.4], [0, 1, 0, 0], groups=["Q3", "Q3", "Q8", "Q8"]) == score
    assert float(score) == 0.5
    assert dict(score.details) == {"questions": 1.0, "left_out": 1.0}
    assert "ties:pessimistic|unanswerable:left out" in score.signature


def test_rank_against_sorting() -> None:
    scores, truth = torch.randn(17, 23), torch.randint(23, (17,))
    order = scores.argsort(dim=1, descending=True)
    expected = [row.tolist().index(t) + 1 for row, t in zip(order, truth.tolist(), strict=True)]
    assert rank_of(scores, truth).tolist() == expected


def test_hit_rate_and_ndcg_by_hand() -> None:
    scores = torch.tensor([[0.9, 0.5, 0.1], [0.9, 0.5, 0.1], [0.9, 0.5, 0.1], [0.2, 0.2, 0.2]])
    truth = torch.tensor([0, 1, 2, 0])  # ranks 1, 2, 3, 3
    assert float(hit_rate(scores, truth, k=1)) == 1 / 4
    assert float(hit_rate(scores, truth, k=2)) == 2 / 4
    assert float(hit_rate(scores, truth, k=3)) == 1.0
    assert float(ndcg(scores, truth, k=1)) == 1 / 4
    assert float(ndcg(scores, truth, k=2)) == pytest.approx((1 + 1 / math.log2(3)) / 4)
    assert float(ndcg(scores, truth, k=5)) == pytest.approx((1 + 1 / math.log2(3) + 2 / math.log2(4)) / 4)
    assert "k:2|ties:pessimistic|ranked:all items|relevant:one" in ndcg(scores, truth, k=2).signature


def test_ndcg_is_scikit_learns() -> None:
    theirs = pytest.importorskip("sklearn.metrics")
    scores, truth = torch.randn(13, 19), torch.randint(19, (13,))
    relevant = torch.nn.functional.one_hot(truth, 19)
    expected = theirs.ndcg_score(relevant.numpy(), scores.numpy(), k=7)
    assert float(ndcg(scores, truth, k=7)) == pytest.approx(expected)


def test_a_model_that_scores_all_alike_finds_nothing() -> None:
    alike, truth = torch.zeros(5, 7), torch.zeros(5, dtype=torch.long)
    assert float(hit_rate(alike, truth, k=6)) == 0.0
    assert float(mean_reciprocal_rank([0.5] * 4, [1, 0, 0, 0], groups=[0] * 4)) == 0.25


def test_items_that_may_not_be_recommended_are_last() -> None:
    scores = torch.tensor([[-math.inf, 0.3, -math.inf, 0.4]])
    assert rank_of(scores, torch.tensor([1])).tolist() == [2]
    assert rank_of(scores, torch.tensor([0])).tolist() == [4]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 8), st.integers(0, 99))
def test_batches_are_added(sizes: list[int], k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [
        (torch.randint(4, (n, 7), generator=generator), torch.randint(7, (n,), generator=generator)) for n in sizes
    ]
    first, *others = (RankCounts.of(*part, k=k) for part in parts)
    added = sum(others, first)
    scores, truth = (torch.cat(list(column)) for column in zip(*parts, strict=True))
    assert added.hit_rate == pytest.approx(float(hit_rate(scores, truth, k=k)))
    assert added.ndcg == pytest.approx(float(ndcg(scores, truth, k=k)))
    assert added.ndcg <= added.hit_rate


def test_what_is_refused() -> None:
    scores, truth = torch.rand(3, 5), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match="predicted: got NaN, expected numbers"):
        hit_rate(scores * torch.nan, truth, k=1)
    with pytest.raises(ValueError, match=r"predicted: got shapes \(3, 5\) and \(2,\), expected scores \(n, items\)"):
        hit_rate(scores, truth[:2], k=1)
    with pytest.raises(ValueError, match="truth: got 5, expected items from 0 to 4"):
        ndcg(scores, truth + 5, k=1)
    with pytest.raises(ValueError, match="k: got 0, expected a whole number >= 1"):
        ndcg(scores, truth, k=0)
    with pytest.raises(ValueError, match="k: got 2, expected that of the other counts, 1"):
        RankCounts(1) + RankCounts(2)
    with pytest.raises(ValueError, match="predicted: got nothing, expected at least one ranking"):
        hit_rate(scores[:0], truth[:0], k=1)
    with pytest.raises(TypeError):
        RankCounts(1) + 1
    with pytest.raises(TypeError, match="predicted: got 'ab', expected a tensor or list of numbers"):
        mean_average_precision("ab", [0, 1], groups=[0, 0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"truth: got \[0, 2\], expected 1 for right, 0 for wrong"):
        mean_average_precision([0.1, 0.2], [0, 2], groups=[0, 0])
    with pytest.raises(ValueError, match="truth: got no right candidate for any question, expected at least one"):
        mean_average_precision([0.1, 0.2], [0, 0], groups=[0, 0])
    with pytest.raises(
        ValueError, match=r"groups: got 3 questions for scores of shape \(2,\), expected one score and one question"
    ):
        mean_reciprocal_rank([0.1, 0.2], [0, 1], groups=[0, 0, 1])
    with pytest.raises(TypeError, match="groups: got 'ab', expected a list with one entry a candidate"):
        mean_reciprocal_rank([0.1, 0.2], [0, 1], groups="ab")
    with pytest.raises(ValueError, match=r"groups: got 2 questions for scores of shape \(2, 3\)"):
        mean_reciprocal_rank(torch.rand(2, 3), torch.ones(2, 3, dtype=torch.long), groups=[0, 1])
    with pytest.raises(ValueError, match=r"truth: got shape \(1,\), expected that of what was predicted, \(2,\)"):
        mean_reciprocal_rank([0.1, 0.2], [0], groups=[0, 0])
