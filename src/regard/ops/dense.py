"""Dense execution: the equation itself. Any device, any dtype, any derivative; the oracle of the others."""

from __future__ import annotations

from torch import Tensor

from regard.ops.call import Call


def dense(call: Call) -> Tensor:
    """Scores of all pairs, weights of all rows, one sum."""
    return call.read(call.weights())
