"""Collected only in a process of its own, in which no kernel is run (see test_compiled.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if os.environ.get("REGARD_COMPILE_FOR") == "sm_90" else ["*.py"]


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors without memory on a Hopper GPU that is not there."""
    from tests.ops.compiled.hopper import pretended

    with pretended(monkeypatch):
        yield
