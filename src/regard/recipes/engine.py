"""Training: Lightning around a recipe, so that a run can be killed at any moment and resumed to the same result.

Everything random is a function of the seed and of the number of the update: which examples, which dropout. So the state to keep
is that of the model, the optimiser and the watch over the metric. It is written, whole or not at all, after each evaluation; a
resumed run does again what came after the last one.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from regard._errors import missing_extra, refusal
from regard._files import whole, write_json, write_lines
from regard.general.alignments import Alignment
from regard.model import Batch, Example, TaskModel, collate
from regard.observe import record, reinforce
from regard.recipes.logs import Events, write_curve
from regard.recipes.look import keep_attention
from regard.recipes.recipe import Judged, Recipe, one_of
from regard.recipes.runs import CURVE, METRICS, PREDICTIONS, RUN, SIGNATURES, STATE, Run

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Checkpoint, RichProgressBar
except ImportError as error:
    raise ImportError(missing_extra("lightning", "train", "regard run")) from error


# Updates between two looks at the losses.
_LOOK = 20
# Some attentions leave parameters alone in some updates: a hop that is not reached, an option that is not chosen.
_STRATEGIES = {"auto": "auto", "ddp": "ddp_find_unused_parameters_true", "fsdp": "fsdp"}


def training_loss(model: TaskModel, batch: Batch) -> Tensor:
    """The loss of a batch; where an alignment samples and learns by reward, with what teaches it beside it.

    The reward of an example is the log-probability of what is right, and is held against the mean of the others' (REINFORCE with a
    leave-one-out baseline: Kool et al. 2019, https://openreview.net/forum?id=r1lgTGL5DE).
    """
    if not any(isinstance(module, Alignment) and module.learns_by_reward for module in model.modules()):
        return model.loss(model(batch), batch)
    with record(model) as trace:
        prediction = model(batch)
    reward = model.output.reward(prediction, batch).detach()
    count = len(reward)
    others = (reward.sum() - reward) / max(1, count - 1)
    return model.loss(prediction, batch) + reinforce(trace, reward, others if count > 1 else 0.0)


class _Updates(IterableDataset[Batch]):
    """The batches of the updates between two evaluations."""

    def __init__(self, recipe: Recipe, examples: Sequence[Example], first: int, rank: int, world: int) -> None:
        super().__init__()
        self.examples, self.order = examples, recipe.order(examples)
        self.updates = range(first, min(first + recipe.every, recipe.steps))
        self.rank, self.world = rank, world

    def __len__(self) -> int:
        return len(self.updates)

    def __iter__(self) -> Iterator[Batch]:
        for update in self.updates:
            # Every process takes its share of the same update.
            chosen = self.order.chosen(update)[self.rank :: self.world]
            yield collate([self.examples[k] for k in chosen])


class _Training(pl.LightningModule):
    """A task model under training."""

    def __init__(self, recipe: Recipe, model: TaskModel, examples: Sequence[Example], kept: dict[str, Any]) -> None:
        super().__init__()
        self.recipe, self.model, self.examples = recipe, model, examples
        self.first = int(kept.get("update", 0))
        self.optimizer_state = kept.get("optimizer")
        self.losses: list[Tensor] = []  # not looked at yet
        self.recent: list[float] = []  # since the last evaluation
        self.events: Events | None = None
        if kept:
            try:
                model.load_state_dict(kept["model"])
            except (RuntimeError, TypeError, AttributeError) as error:
                said = str(error).splitlines()[0]
                raise ValueError(
                    refusal("resume", f"a state of another model: {said}", "one of this configuration")
                ) from error

    @property
    def update(self) -> int:
        """Number of updates done, in this process and before."""
        return self.first + self.global_step

    def train_dataloader(self) -> DataLoader[Batch]:
        updates = _Updates(self.recipe, self.examples, self.update, self.global_rank, self.trainer.world_size)
        return DataLoader(updates, batch_size=None)

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch.to(device)

    def on_train_batch_start(self, batch: Batch, index: int) -> None:
        # A function of the number of the update, like everything else: nothing to keep, nothing to resume.
        (optimizer,) = self.trainer.optimizers
        for group, lr in zip(optimizer.param_groups, self.rates, strict=True):
            group["lr"] = lr * self.recipe.rate(self.update)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        torch.manual_seed(self.recipe.seed_of(self.update) * 1009 + self.global_rank)
        loss = training_loss(self.model, batch) * self._share(batch)
        self.losses.append(loss.detach())
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=False, batch_size=len(batch))
        return loss

    def _share(self, batch: Batch) -> Tensor | float:
        """What the loss of this process counts: gradients are averaged over processes, whose batches may hold more or fewer tokens."""
        if self.trainer.world_size == 1:
            return 1.0
        own = torch.as_tensor(self.model.output.terms(batch), dtype=torch.float32, device=self.device)
        every = self.trainer.strategy.reduce(own.clone(), reduce_op="mean")
        return own / every

    def on_train_batch_end(self, outputs: Any, batch: Batch, index: int) -> None:
        # To look at every loss would make the device wait at every update.
        if len(self.losses) >= _LOOK or self.update >= self.recipe.steps:
            self.look()

    def look(self) -> None:
        """Write the losses since the last look down; stop if there is one that is no number."""
        if not self.losses:
            return
        own = torch.stack(self.losses).float()
        losses = (own if self.trainer.world_size == 1 else self.trainer.strategy.reduce(own, reduce_op="mean")).tolist()
        self.losses.clear()
        for k, loss in enumerate(losses, self.update - len(losses) + 1):
            if not math.isfinite(loss):
                fix = "Fix: a smaller lr, or a smaller clip."
                raise FloatingPointError(f"the loss is {loss} at update {k}. {fix}")
        self.recent += losses
        if self.events is not None:
            self.events.write(self.update, {"loss": sum(losses) / len(losses)})

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if _shards(self.trainer):
            # The norm is that of gradients which no process has all of.
            self.trainer.strategy.model.clip_grad_norm_(gradient_clip_val)  # type: ignore[union-attr, operator]
            return
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.recipe.groups(self.model), weight_decay=self.recipe.weight_decay)
        self.rates = [group["lr"] for group in optimizer.param_groups]
        if self.optimizer_state is not None:
            try:
                optimizer.load_state_dict(self.optimizer_state)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    refusal("resume", f"a state of another optimiser: {error}", "one of this run")
                ) from error
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
        with _gathered(trainer):
            judged = evaluated(self.recipe, module.model, self.examples, module.device, glance=True)
        value = judged.metrics[self.recipe.watch]
        module.look()
        loss, module.recent = sum(module.recent) / max(1, len(module.recent)), []
        self.curve.append({"update": module.update, "loss": loss, **judged.metrics})
        better = self.best is None or (value < self.best if self.recipe.lower else value > self.best)
        self.best, self.since = (value, 0) if better else (self.best, self.since + 1)
        module.log_dict(judged.metrics, prog_bar=True, batch_size=1, rank_zero_only=True)
        # Where parameters are spread over processes, all of them take part in putting them together.
        weights = trainer.strategy.lightning_module_state_dict()
        optimizer = trainer.strategy.optimizer_state(trainer.optimizers[0])
        weights = {name.removeprefix("model."): x for name, x in weights.items()}
        if trainer.is_global_zero:
            if better:
                self.run.save_weights(weights)
            write_curve(self.run.folder / CURVE, self.curve)
            if module.events is not None:
                module.events.write(module.update, judged.metrics)
        perfect = value == (0.0 if self.recipe.lower else 1.0) and self.since >= 1
        done = self.since >= self.recipe.patience or perfect or module.update >= self.recipe.steps
        trainer.should_stop = done
        if trainer.is_global_zero:
            state = {
                "model": weights,
                "optimizer": optimizer,
                "update": module.update,
                "curve": self.curve,
                "best": self.best,
                "since": self.since,
                "done": done,
            }
            whole(self.run.folder / STATE, lambda draft: torch.save(state, draft))


def _shards(trainer: pl.Trainer) -> bool:
    """Whether parameters are spread over processes."""
    from lightning.pytorch.strategies import FSDPStrategy

    return isinstance(trainer.strategy, FSDPStrategy)


def _gathered(trainer: pl.Trainer) -> AbstractContextManager[None]:
    """Whole parameters on every process, where they are spread over them."""
    if not _shards(trainer):
        return nullcontext()
    from torch.distributed.fsdp import FullyShardedDataParallel

    assert trainer.strategy.model is not None
    gathered: AbstractContextManager[None] = FullyShardedDataParallel.summon_full_params(
        trainer.strategy.model, writeback=False
    )
    return gathered


def evaluated(
    recipe: Recipe,
    model: TaskModel,
    examples: Sequence[Example],
    device: torch.device | str = "cpu",
    *,
    glance: bool = False,
) -> Judged:
    """Judge a model, or have a glance at it, and leave it as it was."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return (recipe.glance if glance else recipe.judge)(model, examples, device)
    finally:
        model.train(training)


def train(
    recipe: Recipe,
    run: Run,
    *,
    devices: int = 1,
    strategy: str = "auto",
    progress: bool = True,
) -> bool:
    """Train from the kept state of a run, or from the beginning, and keep the best weights.

    Args:
        recipe: what to train.
        run: its folder.
        devices: processes.
        strategy: `auto`, `ddp` or `fsdp`.
        progress: show a bar.

    Returns:
        Whether this process is the one that speaks for all of them.
    """
    # Which devices there are, and what else could be bought, is not what was asked.
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    one_of("strategy", strategy, tuple(_STRATEGIES))
    if not 1 <= devices <= recipe.batch:
        raise ValueError(refusal("devices", devices, f"from 1 to the examples of an update, batch={recipe.batch}"))
    run.keep_known(recipe)
    torch.manual_seed(recipe.seed)
    model, kept = recipe.build(), _kept(run.folder / STATE)
    if kept.get("done"):
        return True
    if not kept:
        recipe.initialise(model)
    module = _Training(recipe, model, recipe.cached("train"), kept)
    watch = _Watch(run, recipe, recipe.cached("validation"), kept)
    trainer = pl.Trainer(
        max_steps=recipe.steps - module.first,
        max_epochs=-1,
        accelerator="auto",
        devices=devices,
        strategy=_STRATEGIES[strategy if devices > 1 or strategy == "fsdp" else "auto"],
        precision=recipe.precision,  # type: ignore[arg-type]
        callbacks=[watch, *([RichProgressBar(refresh_rate=10)] if progress else [])],
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
    if trainer.is_global_zero:
        module.events = Events(run.folder, module.first)
    # Lightning starts the other processes with the command of this one: they find the run here.
    os.environ[RUN] = str(run.folder)
    with warnings.catch_warnings():
        # One process draws the batches: they are small, and a function of the number of the update.
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*IterableDataset.*")
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        # Every process judges all examples, and comes to the same metrics.
        warnings.filterwarnings("ignore", message=".*sync_dist=True.*")
        try:
            trainer.fit(module)
        except SystemExit as error:
            # Lightning takes the interruption for itself, and leaves.
            raise KeyboardInterrupt from error
        finally:
            del os.environ[RUN]
            if module.events is not None:
                module.events.close()
    return bool(trainer.is_global_zero)


def _kept(path: Path) -> dict[str, Any]:
    """The state of a run, read without running anything that it may hold; nothing where there is none."""
    if not path.exists():
        return {}
    fix = f"Fix: delete {path} to train from the beginning."
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has a dozen kinds of errors for a broken file
        raise ValueError(refusal("resume", f"{path}: {type(error).__name__}", "a state of this run", fix)) from error
    kinds = {"model": dict, "optimizer": dict, "update": int, "curve": list}
    if (
        not isinstance(state, dict)
        or not all(isinstance(state.get(key), kind) for key, kind in kinds.items())
        or state["update"] < 0
    ):
        raise ValueError(refusal("resume", f"{path}: something else", "a state of this run", fix))
    return state


def finish(recipe: Recipe, run: Run) -> dict[str, float]:
    """Judge the best weights on the test examples, and write metrics, answers, and what the attention looked at."""
    model, examples = run.model(), recipe.cached("test")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    judged = evaluated(recipe, model.to(device), examples, device)
    model.to("cpu")
    rows = [
        {
            "input": {name: list(words) for name, words in example.words.items() if name != "target"},
            "answer": answer,
            "target": _told(example),
        }
        for example, answer in zip(examples, judged.answers, strict=True)
    ]
    write_lines(run.folder / PREDICTIONS, rows)
    keep_attention(recipe, run, model, examples)
    if judged.signatures:
        write_json(run.folder / SIGNATURES, judged.signatures)
    write_json(run.folder / METRICS, judged.metrics)
    return judged.metrics


def _told(example: Example) -> Any:
    """The right answer: its words where it has some, or a number; nothing where it is large."""
    if "target" in example.words:
        return list(example.words["target"])
    return example.target.tolist() if example.target is not None and example.target.numel() <= 64 else None
