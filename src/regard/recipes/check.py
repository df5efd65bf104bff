"""Does a recipe run at all? Asked before a folder is made or a grid of runs begun."""

from __future__ import annotations

import dataclasses

import torch

from regard._errors import refusal
from regard.model import collate
from regard.model.naming import UnknownInput
from regard.recipes.recipe import SPLITS, Recipe


def check(recipe: Recipe) -> None:
    """Read the data, build the model and try it on a few examples; what does not go together is refused, by name."""
    from regard.recipes.engine import training_loss

    check_heeded(recipe)
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
        except UnknownInput as error:
            # Who writes a recipe is told how to name its inputs; who chooses an attention, which others there are.
            if not recipe.alternatives or error.role != "attention":
                raise
            raise _misfit(recipe, f"asks for {error.wanted!r}", f", which has {', '.join(error.at_hand)}") from error
        except (ValueError, TypeError) as error:
            if not recipe.alternatives or not str(error).startswith("attention: "):
                raise
            raise type(error)(f"{error} {recipe.fitting()}") from error
        except (ImportError, OSError, MemoryError):
            raise
        except Exception as error:
            said = (str(error).splitlines() or [""])[0]
            raise _misfit(recipe, f"fails with {type(error).__name__}: {said}") from error


def _misfit(recipe: Recipe, why: str, more: str = "") -> ValueError:
    expected = f"one that fits the recipe {recipe.name!r}{more}"
    return ValueError(refusal("attention", f"{recipe.label!r}, which {why}", expected, recipe.fitting()))


def check_heeded(recipe: Recipe) -> None:
    """Refuse sizes of made-up data beside real data, which would not heed them."""
    if recipe.data is None:
        return
    usual = recipe.usual(recipe.attention, recipe.data)
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        # Among the settings that a run has kept are all those that nobody set.
        if field.name in recipe.made_up_only and value not in (field.default, usual.get(field.name)):
            fix = "Fix: limit=… takes so many examples of each split."
            raise ValueError(refusal(field.name, value, "nothing beside data, which are read, not made up", fix))
