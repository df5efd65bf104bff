"""One short training loop, and how well a model then does."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from regard.recipes.planted.task import Batch, Task

Loss = Callable[[nn.Module, Batch], Tensor]


class Classifier(nn.Module):
    """An attention on the inputs of a task, and a linear map to its classes.

    Args:
        attention: called with the inputs of a task by name.
        dim: width of what it gives.
        classes: of the task.
        readout: (classes, dim), where the map starts, as some tasks know it. A map that starts at random may start with the wrong
            sign; then attention learns to look away from the answer, for want of a better way to change the sign.

    Example:
        >>> import regard as rg
        >>> from regard.recipes.planted import MatchingPair
        >>> task = MatchingPair()
        >>> model = Classifier(rg.InteractiveCoAttention(task.dim), 2 * task.dim, task.classes)
        >>> model(**task.draw(5, torch.Generator()).inputs).shape
        torch.Size([5, 4])
    """

    def __init__(self, attention: nn.Module, dim: int, classes: int, readout: Tensor | None = None) -> None:
        super().__init__()
        self.attention = attention
        self.output = nn.Linear(dim, classes)
        if readout is not None:
            with torch.no_grad():
                self.output.weight.copy_(readout)
                self.output.bias.zero_()

    def forward(self, **inputs: object) -> Tensor:
        """Logits of the classes."""
        logits: Tensor = self.output(self.attention(**inputs))
        return logits


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Of logits (..., classes) with the target (...)."""
    return F.cross_entropy(model(**batch.inputs).flatten(0, -2), batch.target.flatten())


def fit(
    model: nn.Module,
    task: Task,
    *,
    steps: int = 300,
    batch: int = 64,
    lr: float = 1e-2,
    seed: int = 0,
    loss: Loss = cross_entropy,
) -> list[float]:
    """Train a model on fresh examples at every step, with Adam; the same seed gives the same model.

    Args:
        model: called with the inputs of a batch by name.
        task: what draws the batches.
        steps: number of updates.
        batch: examples an update.
        lr: learning rate.
        seed: of the examples, and of whatever is random in the model.
        loss: of a model on a batch; cross-entropy when not given.

    Returns:
        The loss at each step.

    Example:
        >>> import regard as rg
        >>> from regard.recipes.planted import MatchingPair
        >>> task = MatchingPair()
        >>> model = Classifier(rg.InteractiveCoAttention(task.dim), 2 * task.dim, task.classes)
        >>> len(fit(model, task, steps=2))
        2
    """
    generator = Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.train()
        for _ in range(steps):
            value = loss(model, task.draw(batch, generator))
            optimizer.zero_grad(set_to_none=True)
            value.backward()
            optimizer.step()
            losses.append(float(value.detach()))
        model.eval()
    return losses


@torch.no_grad()
def accuracy(model: nn.Module, task: Task, *, count: int = 2048, seed: int = 1) -> float:
    """Share of unseen examples that a model gets right."""
    batch = task.draw(count, Generator().manual_seed(seed))
    found = model(**batch.inputs).argmax(-1)
    return float((found == batch.target).float().mean())
