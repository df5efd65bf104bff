"""The names of the package."""

from __future__ import annotations

import types

import regard


def test_completion_offers_public_names_and_subpackages_alone() -> None:
    offered = {name for name in dir(regard) if not name.startswith("__")}
    others = offered - set(regard.__all__)
    assert set(regard.__all__) - {"__version__"} <= offered
    assert {"general", "feature", "query", "observe"} <= others
    for name in others:
        module = getattr(regard, name)
        assert isinstance(module, types.ModuleType)
        assert module.__name__ == f"regard.{name}"


def test_a_name_is_what_the_list_of_public_names_says() -> None:
    from regard import _public

    assert set(regard.__all__) == set(_public.__all__)
    for name in _public.__all__:
        assert getattr(regard, name) is getattr(_public, name)
