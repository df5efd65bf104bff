"""Does a memory of earlier segments help? Bits per character on Tiny Shakespeare, at equal parameters and equal seconds.

Transformer-XL beside the same layers without memory, and beside a Transformer with sinusoidal positions whose feed-forward maps are
wider by what the relative positions cost. All are trained on the same streams of segments for the same number of seconds, and the
state with the best validation is tested: in a few streams, and, for those that remember nothing, also by windows that overlap, so
that every character has half a segment before it. The text is cut in order into 90, 5 and 5 per cent.

The text is not part of the project: `REGARD_DATA` names the file, or a folder with `tinyshakespeare/input.txt` or `input.txt.gz`.
Each model is trained for `seconds` (100 when not given). What was trained is kept in the folder `REGARD_RUNS` (`runs` when not given):
a run that was interrupted goes on, one that has finished is only evaluated.
"""

from __future__ import annotations

import gzip
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._errors import refusal
from regard._files import whole
from regard.bench.measure import Row
from regard.transformer import LanguageModel, Memory, TransformerXLLanguageModel

QUESTION = "shakespeare"
EVALUATIONS = 20
XL, RELATIVE, SINUSOIDAL = "Transformer-XL", "relative positions, no memory", "sinusoidal positions, no memory"


@dataclass(frozen=True)
class Size:
    """Of the models and their batches."""

    dim: int = 256
    heads: int = 8
    layers: int = 6
    segment: int = 128
    batch: int = 64
    dropout: float = 0.2
    lr: float = 1e-3
    streams: int = 8  # of an evaluation

    def __str__(self) -> str:
        return f"L{self.layers} d{self.dim}, segments of {self.segment}"


ON_CPU = Size(dim=64, heads=4, layers=2, segment=32, batch=32, dropout=0.0, lr=3e-3, streams=32)


def text_of(path: str | Path | None) -> str:
    """The text in a file, plain or gzipped, or in its usual place in a folder."""
    if path is None:
        fix = "Fix: set REGARD_DATA to the text, or to a folder that holds tinyshakespeare/input.txt."
        raise ValueError(refusal("path", None, "where Tiny Shakespeare lies", fix))
    path = Path(path)
    places = [path] if path.is_file() else [path / f for f in _PLACES]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ValueError(refusal("path", repr(str(path)), f"a file, or a folder with {' or '.join(_PLACES)}"))
    raw = found.read_bytes()
    return (gzip.decompress(raw) if found.suffix == ".gz" else raw).decode("utf-8")


_PLACES = ("tinyshakespeare/input.txt", "tinyshakespeare/input.txt.gz", "input.txt", "input.txt.gz")


@dataclass(frozen=True)
class Text:
    """Characters as numbers, in three parts."""

    train: Tensor
    valid: Tensor
    test: Tensor
    vocabulary: int

    @staticmethod
    def of(text: str, device: str) -> Text:
        """Cut 90, 5 and 5 per cent in order."""
        known = {c: k for k, c in enumerate(sorted(set(text)))}
        codes = torch.tensor([known[c] for c in text], device=device)
        n = len(codes)
        cuts = (int(0.9 * n), int(0.95 * n))
        return Text(codes[: cuts[0]], codes[cuts[0] : cuts[1]], codes[cuts[1] :], len(known))


class Plain(nn.Module):
    """A language model without memory, called like one that has some."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, memory: Memory | None = None) -> tuple[Tensor, None]:
        return self.model(tokens), None


def models(size: Size, vocabulary: int) -> dict[str, nn.Module]:
    """All that are compared, each from the same seed."""
    common: dict[str, Any] = {"norm": "pre", "dropout": size.dropout, "activation": "gelu"}

    def xl(memory: int) -> nn.Module:
        torch.manual_seed(0)
        return TransformerXLLanguageModel(vocabulary, size.dim, size.heads, size.layers, memory=memory, **common)

    torch.manual_seed(0)
    # What W_R, u and v hold, two matrices more of half the width hold too.
    wider = 4 * size.dim + size.dim // 2
    sinusoidal = LanguageModel(vocabulary, size.dim, size.heads, size.layers, feedforward_dim=wider, **common)
    return {XL: xl(size.segment), RELATIVE: xl(0), SINUSOIDAL: Plain(sinusoidal)}


@dataclass
class Progress:
    """Where the training of one model stands."""

    seconds: float = 0.0
    step: int = 0
    best: float = math.inf
    curve: list[tuple[float, int, float]] = field(default_factory=list)  # seconds, step, bits on the validation part


class Training:
    """One model on streams of segments, by the clock.

    Args:
        name: of the model.
        model: called with a segment and the memory of the one before.
        text: what it reads.
        size: of its batches.
        budget: seconds of training, in all runs together.
        folder: where it is kept.
    """

    def __init__(self, name: str, model: nn.Module, text: Text, size: Size, budget: float, folder: Path) -> None:
        self.name, self.text, self.size, self.budget = name, text, size, budget
        self.device = text.train.device.type
        self.model = model.to(text.train.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=size.lr, betas=(0.9, 0.95), weight_decay=0.01)
        self.progress = Progress()
        self.generator = torch.Generator().manual_seed(0)
        self.path = folder / f"{QUESTION}-{self.device}-{'-'.join(name.replace(',', '').split())}-{budget:g}s.pt"
        self.best_state: dict[str, Tensor] = {}

    def run(self) -> Progress:
        """Train until the budget is spent; what was done before counts."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_file():
            self._load()
        streams = self._streams()
        while self.progress.seconds < self.budget:
            until = min(self.budget, self.progress.seconds + self.budget / EVALUATIONS)
            self.model.train()
            begin, before = time.perf_counter(), self.progress.seconds
            while self.progress.seconds < until:
                self._step(*next(streams))
                self.progress.seconds = before + time.perf_counter() - begin
            self._evaluate()
            self._save()
        self.model.load_state_dict(self.best_state)
        self.model.eval()
        return self.progress

    def _streams(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Segments, what follows each of their characters, and whether a new stream begins; from another place at each pass."""
        T, B = self.size.segment, self.size.batch
        while True:
            first = int(torch.randint(T, (1,), generator=self.generator))
            whole = self.text.train[first:]
            n = (len(whole) - 1) // B
            x, y = whole[: B * n].view(B, n), whole[1 : B * n + 1].view(B, n)
            for t in range(0, n - T + 1, T):
                yield x[:, t : t + T], y[:, t : t + T], t == 0

    def _step(self, x: Tensor, y: Tensor, begins: bool) -> None:
        if begins:
            self.memory = None
        share = self.progress.seconds / self.budget
        warm = min(1.0, share / 0.02 + 0.01)
        for group in self.optimizer.param_groups:
            group["lr"] = self.size.lr * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(share, 1.0))))
        with _half(self.device):
            logits, self.memory = self.model(x, self.memory)
        loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.progress.step += 1
        # The clock of the host must not run ahead of the device.
        if self.device == "cuda" and self.progress.step % 10 == 0:
            torch.cuda.synchronize()

    memory: Memory | None = None

    def _evaluate(self) -> None:
        bits = float(streamed_bits(self.model, self.text.valid, self.size.segment, self.size.streams).mean())
        self.progress.curve.append((self.progress.seconds, self.progress.step, bits))
        if bits < self.progress.best:
            self.progress.best = bits
            self.best_state = {name: x.detach().clone() for name, x in self.model.state_dict().items()}

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "best": self.best_state,
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
            "generator": self.generator.get_state(),
            "size": asdict(self.size),
        }
        whole(self.path, lambda draft: torch.save(state, draft))

    def _load(self) -> None:
        state = torch.load(self.path, map_location=self.text.train.device, weights_only=True)
        if state["size"] != asdict(self.size):
            raise ValueError(refusal("REGARD_RUNS", f"a run of size {state['size']}", f"{asdict(self.size)}"))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.best_state, self.progress = state["best"], Progress(**state["progress"])
        self.generator.set_state(state["generator"].cpu())


def _half(device: str) -> AbstractContextManager[object]:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device == "cuda" else nullcontext()


@torch.no_grad()
def streamed_bits(model: nn.Module, codes: Tensor, segment: int, rows: int) -> Tensor:
    """Bits of each character, read in order with memory, (rows, characters): whole segments."""
    model.eval()
    n = (len(codes) - 1) // rows // segment * segment
    x, y = codes[: rows * n].view(rows, n), codes[1 : rows * n + 1].view(rows, n)
    found, memory = [], None
    for part, target in zip(x.split(segment, 1), y.split(segment, 1), strict=True):
        with _half(codes.device.type):
            logits, memory = model(part, memory)
        found.append(_bits(logits, target))
    return torch.cat(found, 1)


@torch.no_grad()
def windowed_bits(model: nn.Module, codes: Tensor, segment: int) -> Tensor:
    """Bits of each character from windows that overlap by half, each of which tells its second half, (characters,)."""
    model.eval()
    half = segment // 2
    windows = codes[:-1].unfold(0, segment, half)
    targets = codes[1:].unfold(0, segment, half)
    found = []
    for x, y in zip(windows.split(64), targets.split(64), strict=True):
        with _half(codes.device.type):
            logits, _ = model(x, None)
        found.append(_bits(logits, y)[:, half:])
    return torch.cat(found).flatten()


def _bits(logits: Tensor, target: Tensor) -> Tensor:
    nats = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none")
    return nats.view(target.shape) / math.log(2)


def _tested(training: Training) -> Iterator[tuple[str, Tensor]]:
    """The ways in which a trained model is tested, and the bits of each character."""
    model, test, T, S = training.model, training.text.test, training.size.segment, training.size.streams
    if not isinstance(model, TransformerXLLanguageModel) or not model.decoder.memory_length:
        yield "segment by segment", streamed_bits(model, test, T, S)
        yield "windows that overlap", windowed_bits(model, test, T)
        return
    trained = model.decoder.memory_length
    for times in (1, 2, 4):
        model.decoder.memory_length = times * trained
        yield f"memory of {times * trained}", streamed_bits(model, test, T, S)
    model.decoder.memory_length = trained


def rows(path: str | Path | None = None, seconds: float = 100.0, size: Size | None = None) -> Iterator[Row]:
    """Train and test each model.

    Args:
        path: of the text; that of `REGARD_DATA` when not given.
        seconds: of training, for each model.
        size: of the models; a small one on a CPU, when not given.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = size or (Size() if device == "cuda" else ON_CPU)
    text = Text.of(text_of(os.environ.get("REGARD_DATA") if path is None else path), device)
    folder = Path(os.environ.get("REGARD_RUNS", "runs"))
    for name, model in models(size, text.vocabulary).items():
        training = Training(name, model, text, size, seconds, folder)
        progress = training.run()
        count = sum(p.numel() for p in model.parameters())
        for how, bits in _tested(training):
            mean = float(bits.mean())
            extra: dict[str, Any] = {
                "bits": mean,
                "validation": progress.best,
                "parameters": count,
                "steps": progress.step,
                "curve": progress.curve,
            }
            if how in ("segment by segment", f"memory of {size.segment}"):
                extra["by_place"] = [round(float(b), 4) for b in bits.view(-1, size.segment).mean(0)]
            note = f"{mean:.4f} bits a character ({progress.best:.4f} in validation), {count:,} parameters, {progress.step} steps"
            yield Row(QUESTION, f"{size}, {seconds:g} s, {how}", name, progress.seconds, note=note, extra=extra)


def draw(found: Sequence[Row], folder: Path) -> Path:
    """Validation against training time, and bits of the test against the place in a segment."""
    from matplotlib.figure import Figure

    from regard.report.figures import save

    figure = Figure(figsize=(8.0, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for row, style in zip([row for row in found if "by_place" in row.extra], ("o-", "s-", "^-"), strict=False):
        seconds, _, bits = zip(*row.extra["curve"], strict=True)
        left.plot(seconds, bits, style, label=row.what, markersize=3)
        places = torch.tensor(row.extra["by_place"])
        width = max(1, len(places) // 16)
        smooth = places[: len(places) // width * width].view(-1, width).mean(1)
        right.plot([width * k + width / 2 for k in range(len(smooth))], smooth.tolist(), style, markersize=3)
    left.set_xlabel("seconds of training")
    left.set_ylabel("bits a character, validation")
    right.set_xlabel("place in the segment")
    right.set_ylabel("bits a character, test")
    left.legend(frameon=False, fontsize="small")
    path = folder / f"{QUESTION}.svg"
    save(figure, path)
    return path
