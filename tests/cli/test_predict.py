"""`regard predict`: probabilities beside classes, lines that stay where they are, and files that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("lightning")

from regard.cli import app
from regard.recipes import run

WORDS = {"steps": 4, "every": 2, "train_size": 40, "hidden_dim": 8, "embedding_dim": 8, "batch": 8}


def predict(*arguments: object, text: str | bytes | None = None) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["predict", *map(str, arguments)], input=text)
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def sentiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run("sentiment", out=tmp_path_factory.mktemp("runs"), progress=False, **WORDS).folder


def test_classes_have_their_probabilities(sentiment: Path) -> None:
    code, stdout, _ = predict(sentiment, "a dull story", "a fine one", "--json")
    assert code == 0
    for line, text in zip(stdout.splitlines(), ["a dull story", "a fine one"], strict=True):
        told = json.loads(line)
        assert (told["input"], "line" in told) == (text, False)
        assert set(told["probabilities"]) == {"positive", "negative"}
        assert sum(told["probabilities"].values()) == pytest.approx(1.0)
        assert next(iter(told["probabilities"])) == told["answer"]
        assert told["probabilities"][told["answer"]] >= 0.5
    code, plain, _ = predict(sentiment, "a fine one")
    answer, probability = plain.rstrip("\n").split("\t")
    assert (answer, float(probability)) == (told["answer"], pytest.approx(told["probabilities"][answer], abs=1e-4))


@pytest.mark.parametrize("attention", ["capsule-based-attention", "hard"])
def test_whatever_tells_the_classes_apart(attention: str, tmp_path: Path) -> None:
    done = run("sentiment", out=tmp_path, progress=False, attention=attention, **WORDS)
    told = json.loads(predict(done.folder, "a fine one", "--json")[1])
    assert told["probabilities"][told["answer"]] == max(told["probabilities"].values())
    assert all(0 <= p <= 1 for p in told["probabilities"].values())


def test_an_empty_line_is_skipped_and_counted(sentiment: Path) -> None:
    text = "a dull story\n\n   \r\na fine one\r\n"
    code, stdout, _ = predict(sentiment, text=text)
    lines = stdout.split("\n")
    assert (code, len(lines), lines[1:3]) == (0, 5, ["", ""])
    assert lines[0]
    assert lines[3]
    code, stdout, _ = predict(sentiment, "--json", text=text)
    told = [json.loads(line) for line in stdout.splitlines()]
    assert [(each["line"], each["input"]) for each in told] == [(1, "a dull story"), (4, "a fine one")]
    # An argument that is empty was meant.
    assert predict(sentiment, "")[0] == 2


def test_a_line_that_cannot_be_read_is_named(sentiment: Path, tmp_path: Path) -> None:
    code, stdout, stderr = predict(sentiment, text=b"a fine one\n\xff\xfe\n")
    assert code == 2
    assert [bool(line) for line in stdout.splitlines()] == [True, False]
    assert "line 2: '\\\\xff\\\\xfe': text: got" in stderr
    assert "expected UTF-8" in stderr
    digits = run("digits", out=tmp_path, progress=False, steps=2, every=2, attention="additive").folder
    for path, said in (("nowhere.png", "no such file"), (tmp_path, "no such file"), ("x" * 5000, "file name too long")):
        code, _, stderr = predict(digits, text=f"\n{path}\n")
        assert code == 2
        assert "line 2: " in stderr
        assert f"{said}, expected the path of a PNG or JPEG picture" in stderr
    picture = tmp_path / "broken.png"
    picture.write_bytes(b"no picture")
    code, _, stderr = predict(digits, picture)
    assert (code, "expected a PNG or JPEG picture" in stderr) == (2, True)


def test_one_input_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    small = {**WORDS, "test_size": 5}
    dates = run("dates", out=tmp_path, progress=False, **small).folder
    texts = ["3 May 1998", "3 Mär 1998", "June 1, 2001"]
    for arguments, text, number in ((texts, None, "input 2"), ([], "\n".join(texts), "line 2")):
        code, stdout, stderr = predict(dates, *arguments, text=text)
        assert code == 2
        assert [bool(line) for line in stdout.split("\n")] == [True, False, True, False]
        assert stderr.startswith(f"regard: {number}: text: got '3 Mär 1998', with 'ä', expected")
        code, stdout, _ = predict(dates, *arguments, "--json", text=text)
        told = [json.loads(line) for line in stdout.splitlines()]
        assert code == 2
        assert [each["input"] for each in told] == texts
        assert [("answer" in each, "error" in each) for each in told] == [(True, False), (False, True), (True, False)]


def test_a_recipe_that_reads_no_text_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("from regard.recipes.dates import Dates, Recipe", "class Silent(Dates):", "    name = 'silent'")
    (tmp_path / "silent.py").write_text("\n".join([*lines, "    parse = Recipe.parse"]))
    monkeypatch.syspath_prepend(str(tmp_path))
    silent = run("silent:Silent", out=tmp_path, progress=False, **WORDS, test_size=5).folder
    code, _, stderr = predict(silent, "some text")
    assert (code, "Fix: write Silent.parse(self, text)" in stderr) == (2, True)
