"""Scenes of coloured shapes on a grid, questions about them, and the things that decide the answer."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

GRID, CELL = 4, 6
COLOURS = {"red": (0.9, 0.1, 0.1), "green": (0.1, 0.8, 0.2), "blue": (0.2, 0.3, 0.9), "yellow": (0.9, 0.9, 0.1)}
SHAPES = {
    "square": ("......", ".####.", ".####.", ".####.", ".####.", "......"),
    "disc": ("......", "..##..", ".####.", ".####.", "..##..", "......"),
    "cross": ("#....#", ".#..#.", "..##..", "..##..", ".#..#.", "#....#"),
    "bar": ("......", "......", "######", "######", "......", "......"),
}
KINDS = ("colour", "count", "left", "more")
ANSWERS = ("no", "yes", *(str(k) for k in range(6)), *COLOURS)


class Thing(NamedTuple):
    """A shape of a colour in a cell, numbered row by row."""

    shape: str
    colour: str
    cell: int

    @property
    def column(self) -> int:
        return self.cell % GRID


@dataclass(frozen=True)
class Asked:
    """A scene, a question about it, its answer, and the cells of the things that decide it."""

    things: tuple[Thing, ...]
    kind: str
    question: str
    answer: str
    deciding: tuple[int, ...]

    def picture(self) -> Tensor:
        """(3, H, W), from 0 to 1, on a grey ground."""
        image = torch.full((3, GRID * CELL, GRID * CELL), 0.5)
        for thing in self.things:
            row, column = divmod(thing.cell, GRID)
            drawn = torch.tensor([[pixel == "#" for pixel in line] for line in SHAPES[thing.shape]])
            place = image[:, row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
            place.copy_(torch.where(drawn, torch.tensor(COLOURS[thing.colour])[:, None, None], place))
        return image

    def names(self) -> list[str]:
        """What is in each cell."""
        found = {thing.cell: f"{thing.colour} {thing.shape}" for thing in self.things}
        return [found.get(cell, "-") for cell in range(GRID * GRID)]

    def said(self) -> str:
        """Scene and question, which together tell one from another."""
        return f"{sorted(self.things)} {self.question}"


def asked(draw: random.Random) -> Asked:
    """A scene of three to six things, and a question of any kind; yes and no are equally frequent.

    Example:
        >>> asked(random.Random(0)).kind in KINDS
        True
    """
    kind, wanted = draw.choice(KINDS), draw.random() < 0.5
    while True:
        cells = draw.sample(range(GRID * GRID), draw.randint(3, 6))
        things = tuple(Thing(draw.choice(list(SHAPES)), draw.choice(list(COLOURS)), cell) for cell in cells)
        found = _QUESTIONS[kind](draw, things)
        if found is not None and found.answer not in {True: ("no",), False: ("yes",)}[wanted]:
            return found


def _colour(draw: random.Random, things: tuple[Thing, ...]) -> Asked | None:
    shape = draw.choice(list(SHAPES))
    found = [thing for thing in things if thing.shape == shape]
    if len(found) != 1:
        return None
    return Asked(things, "colour", f"what colour is the {shape}", found[0].colour, (found[0].cell,))


def _count(draw: random.Random, things: tuple[Thing, ...]) -> Asked | None:
    colour = draw.choice(list(COLOURS))
    found = [thing for thing in things if thing.colour == colour]
    if len(found) > 5:
        return None
    cells = tuple(thing.cell for thing in found)
    return Asked(things, "count", f"how many things are {colour}", str(len(found)), cells)


def _left(draw: random.Random, things: tuple[Thing, ...]) -> Asked | None:
    shape, colour = draw.choice(list(SHAPES)), draw.choice(list(COLOURS))
    anchors = [thing for thing in things if thing.shape == shape]
    coloured = [thing for thing in things if thing.colour == colour]
    if len(anchors) != 1 or len(coloured) != 1 or anchors[0].column == coloured[0].column:
        return None
    answer = "yes" if coloured[0].column < anchors[0].column else "no"
    question = f"is the {colour} thing left of the {shape}"
    return Asked(things, "left", question, answer, (coloured[0].cell, anchors[0].cell))


def _more(draw: random.Random, things: tuple[Thing, ...]) -> Asked | None:
    first, second = draw.sample(list(COLOURS), 2)
    counts = [sum(thing.colour == colour for thing in things) for colour in (first, second)]
    if not sum(counts):
        return None
    cells = tuple(thing.cell for thing in things if thing.colour in (first, second))
    question = f"are more things {first} than {second}"
    return Asked(things, "more", question, "yes" if counts[0] > counts[1] else "no", cells)


_QUESTIONS = {"colour": _colour, "count": _count, "left": _left, "more": _more}
