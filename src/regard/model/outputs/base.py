"""What every output model is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from regard._errors import refusal
from regard.model.batch import Batch

Read = Callable[..., Tensor]


class Output(nn.Module):
    """What every output model is.

    A plain one is called with the context and what there is beside it. A `stepwise` one is called with a function `read(state, start)`
    that asks and reads, and owns the loop.
    """

    stepwise = False

    def loss(self, prediction: Any, batch: Batch) -> Tensor:
        """A number that training makes small: a mean over `terms`."""
        raise NotImplementedError

    def terms(self, batch: Batch) -> Tensor | int:
        """How many terms the loss is the mean of, so that the losses of several batches can be averaged: examples, or real tokens."""
        return len(batch)

    def reward(self, prediction: Any, batch: Batch) -> Tensor:
        """How good the answer to each example is (B,), for attentions that learn by reward: the log-probability of what is right."""
        raise NotImplementedError(
            refusal("output", type(self).__name__, "an output model that says how good each answer is, with a `reward`")
        )

    def decide(self, prediction: Any) -> Tensor:
        """The answer."""
        raise NotImplementedError

    def probabilities(self, prediction: Any) -> Tensor | None:
        """How likely each class is (B, C); None where the answer is no class."""
        return None


def target_of(batch: Batch) -> Tensor:
    """The target, or a refusal."""
    if batch.target is None:
        raise ValueError(
            refusal("batch", "no target", "a target, to compute a loss or to tell a decoder the steps before")
        )
    return batch.target


def real_terms(batch: Batch) -> Tensor:
    """How many numbers of the target are not padding."""
    return (target_of(batch) >= 0).sum()
