"""Points: say in which order the numbers or points of an input belong."""

from regard.recipes.points.task import Points

RECIPE = Points

__all__ = ["RECIPE", "Points"]
