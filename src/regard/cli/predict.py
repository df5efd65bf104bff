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

# Letters of an input that are said again.
_LONG = 80


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

        examples = task.cached(split)
        if not len(examples):
            raise ValueError(refusal("data", f"no examples of {split}", "at least one"))
        metrics = evaluated(task, found.model(), examples).metrics
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

    An input that cannot be read is named on standard error and leaves an empty line, or an object with an `error`; the others are
    answered, and the exit code is 2.
    An empty line of standard input is answered by an empty one, so that answers stay on the lines of their inputs; in JSON it is left
    out, and every answer names its line.
    """
    from regard.recipes.classification import Classification
    from regard.recipes.recipe import Recipe
    from regard.recipes.runs import Run

    wrong = False
    try:
        found = Run.at(run)
        task, model = found.recipe(), found.model()
        if type(task).parse is Recipe.parse:
            own = f"Fix: write {type(task).__name__}.parse(self, text), which makes an Example of an input."
            fix = own if ":" in task.path() else ""
            raise ValueError(refusal("recipe", repr(task.path()), "one that reads text", fix))
        for number, given in _asked(texts):
            line = None if texts else number
            text = given if isinstance(given, str) else given.decode(errors="backslashreplace")
            if line is not None and not text.strip():
                if not as_json:
                    typer.echo("")
                continue
            try:
                example = task.parse(_decoded(given))
            except ValueError as error:
                # The others can be answered.
                wrong = True
                typer.echo(f"regard: {'input' if line is None else 'line'} {number}: {_named(text, error)}", err=True)
                typer.echo(_object(line, text, {"error": str(error)}) if as_json else "")
                continue
            (answer,) = task.judge(model, [example]).answers
            likely = task.probabilities(model, example) if isinstance(task, Classification) else {}
            more = {"probabilities": likely} if likely else {}
            typer.echo(_object(line, text, {"answer": answer, **more}) if as_json else _plain(answer, likely))
    except (ValueError, ImportError, OSError) as error:
        refuse(error)
    if wrong:
        raise typer.Exit(2)


def _asked(texts: Sequence[str] | None) -> Iterator[tuple[int, str | bytes]]:
    """Inputs with their numbers; those of standard input are its lines."""
    if texts:
        yield from enumerate(texts, 1)
    else:
        for number, line in enumerate(sys.stdin.buffer, 1):
            yield number, line.rstrip(b"\r\n")


def _decoded(text: str | bytes) -> str:
    try:
        return text if isinstance(text, str) else text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(refusal("text", str(error), "UTF-8")) from error


def _named(text: str, error: Exception) -> str:
    """What is wrong with an input, which is said unless the error says it."""
    said = repr(text)
    return str(error) if said in str(error) else f"{said if len(said) <= _LONG else said[:_LONG] + '…'}: {error}"


def _object(line: int | None, text: str, told: dict[str, Any]) -> str:
    place = {} if line is None else {"line": line}
    return json.dumps({**place, "input": text, **told}, ensure_ascii=False)


def _plain(answer: Any, likely: dict[str, float]) -> str:
    return f"{answer}\t{likely[answer]:.4f}" if likely else str(answer)
