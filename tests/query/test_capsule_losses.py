"""What capsules are trained with."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import regard as rg
from regard.query.capsule_losses import PROBABILITY, RECONSTRUCTION, hinge, margin, multi_margin, similarities
from regard.recipes.planted import CapsuleClassifier, Evidence, accuracy, fit
from tests.cases import assert_same, scrambled
from tests.feature.common import normal

SOUND = ("multi-margin", "hinge", "bce", "margin")


def relu(x: float) -> float:
    return max(0.0, x)


def of_probabilities(name: str, x: list[float], true: list[bool]) -> float:
    """One example, class by class."""
    C = len(x)
    if name == "hinge":
        return relu(1 + sum(-v if t else v for v, t in zip(x, true, strict=True)))
    if name == "multi-margin":
        return sum(relu(1 - x[y] + x[c]) for y in range(C) for c in range(C) if true[y] and not true[c]) / C
    if name == "margin":
        return sum(relu(0.9 - v) ** 2 if t else 0.5 * relu(v - 0.1) ** 2 for v, t in zip(x, true, strict=True))
    log = [float(torch.tensor(v if t else 1 - v, dtype=torch.float64).log()) for v, t in zip(x, true, strict=True)]
    return -sum(v for v, t in zip(log, true, strict=True) if t or name == "bce")


def some(classes: int = 3, seed: int = 0) -> rg.Capsules:
    return scrambled(rg.CapsuleAttention(4, classes), seed + 1)(normal(5, 7, 4, seed=seed))


@pytest.mark.parametrize("weight", [0.0, 1.0, 0.3])
@pytest.mark.parametrize("reconstruction", RECONSTRUCTION)
@pytest.mark.parametrize("name", PROBABILITY)
@pytest.mark.parametrize("several", [False, True])
def test_oracle(name, reconstruction, weight, several):
    found = some()
    target = torch.tensor([0, 2, 1, 1, 2])
    booleans = F.one_hot(target, 3).bool()
    if several:
        booleans[0, 1] = booleans[3, 2] = True
        booleans[4] = False
    expected = 0.0
    for b in range(5):
        true, r, mean = booleans[b].tolist(), found.reconstruction[b].tolist(), found.mean[b].tolist()
        if reconstruction == "squared":
            again = sum((x - y) ** 2 for row in r for x, y in zip(row, mean, strict=True))
        else:
            again = of_probabilities(
                reconstruction, [sum(x * y for x, y in zip(row, mean, strict=True)) for row in r], true
            )
        expected += (of_probabilities(name, found.probability[b].tolist(), true) + weight * again) / 5
    loss = rg.CapsuleLoss(name, reconstruction, weight)(found, booleans if several else target)
    assert_same(loss, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", PROBABILITY)
def test_a_class_is_the_same_as_its_booleans(name):
    found, target = some(), torch.tensor([0, 2, 1, 1, 2])
    loss = rg.CapsuleLoss(name)
    assert_same(loss(found, target), loss(found, F.one_hot(target, 3).bool()))


def test_multi_margin_is_torchs():
    x, target = normal(5, 7), torch.tensor([0, 6, 3, 3, 1])
    assert_same(multi_margin(x, target).mean(), F.multi_margin_loss(x, target))
    booleans = F.one_hot(target, 7).bool()
    booleans[0, 4] = True
    listed = torch.full((5, 7), -1)
    for b in range(5):
        listed[b, : booleans[b].sum()] = booleans[b].nonzero().flatten()
    assert_same(multi_margin(x, booleans).mean(), F.multilabel_margin_loss(x, listed))


def test_binary_cross_entropy_is_torchs():
    found, target = some(), torch.tensor([0, 2, 1, 1, 2])
    theirs = F.binary_cross_entropy(found.probability, F.one_hot(target, 3).double(), reduction="sum") / 5
    assert_same(rg.CapsuleLoss("bce", weight=0.0)(found, target), theirs)


@pytest.mark.parametrize("reconstruction", RECONSTRUCTION)
@pytest.mark.parametrize("name", PROBABILITY)
def test_gradients(name, reconstruction):
    loss, target = rg.CapsuleLoss(name, reconstruction, 0.7), torch.tensor([0, 2])
    context, p, mean = normal(2, 3, 4), torch.rand(2, 3, dtype=torch.float64), normal(2, 4, seed=1)
    assert torch.autograd.gradcheck(
        lambda c, p, m: loss(rg.Capsules(c, p, p[..., None] * c, m), target),
        [x.requires_grad_() for x in (context, p, mean)],
    )


@pytest.mark.parametrize("name", PROBABILITY)
def test_certainty_has_finite_gradients(name):
    """Float32 sigmoids reach 0 and 1."""
    p = torch.tensor([[0.0, 1.0, 1.0]], requires_grad=True)
    PROBABILITY[name](p, torch.tensor([0])).sum().backward()
    assert p.grad.isfinite().all()


def test_one_class_has_no_negatives():
    found, target = some(classes=1), torch.zeros(5, dtype=torch.long)
    assert not multi_margin(found.probability, target).any()
    assert_same(hinge(found.probability, target), 1 - found.probability[:, 0])
    for name in PROBABILITY:
        assert rg.CapsuleLoss(name)(found, target).isfinite()


def test_the_margin_is_satisfied_between_a_tenth_and_nine():
    p = torch.tensor([[0.9, 0.1, 0.0], [1.0, 0.1, 0.1], [0.4, 0.0, 0.0], [0.9, 0.5, 0.0]], dtype=torch.float64)
    assert_same(margin(p, torch.zeros(4, dtype=torch.long)), torch.tensor([0.0, 0.0, 0.25, 0.08], dtype=torch.float64))


def test_the_true_class_is_attracted_and_the_others_are_repelled():
    found, target = some(), torch.tensor([0, 2, 1, 1, 2])
    for name in ("multi-margin", "hinge"):
        r = found.reconstruction.detach().requires_grad_()
        RECONSTRUCTION[name](found._replace(reconstruction=r, mean=found.mean.detach()), target).sum().backward()
        along = (-r.grad * found.mean[:, None]).sum(-1)
        true = F.one_hot(target, 3).bool()
        assert (along[true] >= 0).all()
        assert (along[true] > 0).any()
        assert (along[~true] <= 0).all()
        assert (along[~true] < 0).any()
    assert_same(similarities(found), torch.einsum("bcd,bd->bc", found.reconstruction, found.mean))


def test_every_sound_loss_learns_and_the_degenerate_one_does_not():
    """One of five classes; without reconstruction, so that probabilities are on their own."""
    task, table = Evidence(several=False), {}
    for name in (*SOUND, "cross-entropy"):
        torch.manual_seed(0)
        model = CapsuleClassifier(rg.CapsuleAttention(task.dim, task.classes))
        fit(model, task, lr=0.05, loss=CapsuleClassifier.loss(rg.CapsuleLoss(name, weight=0.0)))
        table[name] = accuracy(model, task)
    print("\n" + ", ".join(f"{name} {found:.3f}" for name, found in table.items()))
    for name in SOUND:
        assert table[name] >= 0.95, name
    assert table["cross-entropy"] <= 0.6


def test_refusals():
    with pytest.raises(ValueError, match="probability: got 'mse', expected one of multi-margin"):
        rg.CapsuleLoss("mse")
    with pytest.raises(ValueError, match="reconstruction: got 'bce', expected one of multi-margin, hinge, squared"):
        rg.CapsuleLoss(reconstruction="bce")
    with pytest.raises(ValueError, match="weight: got -1"):
        rg.CapsuleLoss(weight=-1)
    with pytest.raises(ValueError, match=r"target: got a tensor of torch.float32, shape \(5,\)"):
        rg.CapsuleLoss()(some(), torch.zeros(5))
    with pytest.raises(ValueError, match=r"target: got shape \(5, 2\), expected that of the classes, \(5, 3\)"):
        rg.CapsuleLoss()(some(), torch.zeros(5, 2, dtype=torch.bool))
    narrow = rg.CapsuleAttention((4, 4, 2), 3, maps="shared")(torch.randn(5, 7, 4))
    with pytest.raises(ValueError, match="found: got reconstructions of width 2, expected that of the features, 4"):
        rg.CapsuleLoss()(narrow, torch.zeros(5, dtype=torch.long))
    assert rg.CapsuleLoss(weight=0.0)(narrow, torch.zeros(5, dtype=torch.long)).isfinite()


@pytest.mark.parametrize("probability", PROBABILITY)
@pytest.mark.parametrize("wrong", [3, -1, -100])
def test_a_class_that_is_not_there_is_refused(probability, wrong):
    found = rg.CapsuleAttention(4, classes=3)(normal(2, 5, 4).float())
    with pytest.raises(IndexError, match=r"target: got indices from .* to ., expected classes of 3"):
        rg.CapsuleLoss(probability, weight=0)(found, torch.tensor([0, wrong]))


def test_what_are_no_capsules_or_targets_is_refused():
    found = rg.CapsuleAttention(4, classes=3)(normal(2, 5, 4).float())
    with pytest.raises(TypeError, match="found: got Tensor, expected what a layer of capsules gives"):
        rg.CapsuleLoss()(found.probability, torch.tensor([0, 1]))
    with pytest.raises(TypeError, match="target: got list, expected a tensor"):
        rg.CapsuleLoss()(found, [0, 1])
