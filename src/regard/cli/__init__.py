"""The command line: one file a verb.

Nothing here or in a verb imports torch before the verb runs, so that `regard --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import Annotated, TextIO

import typer

from regard._version import __version__
from regard.cli.bench import bench
from regard.cli.list import list_mechanisms
from regard.cli.predict import evaluate, predict
from regard.cli.recipes import list_recipes
from regard.cli.run import run
from regard.cli.runs import list_runs
from regard.cli.show import show
from regard.cli.sweep import sweep

app = typer.Typer(
    name="regard",
    help="Every attention mechanism of the literature, from one equation.",
    add_completion=False,
    no_args_is_help=True,
    # Plain help and plain tracebacks: loading rich for them would cost more time than all the rest.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("list")(list_mechanisms)
app.command("show")(show)
app.command("recipes")(list_recipes)
app.command("run")(run)
app.command("sweep")(sweep)
app.command("runs")(list_runs)
app.command("evaluate")(evaluate)
app.command("predict")(predict)
app.command("bench")(bench)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regard {__version__}")
        raise typer.Exit


@app.callback()
def regard(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Every attention mechanism of the literature, from one equation."""


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        # Equations and Chinese names are beyond what some systems write to a pipe by default.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8")
    if sys.stdout is None:
        sys.exit("regard: stdout is closed: there is nowhere to write")
    try:
        app()
    except OSError as error:
        _abandon(sys.stdout)
        sys.exit(f"regard: {error}")


def _abandon(stream: TextIO) -> None:
    """Let what a stream still holds go nowhere, or leaving would fail once more."""
    with suppress(OSError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
