"""The example that puts self-attention in the place of a convolution and of a recurrent layer."""

from __future__ import annotations

import torch
from torch import nn

import regard as rg
from tests.feature.test_examples import load


def test_attention_takes_the_place_of_both():
    found = load("drop_in").main()
    print(found)
    assert found["attention for a convolution"] > 0.95
    assert found["convolution"] < 0.6
    assert found["attention for a recurrent layer"] > 0.95
    assert found["recurrent layer"] < 0.75


def test_shapes_are_those_of_what_they_replace():
    example = load("drop_in")
    image, tokens = torch.randn(2, 5, 3, 7), torch.randn(2, 11, 5)
    assert example.PlaceAttention(5)(image).shape == nn.Conv2d(5, 5, 3, padding=1)(image).shape
    assert example.SequenceAttention(5)(tokens)[0].shape == nn.GRU(5, 5, batch_first=True)(tokens)[0].shape


def test_a_place_is_read_from_anywhere_and_a_token_only_from_before():
    example = load("drop_in")
    image = torch.randn(1, 5, 4, 4, requires_grad=True)
    reach = torch.autograd.grad(example.PlaceAttention(5)(image)[0, :, 0, 0].sum(), image)[0].abs().sum(1)
    assert (reach > 0).all()
    tokens = torch.randn(1, 6, 5, requires_grad=True)
    reach = torch.autograd.grad(example.SequenceAttention(5)(tokens)[0][0, 3].sum(), tokens)[0].abs().sum(-1)
    assert torch.equal(reach[0] > 0, torch.arange(6) <= 3)


def test_where_it_looks_is_where_the_answer_is():
    example = load("drop_in")
    task = example.Recall(pairs=6)
    torch.manual_seed(0)
    model = example.SequenceModel(task.width, example.SequenceAttention(task.width))
    example.fit(model, task, steps=250, lr=0.02)
    batch = task.draw(256, torch.Generator().manual_seed(3))
    with rg.record(model) as trace:
        model(**batch.inputs)
    weights = trace["layer.attention.attention"].weights[:, -1, :-1]
    assert (weights.argmax(-1) == batch.truth["token"]).float().mean() > 0.9
