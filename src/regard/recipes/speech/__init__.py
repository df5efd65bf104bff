"""Spoken digits, one or several, as words or phones."""

from regard.recipes.speech.recipe import RECIPE, Speech

__all__ = ["RECIPE", "Speech"]
