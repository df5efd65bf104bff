"""Where kernels run, what is allocated holds NaN: numbers that nobody wrote would show."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    path = request.node.path
    if path.parent.name != "interpreted" and not path.name.startswith("test_cuda"):
        yield
        return
    # Fills what is allocated without a value; where torch has no deterministic way, it only says so.
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
        warnings.filterwarnings("ignore", message="Deterministic behavior was enabled")
        assert torch.empty(3).isnan().all()
        yield
    torch.use_deterministic_algorithms(False)
