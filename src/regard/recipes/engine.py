"""Training: Lightning's Fabric around a recipe, so that a run can be killed at any moment and resumed to the same result.

Everything random is a function of the seed and of the number of the update: which examples, which dropout. So the state to keep
is that of the model, the optimiser and the watch over the metric. It is written, whole or not at all, after each evaluation; a
resumed run does again what came after the last one.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard._errors import missing_extra, refusal
from regard._files import check_archive, whole, write_json, write_lines
from regard.general.alignments import Alignment
from regard.model import Batch, Example, TaskModel, collate
from regard.observe import record, reinforce
from regard.recipes.logs import Events, write_curve
from regard.recipes.look import keep_attention
from regard.recipes.progress import Progress
from regard.recipes.recipe import Judged, Recipe, one_of
from regard.recipes.runs import CURVE, KNOWN, METRICS, PREDICTIONS, RUN, SIGNATURES, STATE, Run
from regard.recipes.spread import Spread, gathered, optimizer_state, place_optimizer_state, weights_of

try:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
    from lightning.fabric.strategies.single_device import SingleDeviceStrategy
except ImportError as error:
    raise ImportError(missing_extra("lightning", "train", "regard run")) from error


# Updates between two looks at the losses; to look at every one would make the device wait at every update.
_LOOK = 20
_STRATEGIES = ("auto", "ddp", "fsdp")
# What Lightning knows how to do with parameters that are spread.
_PRECISIONS_SPREAD = ("32-true", "bf16-mixed", "bf16-true")


def training_loss(model: TaskModel, batch: Batch) -> Tensor:
    """The loss of a batch; where an alignment samples and learns by reward, with what teaches it beside it.

    The reward of an example is the log-probability of what is right, and is held against the mean of the others' (REINFORCE with a
    leave-one-out baseline: Kool et al. 2019, https://openreview.net/forum?id=r1lgTGL5DE).
    """
    return (_rewarded_loss if _learns_by_reward(model) else _plain_loss)(model, batch)


def _plain_loss(model: TaskModel, batch: Batch) -> Tensor:
    return model.loss(model(batch), batch)


def _learns_by_reward(model: TaskModel) -> bool:
    return any(isinstance(module, Alignment) and module.learns_by_reward for module in model.modules())


def _rewarded_loss(model: TaskModel, batch: Batch) -> Tensor:
    with record(model) as trace:
        prediction = model(batch)
    reward = model.output.reward(prediction, batch).detach()
    count = len(reward)
    others = (reward.sum() - reward) / max(1, count - 1)
    return model.loss(prediction, batch) + reinforce(trace, reward, others if count > 1 else 0.0)


class _Loss(nn.Module):
    """What the processes have in common: the loss of a model, whose parameters may be copied or spread over them."""

    def __init__(self, model: TaskModel) -> None:
        super().__init__()
        self.model = model
        # To look at every module in every update takes the host as long as a small layer.
        self.by_reward = _learns_by_reward(model)
        self.spread: Spread | None = None

    def over(self, mesh: Any) -> _Loss:
        """The same, its parameters spread over processes."""
        self.spread = Spread(self, mesh)
        return self

    def forward(self, held: _Held) -> Tensor:
        return self.at(held.batch)

    def at(self, batch: Batch) -> Tensor:
        return (_rewarded_loss if self.by_reward else _plain_loss)(self.model, batch)


class _Held:
    """A batch that nobody looks into on its way to the model: to convert what already is right costs as much as a small layer."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch


class _Training:
    """A task model under training, in one of the processes."""

    def __init__(self, recipe: Recipe, run: Run, model: TaskModel, kept: dict[str, Any], fabric: Fabric) -> None:
        self.recipe, self.run, self.model, self.fabric = recipe, run, model, fabric
        self.examples, self.validation = recipe.cached("train"), recipe.cached("validation")
        self.order = recipe.order(self.examples)
        self.update = int(kept.get("update", 0))  # number of updates done, in this process and before
        self.curve: list[dict[str, Any]] = kept.get("curve", [])
        self.best: float | None = kept.get("best")
        self.since = int(kept.get("since", 0))  # evaluations since the best one
        self.losses: list[Tensor] = []  # not looked at yet
        self.recent: list[float] = []  # since the last evaluation
        self.seen: dict[str, float] = {}  # what the bar shows
        self.device, self.precision = fabric.device, fabric.strategy.precision
        self.converts = recipe.precision in ("bf16-true", "64-true")
        if kept:
            try:
                model.load_state_dict(kept["model"])
            except (RuntimeError, TypeError, AttributeError) as error:
                said = str(error).splitlines()[0]
                raise ValueError(
                    refusal("resume", f"a state of another model: {said}", "one of this configuration")
                ) from error
        whole = _Loss(model)
        self.loss = fabric.setup_module(whole)
        self.loss.train()
        self.spread = whole.spread
        self.alone = whole if isinstance(fabric.strategy, SingleDeviceStrategy) else None
        self.optimizer: Any = fabric.setup_optimizers(self._optimizer(kept.get("optimizer")))

    def _optimizer(self, state: dict[str, Any] | None) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.recipe.groups(self.model), weight_decay=self.recipe.weight_decay)
        self.rates = [group["lr"] for group in optimizer.param_groups]
        if state is not None:
            try:
                place_optimizer_state(optimizer, state)
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                raise ValueError(
                    refusal("resume", f"a state of another optimiser: {error}", "one of this run")
                ) from error
        return optimizer

    def fit(self, bar: Progress, events: Events | None) -> None:
        """Update until there is no more to gain."""
        done = False
        while not done:
            for _ in range(min(self.recipe.every, self.recipe.steps - self.update)):
                self._advance()
                if len(self.losses) >= _LOOK:
                    self._look(bar, events)
            self._look(bar, events)
            done = self._judge(bar, events)

    def _advance(self) -> None:
        """One update. Everything in it is a function of its number: nothing to keep, nothing to resume."""
        rank, world = self.fabric.global_rank, self.fabric.world_size
        # Every process takes its share of the same update.
        chosen = self.order.chosen(self.update)[rank::world]
        # Whoever waits for a copy to a device waits for all that it still has to do.
        batch = collate([self.examples[k] for k in chosen]).to(self.device, non_blocking=True)
        batch = self.precision.convert_input(batch) if self.converts else batch
        optimizer, rate = self.optimizer.optimizer, self.recipe.rate(self.update)
        for group, lr in zip(optimizer.param_groups, self.rates, strict=True):
            group["lr"] = lr * rate
        _seed(self.recipe.seed_of(self.update) * 1009 + rank, self.device)
        loss = self._step_together(batch) if self.alone is None else self._step_alone(self.alone, batch, optimizer)
        optimizer.zero_grad()
        self.losses.append(loss.detach())
        self.update += 1

    def _step_alone(self, whole: _Loss, batch: Batch, optimizer: torch.optim.Optimizer) -> Tensor:
        """What `_step_together` comes to for one process, without Fabric's wrappers, which cost as much as several small layers."""
        strategy, precision = self.fabric.strategy, self.precision
        with precision.forward_context():
            found = whole.at(batch)
        loss: Tensor = precision.convert_output(found)
        strategy.backward(loss, None)
        strategy.clip_gradients_norm(whole, optimizer, max_norm=self.recipe.clip, error_if_nonfinite=False)
        strategy.optimizer_step(optimizer)
        return loss

    def _step_together(self, batch: Batch) -> Tensor:
        loss: Tensor = self.loss(_Held(batch))
        loss = loss if self.fabric.world_size == 1 else loss * self._share(batch)
        used = None if self.spread is None else self.spread.used(loss)
        self.fabric.backward(loss)
        if self.spread is not None and used is not None:
            self.spread.leave_others(used)
        self.fabric.clip_gradients(self.loss, self.optimizer, max_norm=self.recipe.clip, error_if_nonfinite=False)
        self.optimizer.step()
        return loss

    def _share(self, batch: Batch) -> Tensor:
        """What the loss of this process counts: gradients are averaged over processes, whose batches may hold more or fewer tokens."""
        own = torch.as_tensor(self.model.output.terms(batch), dtype=torch.float32, device=self.device)
        return own / self._mean(own.clone())

    def _mean(self, x: Tensor) -> Tensor:
        if self.fabric.world_size == 1:
            return x
        mean = self.fabric.all_reduce(x, reduce_op="mean")
        assert isinstance(mean, Tensor)
        return mean

    def _look(self, bar: Progress, events: Events | None) -> None:
        """Write the losses since the last look down; stop if there is one that is no number."""
        if not self.losses:
            return
        losses = self._mean(torch.stack(self.losses).float()).tolist()
        self.losses.clear()
        for k, loss in enumerate(losses, self.update - len(losses) + 1):
            if not math.isfinite(loss):
                fix = "Fix: a smaller lr, or a smaller clip."
                raise FloatingPointError(f"the loss is {loss} at update {k}. {fix}")
        self.recent += losses
        mean = sum(losses) / len(losses)
        self.seen["loss"] = mean
        bar.show(self.update, self.seen)
        if events is not None:
            events.write(self.update, {"loss": mean})

    def _judge(self, bar: Progress, events: Events | None) -> bool:
        """Evaluate, keep the best weights and the state, and say whether to end."""
        recipe, folder, speaks = self.recipe, self.run.folder, self.fabric.is_global_zero
        with gathered(self.loss):
            judged = evaluated(recipe, self.model, self.validation, self.device, glance=True)
        value = judged.metrics[recipe.watch]
        loss, self.recent = sum(self.recent) / max(1, len(self.recent)), []
        self.curve.append({"update": self.update, "loss": loss, **judged.metrics})
        better = self.best is None or (value < self.best if recipe.lower else value > self.best)
        # Of two that are equally good the later one has seen more; with few validation examples that is often so.
        kept = better or value == self.best
        self.best, self.since = (value, 0) if better else (self.best, self.since + 1)
        self.seen |= judged.metrics
        bar.show(self.update, self.seen)
        # Where parameters are spread over processes, all of them take part in putting them together.
        weights = {name.removeprefix("model."): x for name, x in weights_of(self.loss).items()}
        optimizer = optimizer_state(self.optimizer.optimizer)
        perfect = value == (0.0 if recipe.lower else 1.0) and self.since >= 1
        done = self.since >= recipe.patience or perfect or self.update >= recipe.steps
        if speaks:
            if kept:
                self.run.save_weights(weights)
            write_curve(folder / CURVE, self.curve)
            if events is not None:
                events.write(self.update, judged.metrics)
            state = {
                "model": weights,
                "optimizer": optimizer,
                "update": self.update,
                "curve": self.curve,
                "best": self.best,
                "since": self.since,
                "done": done,
            }
            whole(folder / STATE, lambda draft: torch.save(state, draft))
        return done


def _seed(seed: int, device: torch.device) -> None:
    """What `torch.manual_seed` does, for the generators in use alone."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    elif device.type == "cuda":
        torch.default_generator.manual_seed(seed)
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.manual_seed(seed)


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


def check_processes(recipe: Recipe, devices: int, strategy: str) -> None:
    """Refuse processes that cannot share an update."""
    one_of("strategy", strategy, _STRATEGIES)
    if not 1 <= devices <= recipe.batch:
        raise ValueError(refusal("devices", devices, f"from 1 to the examples of an update, batch={recipe.batch}"))
    if strategy == "fsdp" and recipe.precision not in _PRECISIONS_SPREAD:
        expected = "one of " + ", ".join(_PRECISIONS_SPREAD) + ", since strategy='fsdp'"
        raise ValueError(refusal("precision", repr(recipe.precision), expected))


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
    check_processes(recipe, devices, strategy)
    kept = _kept(run.folder / STATE)
    run.keep_known(recipe)
    torch.manual_seed(recipe.seed)
    with _knowing(run) if kept else nullcontext():
        model, count = recipe.build(), len(recipe.cached("train"))
    if devices > count:
        expected = f"at most as many as there are examples of train, {count}"
        raise ValueError(refusal("devices", devices, expected))
    if kept.get("done"):
        return True
    if not kept:
        recipe.initialise(model)
    fabric = _fabric(recipe, devices, strategy)
    # Lightning starts the other processes with the command of this one: they find the run here.
    os.environ[RUN] = str(run.folder)
    try:
        fabric.launch()
        training = _Training(recipe, run, model, kept, fabric)
        speaks = bool(fabric.is_global_zero)
        events = Events(run.folder, training.update) if speaks else None
        try:
            with Progress(recipe.name, recipe.steps, shown=progress and speaks) as bar:
                bar.show(training.update, {})
                training.fit(bar, events)
        finally:
            if events is not None:
                events.close()
    except BaseException as error:
        # What one process cannot do, the others wait for in vain.
        for process in getattr(fabric.strategy.launcher, "procs", ()):
            process.terminate()
        if isinstance(error, RuntimeError) and _says_that_one_is_lost(error):
            said = str(error).splitlines()[0]
            fix = f"Fix: go on with: regard run --resume {run.folder}"
            raise ConnectionError(f"another process of this run has ended: {said} {fix}") from error
        raise
    finally:
        del os.environ[RUN]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return speaks


def _says_that_one_is_lost(error: RuntimeError) -> bool:
    """Whether an error is that of a backend whose other end is gone: they have no class of their own."""
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL error", "Timed out waiting")
    return isinstance(error, torch.distributed.DistError) or any(words in str(error) for words in lost)


@contextmanager
def _knowing(run: Run) -> Iterator[None]:
    """Say of a run that goes on that what it knew is damaged."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        got = f"{run.folder / KNOWN}: {type(error).__name__}: {error}"
        raise ValueError(refusal("resume", got, "what the recipe learnt before training")) from error


def _fabric(recipe: Recipe, devices: int, strategy: str) -> Fabric:
    # Which devices there are, what else could be bought, and that processes have met, is not what was asked.
    for name in ("lightning.fabric", "lightning.fabric.utilities.rank_zero", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    how: Any = "auto"
    if strategy == "fsdp":
        how = ModelParallelStrategy(
            lambda loss, mesh: loss.over(mesh["data_parallel"]),
            data_parallel_size=devices,
            tensor_parallel_size=1,
        )
    elif devices > 1:
        # Some attentions leave parameters alone in some updates: a hop that is not reached, an option that is not chosen.
        how = "ddp_find_unused_parameters_true"
    return Fabric(
        accelerator="auto",
        devices=devices,
        strategy=how,
        precision=recipe.precision,  # type: ignore[arg-type]
    )


def _kept(path: Path) -> dict[str, Any]:
    """The state of a run, read without running anything that it may hold; nothing where there is none."""
    if not path.exists():
        return {}
    fix = f"Fix: delete {path} to train from the beginning."
    try:
        check_archive(path)
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # there are a dozen kinds of errors for a broken file
        raise ValueError(refusal("resume", f"{path}: {type(error).__name__}", "a state of this run", fix)) from error
    kinds = {"model": dict, "optimizer": dict, "update": int, "curve": list, "since": int}
    if (
        not isinstance(state, dict)
        or not all(isinstance(state.get(key), kind) for key, kind in kinds.items())
        or not 0 <= state["update"] < 1 << 32
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
            "target": recipe.right_answer(example),
        }
        for example, answer in zip(examples, judged.answers, strict=True)
    ]
    write_lines(run.folder / PREDICTIONS, rows)
    keep_attention(recipe, run, model, examples, judged.answers)
    if judged.signatures:
        write_json(run.folder / SIGNATURES, judged.signatures)
    write_json(run.folder / METRICS, judged.metrics)
    return judged.metrics
