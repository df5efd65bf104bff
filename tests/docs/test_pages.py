"""What is generated, and what leads from page to page."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from regard import catalog

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
WRITTEN = sorted(page for page in DOCS.rglob("*.md") if page.parent.name != "mechanisms")


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generator()


def test_every_mechanism_has_a_page_that_the_index_leads_to(tmp_path: Path) -> None:
    written = {path.stem: path.read_text() for path in generate.write_mechanisms(tmp_path / "mechanisms")}
    names = {entry.name for entry in catalog.entries()}
    assert set(written) == names | {"index"}
    assert set(re.findall(r"\]\(([\w-]+)\.md\)", written["index"])) == names
    for entry in catalog.entries():
        for fact in (entry.zh, entry.path, entry.choose, entry.avoid, entry.cls.__name__):
            assert fact in written[entry.name]
        assert written[entry.name].count("$$") >= 2


@pytest.mark.parametrize("entry", list(catalog.entries()), ids=lambda entry: entry.name)
def test_the_example_of_a_page_is_a_whole_program(entry: catalog.Entry) -> None:
    exec(generate.program(entry), {})


def row(**facts: Any) -> dict[str, Any]:
    plain = {
        "question": "q", "case": "small", "what": "regard", "seconds": 0.5, "peak_mib": None, "error": None, "note": "",
        "extra": {}, "command": "regard bench q", "device": "this", "cores": 2, "threads": 1, "python": "3", "torch": "2",
        "regard": "0", "commit": "new", "date": "2026-01-02",
    }  # fmt: skip
    return plain | facts


def test_a_table_shows_the_latest_run_of_each_device(tmp_path: Path) -> None:
    rows = [
        row(commit="old", seconds=9.0),
        row(commit="old", device="other", seconds=7.0),
        row(),
        row(what="eager | compiled", seconds=1.0, error=3e-7),
        row(commit="older", date="2026-01-01", case="large", seconds=4.0),
    ]
    rows = [rows[-1], *rows[:-1]]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shown = generate.tables(tmp_path)
    assert "### q" in shown
    assert "| small | regard | 500 | 1.00 |  |" in shown
    assert r"|  | eager \| compiled | 1000 | 2.00 | 3.0e-07 |" in shown
    assert "9000" not in shown
    assert "7000" in shown
    # A case that the latest run left out is shown as it was, below it.
    assert shown.index("commit `new`") < shown.index("commit `older`") < shown.index("| large | regard | 4000 |")
    assert "MiB" not in shown
    assert "regard bench" in generate.tables(tmp_path / "nothing")


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        found = (page.parent / target).resolve()
        generated = found.parent.name == "mechanisms" and found.stem in {"index"} | {e.name for e in catalog.entries()}
        assert generated or found.exists(), f"{target} does not exist"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2].partition("plugins:")[0]
    listed = set(re.findall(r"[\w/-]+\.md", navigation))
    assert listed == {str(page.relative_to(DOCS)) for page in WRITTEN} | {"mechanisms/index.md"}
