"""Hierarchical capsules: capsules that read capsules."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from regard.recipes.planted import CapsuleClassifier, Evidence, fit
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, holes, normal, weights_of
from tests.query import test_capsules, test_routing

LINKS = {
    "attention": "attention",
    "routing": "routing",
    "mixed": ["attention", "routing", "attention"],
    "mixed, other way": ["routing", "attention", "routing"],
}
every_link = pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
every_execution = pytest.mark.parametrize("execution", EXECUTIONS, ids=str)


def oracle(m: rg.HierarchicalCapsules, tokens: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """Reconstructions of all levels of one example."""
    found = []
    for level in m.levels:
        if isinstance(level, rg.DynamicRouting):
            found.append(test_routing.oracle(level, tokens)[0])
        else:
            found.append(torch.stack(test_capsules.oracle(level, list(tokens.values()))[2]))
        tokens = dict(enumerate(found[-1]))
    return found


@every_link
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(link, lead):
    m = rg.HierarchicalCapsules(5, (7, 3, 2), link=link)
    x, mask = torch.randn(*lead, 11, 5), torch.ones(*lead, 11, dtype=torch.bool)
    levels = m.levels_of(x, mask)
    assert [one.probability.shape for one in levels] == [(*lead, 7), (*lead, 3), (*lead, 2)]
    assert torch.equal(m(x, mask).probability, levels[-1].probability)


def test_levels_may_be_of_different_widths():
    m = rg.HierarchicalCapsules((5, 3, 2), (7, 4), link="routing", iterations=2)
    assert [one.reconstruction.shape for one in m.levels_of(torch.randn(2, 11, 5))] == [(2, 7, 3), (2, 4, 2)]
    assert [level.iterations for level in m.levels] == [2, 2]
    assert [level.W.shape for level in m.levels] == [(7, 5, 3), (7, 4, 3, 2)]
    m = rg.HierarchicalCapsules((5, 3, 2), (7, 4), maps="shared")
    assert [one.reconstruction.shape for one in m.levels_of(torch.randn(2, 11, 5))] == [(2, 7, 3), (2, 4, 2)]


@every_execution
@every_link
def test_oracle(link, execution):
    m, mask = scrambled(rg.HierarchicalCapsules(3, (4, 3, 2), link=link)), holes(2, 5)
    clean = normal(2, 5, 3).requires_grad_()
    dirty = torch.where(mask[..., None], clean.detach(), math.nan).requires_grad_()
    with rg.execution(execution[0], panel=execution[1]):
        found = m.levels_of(dirty, mask)
        mine = torch.autograd.grad(found[-1].reconstruction.square().sum(), [dirty, *m.parameters()])
    each = [oracle(m, {i: clean[b, i] for i in range(5) if mask[b, i]}) for b in range(2)]
    for t in range(3):
        assert_same(found[t].reconstruction, torch.stack([one[t] for one in each]))
    expected = torch.stack([one[-1] for one in each])
    theirs = torch.autograd.grad(expected.square().sum(), [clean, *m.parameters()])
    for a, b in zip(mine, theirs, strict=True):
        assert_same(a + 1, b + 1)


@every_link
def test_gradients(link):
    m, mask = scrambled(rg.HierarchicalCapsules(3, (4, 3, 2), link=link)), holes(2, 4)
    x = normal(2, 4, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: m(x, mask).reconstruction, [x], fast_mode=True)


def test_a_level_that_passes_everything_on_is_no_level():
    """Sharp queries that each find one feature, sure of what they read, give the level below."""
    features = torch.eye(4, dtype=torch.float64)[None, [2, 0, 3, 1]] * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]
    m, above = scrambled(rg.HierarchicalCapsules(4, (4, 3))), None
    with torch.no_grad():
        m.levels[0].q.copy_(1e4 * torch.eye(4)[[2, 0, 3, 1]])
        m.levels[0].b.fill_(1e4)
    levels, above = m.levels_of(features), m.levels[1](features)
    assert_same(levels[0].reconstruction, features)
    assert_same(levels[1].reconstruction, above.reconstruction)


def test_paths():
    trace = weights_of(rg.HierarchicalCapsules(5, (7, 3), link=["routing", "attention"]), torch.randn(2, 11, 5))
    assert list(trace) == ["levels.0.routing", "levels.1.attention"]
    assert trace["levels.0.routing"][-1].weights.shape == (2, 11, 7)
    assert trace["levels.1.attention"].weights.shape == (2, 3, 7)


@pytest.mark.parametrize("link", ["attention", ["attention", "routing"]], ids=str)
def test_they_learn(link):
    task = Evidence()
    torch.manual_seed(0)
    model = CapsuleClassifier(rg.HierarchicalCapsules(task.dim, (8, task.classes), link=link))
    fit(model, task, lr=0.05, loss=CapsuleClassifier.loss(rg.CapsuleLoss("margin", weight=0.0)))
    batch = task.draw(2048, torch.Generator().manual_seed(1))
    found = float(((model(**batch.inputs) > 0.5) == batch.target).float().mean())
    print(f"\nevidence for any of five, two levels, {link}: {found:.3f}")
    assert found >= 0.97


def test_a_level_may_be_made_by_a_function():
    m = rg.HierarchicalCapsules(
        4, (7, 3), link=["attention", lambda d, out, count: rg.MultiHeadCapsules(d, count, 2, compare="map")]
    )
    assert m(torch.randn(2, 11, 4)).reconstruction.shape == (2, 3, 4)


def test_refusals():
    with pytest.raises(ValueError, match="capsules: got none"):
        rg.HierarchicalCapsules(5, ())
    with pytest.raises(ValueError, match="dim: got 2 widths, expected one, or 3: features and levels"):
        rg.HierarchicalCapsules((5, 5), (7, 3))
    with pytest.raises(ValueError, match="link: got 1 links, expected one, or one for each of 2 levels"):
        rg.HierarchicalCapsules(5, (7, 3), link=["attention"])
    with pytest.raises(ValueError, match="link: got 'em', expected one of attention, routing"):
        rg.HierarchicalCapsules(5, (7, 3), link="em")
    with pytest.raises(TypeError, match="link: got int"):
        rg.HierarchicalCapsules(5, (7, 3), link=[3, 3])
    with pytest.raises(TypeError, match="iterations: got 2, expected an argument of a level, and none is 'routing'"):
        rg.HierarchicalCapsules(5, (7, 3), iterations=2)


def test_one_number_of_capsules_is_no_list_of_levels():
    with pytest.raises(TypeError, match=r"capsules: got 3, expected their number at each level. Fix: capsules=\(3,\)"):
        rg.HierarchicalCapsules(5, capsules=3)


@pytest.mark.parametrize("link", ["attention", "routing"])
def test_features_of_another_width_are_named_as_such(link):
    with pytest.raises(ValueError, match="features: got width 4, expected dim=5"):
        rg.HierarchicalCapsules(5, capsules=(3, 2), link=link)(torch.zeros(2, 7, 4))
