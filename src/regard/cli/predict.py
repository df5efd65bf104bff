"""`regard evaluate` and `regard predict`: what a trained run answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from regard.cli._output import refuse


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    data: Annotated[Path | None, typer.Option(help="Folder of other data than the run had.")] = None,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Judge the best weights of a run again, on its own data or on other."""
    from dataclasses import replace

    from regard.recipes.recipe import SPLITS
    from regard.recipes.runs import Run

    try:
        if split not in SPLITS:
            raise ValueError(f"split: got {split!r}, expected one of {', '.join(SPLITS)}.")
        found = Run.at(run)
        task = found.recipe()
        if data is not None:
            known = task.known
            task = replace(task, data=str(data))
            task.known = known
        from regard.recipes.engine import evaluated

        metrics = evaluated(task, found.model(), task.examples(split)).metrics
    except (ValueError, ImportError, OSError) as error:
        refuse(error)
    if as_json:
        typer.echo(json.dumps({"run": str(run), "split": split, "metrics": metrics}))
    else:
        typer.echo("  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))


def predict(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    texts: Annotated[list[str] | None, typer.Argument(help="Inputs; lines of standard input without any.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Answer inputs of your own, one a line."""
    from regard.recipes.runs import Run

    try:
        found = Run.at(run)
        task, model = found.recipe(), found.model()
        for text in texts or (line.rstrip("\n") for line in sys.stdin):
            (answer,) = task.judge(model, [task.parse(text)]).answers
            typer.echo(json.dumps({"input": text, "answer": answer}, ensure_ascii=False) if as_json else str(answer))
    except (ValueError, ImportError, OSError) as error:
        refuse(error)
