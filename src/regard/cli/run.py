"""`regard run`: train, evaluate and show a task model with any attention."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli._output import refuse

# Tells the processes that the first one starts which that was.
_FIRST = "REGARD_FIRST_PROCESS"


def run(  # noqa: PLR0913 - one argument an option
    recipe: Annotated[str | None, typer.Argument(help="A recipe, such as dates.")] = None,
    attention: Annotated[
        str | None, typer.Option(help="A mechanism; a score or an alignment means Attention with it.")
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value, as often as needed.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings from a YAML or JSON file.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the real data.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything that is random.")] = None,
    precision: Annotated[str | None, typer.Option(help="As Lightning names it: 32-true, bf16-mixed, …")] = None,
    devices: Annotated[int, typer.Option(help="Processes.")] = 1,
    strategy: Annotated[str, typer.Option(help="auto, ddp or fsdp.")] = "auto",
    resume: Annotated[Path | None, typer.Option(help="A run folder to go on with.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run folders.")] = Path("out/runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Train, evaluate and keep everything of it in a run folder."""
    if devices > 1:
        # torch warns that it looks for parameters without a gradient: some attentions have them.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from regard.recipes.check import check
    from regard.recipes.recipe import configured
    from regard.recipes.runs import RUN, STATE, Run

    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not rank:
        os.environ[_FIRST] = str(os.getpid())
    else:
        from regard.recipes.sweep import end_with_parent

        # Without the first process this one would wait for it in vain.
        if _FIRST in os.environ:
            end_with_parent(int(os.environ[_FIRST]))
        # One of the processes that the first one started; only that one knew the command.
        resume, config, settings = Path(os.environ.get(RUN, "")), None, None
    folder = None
    try:
        chosen = given_settings(config, settings or [])
        given = {"attention": attention, "data": data and str(data), "seed": seed, "precision": precision}
        chosen |= {key: value for key, value in given.items() if value is not None and not rank}
        if resume is not None:
            folder = Run.at(resume)
            task = folder.recipe()
            if recipe is not None and recipe != task.path() and not rank:
                raise ValueError(f"resume: got a run of {task.path()!r}, expected one of {recipe!r}.")
            if chosen and not rank:
                fix = "A run goes on as it began; begin another one for other settings."
                raise ValueError(
                    f"resume: got settings beside it ({', '.join(map(str, chosen))}), expected none. {fix}"
                )
            begun = (folder.folder / STATE).exists()
            if not begun and not rank:
                # A run of a sweep, whose data were not looked at when it was planned.
                check(task)
            if not as_json and not rank and folder.metrics() is None:
                where = "1 process" if devices == 1 else f"{devices} processes"
                typer.echo(f"{'going on' if begun else 'beginning'} in {where}: {folder.folder}")
        else:
            named = chosen.pop("recipe", None)
            if recipe is None:
                recipe = named
            if recipe is None:
                raise ValueError(
                    "recipe: got none, expected a name, such as dates (`regard recipes` lists them); or --resume RUN."
                )
            if named not in (None, recipe):
                raise ValueError(f"recipe: got {recipe!r} beside a configuration of {named!r}, expected the same.")
            from regard.recipes.engine import check_processes

            task = configured(recipe, chosen)
            check_processes(task, devices, strategy)
            check(task)
            folder = Run.begin(task, out)
            if not as_json:
                typer.echo(f"run folder: {folder.folder}")
        metrics = _trained(task, folder, devices, strategy, not as_json and not rank)
        if rank:
            return
    except KeyboardInterrupt:
        if folder is not None:
            typer.echo(f"regard: interrupted; go on with: regard run --resume {folder.folder}", err=True)
        raise typer.Exit(130) from None
    except (ValueError, TypeError, ImportError, FloatingPointError, OSError) as error:
        refuse(error)
    if as_json:
        typer.echo(json.dumps({"run": str(folder.folder), **task.as_dict(), "metrics": metrics}, ensure_ascii=False))
        return
    typer.echo("  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if isinstance(value, float)))
    typer.echo(f"everything is in {folder.folder}")


def _trained(task: Any, folder: Any, devices: int, strategy: str, progress: bool) -> dict[str, Any]:
    from regard.recipes.engine import finish, train
    from regard.recipes.runs import STATE

    found: dict[str, Any] | None = folder.metrics()
    if found is not None:
        return found
    begin, resumed = time.perf_counter(), (folder.folder / STATE).exists()
    if not train(task, folder, devices=devices, strategy=strategy, progress=progress):
        return {}
    if progress:
        typer.echo(f"judging the examples of test: {len(task.cached('test'))}", err=True)
    metrics = finish(task, folder)
    if progress:
        last = ", since it went on" if resumed else ""
        typer.echo(f"trained and judged in {time.perf_counter() - begin:.0f} s{last}")
    return dict(metrics)


def given_settings(config: Path | None, settings: list[str]) -> dict[str, Any]:
    """From a file, then from the command line."""
    chosen: dict[str, Any] = {}
    if config is not None:
        chosen |= _from_file(config)
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"--set: got {setting!r}, expected key=value.")
        chosen[key] = value
    return chosen


def _from_file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config: got {path}: {error.strerror}, expected a YAML or JSON file.") from error
    except RecursionError as error:
        raise ValueError(f"config: got {path}, which is nested too deeply, expected settings by name.") from error
    # Python reads numbers of so many digits only.
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}: {error.problem}" if mark is not None else f"{path}: {error}"  # type: ignore[union-attr]
        raise ValueError(f"config: got {where}, expected a YAML or JSON file.") from error
    if not isinstance(found, dict):
        raise ValueError(f"config: got {path}, which holds {type(found).__name__}, expected settings by name.")
    return found
