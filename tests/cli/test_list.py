"""`regard list`, inside this process."""

import pytest
from typer.testing import CliRunner

from regard import catalog
from regard.cli import _output, app


def invoke(*arguments):
    result = CliRunner().invoke(app, ["list", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def terminal(monkeypatch):
    """Let the verbs believe in a terminal 200 columns wide."""

    class Terminal:
        def isatty(self):
            return True

    class Sys:
        stdout = Terminal()

    monkeypatch.setattr(_output, "sys", Sys)
    monkeypatch.setenv("COLUMNS", "200")


def test_a_category_holds_what_is_under_it_and_nothing_else():
    listed = {line.split("\t")[0] for line in invoke("--category", "general/alignment").splitlines()}
    assert listed == {entry.name for entry in catalog.entries() if entry.path == "general/alignment"}
    parents = {line.split("\t")[0] for line in invoke("--category", "general").splitlines()}
    assert listed < parents


def test_chinese_names_come_first_and_places_are_translated():
    first = invoke("--lang", "zh", "--category", "general/scoring").splitlines()[0].split("\t")
    entry = next(iter(catalog.entries("general/scoring")))
    assert first[:3] == [entry.zh, entry.name, "通用/评分"]


def test_every_part_of_every_place_has_a_chinese_name():
    parts = {part for entry in catalog.entries() for part in entry.path.split("/")}
    assert parts <= set(_output.PLACES_ZH)


def test_a_terminal_gets_a_table_with_a_heading(terminal):
    lines = invoke().splitlines()
    assert list(lines[1].split()) == ["name", "place", "equation", "year"]
    for entry in catalog.entries():
        assert any(line.split()[:1] == [entry.name] and entry.equation[:20] in line for line in lines)


def test_brackets_in_equations_are_not_taken_for_markup(terminal):
    assert "a_j = 1[j = m]" in invoke("--category", "general/alignment")
