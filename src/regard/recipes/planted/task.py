"""What a planted task is: batches in which it is known where the answer lies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Generator, Tensor


@dataclass(frozen=True)
class Batch:
    """Examples of a task.

    `inputs` are the arguments of a model by name, `target` the classes it should give, and `truth` says where the answer
    lies: for each input that is searched, the index of what decides.
    """

    inputs: dict[str, Any]
    target: Tensor
    truth: dict[str, Tensor] = field(default_factory=dict)


class Task(Protocol):
    """A generator of examples."""

    @property
    def classes(self) -> int: ...

    def draw(self, count: int, generator: Generator) -> Batch:
        """So many fresh examples."""
        ...


def one_hot(index: Tensor, size: int) -> Tensor:
    """Ones at the index, in float32."""
    return torch.nn.functional.one_hot(index, size).float()


def permutations(count: int, n: int, generator: Generator) -> Tensor:
    """Permutations of n things, (count, n)."""
    return torch.rand(count, n, generator=generator).argsort(-1)


def hidden_signs(place: Tensor, n: int, generator: Generator) -> Tensor:
    """Signs (count, n), one of which, at `place`, is to be found; neither the sum of all nor that of the others tells it.

    The sum of all is drawn first, evenly and whatever the sign at `place`, so that a mean tells nothing at all. Then the sum of
    the others tells only a little: a reader cannot find the sign by leaving it out.
    """
    count = len(place)
    sign = 2 * choice(count, 2, generator) - 1
    total = 2 * choice(count, n - 1, generator) - (n - 2)
    positive = (total - sign + n - 1) // 2
    others = torch.where(permutations(count, n - 1, generator) < positive[:, None], 1, -1)
    position = torch.arange(n)
    before = others.gather(1, position.clamp(max=n - 2).expand(count, n))
    after = others.gather(1, (position - 1).clamp(min=0).expand(count, n))
    signs = torch.where(position < place[:, None], before, after)
    return torch.where(position == place[:, None], sign[:, None], signs).float()


def of_sign(*widths: int) -> Tensor:
    """Logits of negative and positive from vectors of these widths, each of which ends in a sign.

    Example:
        >>> of_sign(2, 3).tolist()
        [[0.0, -1.0, 0.0, 0.0, -1.0], [0.0, 1.0, 0.0, 0.0, 1.0]]
    """
    weight = torch.cat([one_hot(torch.tensor(width - 1), width) for width in widths])
    return torch.stack([0.0 - weight, weight])


def choice(count: int, n: int, generator: Generator) -> Tensor:
    """One of n for each of count."""
    return torch.randint(n, (count,), generator=generator)


def taken(x: Tensor, index: Tensor) -> Tensor:
    """The entry of each row: x (count, n, ...) and index (count,) to (count, ...)."""
    return x[torch.arange(len(index)), index]
