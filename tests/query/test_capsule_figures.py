"""A figure of what each capsule attends, and of how inputs are coupled to outputs."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from tests.feature.common import weights_of

pytest.importorskip("matplotlib")

from regard.report.figures import heatmap, save, token_strip

WORDS, CLASSES = ["the", "sea", "food", "was", "fresh"], ["negative", "neutral", "positive"]
x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))


def test_what_each_class_attends(tmp_path):
    weights = weights_of(rg.CapsuleAttention(4, 3), x)["attention"].weights[0].detach()
    figure = heatmap(weights, queries=CLASSES, keys=WORDS, title="capsules")
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == CLASSES
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == WORDS
    assert save(figure, tmp_path / "capsules.svg").stat().st_size > 1000
    assert len(token_strip(WORDS, weights).axes[0].texts) >= 3 * 5


def test_what_each_head_attends():
    weights = weights_of(rg.MultiHeadCapsules(4, 3, 2), x)["attention"].weights[0].detach()
    figure = heatmap(weights, queries=CLASSES, keys=WORDS)
    assert [axes.get_title() for axes in figure.axes[:2]] == ["head 0", "head 1"]


def test_couplings_by_iteration(tmp_path):
    calls = weights_of(rg.DynamicRouting((4, 2), 3), x)["routing"]
    iterations = torch.stack([call.weights[0] for call in calls]).detach()
    figure = heatmap(iterations, queries=WORDS, keys=CLASSES, title="couplings, iteration by iteration")
    assert len(figure.axes) == 4
    assert save(figure, tmp_path / "routing.svg").stat().st_size > 1000


def test_every_level():
    trace = weights_of(rg.HierarchicalCapsules(4, (2, 3), link=["attention", "routing"]), x)
    assert len(heatmap(trace["levels.0.attention"].weights[0].detach(), keys=WORDS).axes) == 2
    assert len(heatmap(trace["levels.1.routing"][-1].weights[0].detach(), keys=CLASSES).axes) == 2
