"""Does a recipe run at all? Asked before a folder is made or a grid of runs begun."""

from __future__ import annotations

import torch

from regard._errors import refusal
from regard.model import collate
from regard.recipes.recipe import SPLITS, Recipe


def check(recipe: Recipe) -> None:
    """Read the data, build the model and try it on a few examples; what does not go together is refused, by name."""
    from regard.recipes.engine import training_loss

    some = []
    for split in SPLITS:
        examples = recipe.cached(split)
        if not len(examples):
            raise ValueError(refusal("data", f"no examples of {split}", "at least one"))
        if split == "train":
            # The first one alone may hide what its neighbours would show, and all of them would take long.
            some = [examples[k] for k in range(min(3, len(examples)))]
    # Trying must leave no mark on the random numbers that follow.
    with torch.random.fork_rng(devices=[]):
        try:
            model = recipe.build()
            training_loss(model, collate(some))
        except (ValueError, TypeError, ImportError, OSError, MemoryError):
            raise
        except Exception as error:
            said = (str(error).splitlines() or [""])[0]
            others = ", ".join(recipe.alternatives)
            fix = f"Known to fit: {others}." if others else ""
            got = f"{recipe.label!r}, which fails with {type(error).__name__}: {said}"
            raise ValueError(refusal("attention", got, f"one that fits the recipe {recipe.name!r}", fix)) from error
