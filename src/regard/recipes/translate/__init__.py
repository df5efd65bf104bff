"""Translation, from English to German or French."""

from regard.recipes.translate.recipe import RECIPE, Translate

__all__ = ["RECIPE", "Translate"]
