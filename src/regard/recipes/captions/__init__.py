"""Captions of pictures."""

from regard.recipes.captions.recipe import RECIPE, Captions

__all__ = ["RECIPE", "Captions"]
