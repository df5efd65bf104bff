"""Recommend: what will a user want next?"""

from regard.recipes.recommend.recipe import Recommend

RECIPE = Recommend

__all__ = ["RECIPE", "Recommend"]
