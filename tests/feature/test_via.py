"""Attention-via-attention: words, then characters by query and words."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.recipes.planted import Classifier, WordThenCharacter, accuracy, fit
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, Tokens, attend, check, holes, normal, weights_of

OPTIONS = {
    "additive": {},
    "bilinear": {"score": "general"},
    "two scores": {"score": ("activated-general", "additive"), "hidden_dim": 7},
    "multi-dimensional": {"features": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def oracle(m: rg.AttentionViaAttention, query: torch.Tensor, inputs: list[Tokens]) -> torch.Tensor:
    words, characters = inputs
    c_w = attend(m.words, query, words)
    return torch.cat([c_w, attend(m.characters, torch.cat([query, c_w]), characters)])


class OneQuery(torch.nn.Module):
    """The mechanism with a query for each example."""

    def __init__(self, m, query):
        super().__init__()
        self.m, self.query = m, torch.nn.Parameter(query)

    def forward(self, words, characters, masks):
        return self.m(self.query, words, characters, masks)


@every_option
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(options, lead):
    m = rg.AttentionViaAttention(2, (5, 3), **options)
    words, characters = torch.randn(*lead, 7, 5), torch.randn(*lead, 11, 3)
    assert m(torch.randn(*lead, 2), words, characters).shape == (*lead, 8)
    assert m(torch.randn(*lead, 13, 2), words, characters).shape == (*lead, 13, 8)


@pytest.mark.parametrize("execution", EXECUTIONS, ids=str)
@every_option
def test_oracle(options, execution):
    m = OneQuery(rg.AttentionViaAttention(2, (5, 3), **options), normal(3, 2))
    number = iter(range(3))
    inputs, masks = [normal(3, 4, 5), normal(3, 5, 3, seed=1)], [holes(3, 4), holes(3, 5, seed=1)]
    check(m, lambda m, x: oracle(m.m, m.query[next(number)], x), inputs, masks, execution)


def test_many_queries_are_each_alone():
    m = scrambled(rg.AttentionViaAttention(2, (5, 3)))
    queries, words, characters = normal(2, 7, 2), normal(2, 4, 5), normal(2, 5, 3)
    masks = (holes(2, 4), holes(2, 5, seed=1))
    together = m(queries, words, characters, masks)
    for i in range(7):
        assert_same(together[:, i], m(queries[:, i], words, characters, masks))


@every_option
def test_gradients(options):
    m = scrambled(rg.AttentionViaAttention(2, (5, 3), **options))
    masks = (holes(2, 4), holes(2, 3, seed=1))
    leaves = [x.requires_grad_() for x in (normal(2, 2), normal(2, 4, 5), normal(2, 3, 3))]
    assert torch.autograd.gradcheck(lambda *x: m(*x, masks), leaves, fast_mode=True)


def test_one_word_makes_a_constant_context():
    m = scrambled(rg.AttentionViaAttention(2, (5, 3)))
    query, words, characters = normal(2, 2), normal(2, 1, 5), normal(2, 6, 3)
    out = m(query, words, characters)
    assert_same(out[:, :5], words[:, 0])
    assert_same(out[:, 5:], m.characters(torch.cat([query, words[:, 0]], -1), characters))


def test_levels_have_masks_of_their_own():
    m = scrambled(rg.AttentionViaAttention(2, (5, 3)))
    query, words, characters = normal(2, 2), normal(2, 4, 5), normal(2, 6, 3)
    nobody = torch.zeros(2, 4, dtype=torch.bool)
    out = m(query, words, characters, (nobody, None))
    assert not out[:, :5].any()
    assert_same(out[:, 5:], m.characters(torch.cat([query, torch.zeros(2, 5).double()], -1), characters))


def test_paths():
    trace = weights_of(rg.AttentionViaAttention(2, 5), torch.randn(2, 2), torch.randn(2, 4, 5), torch.randn(2, 6, 5))
    assert list(trace) == ["words", "characters"]


def test_finds_the_word_and_the_character_it_names():
    task = WordThenCharacter()
    of_query, of_words, of_characters = task.dims
    torch.manual_seed(0)
    attention = rg.AttentionViaAttention(of_query, (of_words, of_characters), score="general")
    model = Classifier(attention, of_words + of_characters, task.classes, task.readout)
    fit(model, task, lr=0.03)
    assert accuracy(model, task) >= 0.95
    batch = task.draw(256, torch.Generator().manual_seed(2))
    trace = weights_of(model, **batch.inputs)
    for level in ("words", "characters"):
        found = trace[f"attention.{level}"].weights.argmax(-1)
        assert (found == batch.truth[level]).float().mean() >= 0.95


def test_characters_alone_do_not_find_it():
    """The same model with the words' weights uniform: the word context no longer names a character."""
    task = WordThenCharacter()
    of_query, of_words, of_characters = task.dims
    torch.manual_seed(0)
    attention = rg.AttentionViaAttention(of_query, (of_words, of_characters), score="general")
    model = Classifier(attention, of_words + of_characters, task.classes, task.readout)
    with rg.intervene(model, "uniform", at="attention.words"):
        fit(model, task, lr=0.03)
        assert accuracy(model, task) < 0.6


def test_a_query_may_be_shared():
    m = scrambled(rg.AttentionViaAttention(2, (5, 3)))
    words, characters = normal(4, 6, 5), normal(4, 7, 3)
    one, many = normal(2), normal(1, 11, 2)
    assert_same(m(one, words, characters), m(one.expand(4, 2), words, characters))
    assert_same(m(many, words, characters), m(many.expand(4, 11, 2), words, characters))
