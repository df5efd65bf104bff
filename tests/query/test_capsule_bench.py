"""The study of capsules compares what it says."""

from __future__ import annotations

import pytest
import torch

from regard.bench import capsules, capsules_cost
from regard.recipes.planted import Batch


def test_topics_are_told_by_two_words():
    batch = capsules.Topics(5, noise=0.0).draw(64, torch.Generator().manual_seed(0))
    words = batch.inputs["features"]
    same = (words[:, :, None] - words[:, None]).norm(dim=-1) < 1e-5
    assert ((same.sum((-2, -1)) - 12) == 2).all()
    known = {}
    for text, equal, c in zip(words, same, batch.target.tolist(), strict=True):
        word = text[(equal.sum(-1) == 2).nonzero()[0, 0]]
        assert torch.allclose(known.setdefault(c, word), word, atol=1e-5)
    assert len(known) == 5


def test_an_attack_goes_up_its_gradient_and_counts_where_there_is_none():
    model = torch.nn.Linear(4, 3).double()
    held = Batch({"image": torch.rand(5, 4, dtype=torch.float64)}, torch.tensor([0, 1, 2, 0, 1]))
    found = capsules._gradient(_Of(model), held, capsules._margin)
    scores = model(held.inputs["image"])
    for b, y in enumerate(held.target.tolist()):
        wrong = max((c for c in range(3) if c != y), key=lambda c: float(scores[b, c].detach()))
        assert torch.allclose(found[b], model.weight[wrong] - model.weight[y])


class _Of(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, image):
        return self.inner(image)


def test_an_iterated_attack_stays_within_its_size_and_does_better():
    torch.manual_seed(0)
    model = capsules.PlainDigits().double()
    held = Batch({"image": torch.rand(5, 8, 8, dtype=torch.float64)}, torch.tensor([0, 1, 2, 0, 1]))
    change = capsules._iterated(model, held, 0.1)
    assert float(change.abs().max()) <= 0.1
    once = 0.1 * capsules._gradient(model, held, capsules._margin).sign()

    def reached(change: torch.Tensor) -> float:
        moved = Batch({"image": (held.inputs["image"] + change).clamp(0, 1)}, held.target)
        return float(capsules._margin(model, moved).detach())

    assert reached(change) >= reached(once) > reached(0 * once)


def test_it_runs_and_draws(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(capsules, "NOISE", (0.0, 0.3))
    monkeypatch.setattr(capsules, "ATTACK", (0.1,))
    found = list(capsules.rows(classes=(2, 3), seeds=(0,), steps=1))
    names = {row.what for row in found}
    assert names == {*capsules.readers(capsules.Topics(2)), *capsules.viewers()}
    assert len(found) == 2 * 5 + 4 * (2 + 4)
    assert all(0 <= row.extra["accuracy"] <= 1 for row in found)
    assert capsules.draw(found, tmp_path).stat().st_size > 1000


def test_the_cost_runs_and_draws(tmp_path):
    pytest.importorskip("matplotlib")
    found = list(capsules_cost.rows(classes=(2, 3), budget=0.0))
    assert [row.what for row in found] == 2 * list(capsules.readers(capsules.Topics(2)))
    assert all(row.seconds > 0 for row in found)
    sizes = {row.what: row.extra["parameters"] for row in found if row.extra["classes"] == 3}
    assert sizes["mean and linear"] == 3 * 33
    assert sizes["capsules, bce"] == 3 * 65
    assert capsules_cost.draw(found, tmp_path).stat().st_size > 1000
