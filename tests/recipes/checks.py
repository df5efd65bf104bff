"""What every text recipe is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from regard.model import collate
from regard.recipes import run
from regard.recipes.engine import training_loss
from regard.recipes.recipe import SPLITS, Recipe, configured
from regard.recipes.runs import Run


def assert_learns(name: str, **settings: Any) -> Recipe:
    """The loss of a few examples is finite, and every parameter that must learn is told how; answers come out."""
    task = configured(name, settings)
    torch.manual_seed(0)
    model, examples = task.build(), [task.examples("train")[k] for k in range(7)]
    batch = collate(examples)
    loss = training_loss(model, batch)
    loss.backward()
    assert loss.isfinite()
    told = {key: p.grad for key, p in model.attention.named_parameters()}
    assert all(grad is not None and grad.isfinite().all() for grad in told.values()), {
        k for k, g in told.items() if g is None
    }
    judged = task.judge(model.eval(), examples)
    assert len(judged.answers) == 7
    assert set(judged.signatures) <= set(judged.metrics)
    return task


def assert_no_split_shares(name: str, **settings: Any) -> None:
    """What is said in one split is said in no other; the same seed draws the same, another another."""

    def drawn(seed: int) -> dict[str, set[str]]:
        task = configured(name, {"seed": seed, **settings})
        each = {split: task.examples(split) for split in SPLITS}
        return {split: {" ".join(map(" ".join, e.words.values())) for e in found} for split, found in each.items()}

    first, again, other = drawn(0), drawn(0), drawn(1)
    assert first == again
    assert first["test"] != other["test"]
    assert not first["train"] & first["test"]
    assert not first["train"] & first["validation"]
    assert not first["validation"] & first["test"]


def assert_reaches(out: Path, name: str, metric: str, least: float, **settings: Any) -> Run:
    """A short training reaches so much on the test examples; a run folder answers without the data."""
    done = run(name, out=out, progress=False, **settings)
    metrics = done.metrics() or {}
    print(f"{name}, {settings.get('attention', 'default')}: {metrics}")
    assert metrics[metric] >= least
    return done
