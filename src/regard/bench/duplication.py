"""How many hashes does attention need to copy a word? The duplication task of the Reformer, trained for a fixed time.

A sequence is 0 w 0 w with 511 random symbols in w. A causal Transformer of one layer is to write the second w, and can only by looking 511
places back. One model is trained with full attention and one for each number of hashes; each is then evaluated with other
numbers of hashes too, and with full attention (Kitaev et al. 2020, table 2: 1, 2 and 4 hashes give 77.9, 98.1 and 99.9 % where the
evaluation uses as many, after 150,000 steps).

With REGARD_STATE, a folder, a model goes on from the state that it left there, and leaves its own there.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from regard._files import whole
from regard.bench.measure import Row
from regard.recipes.planted import Duplicate
from regard.transformer import LSHAttention, TokenEmbedding, TransformerDecoder

QUESTION = "duplication"
FULL = "full"
TRAINED: tuple[int | str, ...] = (1, 2, 4, FULL)
EVALUATED: tuple[int | str, ...] = (1, 2, 4, 8, FULL)


@dataclass(frozen=True)
class Setting:
    """Of the task, the model, and its training."""

    task: Duplicate = field(default_factory=Duplicate)
    dim: int = 256
    heads: int = 4
    chunk: int = 64
    batch: int = 128
    lr: float = 2e-3
    warmup: int = 200
    seconds: float = 100.0
    steps: int | None = None  # at most
    examples: int = 512  # in evaluation
    device: str = "cuda"


class Writer(nn.Module):
    """A causal model of one layer that tells the second w.

    Args:
        setting: sizes.
        hashes: rounds of hashing, or "full".
    """

    def __init__(self, setting: Setting, hashes: int | str) -> None:
        super().__init__()
        self.n, self.length, self.chunk = setting.task.n, setting.task.length, setting.chunk
        dim, classes = setting.dim, setting.task.classes
        self.embedding = TokenEmbedding(classes, dim)
        self.decoder = TransformerDecoder(
            dim,
            setting.heads,
            layers=1,
            cross=False,
            position="sinusoidal",
            norm="pre",
            feedforward_dim=dim,
            attention=LSHAttention,
        )
        # Not the embedding once more: with one layer, a token would begin by telling itself.
        self.output = nn.Linear(dim, classes)
        self.see(hashes)

    @property
    def attention(self) -> LSHAttention:
        layer: Any = self.decoder.layers[0]
        attention: LSHAttention = layer.attention
        return attention

    def see(self, hashes: int | str) -> None:
        """Look with so many hashes from now on. Full attention is that of one bucket, queries and keys as they are."""
        attention, full = self.attention, isinstance(hashes, str)
        attention.rounds = 1 if isinstance(hashes, str) else hashes
        attention.chunk, attention.buckets = (self.length, 1) if full else (self.chunk, None)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the second w, (count, n, classes)."""
        hidden = self.decoder(self.embedding(tokens))
        logits: Tensor = self.output(hidden[:, -self.n - 1 : -1])
        return logits


@dataclass
class State:
    """A model in the middle of its training."""

    model: Writer
    optimizer: torch.optim.Optimizer
    generator: Generator
    step: int = 0
    seconds: float = 0.0

    @classmethod
    def new(cls, setting: Setting, hashes: int | str, seed: int = 0) -> State:
        torch.manual_seed(seed)
        model = Writer(setting, hashes).to(setting.device)
        fused = setting.device == "cuda"
        optimizer = torch.optim.Adam(model.parameters(), lr=setting.lr, betas=(0.9, 0.98), fused=fused)
        return cls(model, optimizer, Generator(setting.device).manual_seed(seed))

    def save(self, path: Path) -> None:
        """Whole or not at all: a run that is killed leaves the state before."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "step": self.step,
            "seconds": self.seconds,
        }
        whole(path, lambda draft: torch.save(state, draft))

    def load(self, path: Path, device: str) -> None:
        found = torch.load(path, map_location=device, weights_only=True)
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.generator.set_state(found["generator"].cpu())
        self.step, self.seconds = found["step"], found["seconds"]


def train(
    setting: Setting,
    hashes: int | str,
    path: Path | None = None,
    save_every: float = 20.0,
    say: Callable[[str], None] = print,
) -> State:
    """Train a model for its time, or what is left of it."""
    state = State.new(setting, hashes)
    if path is not None and path.exists():
        state.load(path, setting.device)
    model, task = state.model.train(), setting.task
    logits: Callable[[Tensor], Tensor] = model
    saved = begin = time.perf_counter()
    before, losses = state.seconds, []
    while state.seconds < setting.seconds and (setting.steps is None or state.step < setting.steps):
        for group in state.optimizer.param_groups:
            group["lr"] = setting.lr * _pace(state, setting)
        batch = task.draw(setting.batch, state.generator)
        with casting(setting.device):
            found = logits(batch.inputs["tokens"])
            loss = F.cross_entropy(found.float().flatten(0, 1), batch.target.flatten())
        state.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        state.optimizer.step()
        losses.append(loss.detach())
        state.step += 1
        if setting.device == "cuda" and state.step % 20 == 0:
            # The host must not run ahead of the clock.
            torch.cuda.synchronize()
        now = time.perf_counter()
        state.seconds = before + now - begin
        if now - saved > save_every:
            say(f"  {hashes}: step {state.step}, loss {float(torch.stack(losses[-50:]).mean()):.3f}")
            saved = now
            if path is not None:
                state.save(path)
    if path is not None:
        state.save(path)
    return state


def _pace(state: State, setting: Setting) -> float:
    """A linear start, and half a cosine to the end of the time or of the steps, whichever is nearer."""
    done = state.seconds / setting.seconds
    if setting.steps is not None:
        done = max(done, state.step / setting.steps)
    return min(1.0, (state.step + 1) / setting.warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


def casting(device: str) -> AbstractContextManager[object]:
    """Half precision on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()


@torch.no_grad()
def accuracy(setting: Setting, model: Writer, hashes: int | str) -> float:
    """Share of the symbols of the second w that are told right, with so many hashes."""
    generator, right, size = Generator(setting.device).manual_seed(1), 0.0, min(64, setting.examples)
    model.eval().see(hashes)
    for _ in range(setting.examples // size):
        batch = setting.task.draw(size, generator)
        with casting(setting.device):
            found = model(batch.inputs["tokens"]).argmax(-1)
        right += float((found == batch.target).float().mean())
    return right / (setting.examples // size)


def answer(setting: Setting, trained: Sequence[int | str] = TRAINED, folder: Path | None = None) -> Iterator[Row]:
    """Train and evaluate."""
    task = setting.task
    size = f"0w0w, |w| {task.n}, {task.symbols} symbols"
    for hashes in trained:
        path = None if folder is None else folder / f"duplication-{hashes}.pt"
        state = train(setting, hashes, path)
        for seen in EVALUATED:
            right = accuracy(setting, state.model, seen)
            yield Row(
                QUESTION,
                f"{size}, trained with {_name(hashes)}",
                f"evaluated with {_name(seen)}",
                note=f"accuracy {100 * right:.1f} % after {state.step} steps, {state.seconds:.0f} s",
                extra={
                    "trained": hashes,
                    "evaluated": seen,
                    "accuracy": right,
                    "steps": state.step,
                    "batch": setting.batch,
                    "train_seconds": state.seconds,
                },
            )


def _name(hashes: int | str) -> str:
    return "full attention" if isinstance(hashes, str) else f"{hashes} hash{'es' if hashes > 1 else ''}"


def rows(seconds: float = 100.0) -> Iterator[Row]:
    """All of it, with so many seconds of training for each model."""
    folder = os.environ.get("REGARD_STATE")
    setting = Setting(seconds=seconds)
    yield from answer(setting, folder=None if folder is None else Path(folder))


def draw(found: Sequence[Row], folder: Path) -> Path:
    """Accuracy against the number of hashes in evaluation, a line for each model."""
    from matplotlib.figure import Figure

    from regard.report.figures import save

    figure = Figure(figsize=(5.0, 3.4), layout="constrained")
    axes = figure.subplots()
    ticks = {seen: x for x, seen in enumerate(EVALUATED)}
    for hashes in dict.fromkeys(row.extra["trained"] for row in found):
        points = [
            (ticks[row.extra["evaluated"]], row.extra["accuracy"]) for row in found if row.extra["trained"] == hashes
        ]
        axes.plot(*zip(*sorted(points), strict=True), "o-", label=f"trained with {_name(hashes)}", markersize=3)
    axes.set_xticks(list(ticks.values()), [str(seen) for seen in ticks])
    axes.set_xlabel("hashes in evaluation")
    axes.set_ylabel("accuracy on the second w")
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, fontsize=7)
    path = folder / "duplication.svg"
    save(figure, path)
    return path
