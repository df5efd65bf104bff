"""`regard run`, `runs`, `evaluate` and `predict`: from a name to a judged model, and what it answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("lightning")

from regard.cli import app

SMALL = ["steps=4", "every=2", "train_size=40", "test_size=11", "hidden_dim=16", "embedding_dim=8", "batch=8"]


def regard(*arguments: object, text: str | None = None) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    settings = [f"--set={setting}" for setting in SMALL]
    code, stdout, _ = regard("run", "dates", *settings, "--seed", 3, "--out", out, "--json")
    assert code == 0
    (line,) = stdout.splitlines()
    told = json.loads(line)
    assert (told["recipe"], told["seed"], told["steps"]) == ("dates", 3, 4)
    assert set(told["metrics"]) == {"exact_match", "aer"}
    return Path(told["run"])


def test_runs_are_listed(trained: Path) -> None:
    code, stdout, _ = regard("runs", "--out", trained.parent, "--json")
    assert code == 0
    (row,) = json.loads(stdout)
    assert row["run"] == str(trained)
    assert row["evaluations"] == 2
    assert (row["data"], row["seed"], row["steps"]) == ("generated", 3, 4)
    code, stdout, _ = regard("runs", "--out", trained.parent)
    assert stdout.split("\t")[1:6] == ["dates", "additive", "generated", "3", "4"]


def test_before_the_first_run_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert regard("runs") == (0, "", "regard: no runs yet in out/runs; regard run makes them\n")
        code, stdout, _ = regard("runs", "--json")
        assert (code, json.loads(stdout)) == (0, [])
        # Where the folder is there, and empty, nothing else is said.
        Path("out/runs").mkdir(parents=True, exist_ok=True)
    code, stdout, stderr = regard("runs", "--out", "out/other")
    assert (code, stdout) == (2, "")
    assert "out: got 'out/other', expected a folder of runs" in stderr


def test_a_run_is_evaluated_again(trained: Path) -> None:
    code, stdout, _ = regard("evaluate", trained, "--json")
    assert code == 0
    assert json.loads(stdout)["metrics"] == json.loads((trained / "metrics.json").read_text())
    assert regard("evaluate", trained, "--split", "tests")[0] == 2


def test_a_run_answers_lines(trained: Path) -> None:
    code, stdout, _ = regard("predict", trained, text="3 May 1998\nJune 1, 2001\n")
    assert code == 0
    assert len(stdout.splitlines()) == 2
    code, stdout, _ = regard("predict", trained, "3 May 1998", "--json")
    assert json.loads(stdout)["input"] == "3 May 1998"
    code, _, stderr = regard("predict", trained, "3 März 1998")
    assert code == 2
    assert "'ä'" in stderr


def test_the_last_line_says_where_everything_is(tmp_path: Path) -> None:
    settings = [f"--set={setting}" for setting in SMALL]
    code, stdout, _ = regard("run", "dates", "--attention", "sparsemax", *settings, "--out", tmp_path)
    assert code == 0
    folder = stdout.strip().splitlines()[-1].removeprefix("everything is in ").strip()
    assert json.loads((Path(folder) / "config.json").read_text())["attention"] == "sparsemax"


def test_what_goes_on_says_in_how_many_processes_and_since_when(tmp_path: Path) -> None:
    settings = [f"--set={setting}" for setting in (*SMALL, "limit=7")]
    code, stdout, stderr = regard("run", "dates", *settings, "--out", tmp_path)
    assert (code, "judging the examples of test: 7\n" in stderr) == (0, True)
    assert re.search(r"trained and judged in \d+ s\n", stdout)
    (run,) = tmp_path.iterdir()
    (run / "metrics.json").unlink()
    code, stdout, _ = regard("run", "--resume", run)
    assert stdout.startswith(f"going on in 1 process: {run}\n")
    assert re.search(r"trained and judged in \d+ s, since it went on\n", stdout)
    (run / "metrics.json").unlink()
    code, stdout, stderr = regard("run", "--resume", run, "--json")
    assert (code, len(stdout.splitlines()), stderr) == (0, 1, "")


def test_settings_come_from_a_file(tmp_path: Path) -> None:
    config = tmp_path / "small.yaml"
    config.write_text("\n".join(setting.replace("=", ": ") for setting in SMALL) + "\nattention: general\nlr: 1.0e-3\n")
    code, stdout, _ = regard("run", "dates", "--config", config, "--set", "steps=2", "--out", tmp_path, "--json")
    assert code == 0
    told = json.loads(stdout)
    assert (told["attention"], told["steps"], told["lr"]) == ("general", 2, 1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dates", "--attention", "aditive"], "additive"),
        (["dates", "--set", "attention.score=nothing"], "attention.score"),
        (["dates", "--set", "steps"], "key=value"),
        (["dates", "--set", "stepz=3"], "steps"),
        (["date"], "dates"),
        ([], "recipe: got none"),
        (["--resume", "nowhere"], "a run folder"),
        (["dates", "--config", "nowhere.yaml"], "config: got nowhere.yaml"),
        (["dates", "--strategy", "dpd"], "strategy: got 'dpd'"),
        (["dates", "--devices", "0"], "devices: got 0"),
    ],
)
def test_wrong_usage_is_refused_and_leaves_nothing(arguments: list[str], message: str, tmp_path: Path) -> None:
    code, _, stderr = regard("run", *arguments, "--out", tmp_path / "out")
    assert code == 2
    assert message in stderr
    assert not (tmp_path / "out").exists()


def test_an_out_that_is_no_folder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, stderr = regard("run", "dates", *[f"--set={setting}" for setting in SMALL], "--out", tmp_path / "file")
    assert code == 2
    assert "out: got" in stderr
    assert "expected a folder to write into" in stderr
