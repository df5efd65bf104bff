"""Recipes, planted tasks, studies and examples together call every mechanism of the catalog."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from regard import catalog
from regard.recipes.recipe import RECIPES, recipe

ROOT = Path(__file__).parents[2]
# Places that call mechanisms to do something; unit tests of a mechanism are not among them.
PLACES = ("examples", "src/regard/recipes", "src/regard/bench", "tests/recipes")


def files() -> list[Path]:
    """Those places, and the tests that train on planted tasks."""
    here = [path for place in PLACES for path in (ROOT / place).rglob("*.py") if path != Path(__file__)]
    tests = [
        path for path in (ROOT / "tests").rglob("test_*.py") if "recipes.planted" in path.read_text(encoding="utf-8")
    ]
    return [*here, *tests]


def names_in(path: Path) -> set[str]:
    """Names, attributes and short strings of a file: classes that are used, and mechanisms by name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 60:
            found.add(node.value)
    return found


def test_every_mechanism_is_put_to_work() -> None:
    used = {name for path in files() for name in names_in(path)}
    used |= {name for key in RECIPES for name in (recipe(key).attention, *recipe(key).alternatives)}
    shared = {}
    for entry in catalog.entries():
        shared.setdefault(entry.cls, []).append(entry)
    missing = []
    for entry in catalog.entries():
        alone = len(shared[entry.cls]) == 1
        # What is made by a function counts by the function's name, which is that of the entry.
        if entry.name.replace("-", "_") in used:
            continue
        # A class that stands under several names counts for the one that its options make.
        if entry.name not in used and not (entry.cls.__name__ in used and (alone or not entry.preset)):
            missing.append(entry.name)
    assert not missing


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_says_what_it_is(name: str) -> None:
    found = recipe(name)
    assert found.name == name
    assert found.about
    assert found().attention in {found().attention, *found.alternatives}
    for other in found.alternatives:
        catalog.find(other)
    assert len(found.alternatives) >= 2
