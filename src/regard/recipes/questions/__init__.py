"""Questions: what colour, how many, is there, are there more; about drawn scenes of coloured shapes."""

from regard.recipes.questions.recipe import RECIPE, Questions
from regard.recipes.questions.scenes import Asked, Thing

__all__ = ["RECIPE", "Asked", "Questions", "Thing"]
