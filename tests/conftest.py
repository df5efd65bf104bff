"""What every test starts from: one thread, known random numbers, and no observer or override left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from regard.ops import dispatch, hooks
from regard.ops.parallel import ranks

# Drawn cases are the same in every run, so that a failure is the code's and not the day's.
settings.register_profile("regard", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("regard")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Several test processes share the cores; more threads in each only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert not dispatch._overrides, "an execution() was left open"
    assert not hooks.interventions, "an intervention was left open"
    assert not hooks.observers, "a record was left open"
    assert not hooks.askers, "a record of named fields was left open"
    assert not ranks._contexts, "a parallel.context() was left open"
