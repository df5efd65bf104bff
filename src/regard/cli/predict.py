"""`regard evaluate` and `regard predict`: what a trained run answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from regard._errors import refusal
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
    """Answer inputs of your own, one a line; a class has its probability beside it.

    An empty line of standard input is answered by an empty one, so that answers stay on the lines of their inputs; in JSON it is left
    out, and every answer names its line.
    """
    from regard.recipes.classification import Classification
    from regard.recipes.runs import Run

    try:
        found = Run.at(run)
        task, model = found.recipe(), found.model()
        for line, text in _asked(texts):
            if line is not None and not text.strip():
                if not as_json:
                    typer.echo("")
                continue
            try:
                example = task.parse(text)
            except ValueError as error:
                raise error if line is None else ValueError(f"line {line}: {error}") from error
            (answer,) = task.judge(model, [example]).answers
            likely = task.probabilities(model, example) if isinstance(task, Classification) else {}
            typer.echo(_object(line, text, answer, likely) if as_json else _plain(answer, likely))
    except (ValueError, ImportError, OSError) as error:
        refuse(error)


def _asked(texts: Sequence[str] | None) -> Iterator[tuple[int | None, str]]:
    """Inputs; those of standard input with the numbers of their lines."""
    for text in texts or ():
        yield None, text
    for number, line in enumerate(() if texts else sys.stdin.buffer, 1):
        try:
            yield number, line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number}: {refusal('text', str(error), 'UTF-8')}") from error


def _object(line: int | None, text: str, answer: Any, likely: dict[str, float]) -> str:
    place = {} if line is None else {"line": line}
    more = {"probabilities": likely} if likely else {}
    return json.dumps({**place, "input": text, "answer": answer, **more}, ensure_ascii=False)


def _plain(answer: Any, likely: dict[str, float]) -> str:
    return f"{answer}\t{likely[answer]:.4f}" if likely else str(answer)
