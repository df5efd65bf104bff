"""Points: the answers are right, and pointing learns them."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

from regard.recipes import run
from regard.recipes.points import RECIPE, Points
from regard.recipes.points.task import TASKS, _pointed
from regard.recipes.points.tours import length, shortest_tour
from regard.recipes.recipe import configured
from tests.recipes.checks import assert_learns, assert_no_split_shares, assert_reaches

SMALL = {"train_size": 40, "test_size": 20, "hidden_dim": 12}


@pytest.mark.parametrize("n", [3, 4, 7])
def test_tours_are_the_shortest_of_all(n: int) -> None:
    points = torch.rand(5, n, 2, generator=torch.Generator().manual_seed(n))
    found = shortest_tour(points)
    for p, tour in zip(points.double(), found.tolist(), strict=True):
        ways = [(0, *rest) for rest in permutations(range(1, n)) if rest[0] < rest[-1]]
        best = min(
            ways, key=lambda way: sum(float((p[a] - p[b]).norm()) for a, b in zip(way, way[1:] + way[:1], strict=True))
        )
        assert tuple(tour) == best
    assert length(points, found).isfinite().all()


def test_no_tour_without_every_point() -> None:
    points = torch.rand(4, 5, 2)
    tours = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 3, 3], [0, 1, 2, 3, -1], [4, 2, 0, 1, 3]])
    assert length(points, tours).isfinite().tolist() == [True, False, False, True]
    assert not length(points, tours[:, :4]).isfinite().any()
    square = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]])
    assert length(square, torch.tensor([[2, 1, 0, 3]])).item() == pytest.approx(4)


def test_right_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.recipes.points.task._AT_ONCE", 2)
    numbers = torch.rand(6, 5, 1)
    order = Points(task="sort", size=5).right(numbers)
    assert (numbers.squeeze(-1).gather(1, order).diff(dim=-1) >= 0).all()
    points = torch.rand(6, 7, 2)
    for p, corners in zip(points, Points(task="hull", size=7).right(points), strict=True):
        kept = corners[corners >= 0]
        assert kept.tolist()[0] == kept.min()
        for a, b in zip(kept, kept.roll(-1), strict=True):
            to, others = p[b] - p[a], p - p[a]
            assert (to[0] * others[:, 1] - to[1] * others[:, 0] >= -1e-6).all()


@pytest.mark.parametrize("task", TASKS)
def test_splits(task: str) -> None:
    assert_no_split_shares("points", task=task, **SMALL)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("attention", RECIPE.alternatives)
def test_every_alternative_learns(attention: str, task: str) -> None:
    assert_learns("points", attention=attention, task=task, **SMALL)


def test_answers_of_a_perfect_model_are_perfect(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.model import PointerOutput
    from regard.query.pointer import Pointed

    for task, ratio in (("hull", "area_ratio"), ("tour", "tour_ratio"), ("sort", None)):
        recipe = configured("points", {"task": task, **SMALL})
        assert isinstance(recipe, Points)
        examples = recipe.examples("test")
        right = iter(recipe.batches(examples))

        def answer(self: object, read: object, found: object, beam: int, right: object = right) -> Pointed:
            target = next(right).target  # type: ignore[call-overload]
            return Pointed(target, torch.zeros(len(target)))

        monkeypatch.setattr(PointerOutput, "generate", answer)
        metrics = recipe.judge(recipe.build().eval(), examples).metrics
        assert metrics == pytest.approx({"accuracy": 1.0, **({ratio: 1.0} if ratio else {})})


@pytest.mark.parametrize("attention", ["pointer", pytest.param("multi-head", marks=pytest.mark.slow)])
def test_a_short_training_sorts(tmp_path: Path, attention: str) -> None:
    small = {"size": 4, "hidden_dim": 32, "train_size": 2000, "test_size": 200, "steps": 200, "every": 100, "lr": 1e-2}
    run = assert_reaches(tmp_path, "points", "accuracy", 0.75, attention=attention, **small)
    task = run.recipe()
    assert task.judge(run.model(), [task.parse("0.9, 0.1, 0.5, 0.3")]).answers == [[1, 3, 2, 0]]


def test_a_beam_is_followed() -> None:
    task = configured("points", {"task": "tour", "beam": 3, "size": 5, **SMALL})
    judged = task.judge(task.build().eval(), task.examples("test"))
    assert judged.metrics["tour_ratio"] >= 1
    assert "beam=3" in judged.signatures["tour_ratio"]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="size: got 13, expected from 3 to 12 for the task 'tour'"):
        configured("points", {"task": "tour", "size": 13})
    with pytest.raises(ValueError, match=r"task: got 'tsp'"):
        configured("points", {"task": "tsp"})
    with pytest.raises(ValueError, match="data: got 'somewhere', expected nothing"):
        configured("points", {"data": "somewhere"})
    for text in ("", "0.1 0.2 0.3", "a b c d e f", "0 0 1 1"):
        with pytest.raises(ValueError, match="coordinates of three points"):
            configured("points", {"task": "hull"}).parse(text)


@pytest.mark.parametrize("attention", ["pointer", "multi-head"])
@pytest.mark.parametrize("task", TASKS)
def test_every_task_leaves_a_figure(tmp_path: Path, task: str, attention: str) -> None:
    found = run("points", out=tmp_path, progress=False, task=task, attention=attention, steps=1, **SMALL)
    assert "</svg>" in (found.folder / "attention.svg").read_text()


def test_edges_of_the_figure() -> None:
    weights = torch.tensor([[1.0, 0, 0, 0, 0], [0, 0.9, 0.01, 0.09, 0], [0, 0, 0.5, 0, 0.5], [0.3, 0, 0, 0.0, 0.7]])
    # The hull 0, 1, 2 of four points: from 0 and 1 to the next, and from 2 back to where it began.
    ends, heavy, gold = _pointed(weights, [0, 1, 2], 4)
    assert ends.T.tolist() == [[0, 1], [0, 3], [1, 2], [1, 0], [2, 0], [2, 0]]
    torch.testing.assert_close(heavy, torch.tensor([0.9, 0.09, 0.5, 0.5, 0.3, 0.7]))
    assert gold == [0, 2, 5]
    # A tour ends where no point is left; what is right is drawn however light it is.
    ends, heavy, gold = _pointed(torch.tensor([[1.0, 0, 0], [0, 0, 1.0], [0, 1.0, 0]]), [0, 1, 2], 3)
    assert (ends.T.tolist(), gold) == ([[0, 1], [0, 2], [1, 1], [1, 2]], [0, 3])
