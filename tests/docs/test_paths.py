"""The record paths that the guide promises are those that the mechanisms have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import regard as rg
from tests.contract.cases import CASES

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "observing.md"


def promised() -> dict[str, tuple[list[str], str]]:
    """Paths, and all that the row says, by the name of the class."""
    section = GUIDE.read_text(encoding="utf-8").partition("### Paths of the mechanisms")[2].partition("\n### ")[0]
    found = {}
    for row in re.findall(r"^\| `.*$", section, re.MULTILINE):
        names, paths, note = row.split("|")[1:4]
        for name in re.findall(r"`(\w+)`", names):
            found[name] = (re.findall(r"`([\w.]+)`", paths), paths + note)
    return found


ROWS = {name: row for name, row in promised().items() if row[0]}


def numberless(path: str) -> str:
    return re.sub(r"\.\d+", ".0", path)


@pytest.mark.parametrize("name", ROWS)
def test_paths_are_those_of_the_guide(name: str) -> None:
    paths, row = ROWS[name]
    said = {numberless(path) for path in re.findall(r"`([\w.]+)`", row)}
    seen: set[str] = set()
    cases = [case for case in CASES if rg.catalog.find(case.entry).cls.__name__ == name]
    assert cases
    for case in cases:
        module = case.build()
        with rg.record(module) as trace, torch.no_grad():
            case.run(module, case.inputs())
        assert {numberless(path) for path in trace} <= said
        seen |= {numberless(path) for path in trace}
    assert {numberless(path) for path in paths} <= seen


def test_there_is_a_row_for_the_families() -> None:
    assert {"RotatoryAttention", "HierarchicalAttention", "MultiHopAttention", "TransformerDecoder"} <= set(ROWS)
