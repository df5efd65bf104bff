"""What cannot run is refused before anything is written, and what was written wrongly is never taken for right."""

from __future__ import annotations

import gzip
import io
import json
import random
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("lightning")

from regard import catalog
from regard.cli import app
from regard.model import Example, collate
from regard.recipes.check import check
from regard.recipes.data import Folder
from regard.recipes.nodes.planetoid import _edges
from regard.recipes.recipe import Judged, Recipe, configured, recipe
from regard.recipes.runs import Run
from regard.recipes.sweep import CONFIG, sweep

SMALL = {"steps": 4, "every": 2, "train_size": 20, "test_size": 10, "hidden_dim": 8, "embedding_dim": 4, "batch": 8}
SETTINGS = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]


def invoke(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    return done.exit_code, done.output


@pytest.mark.parametrize("name", ["dates", "sentiment"])
def test_every_mechanism_fits_or_is_refused_by_name(name: str) -> None:
    settings = {"train_size": 6, "hidden_dim": 8, "embedding_dim": 8, **({"test_size": 3} if name == "dates" else {})}
    fits = 0
    for entry in catalog.entries():
        try:
            check(configured(name, {**settings, "attention": entry.name}))
            fits += 1
        except (ValueError, TypeError) as error:
            assert "got" in str(error) or "expected" in str(error), f"{entry.name}: {error}"  # noqa: PT017
    assert fits >= 15


def test_an_attention_that_does_not_fit_leaves_no_folder(tmp_path: Path) -> None:
    code, said = invoke("run", "dates", *SETTINGS, "--attention", "self-attention", "--out", tmp_path)
    assert code == 2
    assert "attention: got 'self-attention'" in said
    assert "Known to fit: additive" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1}, "lr: got -1.0, expected a number > 0"),
        ({"clip": "nan"}, "clip: got nan, expected a number > 0"),
        ({"steps": "inf"}, "steps: got inf, expected a value like"),
        ({"seed": -1}, "seed: got -1, expected a whole number from 0"),
        ({"train_size": 0}, "train_size: got 0, expected a whole number >= 1"),
        ({"precision": "bf16"}, "precision: got 'bf16', expected one of"),
        ({"attention": "aditive"}, "attention: got 'aditive'.*additive"),
        ({"attention": {"score": "dot"}}, "attention: got .*attention.score: …"),
        ({"options": [1]}, r"options: got \[1\], expected options of the attention by name"),
        ({"data": "somewhere"}, "data: got 'somewhere', expected nothing"),
        ({1: 2}, "1: got 2, expected a setting of 'dates'"),
        ({"options": {5: 5}}, "options: got 5 as a name, expected names of options"),
        ({"data": 5}, "data: got 5, expected a folder"),
        ({"limit": 0}, "limit: got 0, expected a whole number >= 1"),
        ({"limit": "2.5"}, "limit: got 2.5, expected a whole number >= 1"),
        ({"limit": "true"}, "limit: got True, expected a whole number >= 1"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[object, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configured("dates", settings)  # type: ignore[arg-type]


def test_a_resumed_run_takes_no_other_settings(tmp_path: Path) -> None:
    run = Run.begin(configured("dates", SMALL), tmp_path)
    for more in (("--seed", "9"), ("--set", "steps=7"), ("--attention", "dot")):
        code, said = invoke("run", "--resume", run.folder, *more)
        assert code == 2
        assert "resume: got settings beside it" in said


def test_a_configuration_may_name_its_recipe(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(configured("dates", SMALL).as_dict()))
    code, said = invoke("run", "sentiment", "--config", path, "--out", tmp_path / "runs")
    assert code == 2
    assert "got 'sentiment' beside a configuration of 'dates'" in said
    code, said = invoke("run", "--config", path, "--out", tmp_path / "runs", "--json")
    assert code == 0, said
    assert json.loads(said.splitlines()[-1])["recipe"] == "dates"
    path.write_text("a: [1")
    code, said = invoke("run", "dates", "--config", path)
    assert code == 2
    assert "line 1" in said


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path) -> None:
    settings = ["--set", "steps=100000", "--set", "every=5", "--set", "patience=100000"]
    command = [sys.executable, "-m", "regard", "run", "dates", *SETTINGS, *settings, "--out", str(tmp_path)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # What runs in the background of a shell ignores interruptions, and hands that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*/state.ckpt")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert f"regard run --resume {next(tmp_path.iterdir())}" in said


def test_a_killed_sweep_takes_its_runs_along(tmp_path: Path) -> None:
    settings = ["--set", "steps=100000", "--set", "every=5", "--set", "patience=100000"]
    command = [
        sys.executable,
        "-m",
        "regard",
        "sweep",
        "dates",
        *SETTINGS,
        *settings,
        "--over",
        "seed=1",
        "--out",
        str(tmp_path),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*/*/state.ckpt")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    (state,) = tmp_path.glob("*/*/state.ckpt")
    time.sleep(2.0)
    before = state.stat().st_mtime_ns
    time.sleep(2.0)
    assert state.stat().st_mtime_ns == before, "nobody trains any more"


def test_a_folder_that_a_killed_sweep_left_empty_is_filled(tmp_path: Path) -> None:
    settings = {**SMALL, "steps": 2}
    (point,) = sweep("dates", {"seed": [3]}, settings, out=tmp_path)
    (point.folder / "metrics.json").unlink()
    (point.folder / CONFIG).unlink()
    (again,) = sweep("dates", {"seed": [3]}, settings, out=tmp_path)
    assert again.metrics == point.metrics
    other = sweep("dates", {"seed": [3]}, {**settings, "precision": "bf16-mixed"}, out=tmp_path)
    assert other[0].folder.parent != point.folder.parent, "another precision is another sweep"


def archive(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as file:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def test_a_damaged_archive_is_never_read_as_another(tmp_path: Path) -> None:
    members = {f"folder/{k}.txt": random.Random(k).randbytes(700) for k in range(6)}
    plain = archive(members)
    whole = gzip.compress(plain)
    (tmp_path / "some.tar.gz").write_bytes(whole)
    assert Folder(tmp_path).members("some.tar.gz") == members
    draw = random.Random(0)
    for _ in range(150):
        place = draw.randrange(len(whole))
        (tmp_path / "some.tar.gz").write_bytes(
            whole[:place] + bytes([whole[place] ^ (1 << draw.randrange(8))]) + whole[place + 1 :]
        )
        try:
            # What the header of a packed file says besides, such as its time, may change.
            assert Folder(tmp_path).members("some.tar.gz") == members
        except ValueError as error:
            assert "expected a whole" in str(error)  # noqa: PT017
    for length in range(0, len(plain) - 10240, 512):
        (tmp_path / "cut.tar").write_bytes(plain[:length])
        with pytest.raises(ValueError, match="expected a whole archive"):
            Folder(tmp_path).members("cut.tar")


def test_a_small_pickle_cannot_take_forever() -> None:
    nested: object = (0,)
    for _ in range(60):
        nested = (nested, nested)
    for other in (nested, [1], True, 7, -1):
        with pytest.raises(ValueError, match="graph with other nodes"):
            _edges({0: [other]}, 5, "some file")


def test_examples_that_are_not_alike_are_not_put_together() -> None:
    row, target = torch.arange(3), torch.tensor(1)
    for first, second, message in (
        (Example({"x": row}), Example({"x": row}, target), "some with a target"),
        (Example({"x": row}), Example({"x": row, "y": row}), "inputs x, y beside x"),
        (Example({"x": row}), Example({"x": row.float()[:2]}), "one dtype"),
        (Example({"x": row}), Example({"x": row}, variables={"v": row}), "variables v beside none"),
        (Example({"x": row}), Example({"x": row}, masks={"x": row[:2] > 0}), r"a mask 'x' of shape \(2,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            collate([first, second])


def test_one_broken_run_does_not_hide_the_others(tmp_path: Path) -> None:
    good, bad, worse = (Run.begin(configured("dates", SMALL), tmp_path) for _ in range(3))
    (bad.folder / "metrics.json").write_text('{"exact')
    (worse.folder / CONFIG).write_text("[" * 100_000)
    code, said = invoke("runs", "--out", tmp_path, "--json")
    assert code == 0
    found = {Path(row["run"]).name: row for row in json.loads(said)}
    assert "problem" not in found[good.folder.name]
    assert all("problem" in found[run.folder.name] for run in (bad, worse))
    code, said = invoke("runs", "--out", tmp_path / "nowhere")
    assert code == 2


def test_recipes_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_recipe.py").write_text(
        "from dataclasses import dataclass\n"
        "from regard.recipes.dates import Dates\n"
        "@dataclass(kw_only=True)\n"
        "class Mine(Dates):\n"
        "    name = 'mine'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = recipe("own_recipe:Mine")
    assert mine.path() == "own_recipe:Mine"
    run = Run.begin(configured("own_recipe:Mine", SMALL), tmp_path / "runs")
    assert type(run.recipe()) is mine
    with pytest.raises(ValueError, match=r"recipe: got 'own_recipe:Yours'"):
        recipe("own_recipe:Yours")
    with pytest.raises(ValueError, match=r"expected a subclass of Recipe"):
        recipe("own_recipe:dataclass")


OWN = """
from dataclasses import dataclass
from regard.recipes.dates import Dates
@dataclass(kw_only=True)
class Mine(Dates):
    name = "mine"
"""


def test_a_module_of_the_working_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "my_dates.py").write_text(OWN)
    script = Path(sys.executable).with_name("regard")

    def regard(*arguments: str) -> str:
        command = [str(script), *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert "attentions that fit: additive" in regard("recipes", "my_dates:Mine")
    swept = json.loads(regard("sweep", "my_dates:Mine", *SETTINGS, "--over", "seed=1", "--json"))
    (point,) = swept["runs"]
    assert point["problem"] is None
    # As if it had been interrupted at the end.
    (tmp_path / point["run"] / "metrics.json").unlink()
    again = json.loads(regard("run", "--resume", point["run"], "--json"))
    assert (again["recipe"], again["metrics"]) == ("my_dates:Mine", point["metrics"])
    assert json.loads(regard("evaluate", point["run"], "--json"))["metrics"] == point["metrics"]


@pytest.mark.parametrize("name", ["../x:y", "my module:y", ":y"])
def test_a_path_is_no_module(name: str) -> None:
    with pytest.raises(ValueError, match=r"recipe: got .*expected a module, in dots and without a path"):
        recipe(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe: 5", "recipe: got 5, expected a name"),
        ("recipe: [dates]", "recipe: got ['dates'], expected a name"),
        (f"steps: {'9' * 5000}", "5000 digits"),
        ("[" * 50_000, "which is nested too deeply, expected settings by name"),
    ],
    ids=["a number", "a list", "digits", "nested"],
)
def test_a_file_that_holds_no_settings_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "some.yaml").write_text(text)
    code, said = invoke("run", "--config", tmp_path / "some.yaml", "--out", tmp_path / "runs")
    assert code == 2
    assert message in said


def reviews(folder: Path, count: int = 30) -> Path:
    """A data set of `sentiment`, sorted by class."""
    for split in ("train", "dev", "test"):
        lines = [f"{int(k >= count // 2)} {split} {k}" for k in range(count)]
        (folder / f"sst2.{split}").write_text("\n".join(lines))
    return folder


def test_a_limit_draws_the_same_examples_for_every_seed(tmp_path: Path) -> None:
    settings = {"data": str(reviews(tmp_path)), "limit": 10}
    first, second = (configured("sentiment", {**settings, "seed": seed}) for seed in (0, 1))
    for split in ("train", "validation", "test"):
        chosen = [example.words["tokens"][1] for example in first.cached(split)]
        assert chosen == [example.words["tokens"][1] for example in second.cached(split)]
        assert len(set(chosen)) == 10
        assert chosen == sorted(chosen, key=int)
        assert {int(example.target) for example in first.cached(split)} == {0, 1}
    assert len(configured("sentiment", {**settings, "limit": "40"}).cached("test")) == 30
    assert len(configured("dates", {**SMALL, "limit": 1}).cached("train")) == 1


def test_candidates_that_are_ranked_together_stay_together() -> None:
    task = configured("pairs", {"data": "somewhere", "set": "wikiqa", "limit": 5})
    assert list(task.drawn("test", 12)) == [0, 1, 2, 3, 4]
    assert list(configured("pairs", {"limit": 5}).drawn("test", 12)) != [0, 1, 2, 3, 4]


def test_sizes_of_made_up_data_are_refused_beside_data(tmp_path: Path) -> None:
    data = reviews(tmp_path)
    for command in (("run", "sentiment"), ("sweep", "sentiment", "--over", "seed=1")):
        code, said = invoke(*command, "--data", data, "--set", "train_size=20", "--out", tmp_path / "runs")
        assert code == 2
        assert "train_size: got 20, expected nothing beside data" in said
        assert "limit=…" in said
    assert not (tmp_path / "runs").exists()
    # A kept configuration has the default.
    check(configured("sentiment", {"data": str(data), "train_size": 1000, "hidden_dim": 8}))


def test_made_up_data_are_named_so(tmp_path: Path) -> None:
    labels = {
        ("sentiment", ()): "generated",
        ("sentiment", (("data", "here"), ("set", "sst5"))): "sst5",
        ("points", (("task", "hull"),)): "generated hull",
        ("facts", (("data", "here"), ("task", 2))): "2",
        ("digits", ()): "scikit-learn",
        ("translate", (("data", "here/multi30k"),)): "",
    }
    for (name, settings), label in labels.items():
        assert configured(name, dict(settings)).data_label == label
    Run.begin(configured("translate", {"data": "here/multi30k", "limit": 9}), tmp_path)
    assert json.loads(invoke("runs", "--out", tmp_path, "--json")[1])[0]["data"] == "multi30k, 9 at most"


def test_right_answers_are_numbers_where_answers_are() -> None:
    word = configured("duplicate", {"train_size": 3, "test_size": 3})
    for example in word.examples("test"):
        tokens = example.inputs["tokens"].tolist()
        right = word.right_answer(example)
        assert right == tokens[1 : 1 + len(right)]
    hull = configured("points", {"task": "hull", "train_size": 3, "test_size": 3})
    for example in hull.examples("test"):
        named = [example.words["tokens"][k] for k in hull.right_answer(example)]
        assert [*named, "stop"] == list(example.words["target"])


def test_data_without_examples_are_refused(tmp_path: Path) -> None:
    data = reviews(tmp_path)
    settings = ("steps=2", "every=2", "hidden_dim=8", "embedding_dim=4", "limit=8")
    arguments = [f"--set={setting}" for setting in settings]
    code, said = invoke("run", "sentiment", "--data", data, *arguments, "--out", tmp_path / "runs", "--json")
    assert code == 0, said
    run = json.loads(said.splitlines()[-1])["run"]
    assert json.loads(invoke("evaluate", run, "--json")[1])["metrics"] == Run.at(run).metrics()
    (tmp_path / "sst2.test").write_text("")
    code, said = invoke("evaluate", run, "--data", data)
    assert (code, said) == (2, "regard: data: got no examples of test, expected at least one.\n")


@pytest.mark.parametrize(
    ("name", "attention", "message"),
    [
        ("sentiment", "gat", "got 'gat', which asks for 'edge_index', expected one that fits the recipe 'sentiment', "),
        ("sentiment", "rotatory", "which asks for 'target', "),
        ("sentiment", "constant-query", "expected a mechanism that reads. "),
        ("sentiment", "soft-ish", "expected a name that `regard list` shows. "),
        ("sentiment", "aditive", "Did you mean 'additive'"),
        ("dates", "self-attention", "which fails with "),
    ],
)
def test_an_attention_that_does_not_fit_is_answered_with_those_that_do(name: str, attention: str, message: str) -> None:
    settings = {"train_size": 6, "hidden_dim": 8, "embedding_dim": 8, "attention": attention}
    with pytest.raises((ValueError, TypeError)) as refused:
        check(configured(name, settings))
    said = str(refused.value)
    assert message in said
    assert said.count(f"Known to fit: {', '.join(recipe(name).alternatives)}.") == 1
    assert "On(module" not in said


def test_a_sweep_says_which_attentions_fit(tmp_path: Path) -> None:
    code, said = invoke("sweep", "sentiment", "--over", "attention=additive,foo", "--out", tmp_path)
    assert (code, "attention: got 'foo'" in said, "Known to fit: additive, query-free" in said) == (2, True, True)
    settings = {key: value for key, value in SMALL.items() if key != "test_size"}
    (point,) = sweep("sentiment", {"attention": ["gat"]}, settings, out=tmp_path)
    assert "Known to fit: additive, query-free" in (point.problem or "")


@pytest.mark.parametrize(
    ("name", "settings", "written"),
    [
        ("sentiment", {"train_size": 9}, "negative|positive"),
        ("dates", {"test_size": 3}, r"\d{4}-\d\d-\d\d"),
        ("pairs", {"train_size": 9}, "entailment|neutral|contradiction"),
        ("translate", {"train_size": 9}, r"[a-z ]+\."),
        ("speech", {"test_size": 3, "unit": "phone"}, "[a-z]+( [a-z]+)*"),
        ("recommend", {"train_size": 9}, r"\d+\.\d+"),
    ],
)
def test_right_answers_are_written_as_answers_are(name: str, settings: dict[str, object], written: str) -> None:
    task = configured(name, settings)
    for example in task.examples("test")[:3]:
        assert re.fullmatch(written, task.right_answer(example))
        if name != "sentiment":
            assert "end" not in task.right_answer(example).split()


def test_recipes_and_their_settings_are_listed() -> None:
    code, said = invoke("recipes")
    assert code == 0
    assert "translate" in said
    code, said = invoke("recipes", "sentiment", "--json")
    settings = {row["name"]: row for row in json.loads(said)["settings"]}
    assert settings["steps"]["default"] == 600
    assert settings["steps"]["others"] == [{"value": 300, "data": False, "attentions": []}]
    assert settings["batch"]["others"] == []
    code, said = invoke("recipes", "sentiment")
    assert "hidden_dim=128\twidth of the features. (64 without --data)" in said
    code, said = invoke("recipes", "translate")
    assert "(0.005 without --data; 0.002 without --data by transformer)" in said
    assert "(3 with --data by transformer)" in said
    assert all(row["about"] for row in settings.values()), [name for name, row in settings.items() if not row["about"]]


def test_scores_are_numbers_in_a_judgement() -> None:
    from regard.evaluate.outer import accuracy

    assert Judged({"accuracy": accuracy([1, 0], [1, 1])}, []).metrics == {"accuracy": 0.5}  # type: ignore[dict-item]
    assert issubclass(recipe("dates"), Recipe)
