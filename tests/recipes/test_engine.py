"""The engine: a run is what its folder says, and a killed one resumes to the same result."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

pytest.importorskip("lightning")

from regard.cli import app
from regard.recipes.engine import _kept, _Training, finish, train
from regard.recipes.recipe import configured
from regard.recipes.runs import CURVE, KNOWN, METRICS, STATE, WEIGHTS, Run, runs

SMALL = {"steps": 12, "every": 4, "train_size": 60, "test_size": 20, "hidden_dim": 16, "embedding_dim": 8, "batch": 8}


def small_run(out: Path, **settings: object) -> Run:
    task = configured("dates", {**SMALL, **settings})
    run = Run.begin(task, out)
    train(task, run, progress=False)
    finish(task, run)
    return run


def test_a_run_folder_holds_everything(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    names = {path.name for path in run.folder.iterdir()}
    assert names == {
        *(
            "config.json",
            "known.json",
            "versions.json",
            "metrics.json",
            "curve.csv",
            "weights.safetensors",
            "state.ckpt",
        ),
        *("predictions.jsonl", "attention.safetensors", "attention.svg", "tensorboard"),
    }
    assert run.recipe().as_dict() == configured("dates", SMALL).as_dict()
    assert [row["update"] for row in run.curve()] == [4, 8, 12]
    assert set(run.metrics() or {}) == {"exact_match", "aer"}
    assert len((run.folder / "predictions.jsonl").read_text().splitlines()) == 20
    rows = [json.loads(line) for line in (run.folder / "predictions.jsonl").read_text().splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", row["target"]) for row in rows)
    assert [found.folder for found in runs(tmp_path)] == [run.folder]


def test_the_same_seed_gives_the_same_run_and_another_another(tmp_path: Path) -> None:
    first, again, other = small_run(tmp_path), small_run(tmp_path), small_run(tmp_path, seed=1)
    assert (first.folder / CURVE).read_text() == (again.folder / CURVE).read_text()
    assert (first.folder / CURVE).read_text() != (other.folder / CURVE).read_text()
    one, two = (load_file(run.folder / WEIGHTS) for run in (first, again))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_no_update_looks_at_its_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device would have to finish everything first: losses are looked at together, once in a while."""
    read: list[torch.dtype] = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point():
                read.append(args[0].dtype)
            return function(*args, **(kwargs or {}))

    advance = _Training._advance

    def watched(training: _Training) -> None:
        with Reads():
            advance(training)

    monkeypatch.setattr(_Training, "_advance", watched)
    # Adam reads the number of its steps, which is no tensor of a device.
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
    task = configured("sentiment", {"train_size": 40, "hidden_dim": 8, "batch": 8, "steps": 4, "every": 2})
    train(task, Run.begin(task, tmp_path), progress=False)
    assert not read


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "regard", "run", *map(str, arguments)]


def test_a_killed_run_resumes_to_the_result_of_an_unbroken_one(tmp_path: Path) -> None:
    settings = [f"--set={key}={value}" for key, value in {**SMALL, "attention.dropout": 0.2}.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole = subprocess.run(
        command("dates", *settings, "--out", tmp_path / "whole", "--json"),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = json.loads(whole.stdout.splitlines()[-1])
    process = subprocess.Popen(
        command("dates", *settings, "--out", tmp_path / "broken", "--json"), env=environment, stdout=subprocess.PIPE
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(f"broken/*/{STATE}")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (folder,) = (tmp_path / "broken").iterdir()
    assert not (folder / METRICS).exists(), "it was killed before its end"
    resumed = subprocess.run(
        command("--resume", folder, "--json"), env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(resumed.stdout.splitlines()[-1])["metrics"] == expected["metrics"]
    unbroken = Path(expected["run"])
    assert (folder / CURVE).read_text() == (unbroken / CURVE).read_text()
    one, two = load_file(folder / WEIGHTS), load_file(unbroken / WEIGHTS)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    before = (run.folder / STATE).stat().st_mtime_ns
    done = subprocess.run(command("--resume", run.folder, "--json"), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["metrics"] == run.metrics()
    assert (run.folder / STATE).stat().st_mtime_ns == before


def test_a_full_disk_is_said_and_leaves_what_was_there(tmp_path: Path) -> None:
    task = configured("dates", {**SMALL, "steps": 8})
    run = Run.begin(task, tmp_path)
    train(configured("dates", {**SMALL, "steps": 4}), run, progress=False)
    kept = torch.load(run.folder / STATE, weights_only=True)
    torch.save({**kept, "done": False}, run.folder / STATE)
    before = {path.name: path.read_bytes() for path in run.folder.iterdir() if path.is_file()}
    # Files may not grow beyond some kilobytes: what a full disk does, without filling one.
    limited = (
        "import resource, runpy, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "runpy.run_module('regard', run_name='__main__')\n"
    )
    command = [sys.executable, "-c", limited, "run", "--resume", str(run.folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "regard: " in done.stderr
    assert "could not be written" in done.stderr or "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    after = {path.name: path.read_bytes() for path in run.folder.iterdir() if path.is_file()}
    assert after[STATE] == before[STATE]
    # Those of an evaluation that was as good as the best one, of which the state does not know yet: it will come again.
    assert load_file(run.folder / WEIGHTS).keys() == kept["model"].keys()
    assert not [name for name in after if name.endswith(".tmp")]
    resumed = subprocess.run(command_of(run), capture_output=True, text=True, check=False)
    assert resumed.returncode == 0, resumed.stderr


def command_of(run: Run) -> list[str]:
    return command("--resume", run.folder, "--json")


def flipped(path: Path, x: torch.Tensor) -> bytes:
    """A file with one bit of a tensor changed."""
    content = bytearray(path.read_bytes())
    content[content.find(x.numpy().tobytes())] ^= 1
    return bytes(content)


@pytest.mark.parametrize("broken", ["truncated", "foreign", "empty", "flipped"])
def test_a_broken_state_is_refused_by_name(tmp_path: Path, broken: str) -> None:
    run = small_run(tmp_path)
    path = run.folder / STATE
    some = max(torch.load(path, weights_only=True)["model"].values(), key=torch.Tensor.numel)
    content = {"truncated": path.read_bytes()[:1000], "foreign": b"not a state", "empty": b""} | {
        "flipped": flipped(path, some)
    }
    content = content[broken]
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"resume: got .*state\.ckpt.*expected a state of this run.*delete"):
        train(run.recipe(), run, progress=False)


def test_broken_weights_are_refused_by_name(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    path = run.folder / WEIGHTS
    path.write_bytes(flipped(path, max(load_file(path).values(), key=torch.Tensor.numel)))
    with pytest.raises(ValueError, match=r"run: got .*weights\.safetensors: its bytes have changed"):
        run.model()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"since": "x"}, "expected a state of this run"),
        ({"update": 10**30}, "expected a state of this run"),
        ({"optimizer": {"state": 5, "param_groups": 5}}, "a state of another optimiser"),
        ({"optimizer": {"state": {0: 5}, "param_groups": []}}, "a state of another optimiser"),
    ],
)
def test_a_state_of_something_else_is_refused_by_name(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    run = small_run(tmp_path)
    state = torch.load(run.folder / STATE, weights_only=True)
    torch.save({**state, "done": False, **changed}, run.folder / STATE)
    with pytest.raises(ValueError, match=f"resume: .*{message}"):
        train(run.recipe(), run, progress=False)


def test_what_was_learnt_before_training_must_be_whole(tmp_path: Path) -> None:
    task = configured("sentiment", {"train_size": 40, "steps": 2, "every": 2, "hidden_dim": 8, "embedding_dim": 8})
    run = Run.begin(task, tmp_path)
    train(task, run, progress=False)
    state = torch.load(run.folder / STATE, weights_only=True)
    torch.save({**state, "done": False}, run.folder / STATE)
    (run.folder / KNOWN).write_text("{}")
    with pytest.raises(ValueError, match=r"resume: got .*known\.json: KeyError"):
        train(run.recipe(), run, progress=False)


@pytest.mark.parametrize("text", ['{"a": "b"}', "[1]", "[" * 100_000, "{"])
def test_metrics_of_something_else_are_refused_by_name(tmp_path: Path, text: str) -> None:
    run = Run.begin(configured("dates", SMALL), tmp_path)
    (run.folder / METRICS).write_text(text)
    with pytest.raises(ValueError, match=r"run: got .*metrics\.json"):
        run.metrics()
    listed = CliRunner().invoke(app, ["runs", "--out", str(tmp_path), "--json"])
    assert "metrics.json" in json.loads(listed.stdout)[0]["problem"]


def test_more_processes_than_examples_are_refused(tmp_path: Path) -> None:
    task = configured("dates", {**SMALL, "train_size": 1})
    with pytest.raises(ValueError, match="devices: got 2, expected at most as many as there are examples of train, 1"):
        train(task, Run.begin(task, tmp_path), devices=2, progress=False)


def test_a_flipped_bit_in_a_state_is_refused_or_harmless(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(1.0, 13.0)}, "optimizer": {}, "update": 7, "curve": [], "since": 0}
    path = tmp_path / STATE
    torch.save(state, path)
    whole = path.read_bytes()
    refused = 0
    for place in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            found = _kept(path)
        except ValueError as error:
            assert "expected a state of this run" in str(error)  # noqa: PT017
            refused += 1
            continue
        assert torch.equal(found.pop("model")["w"], state["model"]["w"]), f"bit {place % 8} of byte {place // 8}"
        assert found == {name: x for name, x in state.items() if name != "model"}
    assert refused > 4 * len(whole)


def test_a_state_cannot_run_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'owned'}",)

    run = small_run(tmp_path / "runs")
    torch.save({"state_dict": Evil()}, run.folder / STATE)
    with pytest.raises(ValueError, match="resume"):
        train(run.recipe(), run, progress=False)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stepz": 3}, r"stepz: got 3, expected a setting of 'dates'.*steps"),
        ({"steps": "many"}, r"steps: got 'many', expected a value like"),
        ({"steps": 0}, r"steps: got 0, expected a whole number >= 1"),
        ({"batch": 2.5}, r"batch: got 2\.5"),
        ({"lr": 1e38}, r"lr: got 1e\+38, expected a number > 0, at most 1e\+09"),
        ({"precision": "16-true"}, "precision: got '16-true', expected one of 32-true, .*16-mixed"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configured("dates", settings)


def test_unknown_recipes_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"recipe: got 'date'.*dates"):
        configured("date", {})
    with pytest.raises(ValueError, match=r"run: got .*expected a run folder"):
        Run.at(tmp_path)
    Run.begin(configured("dates", SMALL), tmp_path)
    (folder,) = tmp_path.iterdir()
    with pytest.raises(ValueError, match=r"has no weights\.safetensors"):
        Run.at(folder).model()
