"""Two modalities in one space, each reading the other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.recipes.planted import PairedViews, fit
from tests import oracles
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, holes, normal, weighted, weights_of


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return oracles.dot(a, b) / (oracles.norm(a) * oracles.norm(b))


def crossed(m: rg.CrossModalAttention, first: list[Tensor], second: list[Tensor]) -> tuple[Tensor, Tensor]:
    """One pair of sets without padding."""
    a, b = [oracles.times(m.P_a, x) for x in first], [oracles.times(m.P_b, x) for x in second]
    tau = m.temperature
    of_second = [weighted([cosine(x, y) / tau for y in b], second) for x in a]
    of_first = [weighted([cosine(y, x) / tau for x in a], first) for y in b]
    return torch.stack(of_second), torch.stack(of_first)


@pytest.mark.parametrize("execution", EXECUTIONS, ids=str)
def test_oracle(execution):
    m = scrambled(rg.CrossModalAttention((3, 5), 4))
    first, second, masks = normal(2, 7, 3), normal(2, 6, 5, seed=1), (holes(2, 7), holes(2, 6, seed=1))
    dirty = [torch.where(k[..., None], x, math.nan) for x, k in zip((first, second), masks, strict=True)]
    with rg.execution(execution[0], panel=execution[1]):
        found = m(*dirty, masks)
    assert found.first.shape == (2, 7, 5)
    assert found.second.shape == (2, 6, 3)
    for b in range(2):
        expected = crossed(m, list(first[b][masks[0][b]]), list(second[b][masks[1][b]]))
        assert_same(found.first[b][masks[0][b]], expected[0])
        assert_same(found.second[b][masks[1][b]], expected[1])
        assert not found.first[b][~masks[0][b]].any()


def test_gradients():
    m, mask = scrambled(rg.CrossModalAttention((3, 5), 4)), holes(2, 4)
    leaves = normal(2, 4, 3).requires_grad_(), normal(2, 4, 5, seed=1).requires_grad_()
    for of in (lambda x, y: m(x, y, (mask, mask)), m.contrast, m.transport):
        assert torch.autograd.gradcheck(of, leaves, fast_mode=True)


def test_the_contrast_is_its_equation():
    m, masks = scrambled(rg.CrossModalAttention((3, 5), 4)), (holes(3, 7), holes(3, 6, seed=1))
    first, second = normal(3, 7, 3), normal(3, 6, 5, seed=1)
    a = [oracles.times(m.P_a, x[k].mean(0)) for x, k in zip(first, masks[0], strict=True)]
    b = [oracles.times(m.P_b, x[k].mean(0)) for x, k in zip(second, masks[1], strict=True)]
    e = [[cosine(x, y) / m.temperature for y in b] for x in a]
    total = oracles.zero()
    for i in range(3):
        total = total - oracles.soft(e[i], [True] * 3)[i].log()
        total = total - oracles.soft([row[i] for row in e], [True] * 3)[i].log()
    assert_same(m.contrast(first, second, masks), total / 6)


def test_transport_does_not_see_padding_and_is_free_for_the_same_set():
    m = scrambled(rg.CrossModalAttention(3, 4))
    with torch.no_grad():
        m.P_b.copy_(m.P_a)
    first, mask = normal(2, 5, 3), torch.tensor([True, True, True, False, False]).expand(2, 5)
    second = first[:, [2, 0, 1, 3, 4]]
    cost = m.transport(
        first, torch.where(mask[..., None], second, math.nan), (mask, mask), epsilon=0.005, iterations=200
    )
    assert_same(cost, m.transport(first[:, :3], second[:, :3], epsilon=0.005, iterations=200))
    assert (cost.abs() < 1e-3).all()


def test_views_of_the_same_things_find_each_other():
    """Trained on whole sets alone, each view finds its partner."""
    task = PairedViews()
    batch = task.draw(512, torch.Generator().manual_seed(5))
    for align in (rg.Soft(), rg.Sinkhorn()):
        torch.manual_seed(0)
        m = rg.CrossModalAttention((task.first_dim, task.second_dim), task.things, align=align)

        def right(m: rg.CrossModalAttention = m) -> float:
            found = weights_of(m, **batch.inputs)["first"].weights.argmax(-1)
            return float((found == batch.target).float().mean())

        before = right()
        fit(m, task, steps=200, lr=0.02, loss=lambda model, b: model.contrast(**b.inputs))
        print(f"\n{type(align).__name__}: partners found {before:.3f} before, {right():.3f} after")
        assert before <= 0.35
        assert right() >= 0.97


def test_refusals():
    with pytest.raises(ValueError, match="temperature: got 0"):
        rg.CrossModalAttention(3, 4, temperature=0)
    with pytest.raises(ValueError, match="first and second: got shapes"):
        rg.info_nce(torch.randn(2, 3), torch.randn(3, 3))


def test_a_temperature_of_zero_is_refused_by_the_loss():
    with pytest.raises(ValueError, match="temperature: got 0, expected a finite number > 0"):
        rg.info_nce(torch.eye(3), torch.eye(3), temperature=0)


@pytest.mark.parametrize("method", ["contrast", "transport"])
def test_widths_are_checked_by_every_method(method):
    with pytest.raises(ValueError, match=r"second: got shape \(2, 7, 4\), expected width 5"):
        getattr(rg.CrossModalAttention((3, 5), 2), method)(torch.zeros(2, 7, 3), torch.zeros(2, 7, 4))
