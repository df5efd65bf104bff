"""`regard sweep`: a grid of runs, on this machine or on a Ray cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli._output import refuse, repeatable, write_json, write_table
from regard.cli.run import given_settings


def sweep(  # noqa: PLR0913 - one argument an option
    recipe: Annotated[str, typer.Argument(help="A recipe, such as dates.")],
    over: Annotated[list[str], typer.Option(help="key=a,b,c, as often as needed: all combinations are run.")],
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value, the same for every run.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings from a YAML or JSON file.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the real data.")] = None,
    precision: Annotated[str | None, typer.Option(help="As Lightning names it: 32-true, bf16-mixed, …")] = None,
    workers: Annotated[int, typer.Option(help="Runs at a time.")] = 1,
    engine: Annotated[str, typer.Option(help="local, or ray.")] = "local",
    address: Annotated[str | None, typer.Option(help="Of a Ray cluster; one is started here without.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the sweeps.")] = Path("out/sweeps"),
    store: Annotated[Path | None, typer.Option(help="Append the means to a file of stored results.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Run a recipe over a grid of settings; the same command again goes on where it was."""
    try:
        grid = dict(_values(option) for option in over)
        if len(grid) < len(over):
            raise ValueError("over: got a key twice, expected all its values at once: key=a,b,c.")
        common = given_settings(config, settings or [])
        given = {"data": data and str(data), "precision": precision}
        common |= {key: value for key, value in given.items() if value is not None}
        if common.pop("recipe", recipe) != recipe:
            raise ValueError(f"recipe: got {recipe!r} beside a configuration of another, expected the same.")
        from regard.recipes.sweep import SWEEP, Point, means
        from regard.recipes.sweep import sweep as swept

        with _Bar(grid, shown=not as_json) as advance:

            def told(point: Point) -> None:
                advance(point.problem and f"{point.folder.name}: {point.problem}")

            points = swept(recipe, grid, common, out=out, told=told, workers=workers, engine=engine, address=address)
    except KeyboardInterrupt:
        typer.echo("regard: interrupted; the same command goes on where it was", err=True)
        raise typer.Exit(130) from None
    except (ValueError, TypeError, ImportError, OSError) as error:
        refuse(error)
    folder = points[0].folder.parent
    if store is not None:
        from regard.recipes.sweep import store_means

        store_means(recipe, points, store, repeatable(sys.argv[1:]))
    failed = [point for point in points if point.problem is not None]
    if as_json:
        runs = [{**p.settings, "run": str(p.folder), "metrics": p.metrics, "problem": p.problem} for p in points]
        write_json({"sweep": str(folder), "runs": runs, "means": means(points)})
    else:
        rows = means(points)
        names = list(dict.fromkeys(name for row in rows for name in row if not name.endswith("_sd")))
        plain = not sys.stdout.isatty()
        # For other programs, which see no heading, every cell says what it is.
        write_table(
            names, [[f"{name} {_cell(row, name)}" if plain else _cell(row, name) for name in names] for row in rows]
        )
        for point in failed:
            typer.echo(f"failed: {point.folder.name}: {point.problem}", err=True)
        typer.echo(f"everything is in {folder}, the table in {folder / SWEEP}")
    if failed:
        raise typer.Exit(1)


def _values(option: str) -> tuple[str, list[str]]:
    key, equals, values = option.partition("=")
    if not equals or not key or not values:
        raise ValueError(f"--over: got {option!r}, expected key=a,b,c.")
    return key, values.split(",")


def _cell(row: dict[str, Any], name: str) -> str:
    value, spread = row.get(name), row.get(f"{name}_sd")
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if spread is None else f"{value:.4f} ± {spread:.4f}"


class _Bar:
    """Progress over the runs, and what went wrong in some of them."""

    def __init__(self, grid: dict[str, list[str]], shown: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress

        total = 1
        for values in grid.values():
            total *= len(values)
        self.progress = Progress(console=Console(stderr=True), disable=not shown)
        self.task = self.progress.add_task("runs", total=total)

    def __enter__(self) -> Any:
        self.progress.start()

        def advance(problem: str | None) -> None:
            self.progress.advance(self.task)
            if problem:
                self.progress.console.print(problem, markup=False, highlight=False)

        return advance

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
