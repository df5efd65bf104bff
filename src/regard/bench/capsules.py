r"""Do capsules suit many classes, and are they more robust than a plain classifier?

Summaries recommend capsules for a moderate number of classes, and claim that they withstand noise and attacks. Both are measured
here (what they cost, in `capsules_cost`): accuracy from 2 to 200 classes on texts in which two of twelve words tell the class, and
accuracy on digits under Gaussian noise and under the fast gradient sign method,
$x + \epsilon\, \mathrm{sign}(\nabla_x \mathcal{L})$ (Goodfellow et al. 2015, https://arxiv.org/abs/1412.6572).

An attack is only as good as its gradient. Where a margin loss is satisfied it has none, and a model may seem to withstand what
merely misses it. So there are four attacks: by the model's own loss; by the difference of the best wrong score and the right one,
which is never satisfied; the same in ten steps, which follow the gradient as it changes (Madry et al. 2018,
https://arxiv.org/abs/1706.06083); and one that was made on the plain classifier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from regard.bench.measure import Row
from regard.general.attention import Attention
from regard.query import CapsuleAttention, CapsuleLoss, Capsules, DynamicRouting, LearnableQuery, PooledQuery
from regard.recipes.planted import Batch, CapsuleClassifier, CapsuleNetwork, Digits, accuracy, cross_entropy, fit
from regard.recipes.planted.task import permutations

QUESTION = "capsules"
CLASSES = (2, 5, 10, 20, 50, 100, 200)
SEEDS = (0, 1, 2)
NOISE = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
ATTACK = (0.02, 0.05, 0.1, 0.2)

_COLOURS = {
    "plain": "C0",
    "mean and linear": "C0",
    "one query and linear": "C1",
    "capsules, multi-margin": "C2",
    "capsules, bce": "C3",
    "routing, margin": "C4",
}

Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Topics:
    """Say what a text is about: two of its twelve words are near the word of its class, the others are any words."""

    classes: int
    words: int = 12
    dim: int = 32
    noise: float = 0.1

    def draw(self, count: int, generator: Generator) -> Batch:
        """Input `features` (count, words, dim)."""
        # Of a seed that no batch has.
        known = F.normalize(torch.randn(self.classes, self.dim, generator=Generator().manual_seed(4711)), dim=-1)
        target = torch.randint(self.classes, (count,), generator=generator)
        words = F.normalize(torch.randn(count, self.words, self.dim, generator=generator), dim=-1)
        two = permutations(count, self.words, generator) < 2
        near = known[target][:, None] + self.noise * torch.randn(words.shape, generator=generator)
        # Words of length two: dot products then tell them apart without large queries.
        return Batch({"features": 2 * torch.where(two[..., None], near, words)}, target)


class Plain(nn.Module):
    """One vector of the whole text, and a linear map to the classes."""

    def __init__(self, dim: int, classes: int, attend: bool) -> None:
        super().__init__()
        self.query = LearnableQuery(dim) if attend else PooledQuery()
        self.attention = Attention("dot") if attend else None
        self.output = nn.Linear(dim, classes)

    def forward(self, features: Tensor) -> Tensor:
        asked = self.query(features)
        read = asked if self.attention is None else self.attention(asked, features)
        logits: Tensor = self.output(read)
        return logits


class Routed(nn.Module):
    """Words as input capsules, classes as output capsules."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.routing = DynamicRouting((dim, 8), classes)

    def forward(self, features: Tensor) -> Capsules:
        return self.routing.capsules(features)


def readers(task: Topics) -> dict[str, tuple[nn.Module, Loss]]:
    """Who is compared on texts: each with its loss."""
    d, C = task.dim, task.classes
    loss = CapsuleClassifier.loss
    return {
        "mean and linear": (Plain(d, C, attend=False), cross_entropy),
        "one query and linear": (Plain(d, C, attend=True), cross_entropy),
        "capsules, multi-margin": (CapsuleClassifier(CapsuleAttention(d, C)), loss(CapsuleLoss())),
        "capsules, bce": (CapsuleClassifier(CapsuleAttention(d, C)), loss(CapsuleLoss("bce", weight=0.0))),
        "routing, margin": (CapsuleClassifier(Routed(d, C)), loss(CapsuleLoss("margin", weight=0.0))),
    }


class Seen(nn.Module):
    """Two convolutions, as those of `CapsuleNetwork`, and a vector for each of 4 x 4 places."""

    def __init__(self, channels: int = 32, dim: int = 32) -> None:
        super().__init__()
        self.conv, self.primary = nn.Conv2d(1, channels, 3), nn.Conv2d(channels, dim, 3)
        self.place = nn.Parameter(0.1 * torch.randn(16, dim))

    def forward(self, image: Tensor) -> Tensor:
        seen = self.primary(self.conv(image.unsqueeze(1)).relu()).relu()
        features: Tensor = seen.flatten(2).mT + self.place
        return features


class PlainDigits(nn.Module):
    """A linear map of all places."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.output = Seen(), nn.Linear(16 * 32, 10)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.output(self.seen(image).flatten(1))
        return logits


class AttendedDigits(nn.Module):
    """Capsules that attend places."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.capsules = Seen(), CapsuleAttention(32, 10)

    def forward(self, image: Tensor) -> Capsules:
        found: Capsules = self.capsules(self.seen(image))
        return found


def viewers() -> dict[str, tuple[nn.Module, Loss]]:
    """Who is compared on digits."""
    loss = CapsuleClassifier.loss
    return {
        "plain": (PlainDigits(), cross_entropy),
        "capsules, multi-margin": (CapsuleClassifier(AttendedDigits()), loss(CapsuleLoss(weight=0.0))),
        "capsules, bce": (CapsuleClassifier(AttendedDigits()), loss(CapsuleLoss("bce", weight=0.0))),
        "routing, margin": (CapsuleNetwork(), CapsuleNetwork.loss),
    }


def rows(classes: Sequence[int] = CLASSES, seeds: Sequence[int] = SEEDS, steps: int = 300) -> Iterator[Row]:
    """Texts with more and more classes, then digits with more and more noise."""
    torch.set_num_threads(1)
    for count in classes:
        yield from _many_classes(count, seeds, steps)
    yield from _robustness(seeds, 2 * steps)


def _many_classes(count: int, seeds: Sequence[int], steps: int) -> Iterator[Row]:
    task = Topics(count)
    for name in readers(task):
        found = []
        for seed in seeds:
            torch.manual_seed(seed)
            model, loss = readers(task)[name]
            fit(model, task, steps=steps, lr=0.02, seed=seed, loss=loss)
            found.append(accuracy(model, task))
        right, spread = _mean(found)
        extra = {"classes": count, "accuracy": right, "sd": spread}
        yield Row(QUESTION, f"texts of {count} classes", name, note=f"accuracy {right:.3f} ± {spread:.3f}", extra=extra)


def _robustness(seeds: Sequence[int], steps: int) -> Iterator[Row]:
    test = Digits(test=True)
    held = test.draw(len(test), Generator().manual_seed(1))
    held = Batch({"image": held.inputs["image"].double()}, held.target)
    trained: dict[str, list[tuple[nn.Module, Loss]]] = {}
    for name in viewers():
        trained[name] = []
        for seed in seeds:
            torch.manual_seed(seed)
            model, loss = viewers()[name]
            fit(model, Digits(), steps=steps, lr=3e-3, seed=seed, loss=loss)
            # In float64 a confident sigmoid still has a gradient to attack.
            trained[name].append((model.double(), loss))
    drawn = torch.randn(held.inputs["image"].shape, generator=Generator().manual_seed(2), dtype=torch.float64)
    on_plain = [_gradient(model, held, _margin) for model, _ in trained["plain"]]
    for name, models in trained.items():
        for sigma in NOISE:
            found = [_right(model, held, sigma * drawn) for model, _ in models]
            yield _row(f"digits, noise {sigma}", name, "noise", sigma, found)
        attacks = {
            "own loss": [_gradient(model, held, loss) for model, loss in models],
            "margin": [_gradient(model, held, _margin) for model, _ in models],
            "of plain": on_plain,
        }
        for epsilon in ATTACK:
            found = [_right(model, held, _iterated(model, held, epsilon)) for model, _ in models]
            yield _row(f"digits, FGSM {epsilon}, iterated", name, "iterated", epsilon, found)
        for kind, gradients in attacks.items():
            blind = sum(float((g == 0).flatten(1).all(1).double().mean()) for g in gradients) / len(gradients)
            for epsilon in ATTACK:
                pairs = zip(models, gradients, strict=True)
                found = [_right(model, held, epsilon * g.sign()) for (model, _), g in pairs]
                yield _row(f"digits, FGSM {epsilon}, {kind}", name, kind, epsilon, found, blind)


def _row(case: str, name: str, kind: str, size: float, found: list[float], blind: float | None = None) -> Row:
    right, spread = _mean(found)
    note = f"accuracy {right:.3f} ± {spread:.3f}" + (f", no gradient for {blind:.0%}" if blind else "")
    extra = {"kind": kind, "size": size, "accuracy": right, "sd": spread, "without_gradient": blind}
    return Row(QUESTION, case, name, note=note, extra=extra)


def _margin(model: nn.Module, batch: Batch) -> Tensor:
    """The best wrong score less the right one."""
    scores: Tensor = model(**batch.inputs)
    right = F.one_hot(batch.target, scores.shape[-1]).bool()
    wrong: Tensor = torch.where(right, -torch.inf, scores).amax(-1)
    return (wrong - scores[right]).sum()


def _gradient(model: nn.Module, batch: Batch, loss: Loss) -> Tensor:
    image = batch.inputs["image"].clone().requires_grad_()
    found: Tensor = torch.autograd.grad(loss(model, Batch({"image": image}, batch.target)), image)[0]
    return found


def _iterated(model: nn.Module, batch: Batch, epsilon: float, steps: int = 10) -> Tensor:
    """A change of at most epsilon a pixel, found in small steps."""
    image = batch.inputs["image"]
    change = torch.zeros_like(image)
    for _ in range(steps):
        seen = Batch({"image": (image + change).clamp(0.0, 1.0)}, batch.target)
        change = change + 2.5 * epsilon / steps * _gradient(model, seen, _margin).sign()
        change = change.clamp(-epsilon, epsilon)
    return change


@torch.no_grad()
def _right(model: nn.Module, batch: Batch, change: Tensor) -> float:
    found = model(image=(batch.inputs["image"] + change).clamp(0.0, 1.0))
    return float((found.argmax(-1) == batch.target).double().mean())


def _mean(found: Sequence[float]) -> tuple[float, float]:
    x = torch.tensor(found, dtype=torch.float64)
    return float(x.mean()), float(x.std()) if len(x) > 1 else 0.0


def draw(found: Sequence[Row], folder: Path) -> Path:
    """Accuracy against the number of classes, and against noise and attacks."""
    from matplotlib.figure import Figure

    from regard.report.figures import save

    figure = Figure(figsize=(10.0, 5.6), layout="constrained")
    panels = figure.subplots(2, 3).ravel()
    texts = [row for row in found if "classes" in row.extra]
    lines(panels[0], texts, lambda row: (row.extra["classes"], row.extra["accuracy"]), "classes", "accuracy on texts")
    panels[0].set_xscale("log")
    kinds = {
        "noise": "noise σ",
        "own loss": "FGSM ε, by its own loss",
        "margin": "FGSM ε, by the margin",
        "iterated": "ten steps within ε, by the margin",
        "of plain": "FGSM ε, made on the plain one",
    }
    for axes, (kind, label) in zip(panels[1:], kinds.items(), strict=True):
        some = [row for row in found if row.extra.get("kind") == kind]
        lines(axes, some, lambda row: (row.extra["size"], row.extra["accuracy"]), label, "accuracy on digits")
        axes.set_ylim(0, 1.02)
    path = folder / "capsules.svg"
    save(figure, path)
    return path


def lines(axes: Any, found: Sequence[Row], point: Callable[[Row], tuple[float, float]], x: str, y: str) -> None:
    """A line for each of those that were measured."""
    for name in dict.fromkeys(row.what for row in found):
        points = [point(row) for row in found if row.what == name]
        axes.plot(*zip(*points, strict=True), "o-", color=_COLOURS[name], label=name, markersize=3)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(frameon=False, fontsize=7)
