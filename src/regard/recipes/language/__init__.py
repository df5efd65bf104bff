"""Language: what comes next in a text?"""

from regard.recipes.language.task import Language

RECIPE = Language

__all__ = ["RECIPE", "Language"]
