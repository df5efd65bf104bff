"""What the attention of a trained model looked at: a saved trace and a figure of the first example."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard._files import whole
from regard.model import Example, TaskModel, collate
from regard.observe import Recorded, Trace, record
from regard.recipes.runs import HEATMAP, TRACE, Run

if TYPE_CHECKING:
    from regard.recipes.recipe import Recipe

# More words than these cannot be read in a figure.
_READABLE = 400


@torch.no_grad()
def keep_attention(recipe: Recipe, run: Run, model: TaskModel, examples: Sequence[Example], count: int = 16) -> None:
    """Record the first examples, and draw what can be drawn."""
    some = [examples[k] for k in range(min(count, len(examples)))]
    if not some:
        return
    with record(model) as trace:
        model(collate(some))
    whole(run.folder / TRACE, lambda draft: trace.save(draft, "weights"))
    recipe.draw(trace, some, run.folder)


def draw(trace: Trace, examples: Sequence[Example], folder: Path, title: str) -> None:
    """Draw the first example: words shaded by their weights where there is one query, a heat map where there are several."""
    from regard.report.figures import heatmap, save, token_strips

    example = examples[0]
    strips: dict[str, tuple[Sequence[str], Any]] = {}
    for path, calls in trace.items():
        told = [one_for_each_pair(call)[0] for call in calls]
        words = _read_by(path, told[0].shape[-1], example, examples)
        if not words or len(words) > _READABLE:
            continue
        outputs = example.words.get("target", ())
        if told[0].dim() == 1:
            rows = [weights[: len(words)] for weights in told]
            strips[path] = words, torch.stack(rows) if len(rows) > 1 else rows[0]
        elif told[0].dim() == 2 and not strips:
            queries = outputs if 0 < len(outputs) <= told[0].shape[0] else words
            shown = told[0][: len(queries), : len(words)]
            # A self-attention has a query for each word; other queries have no names.
            if shown.shape == (len(queries), len(words)):
                known = example.gold is not None and example.gold.shape == shown.shape
                gold = example.gold == 2 if known and example.gold is not None else None
                save(heatmap(shown, queries=queries, keys=words, gold=gold, title=title), folder / HEATMAP)
                return
    if strips:
        save(token_strips(strips, title=title), folder / HEATMAP)


def one_for_each_pair(told: Recorded) -> Tensor:
    """Weights (B, N) or (B, M, N): the mean over features or heads, where there are several."""
    weights = told.weights.mean(-1) if told.call.form.multi else told.weights
    while weights.dim() > 3:
        weights = weights.mean(1)
    return weights


def _read_by(path: str, length: int, example: Example, examples: Sequence[Example]) -> Sequence[str]:
    """The words of the input that an attention read: the one that its path names, or the first that is as long."""
    named = [name for name in example.inputs if name in path.split(".")]
    for name in [*named, *example.inputs]:
        longest = max(len(e.inputs[name]) for e in examples)
        if longest == length and name in example.words:
            return example.words[name]
    return ()
