"""Classes, labels, capsules: one answer for each example."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from regard.model import Batch, CapsuleClassifier, Classifier, Embedding, MultiLabel, On, TaskModel
from regard.model.naming import Available
from tests.model.outputs.common import NOTHING, gradients_flow, halves, losses_of_parts_average_to_that_of_the_whole

WIDTH, CLASSES = 5, 3


def test_contexts_of_tokens_are_averaged_over_the_real_ones() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    context = torch.randn(2, 3, WIDTH).masked_fill(~mask.unsqueeze(-1), float("nan"))
    for output in (Classifier(WIDTH, CLASSES), MultiLabel(WIDTH, CLASSES)):
        found = output(context, Available({}, {"x": mask}, {}))
        means = torch.stack([context[0, :2].mean(0), context[1, 0]])
        torch.testing.assert_close(found, output.linear(means))
        torch.testing.assert_close(output(means, NOTHING), found)


def test_terms_of_classes_are_examples() -> None:
    output, batch = Classifier(WIDTH, CLASSES), Batch({"x": torch.zeros(7, 1)}, target=torch.randint(CLASSES, (7,)))
    logits = torch.randn(7, CLASSES)
    losses_of_parts_average_to_that_of_the_whole(output, (logits, batch), halves(logits, batch, 2))


def test_every_label_is_judged_by_itself() -> None:
    output = MultiLabel(WIDTH, CLASSES, threshold=0.7)
    target = torch.tensor([[1, 0, -1], [0, 0, 1], [-1, -1, 1]])
    batch, logits = Batch({"x": torch.zeros(3, 1)}, target=target), torch.randn(3, CLASSES)
    each = []
    for row, known in zip(logits.tolist(), target.tolist(), strict=True):
        for z, y in zip(row, known, strict=True):
            p = 1 / (1 + math.exp(-z))
            if y >= 0:
                each.append(-math.log(p if y else 1 - p))
    assert float(output.loss(logits, batch)) == pytest.approx(sum(each) / len(each), rel=1e-5)
    losses_of_parts_average_to_that_of_the_whole(output, (logits, batch), halves(logits, batch, 1))
    assert torch.equal(output.decide(logits), logits.sigmoid() >= 0.7)
    gradients_flow(output, output.loss(output(torch.randn(3, WIDTH), NOTHING), batch))


def test_labels_that_are_all_unknown_cost_nothing() -> None:
    batch = Batch({"x": torch.zeros(1, 1)}, target=torch.full((1, CLASSES), -1))
    assert MultiLabel(WIDTH, CLASSES).loss(torch.randn(1, CLASSES), batch) == 0


def test_labels_may_be_booleans() -> None:
    logits, target = torch.randn(2, CLASSES), torch.tensor([[1, 0, 1], [0, 0, 1]])
    output = MultiLabel(WIDTH, CLASSES)
    found = [output.loss(logits, Batch({"x": logits}, target=target.to(kind))) for kind in (torch.long, torch.bool)]
    assert found[0] == found[1]


def test_bad_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="threshold: got 1"):
        MultiLabel(WIDTH, CLASSES, threshold=1)
    with pytest.raises(ValueError, match=r"batch: got target of shape \(2,\), expected one number a label, \(2, 3\)"):
        MultiLabel(WIDTH, CLASSES).loss(torch.zeros(2, 3), Batch({"x": torch.zeros(2)}, target=torch.zeros(2)))


def test_capsules_that_know_their_probabilities() -> None:
    loss = rg.CapsuleLoss()
    attend = rg.CapsuleAttention(WIDTH, classes=CLASSES)
    model = TaskModel(Embedding(11, WIDTH), None, attend, CapsuleClassifier(loss))
    batch = Batch({"tokens": torch.randint(11, (4, 7))}, target=torch.randint(CLASSES, (4,)))
    found = model(batch)
    capsules = attend(model.features(batch.inputs["tokens"]))
    torch.testing.assert_close(found.probability, capsules.probability)
    torch.testing.assert_close(model.loss(found, batch), loss(capsules, batch.target))
    assert torch.equal(model.output.decide(found), capsules.probability.argmax(-1))
    gradients_flow(model.attention, model.loss(found, batch))


def test_lengths_of_routed_capsules_are_probabilities() -> None:
    route = rg.DynamicRouting((WIDTH, 4), capsules=CLASSES)
    batch = Batch({"parts": torch.randn(2, 7, WIDTH)}, target=torch.tensor([2, 0]))
    model = TaskModel({}, None, On(route, u="parts"), CapsuleClassifier())
    found, lengths = model(batch), route(batch.inputs["parts"]).detach().norm(dim=-1)
    expected = 0.0
    for row, y in zip(lengths.tolist(), [2, 0], strict=True):
        for c, p in enumerate(row):
            expected += max(0, 0.9 - p) ** 2 if c == y else 0.5 * max(0, p - 0.1) ** 2
    assert model.loss(found, batch).item() == pytest.approx(expected / 2, rel=1e-5)
    assert torch.equal(model.output.decide(found), lengths.argmax(-1))


def test_what_a_capsule_draws_is_compared_with_the_input() -> None:
    decoder = rg.CapsuleDecoder(CLASSES, 4, out_dim=6, hidden=(5,))
    output = CapsuleClassifier(decoder=decoder, drawn="image")
    v, image = torch.randn(2, CLASSES, 4), torch.rand(2, 1, 2, 3)
    batch = Batch({"image": image}, target=torch.tensor([2, 0]))
    found = output(v, NOTHING)
    plain = CapsuleClassifier().loss(found, batch)
    extra = decoder.loss(v, batch.target, image.flatten(1))
    torch.testing.assert_close(output.loss(found, batch), plain + extra)
    gradients_flow(output, output.loss(found, batch))
    with pytest.raises(ValueError, match="drawn: got 'image', expected one of x"):
        output.loss(found, Batch({"x": image}, target=batch.target))


def test_bad_capsules_are_refused() -> None:
    with pytest.raises(TypeError, match="loss: got str"):
        CapsuleClassifier("margin")
    with pytest.raises(ValueError, match="drawn: got None"):
        CapsuleClassifier(decoder=rg.CapsuleDecoder(CLASSES, 4, out_dim=6))
    with pytest.raises(ValueError, match=r"context: got shape \(2, 4\)"):
        CapsuleClassifier()(torch.zeros(2, 4), NOTHING)
    with pytest.raises(ValueError, match="context: got vectors, expected Capsules"):
        CapsuleClassifier(rg.CapsuleLoss())(torch.zeros(2, 3, 4), NOTHING)
