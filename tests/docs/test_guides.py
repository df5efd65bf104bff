"""Every Python block of the README and of the guides runs, from top to bottom of its page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from regard import catalog

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
sybil = Sybil(parsers=[PythonCodeBlockParser()])


@pytest.fixture(autouse=True)
def _left_as_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A page may register a mechanism, change the default dtype, or write a file."""
    known = {entry.name: entry for entry in catalog.entries()}
    monkeypatch.setattr(catalog, "_entries", known)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_runs(page: Path) -> None:
    blocks = list(sybil.parse(page))
    assert blocks or page == ROOT / "docs" / "guides" / "index.md"
    for block in blocks:
        block.evaluate()
