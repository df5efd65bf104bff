"""Made-up examples, shared out among the splits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar
from zlib import crc32

T = TypeVar("T")

# Tenths of everything that can be made up.
_TENTHS = {"train": (0, 8), "validation": (8, 9), "test": (9, 10)}


def shared_out(
    make: Callable[[random.Random], T], said: Callable[[T], str], count: int, seed: int
) -> dict[str, list[T]]:
    """So many for training, a fifth as many for validation and for testing: the same for the same seed, and none in two splits.

    Args:
        make: draws one.
        said: what tells it from others; it decides which split it may be in.
        count: of those for training.
        seed: of all.

    Example:
        >>> found = shared_out(lambda draw: draw.randrange(100), str, 20, seed=0)
        >>> [len(found[split]) for split in found], set(found["train"]) & set(found["test"])
        ([20, 4, 4], set())
    """
    found: dict[str, list[T]] = {}
    for split, (low, high) in _TENTHS.items():
        found[split] = []
        for k in range(count if split == "train" else max(1, count // 5)):
            draw = random.Random(f"{seed} {split} {k}")
            thing = make(draw)
            while not low <= crc32(said(thing).encode()) % 10 < high:
                thing = make(draw)
            found[split].append(thing)
    return found
