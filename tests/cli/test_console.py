"""The command line as users meet it: the installed script, in a process of its own."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import regard
from regard.bench import QUESTIONS

SCRIPT = Path(sys.executable).with_name("regard")


def run(*arguments, timeout=120):
    return subprocess.run([str(SCRIPT), *arguments], capture_output=True, encoding="utf-8", timeout=timeout)


def test_version():
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, f"regard {regard.__version__}\n")


def test_python_dash_m_is_the_same_program():
    module = subprocess.run([sys.executable, "-m", "regard", "--version"], capture_output=True, encoding="utf-8")
    assert module.stdout == run("--version").stdout


def test_help_names_every_verb_and_loads_no_torch():
    code = "import sys, regard.cli; print('torch' in sys.modules, 'rich' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], encoding="utf-8").split() == ["False", "False"]
    result = run("--help")
    assert result.returncode == 0
    verbs = re.findall(r"^  (\w+) ", result.stdout.partition("Commands:")[2], re.MULTILINE)
    assert {"list", "show"} <= set(verbs)
    for verb in verbs:
        assert run(verb, "--help").returncode == 0


def test_help_of_bench_names_every_benchmark_and_loads_no_torch():
    code = "import sys, regard.cli.bench; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], encoding="utf-8").split() == ["False"]
    said = "".join(run("bench", "--help").stdout.split())
    for name in QUESTIONS:
        # Long lines are broken anywhere.
        assert f"{name}," in said or f"{name}." in said


def test_help_answers_in_less_than_three_tenths_of_a_second():
    """Of the processor's time, and at best: other processes may hold the cores for a while."""

    def once():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    assert min(once() for _ in range(8)) < 0.3


def test_list_through_a_pipe_is_one_line_a_mechanism():
    result = run("list")
    assert result.returncode == 0, result.stderr
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    entries = list(regard.catalog.entries())
    assert [line[0] for line in lines] == [entry.name for entry in entries]
    assert {len(line) for line in lines} == {5}
    assert "\x1b" not in result.stdout


def test_list_json_has_exactly_these_fields():
    result = run("list", "--json")
    listed = json.loads(result.stdout)
    fields = {"name", "zh", "path", "equation", "paper", "year", "time", "memory", "choose", "avoid", "class"}
    assert isinstance(listed, list)
    assert all(set(item) == fields for item in listed)
    assert [item["name"] for item in listed] == [entry.name for entry in regard.catalog.entries()]
    additive = next(item for item in listed if item["name"] == "additive")
    assert (additive["zh"], additive["class"], additive["year"]) == ("加性评分", "Additive", 2015)
    assert all(isinstance(item["year"], int) for item in listed)


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (("show", "aditive", "--json"), "Did you mean 'additive'"),
        (("show", "加性"), "Did you mean '加性评分'"),
        (("list", "--category", "scoring"), "Did you mean 'general/scoring'"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(arguments, suggestion):
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert suggestion in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_verb_or_option_is_a_usage_error():
    for arguments in (("lisst",), ("list", "--lang", "fr"), ("show",)):
        result = run(*arguments)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr
        assert result.stderr


def test_a_reader_that_leaves_early_is_no_error_to_look_at():
    command = f"{SCRIPT} list --json | head -c 10"
    result = subprocess.run(["bash", "-c", command], capture_output=True, encoding="utf-8")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", ["list", "list --json", "show additive", "--help"])
@pytest.mark.parametrize(
    ("target", "reason"),
    [(">&-", "stdout is closed"), (">/dev/full", "No space left on device")],
    ids=["closed", "full"],
)
def test_nowhere_to_write_is_said_in_one_line(arguments, target, reason):
    result = subprocess.run(["bash", "-c", f"{SCRIPT} {arguments} {target}"], capture_output=True, encoding="utf-8")
    assert result.returncode == 1
    assert result.stderr.startswith("regard: ")
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1
