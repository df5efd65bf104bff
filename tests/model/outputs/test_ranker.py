"""Rankers: scores of candidates, scores of pairs."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.model import Batch, Embedding, Example, PairRanker, Ranker, TaskModel, collate
from regard.model.naming import Available, On
from tests.model.outputs.common import NOTHING, gradients_flow, halves, losses_of_parts_average_to_that_of_the_whole

WIDTH, OWN = 5, 3


@pytest.mark.parametrize("own", [None, OWN])
def test_scores_are_those_of_the_formula(own: int | None) -> None:
    rank = Ranker(WIDTH, own, "answers")
    context, answers = torch.randn(2, WIDTH, requires_grad=True), torch.randn(2, 4, own or WIDTH)
    mask = torch.tensor([[True, True, False, False], [True] * 4])
    holes = answers.masked_fill(~mask.unsqueeze(-1), float("nan"))
    scores = rank(context, Available({"answers": holes}, {"answers": mask}, {}))
    for b in range(2):
        asked = context[b] if own is None else rank.map.weight @ context[b]
        for k in range(4):
            expected = asked @ answers[b, k] if mask[b, k] else torch.tensor(-torch.inf)
            torch.testing.assert_close(scores[b, k], expected)
    batch = Batch({"answers": answers}, target=torch.tensor([1, 3]))
    each = [-scores[0, :2].log_softmax(0)[1], -scores[1].log_softmax(0)[3]]
    torch.testing.assert_close(rank.loss(scores, batch), torch.stack(each).mean())
    losses_of_parts_average_to_that_of_the_whole(rank, (scores, batch), halves(scores, batch, 1))
    assert torch.equal(rank.decide(scores), scores.argmax(-1))
    rank.loss(scores, batch).backward()
    assert context.grad.isfinite().all()


def test_all_of_a_table_are_candidates() -> None:
    for dim in (WIDTH, 7):
        items = Embedding(11, WIDTH)
        rank, context = Ranker(dim, table=items), torch.randn(3, dim)
        asked = context if dim == WIDTH else context @ rank.map.weight.mT
        scores = rank(context, NOTHING)
        torch.testing.assert_close(scores, asked @ items.table.weight.mT)
        gradients_flow(rank, rank.loss(scores, Batch({"x": context}, target=torch.tensor([1, 2, 10]))))


def test_candidates_are_an_input_of_the_task() -> None:
    words = Embedding(23, WIDTH)
    examples = [
        Example({"tokens": torch.randint(23, (n,)), "candidates": torch.randint(23, (k,))}, torch.tensor(0))
        for n, k in ((4, 3), (9, 2))
    ]
    batch = collate(examples)
    attend = On(rg.Attention("additive", query_dim=WIDTH, key_dim=WIDTH, hidden_dim=4), key="tokens")
    model = TaskModel(words, On(rg.PooledQuery(), features="tokens"), attend, Ranker(WIDTH))
    scores = model(batch)
    assert scores.shape == (2, 3)
    assert scores[1, 2] == -torch.inf
    for row, example, k in zip(scores, examples, (3, 2), strict=True):
        torch.testing.assert_close(row[:k], model(collate([example]))[0])
    gradients_flow(model, model.loss(scores, batch))


def test_a_pair_has_one_score() -> None:
    rank, batch = PairRanker(WIDTH), Batch({"x": torch.zeros(4, 1)}, target=torch.tensor([1, 0, 0, 1]))
    scores = rank(torch.randn(4, WIDTH), NOTHING)
    assert scores.shape == (4,)
    p = scores.sigmoid()
    each = [-(p[k] if y else 1 - p[k]).log() for k, y in enumerate([1, 0, 0, 1])]
    torch.testing.assert_close(rank.loss(scores, batch), torch.stack(each).mean())
    losses_of_parts_average_to_that_of_the_whole(rank, (scores, batch), halves(scores, batch, 3))
    assert torch.equal(rank.decide(scores), p > 0.5)
    gradients_flow(rank, rank.loss(scores, batch))


def test_bad_candidates_are_refused() -> None:
    with pytest.raises(ValueError, match="candidates: got 'candidates', expected the name of an input: tokens"):
        Ranker(WIDTH)(torch.zeros(1, WIDTH), Available({"tokens": torch.zeros(1, 2, WIDTH)}, {}, {}))
    with pytest.raises(ValueError, match=r"candidates: got 'candidates' of shape \(1, 2, 4\), expected \(B, K, 5\)"):
        Ranker(WIDTH)(torch.zeros(1, WIDTH), Available({"candidates": torch.zeros(1, 2, 4)}, {}, {}))
    with pytest.raises(ValueError, match="context: got width 4, expected dim=5"):
        Ranker(WIDTH)(torch.zeros(1, 4), NOTHING)
    with pytest.raises(ValueError, match="table: got vectors of width 5, expected candidate_dim=3"):
        Ranker(WIDTH, 3, table=Embedding(4, WIDTH))
