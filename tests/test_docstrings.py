"""Every example in a docstring runs."""

from __future__ import annotations

import doctest
import pkgutil
from importlib import import_module

import pytest

import regard

MODULES = sorted(m.name for m in pkgutil.walk_packages(regard.__path__, "regard.") if not m.name.endswith("__main__"))


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "regard").startswith("regard"):
            raise
        pytest.skip(f"needs {error.name}, which is not installed")
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    modules = [import_module(name) for name in MODULES if name.startswith(("regard.general", "regard.ops.random"))]
    assert sum(len(found.examples) for module in modules for found in finder.find(module)) > 50
