"""Facts: what follows from a few of them?"""

from regard.recipes.facts.recipe import Facts

RECIPE = Facts

__all__ = ["RECIPE", "Facts"]
