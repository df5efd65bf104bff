"""Hierarchical attention: inside each segment, then over the segments."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from regard.recipes.planted import Classifier, MarkedWord, accuracy, fit
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, attend, holes, normal, weights_of

OPTIONS = {
    "query-free": {},
    "learned queries": {"score": "additive", "hidden_dim": 7},
    "two scores": {"score": ("general", "query-free")},
    "multi-dimensional": {"features": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def oracle(
    m: rg.HierarchicalAttention, leaves: torch.Tensor, mask: torch.Tensor, level: int | None = None
) -> torch.Tensor:
    """One document: recursion over segments, of which those with nothing in them do not exist."""
    names = list(m.levels)
    level = len(names) - 1 if level is None else level
    if level == 0:
        tokens = [x for x, ok in zip(leaves, mask, strict=True) if ok]
    else:
        tokens = [oracle(m, x, ok, level - 1) for x, ok in zip(leaves, mask, strict=True) if ok.any()]
    query = m.queries.get(names[level])
    return attend(m.levels[names[level]], query, tokens)


@every_option
@pytest.mark.parametrize("levels", [("token",), ("word", "sentence"), ("letter", "word", "sentence")], ids=len)
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(options, levels, lead):
    if isinstance(options.get("score"), tuple):
        options = {"score": (options["score"] * 2)[: len(levels)]}
    m = rg.HierarchicalAttention(5, levels, **options)
    assert m(torch.randn(*lead, *(3, 7, 11)[-len(levels) :], 5)).shape == (*lead, 5)


@pytest.mark.parametrize("execution", EXECUTIONS, ids=str)
@every_option
def test_oracle_of_ragged_documents(options, execution):
    m = scrambled(rg.HierarchicalAttention(3, **options))
    mask = holes(3, 4, 5)
    mask[0, 2] = False
    mask[1, 1:] = False
    x = torch.where(mask[..., None], normal(3, 4, 5, 3), math.nan).requires_grad_()
    y = x.detach().nan_to_num(0.0).requires_grad_()
    with rg.execution(execution[0], panel=execution[1]):
        found = m(x, mask)
    expected = torch.stack([oracle(m, y[b], mask[b]) for b in range(3)])
    assert_same(found, expected)
    cotangent = normal(3, 3, seed=5)
    ours = torch.autograd.grad(found, [x, *m.parameters()], cotangent)
    theirs = torch.autograd.grad(expected, [y, *m.parameters()], cotangent)
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b)


def test_oracle_of_three_levels():
    m = scrambled(rg.HierarchicalAttention(3, ("letter", "word", "sentence")))
    x, mask = normal(2, 2, 3, 4, 3), holes(2, 2, 3, 4)
    mask[0, 1, 2] = False
    mask[1, 0] = False
    assert_same(m(x, mask), torch.stack([oracle(m, x[b], mask[b]) for b in range(2)]))


@every_option
def test_gradients(options):
    m, mask = scrambled(rg.HierarchicalAttention(3, **options)), holes(2, 2, 3)
    mask[0, 1] = False
    assert torch.autograd.gradcheck(lambda x: m(x, mask), [normal(2, 2, 3, 3).requires_grad_()], fast_mode=True)


def test_a_padded_sentence_weighs_nothing():
    m, x, mask = scrambled(rg.HierarchicalAttention(3)), normal(2, 4, 5, 3), holes(2, 4, 5)
    mask[:, 1] = False
    trace = weights_of(m, x, mask)
    assert not trace["levels.sentence"].weights[:, 1].any()
    assert not m.leaf_weights(trace)[~mask].any()
    kept = [0, 2, 3]
    assert_same(m(x, mask), m(x[:, kept], mask[:, kept]))


def test_a_document_of_empty_sentences_is_zero():
    m = scrambled(rg.HierarchicalAttention(3))
    assert not m(normal(2, 4, 0, 3)).any()
    assert not m(normal(2, 0, 5, 3)).any()
    assert not m(normal(2, 4, 5, 3), torch.zeros(2, 4, 5, dtype=torch.bool)).any()
    # An encoder would make something of nothing.
    encoded = scrambled(rg.HierarchicalAttention(3, encoders=[None, rg.RecurrentEncoder(3)]))
    assert not encoded(normal(2, 4, 0, 3)).any()


def test_sentences_are_a_set_and_so_are_their_words():
    m, x, mask = scrambled(rg.HierarchicalAttention(3)), normal(2, 4, 5, 3), holes(2, 4, 5)
    sentences, words = torch.randperm(4), torch.randperm(5)
    assert_same(m(x[:, sentences][:, :, words], mask[:, sentences][:, :, words]), m(x, mask))
    # Not so their union: which word is in which sentence matters.
    assert (m(x.flatten(1, 2).roll(1, 1).view_as(x)) - m(x)).abs().max() > 1e-3


@every_option
def test_leaf_weights_are_the_weights_of_the_leaves(options):
    m, x, mask = scrambled(rg.HierarchicalAttention(3, **options)), normal(2, 4, 5, 3), holes(2, 4, 5)
    model = torch.nn.ModuleDict({"attention": m})
    with rg.record(model) as trace:
        out = m(x, mask)
    weights = m.leaf_weights(trace, at="attention")
    assert weights.shape == (2, 4, 5, *([3] if "features" in options else []))
    weights = weights if weights.dim() == 4 else weights[..., None]
    assert_same((weights * torch.where(mask[..., None], x, 0.0)).sum((1, 2)), out)


def test_leaf_weights_of_a_part_of_a_model():
    class Reader(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.reader = rg.HierarchicalAttention(3)

        def forward(self, x):
            return self.reader(x)

    m, x = Reader(), torch.randn(2, 4, 5, 3)
    with rg.record(m) as trace:
        m(x)
    weights = m.reader.leaf_weights(trace, at="reader")
    assert weights.shape == (2, 4, 5)
    assert torch.allclose(weights.sum((1, 2)), torch.ones(2))


def test_leaf_weights_say_where_there_are_some():
    model = torch.nn.Sequential(rg.HierarchicalAttention(3), rg.HierarchicalAttention(3))
    with rg.record(model) as trace:
        for reader in model:
            reader(torch.randn(2, 4, 5, 3))
    for at, got in (("", "''"), ("reader", "'reader'")):
        with pytest.raises(KeyError, match=rf"at: got {got}, expected the path of this .* Fix: at='0' or at='1'\."):
            model[0].leaf_weights(trace, at)
    with rg.record(model) as empty, pytest.raises(KeyError, match="nothing was recorded"):
        model[0].leaf_weights(empty)


def test_a_given_query_takes_the_place_of_the_learned_ones():
    m = scrambled(rg.HierarchicalAttention(3, score="additive"))
    x, mask, query = normal(2, 4, 5, 3), holes(2, 4, 5), normal(2, 3, seed=7)
    found = m(x, mask, query=query)
    for b in range(2):
        with torch.no_grad():
            for learned in m.queries.values():
                learned.copy_(query[b])
        assert_same(m(x[b], mask[b]), found[b])
    # Nothing to read, whatever the query holds.
    empty = torch.zeros(2, 4, 5, dtype=torch.bool)
    loud = torch.full((2, 3), math.nan, dtype=torch.float64, requires_grad=True)
    out = m(x, empty, query=loud)
    out.sum().backward()
    assert not out.any()
    assert not loud.grad.any()


def test_encoders_stand_before_their_level():
    encoder = rg.RecurrentEncoder(3, 4)
    m = scrambled(rg.HierarchicalAttention(3, encoders=[encoder, rg.RecurrentEncoder(8, 2)]))
    x, mask = normal(2, 3, 5, 3), holes(2, 3, 5)
    mask[1, 2] = False
    words = encoder(x, mask)
    sentences = m.levels["word"](None, words, mask=mask)
    expected = m.levels["sentence"](None, m.encoders["sentence"](sentences, mask.any(-1)), mask=mask.any(-1))
    assert m(x, mask).shape == (2, 4)
    assert_same(m(x, mask), expected)


def test_an_encoder_may_be_left_out():
    m = rg.HierarchicalAttention(3, encoders=[None, rg.RecurrentEncoder(3, 5)])
    assert m(torch.randn(2, 4, 5, 3)).shape == (2, 10)
    assert list(m.encoders) == ["sentence"]


def test_ready_made_attentions():
    levels = [rg.Attention("additive", query_dim=3, key_dim=3, hidden_dim=4) for _ in range(2)]
    x = torch.randn(2, 4, 5, 3)
    by_order, by_name = (
        rg.HierarchicalAttention(3, chosen) for chosen in (levels, {"frame": levels[0], "shot": levels[1]})
    )
    assert list(weights_of(by_order, x)) == ["levels.0", "levels.1"]
    assert list(weights_of(by_name, x)) == ["levels.frame", "levels.shot"]
    assert by_order.queries["0"].shape == (3,)


def test_padding_ragged_documents():
    documents = [[normal(3, 2), normal(5, 2)], [normal(1, 2), normal(2, 2), normal(4, 2)]]
    features, mask = rg.pad_levels(documents, depth=2)
    assert features.shape == (2, 3, 5, 2)
    assert mask.sum(-1).tolist() == [[3, 5, 0], [1, 2, 4]]
    assert_same(features[1, 2, :4], documents[1][2])
    assert not features[~mask].any()
    m = scrambled(rg.HierarchicalAttention(2))
    for b, document in enumerate(documents):
        alone, there = rg.pad_levels([document], depth=2)
        assert_same(m(alone, there)[0], m(features, mask)[b])


def test_padding_documents_some_of_which_are_empty():
    documents = [[], [normal(3, 2), normal(0, 2)], [normal(1, 2)], []]
    features, mask = rg.pad_levels(documents, depth=2)
    assert features.shape == (4, 2, 3, 2)
    assert mask.sum(-1).tolist() == [[0, 0], [3, 0], [1, 0], [0, 0]]
    m = scrambled(rg.HierarchicalAttention(2, encoders=[rg.RecurrentEncoder(2, 1), None]))
    found = m(features, mask)
    assert not found[[0, 3]].any()
    assert_same(found[1], m(documents[1][0][None]))
    deeper, there = rg.pad_levels([documents, []], depth=3)
    assert deeper.shape == (2, 4, 2, 3, 2)
    assert torch.equal(there[0], mask)
    assert not there[1].any()


def test_padding_takes_leaves_of_one_kind():
    one = normal(3, 2)
    for nested, depth, pattern in [
        ([[one]], 1, r"nested: got list, expected tensors \(N, d\) inside 1 lists"),
        ([[one], one], 2, r"nested: got shape \(2,\), expected tensors \(N, d\) inside 2 lists"),
        ("ab", 1, r"nested: got str, expected tensors \(N, d\) inside 1 lists"),
        (None, 1, "nested: got NoneType"),
        ([[], []], 2, "nested: got lists without a single tensor, expected at least one"),
        ([one, normal(3, 5)], 1, r"nested: got a tensor of width 5, .* expected all like the first: width 2"),
        ([one, one.float()], 1, r"nested: got a tensor of width 2, torch\.float32"),
        ([one], 0, "depth: got 0, expected a whole number >= 1"),
    ]:
        with pytest.raises(ValueError, match=pattern):
            rg.pad_levels(nested, depth)


def test_refusals():
    with pytest.raises(ValueError, match="levels: got \\(\\)"):
        rg.HierarchicalAttention(3, ())
    with pytest.raises(ValueError, match="levels: got 'word'"):
        rg.HierarchicalAttention(3, "word")
    with pytest.raises(ValueError, match="each with a name of its own"):
        rg.HierarchicalAttention(3, ("word", "word"))
    with pytest.raises(ValueError, match="levels: got 2, expected names of levels, or one attention a level"):
        rg.HierarchicalAttention(3, 2)
    for name in ("a.b", "", "keys"):
        with pytest.raises(ValueError, match=f"levels: got '{name}', expected a name that can stand in a path"):
            rg.HierarchicalAttention(3, (name, "sentence"))
    with pytest.raises(ValueError, match="features: got width 4, expected 3"):
        rg.HierarchicalAttention(3)(torch.randn(2, 5, 7, 4))
    with pytest.raises(ValueError, match="encoders: got 1 of them"):
        rg.HierarchicalAttention(3, encoders=[None])
    with pytest.raises(TypeError, match="attentions alone, or names alone"):
        rg.HierarchicalAttention(3, [rg.Attention("dot"), "sentence"])
    with pytest.raises(ValueError, match="features: got 2 axes, expected at least 3, for 2 levels"):
        rg.HierarchicalAttention(3)(torch.randn(4, 3))
    with pytest.raises(ValueError, match="mask of features: got shape \\(4, 4\\)"):
        rg.HierarchicalAttention(3)(torch.randn(2, 4, 5, 3), torch.ones(4, 4, dtype=torch.bool))


def test_finds_the_marked_word():
    task = MarkedWord()
    torch.manual_seed(0)
    model = Classifier(rg.HierarchicalAttention(task.dim), task.dim, task.classes)
    fit(model, task, lr=0.03)
    assert accuracy(model, task) >= 0.95
    batch = task.draw(256, torch.Generator().manual_seed(2))
    trace = weights_of(model, **batch.inputs)
    rows = torch.arange(256)
    sentence = trace["attention.levels.sentence"].weights[rows, batch.truth["sentence"]].mean()
    leaf = model.attention.leaf_weights(trace, at="attention")[
        rows, batch.truth["sentence"], batch.truth["word"]
    ].mean()
    print(f"weight on the planted sentence {sentence:.3f}, on the planted word {leaf:.3f}")
    assert sentence >= 0.8
    assert leaf >= 0.8


def test_without_attention_the_word_is_lost():
    task = MarkedWord()
    torch.manual_seed(0)
    model = Classifier(rg.HierarchicalAttention(task.dim), task.dim, task.classes)
    with rg.intervene(model, "uniform"):
        fit(model, task, lr=0.03)
        assert accuracy(model, task) < 0.5
