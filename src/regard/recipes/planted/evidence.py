"""Evidence for several classes in one text, and capsules as its classifier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from regard.query import CapsuleLoss, Capsules
from regard.recipes.planted.task import Batch, choice, one_hot, permutations


@dataclass(frozen=True)
class Evidence:
    """Say which classes a text speaks for.

    Every class has one token, which names it and judges all classes; only its judgement of the class that it names counts. Up to
    three fillers judge too. Each class has to find its own token: a mean of all is a vote of those who do not count, and one query
    cannot ask each for something else.
    """

    classes: int = 5
    several: bool = True  # any number of classes, or exactly one
    fillers: int = 3

    @property
    def dim(self) -> int:
        """Width of a token: the class that it names, or none, and a judgement of each class."""
        return 2 * self.classes + 1

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `features` (count, N, dim) and `mask`; truth `token`, for each class.

        The target is booleans (count, classes), or the class (count,) where there is exactly one.
        """
        C, N = self.classes, self.classes + self.fillers
        name = permutations(count, N, generator)
        token = name.argsort(-1)[:, :C]
        judged = torch.randn(count, N, C, generator=generator)
        judged = judged.sign() * (0.5 + judged.abs())
        one, left = choice(count, C, generator), choice(count, self.fillers + 1, generator)
        at = token[:, None]
        own = judged.gather(1, at)
        if not self.several:
            own = torch.where(torch.arange(C) == one[:, None, None], own.abs(), -own.abs())
            judged = judged.scatter(1, at, own)
        features = torch.cat([one_hot(name.clamp(max=C), C + 1), judged], -1)
        target = own[:, 0] > 0 if self.several else one
        return Batch({"features": features, "mask": name < C + left[:, None]}, target, {"token": token})


class CapsuleClassifier(nn.Module):
    """Capsules on the features of a task; `fit` takes `loss`, and `accuracy` the probabilities.

    Args:
        capsules: called with the inputs of a task by name; its weights are below `capsules` under a trace.

    Example:
        >>> import regard as rg
        >>> task = Evidence()
        >>> model = CapsuleClassifier(rg.CapsuleAttention(task.dim, task.classes))
        >>> model(**task.draw(3, torch.Generator()).inputs).shape
        torch.Size([3, 5])
    """

    def __init__(self, capsules: nn.Module) -> None:
        super().__init__()
        self.capsules = capsules

    def forward(self, **inputs: object) -> Tensor:
        """Probabilities of the classes."""
        found: Capsules = self.capsules(**inputs)
        return found.probability

    @staticmethod
    def loss(of: CapsuleLoss) -> Callable[[nn.Module, Batch], Tensor]:
        """What `fit` minimises."""

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            assert isinstance(model, CapsuleClassifier)
            value: Tensor = of(model.capsules(**batch.inputs), batch.target)
            return value

        return loss
