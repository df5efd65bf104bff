"""Made-up examples: as many as were asked for, the same for the same seed, and nothing in two splits."""

from __future__ import annotations

from regard.recipes.made import shared_out


def test_few_things_are_never_in_two_splits() -> None:
    found = shared_out(lambda draw: draw.randrange(60), str, 300, seed=3)
    assert {split: len(things) for split, things in found.items()} == {"train": 300, "validation": 60, "test": 60}
    train, validation, test = (set(things) for things in found.values())
    assert not train & validation
    assert not train & test
    assert not validation & test


def test_the_seed_decides() -> None:
    first, again, other = (shared_out(lambda draw: draw.random(), str, 5, seed=k) for k in (0, 0, 1))
    assert first == again
    assert first != other
