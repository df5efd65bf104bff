"""What every output model must do, asked of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.model import Batch, Output
from regard.model.naming import Available

NOTHING = Available({}, {}, {})


def losses_of_parts_average_to_that_of_the_whole(output: Output, whole: Any, parts: list[Any]) -> None:
    """A pair is a prediction and its batch; `terms` are the weights of the mean."""
    weights = torch.tensor([float(output.terms(batch)) for _, batch in parts], dtype=torch.float64)
    each = torch.stack([output.loss(prediction, batch) for prediction, batch in parts]).double()
    torch.testing.assert_close(
        (each * weights).sum() / weights.sum(), output.loss(*whole).double(), rtol=1e-5, atol=1e-6
    )
    assert float(output.terms(whole[1])) == float(weights.sum())


def halves(prediction: Tensor, batch: Batch, first: int) -> list[tuple[Tensor, Batch]]:
    """The first so many examples, and the others."""
    return [(prediction[part], at(batch, part)) for part in (slice(0, first), slice(first, None))]


def at(batch: Batch, part: slice) -> Batch:
    """Some of the examples."""
    return Batch(
        {name: x[part] for name, x in batch.inputs.items()},
        {name: x[part] for name, x in batch.masks.items()},
        None if batch.target is None else batch.target[part],
    )


def gradients_flow(module: nn.Module, loss: Tensor) -> None:
    """Every parameter has a finite gradient, and is not left out."""
    loss.backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name
