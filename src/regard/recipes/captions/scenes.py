"""Scenes: two coloured shapes on a dark ground, and what there is to say about them.

`a red square left of a blue circle`: the shape that is farther left goes first; where both are in one column, the upper one does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.recipes.made import shared_out

SIZE = 24
_CELL = SIZE // 3  # a shape stands in one of nine places
COLOURS = {"red": (0.9, 0.1, 0.1), "green": (0.1, 0.8, 0.2), "blue": (0.2, 0.3, 1.0), "yellow": (0.9, 0.9, 0.1)}
SHAPES = ("square", "circle", "triangle", "cross")


@dataclass(frozen=True)
class Shape:
    """One shape: what it is and which of the places it is in."""

    colour: str
    kind: str
    row: int
    column: int

    @property
    def corner(self) -> tuple[int, int]:
        """Of its place, in pixels from above and from the left."""
        return self.row * _CELL, self.column * _CELL


@dataclass(frozen=True)
class Scene:
    """Two shapes, in the order in which they are named."""

    first: Shape
    second: Shape

    @property
    def words(self) -> list[str]:
        """The caption."""
        where = ["left", "of"] if self.first.column < self.second.column else ["above"]
        return ["a", self.first.colour, self.first.kind, *where, "a", self.second.colour, self.second.kind]

    def named(self) -> list[Shape | None]:
        """For every word of the caption the shape that it tells of."""
        between = len(self.words) - 6
        return [None, self.first, self.first, *[None] * between, None, self.second, self.second]

    def drawn(self) -> Tensor:
        """The picture (3, H, W), from 0 to 1."""
        picture = torch.full((3, SIZE, SIZE), 0.08)
        for shape in (self.first, self.second):
            down, right = shape.corner
            inside = _stamp(shape.kind)
            place = picture[:, down : down + _CELL, right : right + _CELL]
            place[:, inside] = torch.tensor(COLOURS[shape.colour])[:, None]
        return picture


def _stamp(kind: str) -> Tensor:
    """Which pixels of its place a shape fills."""
    across = torch.arange(_CELL) - (_CELL - 1) / 2
    y, x = torch.meshgrid(across, across, indexing="ij")
    half = _CELL / 2 - 1
    if kind == "square":
        return (x.abs() < half) & (y.abs() < half)
    if kind == "circle":
        return x.square() + y.square() < half**2 + 0.5
    if kind == "triangle":
        return (y.abs() < half) & (x.abs() <= (y + half) / 2)
    return ((x.abs() < 1) | (y.abs() < 1)) & (x.abs() < half) & (y.abs() < half)


def scene(draw: random.Random) -> Scene:
    """One scene."""
    places = draw.sample(range(9), 2)
    shapes = [Shape(draw.choice(sorted(COLOURS)), draw.choice(SHAPES), place // 3, place % 3) for place in places]
    return Scene(*sorted(shapes, key=lambda shape: (shape.column, shape.row)))


def scenes(count: int, seed: int) -> dict[str, list[Scene]]:
    """Scenes by split, so many for training; no scene is in two splits.

    Example:
        >>> len(scenes(1, seed=0)["train"][0].words) in (7, 8)
        True
    """
    return shared_out(scene, repr, count, seed)
