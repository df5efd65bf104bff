"""Run folders: what is in one, and how it is read back."""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from regard._errors import refusal
from regard._files import DamagedError, read_tensors, write_json, write_tensors
from regard._version import __version__
from regard.model import TaskModel
from regard.recipes.logs import read_curve
from regard.recipes.recipe import Recipe, configured

CONFIG, KNOWN, VERSIONS, METRICS, CURVE = "config.json", "known.json", "versions.json", "metrics.json", "curve.csv"
SIGNATURES = "signatures.json"
# Variable of the environment that names the run folder to the processes that the first one starts.
RUN = "REGARD_RUN"
WEIGHTS, STATE, PREDICTIONS, TRACE, HEATMAP = (
    *("weights.safetensors", "state.ckpt", "predictions.jsonl", "attention.safetensors", "attention.svg"),
)


@dataclass(frozen=True)
class Run:
    """A run folder.

    Holds the resolved configuration, versions, the curve of the metrics, the best weights, the resumable state, and at the end the
    metrics of the test examples, the answers, and what the attention looked at in some of them.
    """

    folder: Path

    @staticmethod
    def begin(recipe: Recipe, out: Path) -> Run:
        """A new folder for a recipe, under `out`."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        base = re.sub(r"[^\w.=+-]+", "-", f"{recipe.name}-{recipe.label}")[:120] + f"-{stamp}"
        for k in range(1000):
            folder = out / (base if k == 0 else f"{base}-{k}")
            try:
                return Run.begin_at(recipe, folder)
            except FileExistsError:
                continue
            except OSError as error:
                got = f"{out}: {error.strerror}"
                raise ValueError(refusal("out", got, "a folder to write into")) from error
        raise FileExistsError(f"{out} has a thousand runs of this second")

    @staticmethod
    def begin_at(recipe: Recipe, folder: Path, exist_ok: bool = False) -> Run:
        """A folder that is not there yet, unless it may be."""
        folder.mkdir(parents=True, exist_ok=exist_ok)
        write_json(folder / VERSIONS, versions())
        write_json(folder / CONFIG, recipe.as_dict())
        return Run(folder)

    @staticmethod
    def at(folder: str | Path) -> Run:
        """An existing one; anything else is refused."""
        folder = Path(folder)
        if not (folder / CONFIG).is_file():
            raise ValueError(refusal("run", repr(str(folder)), f"a run folder, which has a {CONFIG}"))
        return Run(folder)

    def recipe(self) -> Recipe:
        """The recipe as it was configured."""
        try:
            config = json.loads((self.folder / CONFIG).read_text(encoding="utf-8"))
            found = configured(config["recipe"], config)
            if (self.folder / KNOWN).is_file():
                found.known = json.loads((self.folder / KNOWN).read_text(encoding="utf-8"))
            return found
        except (json.JSONDecodeError, KeyError, TypeError, RecursionError, UnicodeDecodeError) as error:
            got = f"{self.folder}: {type(error).__name__}: {error}"
            raise ValueError(refusal("run", got, f"a folder with a {CONFIG} and a {KNOWN} that are whole")) from error

    def keep_known(self, recipe: Recipe) -> None:
        """Write what the recipe learnt before training, once."""
        if not (self.folder / KNOWN).is_file():
            write_json(self.folder / KNOWN, recipe.known)

    def model(self) -> TaskModel:
        """The model with its best weights."""
        path = self.folder / WEIGHTS
        if not path.is_file():
            fix = f"Fix: regard run --resume {self.folder}."
            raise ValueError(
                refusal("run", f"{self.folder}, which has no {WEIGHTS}", "a run that was evaluated once", fix)
            )
        try:
            model = self.recipe().build()
        except (KeyError, TypeError) as error:
            raise ValueError(refusal("run", f"{self.folder / KNOWN}: no {error}", "what the recipe learnt")) from error
        try:
            model.load_state_dict(read_tensors(path)[0])
        except (DamagedError, RuntimeError) as error:
            raise ValueError(refusal("run", f"{path}: {error}", "the weights of this configuration")) from error
        return model.eval()

    def save_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Weights, whole or not at all."""
        # Copies: tied parameters share their memory, and a file of tensors may not.
        write_tensors(
            self.folder / WEIGHTS, {name: x.detach().cpu().clone().contiguous() for name, x in weights.items()}
        )

    def curve(self) -> list[dict[str, Any]]:
        """Metrics of every evaluation so far."""
        return read_curve(self.folder / CURVE)

    def metrics(self) -> dict[str, Any] | None:
        """Of the test examples; None while the run is not finished."""
        path = self.folder / METRICS
        try:
            found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(refusal("run", f"{path}: {error}", "metrics")) from error
        if found is not None and not (
            isinstance(found, dict) and all(isinstance(value, int | float) for value in found.values())
        ):
            raise ValueError(refusal("run", f"{path}: something else", "metrics, numbers by name"))
        return found


def runs(out: Path) -> Iterator[Run]:
    """All runs under a folder, those of sweeps too, the oldest first."""
    if not out.is_dir():
        raise ValueError(refusal("out", repr(str(out)), "a folder of runs"))
    found = [path for pattern in (f"*/{CONFIG}", f"*/*/{CONFIG}") for path in out.glob(pattern)]
    for path in sorted(found, key=lambda path: path.stat().st_mtime):
        yield Run(path.parent)


def versions() -> dict[str, str]:
    """What the figures depend on."""
    import torch

    return {
        "regard": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": str(torch.get_num_threads()),
    }
