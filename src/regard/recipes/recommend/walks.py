"""What users wanted, in the order in which they did: of a data file, or made up."""

from __future__ import annotations

import random

from regard._errors import refusal
from regard.recipes.data import Folder

# Made up: groups of items, each of which leads to another group.
GROUPS, OF_EACH = 12, 5
_ASTRAY = 0.1


def read(data: str) -> list[list[str]]:
    """The items of each user of `beauty.txt`, a user and an item a line, in the order of time; users with fewer than three are left out."""
    folder = Folder(data, "beauty.txt")
    found: dict[str, list[str]] = {}
    for number, line in enumerate(folder.lines("beauty.txt"), 1):
        pair = line.split()
        if len(pair) != 2:
            where = f"{folder.path / 'beauty.txt'}, line {number}: {line!r}"
            raise ValueError(refusal("data", where, "a user and an item"))
        found.setdefault(pair[0], []).append(pair[1])
    walks = [items for items in found.values() if len(items) >= 3]
    if not walks:
        raise ValueError(refusal("data", f"{len(found)} users with fewer than three items", "some with more"))
    return walks


def made_up(users: int, seed: int) -> list[list[str]]:
    """Users who go from a group of items to the one that it leads to, and now and then astray.

    Example:
        >>> len(made_up(3, seed=0))
        3
    """
    draw = random.Random(f"{seed} walks")
    groups = list(range(GROUPS))
    draw.shuffle(groups)
    leads_to = {group: groups[(k + 1) % GROUPS] for k, group in enumerate(groups)}
    found = []
    for _ in range(users):
        group, walk = draw.randrange(GROUPS), []
        for _ in range(draw.randint(5, 10)):
            left = [item for k in range(OF_EACH) if (item := f"{group}.{k}") not in walk]
            walk += [draw.choice(left)] if left else []
            group = draw.randrange(GROUPS) if draw.random() < _ASTRAY else leads_to[group]
        found.append(walk)
    return found
