"""Sweeps: all combinations, on processes or on Ray, and what was done is not done again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")

from regard.recipes.recipe import configured
from regard.recipes.runs import METRICS, STATE, WEIGHTS, Run
from regard.recipes.sweep import SWEEP, Point, grid, means, store_means, sweep

SMALL = {"steps": 4, "every": 2, "train_size": 20, "test_size": 10, "hidden_dim": 8, "embedding_dim": 4, "batch": 8}


def test_all_combinations() -> None:
    assert grid({"a": [1, 2], "b": ["x", "y"]}) == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]
    with pytest.raises(ValueError, match=r"over: got seed=, expected values that differ"):
        grid({"seed": []})
    with pytest.raises(ValueError, match=r"over: got seed=1,1, expected values that differ"):
        grid({"seed": [1, "1"]})


def test_means_over_seeds(tmp_path: Path) -> None:
    values = {("dot", 0): 0.5, ("dot", 1): 0.7, ("general", 0): 0.2}
    points = [
        Point({"attention": name, "seed": seed}, tmp_path, {"accuracy": value})
        for (name, seed), value in values.items()
    ]
    broken = Point({"attention": "general", "seed": 1}, tmp_path, None, "it broke")
    dot, general = means([*points, broken])
    assert dot["attention"] == "dot"
    assert dot["runs"] == 2
    assert dot["accuracy"] == pytest.approx(0.6)
    assert dot["accuracy_sd"] == pytest.approx(0.02**0.5)
    assert general == {"attention": "general", "runs": 1, "accuracy": 0.2, "accuracy_sd": None}


def test_a_sweep_runs_what_is_missing_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    over = {"attention": ["dot", "general"]}
    arguments = ["--over", "attention=dot,general", *(f"--set={key}={value}" for key, value in SMALL.items())]
    command = [
        sys.executable,
        "-m",
        "regard",
        "sweep",
        "dates",
        *arguments,
        "--workers",
        "2",
        "--out",
        tmp_path,
        "--json",
    ]
    done = json.loads(subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout)
    folder = Path(done["sweep"])
    assert [run["attention"] for run in done["runs"]] == ["dot", "general"]
    assert all(run["problem"] is None for run in done["runs"])
    assert json.loads((folder / SWEEP).read_text())["means"] == done["means"]
    # One run is as if it had been killed, and its state is foreign: it fails, and the other one is only read.
    (folder / "attention=dot" / METRICS).unlink()
    (folder / "attention=dot" / STATE).write_bytes(b"no state")
    weights = folder / "attention=general" / WEIGHTS
    before = weights.stat().st_mtime_ns
    told: list[Point] = []
    dot, general = sweep("dates", over, SMALL, out=tmp_path, told=told.append)
    assert len(told) == 2
    assert dot.metrics is None
    assert "resume: got" in (dot.problem or "")
    assert general.metrics == done["runs"][1]["metrics"]
    assert weights.stat().st_mtime_ns == before
    # Without that state it trains again, to the same result.
    (folder / "attention=dot" / STATE).unlink()
    dot, _ = sweep("dates", over, SMALL, out=tmp_path)
    assert dot.metrics == done["runs"][0]["metrics"]


def test_a_sweep_is_checked_before_its_first_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"stepz: got .*steps"):
        sweep("dates", {"stepz": [1, 2]}, out=tmp_path)
    with pytest.raises(ValueError, match=r"engine: got 'slurm', expected one of local, ray"):
        sweep("dates", {"seed": [1, 2]}, out=tmp_path, engine="slurm")
    with pytest.raises(ValueError, match=r"workers: got 0"):
        sweep("dates", {"seed": [1, 2]}, out=tmp_path, workers=0)
    assert not list(tmp_path.iterdir())


def test_stored_means_say_that_the_data_were_made_up(tmp_path: Path) -> None:
    point = Point({"seed": 0}, tmp_path / "run", {"accuracy": 0.5})
    for settings, case in (
        ({}, "sentiment generated"),
        ({"data": "here"}, "sentiment sst2"),
        ({"data": "here", "limit": 5}, "sentiment sst2 limit=5"),
    ):
        Run.begin_at(configured("sentiment", settings), point.folder, exist_ok=True)
        store_means("sentiment", [point], tmp_path / "some.jsonl", "regard sweep")
        assert json.loads((tmp_path / "some.jsonl").read_text().splitlines()[-1])["case"] == case


def test_ray_comes_to_the_same_results(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    over = {"seed": [0, 1]}
    by_ray = sweep("dates", over, SMALL, out=tmp_path, workers=2, engine="ray")
    assert [point.problem for point in by_ray] == [None, None]
    for point in by_ray:
        alone = Run.begin(configured("dates", {**SMALL, **point.settings}), tmp_path / "alone")
        command = [sys.executable, "-m", "regard", "run", "--resume", str(alone.folder), "--json"]
        subprocess.run(command, capture_output=True, check=True)
        assert point.metrics == alone.metrics()
