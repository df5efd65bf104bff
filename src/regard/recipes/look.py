"""What the attention of a trained model looked at: a saved trace and a heat map."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from regard._files import whole
from regard.model import Example, TaskModel, collate
from regard.observe import record
from regard.recipes.recipe import Recipe
from regard.recipes.runs import HEATMAP, TRACE, Run


@torch.no_grad()
def keep_attention(recipe: Recipe, run: Run, model: TaskModel, examples: Sequence[Example], count: int = 16) -> None:
    """Record the first examples, and draw the first one."""
    some = [examples[k] for k in range(min(count, len(examples)))]
    batch = collate(some)
    with record(model) as trace:
        model(batch)
    whole(run.folder / TRACE, lambda draft: trace.save(draft, "weights"))
    path = next(iter(trace), None)
    if path is None:
        return
    weights = trace[path][0].weights[0]
    inputs, outputs = _words(some[0])
    if weights.dim() != 2 or weights.shape[0] < len(outputs) or weights.shape[1] < len(inputs):
        return
    from regard.report.figures import heatmap, save

    gold = None if some[0].gold is None else some[0].gold == 2
    shown = weights[: len(outputs), : len(inputs)]
    save(
        heatmap(shown, queries=outputs, keys=inputs, gold=gold, title=f"{recipe.name}: {recipe.attention}"),
        run.folder / HEATMAP,
    )


def _words(example: Example) -> tuple[Sequence[str], Sequence[str]]:
    """Of the first input and of the output."""
    name = next(iter(example.inputs))
    return example.words.get(name, ()), example.words.get("target", ())
