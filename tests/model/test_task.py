"""The task model: four parts that find their inputs by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import regard as rg
from regard.model import (
    Batch,
    Chain,
    Classifier,
    Embedding,
    Example,
    On,
    SequenceDecoder,
    TaskModel,
    collate,
)
from regard.model.naming import Available

VOCABULARY, WIDTH, CLASSES = 23, 7, 5


def tokens(*lengths: int, name: str = "tokens") -> Batch:
    examples = [
        Example({name: torch.randint(VOCABULARY, (n,))}, torch.tensor(k % CLASSES)) for k, n in enumerate(lengths)
    ]
    return collate(examples)


def attention(**options: object) -> rg.Attention:
    return rg.Attention("additive", query_dim=WIDTH, key_dim=WIDTH, hidden_dim=3, **options)


def test_the_four_parts_are_the_equation() -> None:
    batch = tokens(3, 11, 2)
    model = TaskModel(Embedding(VOCABULARY, WIDTH), rg.LearnableQuery(WIDTH), attention(), Classifier(WIDTH, CLASSES))
    mask, features = batch.masks["tokens"], model.features(batch.inputs["tokens"])
    context = torch.stack([model.attention(model.query.query, f[m]) for f, m in zip(features, mask, strict=True)])
    torch.testing.assert_close(model(batch), model.output.linear(context))
    loss = model.loss(model(batch), batch)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(model(batch), batch.target))
    assert model.output.decide(model(batch)).shape == (3,)


def test_the_weights_are_at_attention() -> None:
    batch = tokens(3, 11)
    model = TaskModel(Embedding(VOCABULARY, WIDTH), rg.PooledQuery(), attention(), Classifier(WIDTH, CLASSES))
    with rg.record(model) as trace:
        model(batch)
    assert list(trace) == ["attention"]
    weights = trace["attention"].weights
    assert weights.shape == (2, 11)
    assert (weights[0, 3:] == 0).all()


@pytest.mark.parametrize("name", ["tokens", "sentence"])
@pytest.mark.parametrize(
    ("make", "width"),
    [
        (lambda: rg.SelfAttention(WIDTH), WIDTH),
        (lambda: rg.Attention("query-free", key_dim=WIDTH, hidden_dim=3), WIDTH),
        (lambda: rg.MultiHeadAttention(WIDTH, heads=1), WIDTH),
    ],
)
def test_a_single_input_goes_by_any_name(name: str, make: object, width: int) -> None:
    batch = tokens(3, 11, name=name)
    module = make()
    query = rg.PooledQuery() if isinstance(module, rg.MultiHeadAttention) else None
    model = TaskModel(Embedding(VOCABULARY, WIDTH), query, module, Classifier(width, CLASSES)).eval()
    alone = tokens(3, name=name)
    alone = Batch({name: batch.inputs[name][:1, :3]}, {name: batch.masks[name][:1, :3]}, batch.target[:1])
    torch.testing.assert_close(model(batch)[:1], model(alone), msg="padding never matters")


def test_mechanisms_of_several_inputs_name_theirs() -> None:
    parts = ("target", "left", "right")
    examples = [
        Example({part: torch.randint(VOCABULARY, (n + k,)) for k, part in enumerate(parts)}, torch.tensor(1))
        for n in (2, 5)
    ]
    batch = collate(examples)
    rotate = rg.RotatoryAttention(WIDTH)
    model = TaskModel(Embedding(VOCABULARY, WIDTH), None, rotate, Classifier(4 * WIDTH, CLASSES))
    features = {name: model.features(x, batch.masks[name]) for name, x in batch.inputs.items()}
    expected = rotate(**features, masks=tuple(batch.masks[part] for part in parts))
    torch.testing.assert_close(model(batch), model.output.linear(expected))
    pair = collate([Example({"first": e.inputs["left"], "second": e.inputs["right"]}, e.target) for e in examples])
    both = TaskModel(
        Embedding(VOCABULARY, WIDTH), None, rg.InteractiveCoAttention(WIDTH), Classifier(2 * WIDTH, CLASSES)
    )
    assert both(pair).shape == (2, CLASSES)


def test_other_names_and_variables() -> None:
    examples = [
        Example(
            {"question": torch.randint(VOCABULARY, (n,)), "scene": torch.randn(4, WIDTH)},
            torch.tensor(0),
            variables={"variable": torch.randn(3)},
        )
        for n in (2, 6)
    ]
    batch = collate(examples)
    features = {"question": Embedding(VOCABULARY, WIDTH)}
    asked = TaskModel(
        features, On(rg.PooledQuery(), features="question"), On(attention(), key="scene"), Classifier(WIDTH, 2)
    )
    assert asked(batch).shape == (2, 2)
    told = TaskModel(features, rg.AuxiliaryQuery(3, WIDTH), On(attention(), key="scene"), Classifier(WIDTH, 2))
    assert told(batch).shape == (2, 2)
    with pytest.raises(
        ValueError, match=r"attention: got a module that asks for 'key', expected one of question, scene"
    ):
        TaskModel(features, rg.AuxiliaryQuery(3, WIDTH), attention(), Classifier(WIDTH, 2))(batch)
    with pytest.raises(TypeError, match=r"names: got keys, expected arguments of its forward"):
        On(attention(), keys="scene")


@pytest.mark.parametrize("feeding", [False, True])
def test_a_decoder_that_is_told_the_steps_before_is_one_that_takes_them(feeding: bool) -> None:
    end = 10
    examples = [Example({"tokens": torch.randint(VOCABULARY, (n,))}, torch.tensor([3, 1, end])) for n in (4, 9)]
    batch = collate(examples)
    decoder = SequenceDecoder(end + 1, 4, 6, WIDTH, feeding=feeding)
    read = rg.Attention("additive", query_dim=6, key_dim=WIDTH, hidden_dim=3)
    model = TaskModel(Chain(Embedding(VOCABULARY, WIDTH)), None, read, decoder).eval()
    found = model.encode(batch)
    decoded = decoder.generate(model.reader(found), found, 5)
    again = Batch(batch.inputs, batch.masks, decoded.tokens)
    told = model(again)
    real = decoded.tokens >= 0
    assert torch.equal(told.argmax(-1)[real], decoded.tokens[real])
    picked = told.log_softmax(-1).gather(-1, decoded.tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close((picked * real).sum(-1), decoded.log_prob)


def test_what_was_encoded_is_printed_by_names_and_shapes() -> None:
    model = TaskModel(Embedding(VOCABULARY, WIDTH), rg.PooledQuery(), attention(), Classifier(WIDTH, CLASSES))
    shown = repr(model.encode(tokens(3, 11)))
    assert "\n" not in shown
    assert shown.startswith(f"Available(inputs={{tokens: float32 (2, 11, {WIDTH})}}, masks={{tokens: bool (2, 11)}}")
    assert "tensor(" not in shown
    other = Available({}, {}, {"length": 3, "where": torch.zeros(2, device="meta")}, ("a",), frozenset({"a"}))
    assert repr(other) == "Available(values={length: int, where: float32 (2,) on meta}, reads=('a',), filled=['a'])"


def test_wrong_parts_are_refused() -> None:
    embed, classify = Embedding(VOCABULARY, WIDTH), Classifier(WIDTH, 2)
    with pytest.raises(TypeError, match=r"attention: got str, expected a module"):
        TaskModel(embed, None, "additive", classify)
    with pytest.raises(TypeError, match=r"output: got Linear, expected an Output"):
        TaskModel(embed, None, attention(), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"batch: got no target"):
        TaskModel(embed, rg.PooledQuery(), attention(), classify).loss(torch.zeros(1, 2), Batch({"x": torch.zeros(1)}))


def test_the_loss_of_sequences_counts_real_tokens_alone() -> None:
    end = 10
    targets = [torch.tensor([3, end]), torch.tensor([1, 2, 4, end])]
    batch = collate([Example({"tokens": torch.randint(VOCABULARY, (5,))}, target) for target in targets])
    read = rg.Attention("additive", query_dim=6, key_dim=WIDTH, hidden_dim=3)
    model = TaskModel(Embedding(VOCABULARY, WIDTH), None, read, SequenceDecoder(end + 1, 4, 6, WIDTH))
    logits = model(batch)
    each = [
        nn.functional.cross_entropy(row[: len(target)], target, reduction="sum")
        for row, target in zip(logits, targets, strict=True)
    ]
    torch.testing.assert_close(model.loss(logits, batch), sum(each) / 6)
