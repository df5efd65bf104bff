"""`regard bench`: measure, beside the alternatives."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from regard.bench import QUESTIONS
from regard.cli._output import refuse, repeatable

_NAMES = f"A benchmark; without one, all that this machine can run. One of {', '.join(QUESTIONS)}."


def bench(
    name: Annotated[str | None, typer.Argument(help=_NAMES)] = None,
    results: Annotated[Path, typer.Option(help="Folder of the stored results, one file a benchmark.")] = Path(
        "benchmarks/results"
    ),
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Time to train a model, for benchmarks that train; for the others, time that all of it may take."
        ),
    ] = None,
    dry: Annotated[bool, typer.Option("--dry", help="Print, do not store.")] = False,
) -> None:
    """Run benchmarks, print their tables, and append every figure to a stored file."""
    import torch

    from regard.bench import run

    here = "cuda" if torch.cuda.is_available() else "cpu"
    names = [name] if name else [key for key, (_, device) in QUESTIONS.items() if device in ("cpu", here)]
    command = repeatable(sys.argv[1:])
    for question in names:
        try:
            run(question, None if dry else results, command, typer.echo, seconds)
        except ValueError as error:
            refuse(error)
