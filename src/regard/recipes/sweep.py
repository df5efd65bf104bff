"""A grid of runs: one process a run, on this machine or on a Ray cluster, with the same results.

Every run of a grid has a folder whose name says how it differs from the others. So a sweep that was interrupted, in whatever way,
goes on where it was when the same command is given again: finished runs are read, unfinished ones resumed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard._errors import missing_extra, refusal
from regard._files import write_json
from regard.recipes.check import check_heeded
from regard.recipes.recipe import Recipe, configured, one_of
from regard.recipes.runs import CONFIG, Run

SWEEP = "sweep.json"
ENGINES = ("local", "ray")


@dataclass(frozen=True)
class Point:
    """A run of a grid: what is set for it alone, its metrics, or what went wrong."""

    settings: dict[str, Any]
    folder: Path
    metrics: dict[str, Any] | None = None
    problem: str | None = None


def grid(over: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations, the last name changing fastest.

    Example:
        >>> grid({"attention": ["dot", "additive"], "seed": [0, 1]})[1]
        {'attention': 'dot', 'seed': 1}
    """
    for key, values in over.items():
        if not values or len(set(map(str, values))) < len(values):
            raise ValueError(refusal("over", f"{key}={','.join(map(str, values))}", "values that differ, at least one"))
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]


def sweep(
    recipe: str,
    over: Mapping[str, Sequence[Any]],
    settings: Mapping[str, Any] | None = None,
    *,
    out: str | Path = "out/sweeps",
    workers: int = 1,
    engine: str = "local",
    address: str | None = None,
    told: Callable[[Point], None] | None = None,
) -> list[Point]:
    """Run a recipe once for each point of a grid.

    Args:
        recipe: its name.
        over: values by name of a setting, such as `{"attention": ["dot", "additive"], "seed": [0, 1, 2]}`.
        settings: of every run.
        out: folder of the sweeps; the same grid of the same settings has the same folder there.
        workers: runs at a time; each has its share of the machine's threads.
        engine: `local`, processes of this machine; `ray`, tasks of a Ray cluster whose machines see the folder.
        address: of the Ray cluster; one is started on this machine when not given.
        told: called with each point when it is done.

    Returns:
        The points of the grid in its order, each with its metrics or the problem that it had.
    """
    one_of("engine", engine, ENGINES)
    if workers < 1:
        raise ValueError(refusal("workers", workers, "a whole number >= 1"))
    points = _planned(recipe, grid(over), settings or {}, Path(out))
    threads = max(1, (os.cpu_count() or 1) // workers)
    done: dict[str, Point] = {}

    def end(point: Point, metrics: dict[str, Any] | None, problem: str | None) -> None:
        done[str(point.folder)] = Point(point.settings, point.folder, metrics, problem)
        if told is not None:
            told(done[str(point.folder)])

    waiting: dict[str, Point] = {}
    for point in points:
        metrics = Run.at(point.folder).metrics()
        if metrics is None:
            waiting[str(point.folder)] = point
        else:
            end(point, metrics, None)
    run = _by_ray(workers, threads, address) if engine == "ray" else _by_processes(workers, threads)
    commands = {folder: [sys.executable, "-m", "regard", "run", "--resume", folder, "--json"] for folder in waiting}
    for folder, answer in run(commands):
        end(waiting[folder], answer.get("metrics"), answer.get("problem"))
    found = [done[str(point.folder)] for point in points]
    rows = [{"settings": p.settings, "run": p.folder.name, "metrics": p.metrics, "problem": p.problem} for p in found]
    write_json(points[0].folder.parent / SWEEP, {"recipe": recipe, "runs": rows, "means": means(found)})
    return found


def means(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Mean and standard deviation of the metrics over the seeds, for each other combination of settings."""
    return [_mean(members) for members in _by_settings(points)]


def _by_settings(points: Sequence[Point]) -> list[list[Point]]:
    """The points that have metrics, those together that differ in their seed alone."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        if point.metrics is not None:
            groups.setdefault(json.dumps(_but_seed(point)), []).append(point)
    return list(groups.values())


def _but_seed(point: Point) -> dict[str, Any]:
    return {key: value for key, value in point.settings.items() if key != "seed"}


def _mean(points: Sequence[Point]) -> dict[str, Any]:
    row: dict[str, Any] = {**_but_seed(points[0]), "runs": len(points)}
    for name in points[0].metrics or {}:
        values = [p.metrics[name] for p in points if p.metrics is not None and name in p.metrics]
        row[name] = statistics.fmean(values)
        row[f"{name}_sd"] = statistics.stdev(values) if len(values) > 1 else None
    return row


def store_means(recipe: str, points: Sequence[Point], path: Path, command: str) -> None:
    """Append the means over seeds to a file of stored results, with the machine and the versions."""
    from regard.bench.measure import Row, store

    rows = []
    for members in _by_settings(points):
        task = Run.at(members[0].folder).recipe()
        seeds = [point.settings["seed"] for point in members if "seed" in point.settings]
        rows.append(Row("recipes", _case(recipe, task), task.label, extra={**_mean(members), "seeds": seeds}))
    store(rows, path, command)


def _case(recipe: str, task: Recipe) -> str:
    """The recipe and its data, as stored results name them: figures of made-up data, or of a part, are to look like nothing else."""
    part = "" if task.limit is None else f"limit={task.limit}"
    return " ".join(word for word in (recipe, task.data_label, part) if word)


def _planned(recipe: str, settings: list[dict[str, Any]], common: Mapping[str, Any], out: Path) -> list[Point]:
    """A folder for each point; every configuration is checked before the first run begins."""
    tasks = [configured(recipe, {**common, **own}) for own in settings]
    for task in tasks:
        check_heeded(task)
    digest = hashlib.sha256(json.dumps([task.as_dict() for task in tasks], sort_keys=True).encode()).hexdigest()[:8]
    folder = out / f"{recipe}-{digest}"
    points = []
    for own, task in zip(settings, tasks, strict=True):
        name = re.sub(r"[^\w.=+-]+", "-", " ".join(f"{key}={value}" for key, value in own.items())) or "run"
        place = folder / name
        # A folder without a configuration is what is left of a sweep that was killed while it planned.
        if not (place / CONFIG).exists():
            Run.begin_at(task, place, exist_ok=True)
        points.append(Point(own, place))
    if len({point.folder for point in points}) < len(points):
        raise ValueError(
            refusal("over", "values that have the same name in a path", "values that differ in letters or digits")
        )
    return points


Answers = Iterator[tuple[str, dict[str, Any]]]


def _executed(command: list[str], threads: int, here: str) -> dict[str, Any]:
    """Run a command and read the object that it prints; what went wrong is an answer too.

    Args:
        command: words.
        threads: of the process.
        here: where the sweep was begun, which may hold the module of a recipe; not every machine of a cluster need have it.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        command,
        env=environment,
        cwd=here if os.path.isdir(here) else None,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=end_with_parent,
    )
    if done.returncode == 0:
        try:
            found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return found
        except (IndexError, json.JSONDecodeError):
            return {"problem": "it printed no metrics"}
    said = done.stderr.strip().splitlines()
    return {"problem": said[-1] if said else f"it ended with status {done.returncode}"}


def end_with_parent(parent: int | None = None) -> None:
    """Ask Linux to end this process with the one that started it: what is killed leaves no run behind.

    Args:
        parent: number of the process that started this one, which may have ended before this is asked.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


def _by_processes(workers: int, threads: int) -> Callable[[Mapping[str, list[str]]], Answers]:
    def run(commands: Mapping[str, list[str]]) -> Answers:
        with ThreadPoolExecutor(workers) as pool:
            here = os.getcwd()
            futures = {pool.submit(_executed, command, threads, here): key for key, command in commands.items()}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    return run


def _by_ray(workers: int, threads: int, address: str | None) -> Callable[[Mapping[str, list[str]]], Answers]:
    try:
        import ray
    except ImportError as error:
        raise ImportError(missing_extra("ray", "cluster", "regard sweep --engine ray")) from error

    def run(commands: Mapping[str, list[str]]) -> Answers:
        if not commands:
            return
        own = not ray.is_initialized()
        if own:
            cores: dict[str, Any] = (
                {} if address is not None else {"num_cpus": workers * threads, "include_dashboard": False}
            )
            ray.init(address=address, log_to_driver=False, **cores)
        try:
            task = ray.remote(num_cpus=threads, max_retries=1)(_executed)
            here = os.getcwd()
            waiting = {task.remote(command, threads, here): key for key, command in commands.items()}
            while waiting:
                (ready,), _ = ray.wait(list(waiting), num_returns=1)
                key = waiting.pop(ready)
                try:
                    yield key, ray.get(ready)
                except ray.exceptions.RayError as error:
                    yield key, {"problem": str(error).splitlines()[0]}
        finally:
            if own:
                ray.shutdown()

    return run
