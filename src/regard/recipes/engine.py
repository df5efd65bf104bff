"""Training: Lightning around a recipe, so that a run can be killed at any moment and resumed to the same result.

Everything random is a function of the seed and of the number of the update: which examples, which dropout. So the state to keep
is that of the model, the optimiser and the watch over the metric. It is written, whole or not at all, after each evaluation; a
resumed run does again what came after the last one.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from regard._errors import missing_extra, refusal
from regard._files import whole, write_json, write_lines
from regard.model import Batch, Example, TaskModel
from regard.recipes.look import keep_attention
from regard.recipes.recipe import Judged, Recipe
from regard.recipes.runs import CURVE, METRICS, PREDICTIONS, STATE, Run

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Checkpoint
except ImportError as error:
    raise ImportError(missing_extra("lightning", "train", "regard run")) from error


class _Updates(IterableDataset[Batch]):
    """The batches of the updates between two evaluations."""

    def __init__(self, recipe: Recipe, examples: Sequence[Example], first: int, rank: int, world: int) -> None:
        super().__init__()
        self.recipe, self.examples = recipe, examples
        self.updates = range(first, min(first + recipe.every, recipe.steps))
        self.rank, self.world = rank, world

    def __len__(self) -> int:
        return len(self.updates)

    def __iter__(self) -> Iterator[Batch]:
        for update in self.updates:
            yield self.recipe.training_batch(self.examples, update, self.rank, self.world)


class _Training(pl.LightningModule):
    """A task model under training."""

    def __init__(self, recipe: Recipe, model: TaskModel, examples: Sequence[Example], kept: dict[str, Any]) -> None:
        super().__init__()
        self.recipe, self.model, self.examples = recipe, model, examples
        self.first = int(kept.get("update", 0))
        self.optimizer_state = kept.get("optimizer")
        if kept:
            model.load_state_dict(kept["model"])

    @property
    def update(self) -> int:
        """Number of updates done, in this process and before."""
        return self.first + self.global_step

    def train_dataloader(self) -> DataLoader[Batch]:
        updates = _Updates(self.recipe, self.examples, self.update, self.global_rank, self.trainer.world_size)
        return DataLoader(updates, batch_size=None)

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch.to(device)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        torch.manual_seed(self.recipe.seed_of(self.update) * 1009 + self.global_rank)
        loss = self.model.loss(self.model(batch), batch)
        if not math.isfinite(float(loss.detach())):
            fix = "Fix: a smaller lr, or a smaller clip."
            raise FloatingPointError(f"the loss is {float(loss.detach())} at update {self.update}. {fix}")
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=False, batch_size=len(batch))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(self.model.parameters(), lr=self.recipe.lr)
        if self.optimizer_state is not None:
            optimizer.load_state_dict(self.optimizer_state)
        return optimizer


class _Watch(Checkpoint):
    """Evaluates, keeps the best weights and the state, and ends training when nothing improves."""

    def __init__(self, run: Run, recipe: Recipe, examples: Sequence[Example], kept: dict[str, Any]) -> None:
        self.run, self.recipe, self.examples = run, recipe, examples
        self.curve: list[dict[str, Any]] = kept.get("curve", [])
        self.best: float | None = kept.get("best")
        self.since = int(kept.get("since", 0))

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, _Training)
        judged = evaluated(self.recipe, module.model, self.examples, module.device)
        value = judged.metrics[self.recipe.watch]
        loss = float(trainer.callback_metrics.get("loss", torch.tensor(math.nan)))
        self.curve.append({"update": module.update, "loss": loss, **judged.metrics})
        better = self.best is None or (value < self.best if self.recipe.lower else value > self.best)
        self.best, self.since = (value, 0) if better else (self.best, self.since + 1)
        module.log_dict(judged.metrics, prog_bar=True, batch_size=1, rank_zero_only=True)
        if trainer.is_global_zero:
            if better:
                self.run.save_weights(module.model)
            write_lines(self.run.folder / CURVE, self.curve)
        perfect = value == (0.0 if self.recipe.lower else 1.0) and self.since >= 1
        done = self.since >= self.recipe.patience or perfect or module.update >= self.recipe.steps
        trainer.should_stop = done
        if trainer.is_global_zero:
            state = {
                "model": module.model.state_dict(),
                "optimizer": trainer.optimizers[0].state_dict(),
                "update": module.update,
                "curve": self.curve,
                "best": self.best,
                "since": self.since,
                "done": done,
            }
            whole(self.run.folder / STATE, lambda draft: torch.save(state, draft))


def evaluated(
    recipe: Recipe, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu"
) -> Judged:
    """Judge a model, and leave it as it was."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return recipe.judge(model, examples, device)
    finally:
        model.train(training)


def train(
    recipe: Recipe,
    run: Run,
    *,
    devices: int = 1,
    strategy: str = "auto",
    precision: str = "32-true",
    progress: bool = True,
) -> None:
    """Train from the kept state of a run, or from the beginning, and keep the best weights.

    Args:
        recipe: what to train.
        run: its folder.
        devices: processes.
        strategy: `auto`, `ddp` or `fsdp`.
        precision: as Lightning names it.
        progress: show a bar.
    """
    # Which devices there are, and what else could be bought, is not what was asked.
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.manual_seed(recipe.seed)
    model, kept = recipe.build(), _kept(run.folder / STATE)
    if kept.get("done"):
        return
    module = _Training(recipe, model, recipe.examples("train"), kept)
    watch = _Watch(run, recipe, recipe.examples("validation"), kept)
    trainer = pl.Trainer(
        max_steps=recipe.steps - module.first,
        max_epochs=-1,
        accelerator="auto",
        devices=devices,
        strategy=strategy,
        precision=precision,  # type: ignore[arg-type]
        callbacks=[watch],
        logger=False,
        enable_progress_bar=progress,
        enable_model_summary=False,
        enable_checkpointing=True,
        gradient_clip_val=recipe.clip,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        default_root_dir=run.folder,
    )
    if trainer.world_size != devices:
        raise ValueError(refusal("devices", devices, f"what this machine gives: {trainer.world_size}"))
    with warnings.catch_warnings():
        # One process draws the batches: they are small, and a function of the number of the update.
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*IterableDataset.*")
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        trainer.fit(module)


def _kept(path: Path) -> dict[str, Any]:
    """The state of a run, read without running anything that it may hold; nothing where there is none."""
    if not path.exists():
        return {}
    fix = f"Fix: delete {path} to train from the beginning."
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has a dozen kinds of errors for a broken file
        got = f"{path}: {(str(error) or type(error).__name__).splitlines()[0]}"
        raise ValueError(refusal("resume", got, "a state of this run", fix)) from error
    if not isinstance(state, dict) or not {"model", "optimizer", "update", "curve"} <= set(state):
        raise ValueError(refusal("resume", f"{path}: something else", "a state of this run", fix))
    return state


def finish(recipe: Recipe, run: Run) -> dict[str, float]:
    """Judge the best weights on the test examples, and write metrics, answers, and what the attention looked at."""
    model, examples = run.model(), recipe.examples("test")
    judged = evaluated(recipe, model, examples)
    rows = [
        {"input": {name: list(words) for name, words in example.words.items() if name != "target"}, "answer": answer}
        for example, answer in zip(examples, judged.answers, strict=True)
    ]
    write_lines(run.folder / PREDICTIONS, rows)
    keep_attention(recipe, run, model, examples)
    write_json(run.folder / METRICS, judged.metrics)
    return judged.metrics
