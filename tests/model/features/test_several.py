"""Several embeddings of the same tokens, and bags of words of nodes."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.model import Embedding, Embeddings, GraphFeatures
from tests.model.features.common import gradients_flow, padding_never_matters

COUNT, DIM = 11, 5


def several(known: object = None, **options: object) -> Embeddings:
    return Embeddings([Embedding(COUNT, 3), Embedding(COUNT, 7), Embedding(COUNT, 2)], DIM, known, **options)


def test_a_token_is_the_weighed_sum_of_its_vectors() -> None:
    has = [torch.ones(COUNT).bool(), torch.arange(COUNT) % 2 == 0, torch.arange(COUNT) > 3]
    has[0][1] = False
    embed, tokens = several([*has]).double(), torch.arange(COUNT)
    found = embed(tokens[None])[0]
    for token in range(COUNT):
        mapped, scores = [], []
        for table, to, knows in zip(embed.tables, embed.join.maps, has, strict=True):
            if knows[token]:
                mapped.append(to.weight @ table.table.weight[token] + to.bias)
                scores.append(mapped[-1] @ embed.join.u)
        expected = torch.zeros(DIM).double()
        if mapped:
            weights = torch.stack(scores).softmax(0)
            expected = sum(a * t for a, t in zip(weights, mapped, strict=True))
        torch.testing.assert_close(found[token], expected)
    assert (found[1] == 0).all(), "a token that all lack"


@pytest.mark.parametrize("options", [{}, {"align": "sigmoid"}, {"contextual": 2}])
def test_padding_never_matters_to_embeddings(options: dict[str, object]) -> None:
    padding_never_matters(several(**options), [torch.randint(COUNT, (n,)) for n in (3, 7, 1)], 0)


def test_the_weights_of_the_tables_are_recorded() -> None:
    embed = several([None, torch.arange(COUNT) > 5, None])
    with rg.record(embed) as trace:
        found = embed(torch.tensor([[2, 9]]))
    weights = trace["join.attention"].weights
    assert weights.shape == (1, 2, 3)
    assert weights[0, 0, 1] == 0
    gradients_flow(embed, found)


def test_bad_tables_are_refused() -> None:
    with pytest.raises(TypeError, match="expected at least one Embedding"):
        Embeddings([], DIM)
    with pytest.raises(ValueError, match=r"tables: got tables of \[3, 4\] tokens"):
        Embeddings([Embedding(3, 2), Embedding(4, 2)], DIM)
    with pytest.raises(ValueError, match="known: got 1 of them"):
        several([None])
    with pytest.raises(ValueError, match=r"known: got torch.bool, shape \(3,\)"):
        several([torch.ones(3).bool(), None, None])


def test_nodes_are_shares_of_words() -> None:
    counts = torch.randint(4, (2, 5, 7)).float()
    counts[0, 3] = 0
    found = GraphFeatures(7)(counts)
    for b in range(2):
        for n in range(5):
            total = counts[b, n].sum()
            torch.testing.assert_close(found[b, n], counts[b, n] / total if total else counts[b, n])
    mapped = GraphFeatures(7, 3)
    torch.testing.assert_close(mapped(counts), found @ mapped.linear.weight.mT)
    gradients_flow(mapped, mapped(counts))
    padding_never_matters(mapped, [torch.rand(n, 7) for n in (3, 5)], float("nan"))
    assert GraphFeatures(7)(counts[0]).shape == (5, 7), "a graph without an axis of batches"
    with pytest.raises(ValueError, match="x: got width 6, expected 7"):
        mapped(counts[..., :6])


def test_shares_are_dropped_while_training() -> None:
    module, counts = GraphFeatures(7, dropout=0.5), torch.ones(1, 50, 7)
    assert 0.3 < float((module(counts) == 0).float().mean()) < 0.7
    assert (module.eval()(counts) == 1 / 7).all()
