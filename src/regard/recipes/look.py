"""What the attention of a trained model looked at: a saved trace and a figure of the first example."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
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
def keep_attention(
    recipe: Recipe,
    run: Run,
    model: TaskModel,
    examples: Sequence[Example],
    answers: Sequence[Any] = (),
    count: int = 16,
) -> None:
    """Record the first examples, and draw what can be drawn; answers of one word come along as words called "predicted"."""
    some = [examples[k] for k in range(min(count, len(examples)))]
    if not some:
        return
    for k, answer in enumerate(answers[: len(some)]):
        if isinstance(answer, str):
            some[k] = replace(some[k], words={**some[k].words, "predicted": (answer,)})
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
                names = ("answer", "input") if queries is outputs else ("queries", "keys")
                figure = heatmap(shown, queries=queries, keys=words, gold=gold, title=title, names=names)
                save(figure, folder / HEATMAP)
                return
    if strips:
        labels = told_apart(strips)
        save(token_strips({labels[path]: part for path, part in strips.items()}, title=title), folder / HEATMAP)


def told_apart(paths: Iterable[str]) -> dict[str, str]:
    """For each path, what is left of it without the parts in front that all share.

    Example:
        >>> told_apart(["attention.attention.left", "attention.attention.right"])
        {'attention.attention.left': 'left', 'attention.attention.right': 'right'}
    """
    parts = {path: path.split(".") for path in paths}
    while all(len(names) > 1 for names in parts.values()) and len({names[0] for names in parts.values()}) == 1:
        parts = {path: names[1:] for path, names in parts.items()}
    return {path: ".".join(names) for path, names in parts.items()}


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
