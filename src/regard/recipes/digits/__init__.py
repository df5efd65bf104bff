"""Digits: which digit a picture shows; MNIST, or those of scikit-learn."""

from regard.recipes.digits.parts import PrimaryCapsules, Shifts, Strokes
from regard.recipes.digits.recipe import RECIPE, Digits

__all__ = ["RECIPE", "Digits", "PrimaryCapsules", "Shifts", "Strokes"]
