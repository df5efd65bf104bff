"""Summaries by a kernel on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.ops.summary_cases import CASES, Case, check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("along", [True, False], ids=["along", "apart"])
@pytest.mark.parametrize("case", [*CASES, *(dataclasses.replace(c, n=333, nq=301) for c in CASES[:6:2])], ids=str)
def test_as_exact_as_panels(case: Case, along: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, "cuda", monkeypatch, along)
