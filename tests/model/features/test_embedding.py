"""Vectors of token numbers."""

from __future__ import annotations

import pytest
import torch

from regard.model import Embedding
from tests.model.features.common import gradients_flow, padding_never_matters


def test_vectors_may_be_given_and_frozen() -> None:
    vectors = torch.randn(5, 3)
    table = Embedding(5, vectors=vectors, freeze=True)
    found = table(torch.tensor([[1, 4]]), torch.tensor([[True, False]]))
    assert torch.equal(found, torch.stack([vectors[1], torch.zeros(3)])[None])
    assert not any(p.requires_grad for p in table.parameters())
    with pytest.raises(ValueError, match=r"vectors: got shape \(5, 3\), expected \(6, d\)"):
        Embedding(6, vectors=vectors)
    with pytest.raises(TypeError, match="whole numbers"):
        table(torch.randn(1, 2))
    with pytest.raises(ValueError, match="dim: got None"):
        Embedding(5)


def test_vectors_are_those_of_the_table() -> None:
    table, tokens = Embedding(11, 3), torch.randint(11, (2, 5, 7))
    found = table(tokens)
    for place in ((0, 0, 0), (1, 4, 6), (0, 3, 2)):
        assert torch.equal(found[place], table.table.weight[tokens[place]])
    padding_never_matters(table, [torch.randint(11, (n,)) for n in (3, 7)], 0)
    gradients_flow(table, table(tokens))


def test_numbers_are_dropped_while_training() -> None:
    table, tokens = Embedding(11, 50, dropout=0.5), torch.zeros(1, 9).long()
    assert 0.3 < float((table(tokens) == 0).float().mean()) < 0.7
    assert torch.equal(table.eval()(tokens)[0, 0], table.table.weight[0])
