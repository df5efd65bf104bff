"""`regard runs`: what was run, and how well it did."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli._output import refuse, write_json, write_table

if TYPE_CHECKING:
    from regard.recipes.recipe import Recipe

_OUT = Path("out/runs")  # where `regard run` puts them, too
_COLUMNS = ("run", "recipe", "attention", "data", "seed", "steps")


def list_runs(
    out: Annotated[Path | None, typer.Option(help=f"Folder of the run folders; {_OUT} when not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False,
) -> None:
    """List runs, the oldest first, with their metrics; a run without metrics is unfinished."""
    from regard.recipes.runs import runs

    found: list[dict[str, Any]] = []
    try:
        # Before the first run there is no folder, and that is no mistake.
        begun = out is not None or _OUT.is_dir()
        for run in runs(out or _OUT) if begun else ():
            try:
                task = run.recipe()
                done: dict[str, Any] = {
                    "run": str(run.folder),
                    "recipe": task.path(),
                    "attention": task.label,
                    "data": _data(task),
                }
                done |= {"seed": task.seed, "steps": task.steps}
                found.append({**done, "metrics": run.metrics(), "evaluations": len(run.curve())})
            except (ValueError, KeyError, OSError, RecursionError) as error:
                found.append({"run": str(run.folder), "problem": str(error)})
    except ValueError as error:
        refuse(error)
    if not found:
        typer.echo(f"regard: no runs yet in {out or _OUT}; regard run makes them", err=True)
    if as_json:
        write_json(found)
        return
    rows = []
    for row in found:
        metrics = row.get("metrics")
        text = "  ".join(f"{k} {v:.4f}" for k, v in metrics.items()) if isinstance(metrics, dict) else "unfinished"
        known = [str(row.get(key, "")) for key in _COLUMNS]
        rows.append([*known, str(row.get("problem", text))])
    write_table([*_COLUMNS, "metrics"], rows)


def _data(task: Recipe) -> str:
    """`generated`; or the set, or else the folder; and how much of it."""
    source = task.data_label or Path(task.data or "").name
    return source if task.limit is None else f"{source}, {task.limit} at most"
