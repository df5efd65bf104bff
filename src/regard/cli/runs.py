"""`regard runs`: what was run, and how well it did."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli._output import refuse, write_json, write_table


def list_runs(
    out: Annotated[Path, typer.Option(help="Folder of the run folders.")] = Path("out/runs"),
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False,
) -> None:
    """List runs, the oldest first, with their metrics; a run without metrics is unfinished."""
    from regard.recipes.runs import runs

    found: list[dict[str, Any]] = []
    try:
        for run in runs(out):
            try:
                task = run.recipe()
                done = {"run": str(run.folder), "recipe": task.path(), "attention": task.label, "seed": task.seed}
                found.append({**done, "metrics": run.metrics(), "evaluations": len(run.curve())})
            except (ValueError, KeyError, OSError, RecursionError) as error:
                found.append({"run": str(run.folder), "problem": str(error)})
    except ValueError as error:
        refuse(error)
    if as_json:
        write_json(found)
        return
    rows = []
    for row in found:
        metrics = row.get("metrics")
        text = "  ".join(f"{k} {v:.4f}" for k, v in metrics.items()) if isinstance(metrics, dict) else "unfinished"
        rows.append(
            [str(row["run"]), str(row.get("recipe", "")), str(row.get("attention", "")), str(row.get("problem", text))]
        )
    write_table(["run", "recipe", "attention", "metrics"], rows)
