"""Recipes: a task with its data, its model and how it is judged; and generated tasks with known truth."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.recipes.recipe import Recipe
    from regard.recipes.runs import Run

__all__ = ["run"]


def run(recipe: str | type[Recipe], *, out: str | Path = "out/runs", progress: bool = True, **settings: Any) -> Run:
    """Train, judge and keep everything in a run folder, as `regard run` does.

    Args:
        recipe: its name, such as `"dates"`; or a `Recipe` of one's own, a class of a module that can be imported.
        out: folder of the run folders.
        progress: show a bar.
        **settings: of the recipe, such as `attention="general"`, `steps=200`; `options={…}` are those of the attention.

    Returns:
        The run: `run.metrics()`, `run.model()`, `run.folder`.
    """
    from regard.recipes.check import check
    from regard.recipes.engine import finish, train
    from regard.recipes.recipe import configured
    from regard.recipes.runs import Run

    task = configured(recipe if isinstance(recipe, str) else recipe.path(), settings)
    check(task)
    begun = Run.begin(task, Path(out))
    train(task, begun, progress=progress)
    finish(task, begun)
    return begun
