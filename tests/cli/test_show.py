"""`regard show`, inside this process."""

import json

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from regard import catalog
from regard.cli import app
from regard.cli._example import program


def invoke(*arguments):
    result = CliRunner().invoke(app, ["show", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("name", [entry.name for entry in catalog.entries()])
def test_everything_in_the_catalog_can_be_shown(name):
    entry = catalog.find(name)
    text = invoke(name)
    for fact in (entry.name, entry.zh, entry.path, entry.equation, entry.paper, entry.time, entry.choose, entry.avoid):
        assert fact in text
    assert f"regard.{entry.cls.__name__}(" in text
    # Every program is run in tests/docs/test_pages.py, from the page of its mechanism.
    assert text.endswith(f"\n\n{program(entry)}\n")


@pytest.mark.parametrize("spelling", ["scaled-dot", "ScaledDot", "scaled dot", "SCALED_DOT", "缩放点积评分"])
def test_spellings_of_one_name(spelling):
    assert json.loads(invoke(spelling, "--json"))["name"] == "scaled-dot"


def test_json_is_the_object_of_the_list():
    assert json.loads(invoke("additive", "--json")) == catalog.find("additive").as_dict()


def test_the_constructor_shows_what_makes_this_entry_of_its_class():
    assert "position='predictive'" in invoke("local-predictive")
    assert "position='monotonic'" in invoke("local-monotonic")
    assert "regard.Additive(query_dim, key_dim, hidden_dim, activation='tanh'" in invoke("additive")
    assert "impl='auto', **options)" in invoke("attention")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("local-predictive", '"local-predictive"'),
        ("multi-dimensional", "features="),
        ("multi-hop-variants", 'transform="attention"'),
        ("feature-update", 'update="residual"'),
        ("gat", 'score="gat"'),
    ],
)
def test_the_example_is_of_this_entry_and_runs_as_it_stands(name, shown):
    text = invoke(name).partition("\n\n")[2]
    assert shown in text
    exec(text, {})


def test_labels_and_place_are_translated():
    text = invoke("rotatory", "--lang", "zh")
    assert text.startswith("名称\t旋转注意力 · rotatory\n类别\t特征/数量\n")
    # What is not translated is said to be so.
    entry = catalog.find("rotatory")
    assert entry.choose in text
    parameters = {p.name: p for p in get_command(app).commands["show"].params}
    assert "what is said of a mechanism is English" in parameters["lang"].help


def test_an_argument_that_goes_by_name_is_shown_by_name():
    result = CliRunner().invoke(app, ["show", "transformer-xl"])
    assert "memory=…" in result.stdout


@pytest.mark.parametrize("name", ["gatv2", "GATv2"])
def test_a_mechanism_is_found_by_the_name_that_its_score_goes_by(name):
    assert invoke(name) == invoke("graph-attention")
    assert invoke("gat") != invoke("graph-attention")
