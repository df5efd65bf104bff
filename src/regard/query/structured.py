"""Structured attention: weights that are the marginals of a distribution over which keys are selected together."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from regard._errors import refusal
from regard.general.alignments.base import Alignment, softmax
from regard.ops.call import Call, Tile
from regard.query.parts import uncast


class Structure(Protocol):
    """A distribution over selections z of keys, one for each row of scores."""

    def log_partition(self) -> Tensor:
        """The logarithm of the normaliser, (..., rows)."""
        ...

    def marginals(self) -> Tensor:
        """Probability of each key to be selected, (..., rows, N)."""
        ...

    def entropy(self) -> Tensor:
        """Entropy of the selection, (..., rows), in nats."""
        ...

    def sample(self, generator: Generator | None = None) -> Tensor:
        """A selection, booleans (..., rows, N)."""
        ...

    def log_prob(self, selected: Tensor) -> Tensor:
        """Of a selection, (..., rows)."""
        ...


class Structured(Alignment):
    """An alignment whose weights are the marginals of a distribution over selections, each row's own.

    They are probabilities of N events, not of N outcomes: a row sums to the expected number of selected keys, unless `normalize`
    divides by it.
    """

    def __init__(self, normalize: bool = False) -> None:
        super().__init__()
        self.normalize = bool(normalize)

    def structure(self, scores: Tensor, mask: Tensor | None) -> Any:
        """The distribution that rows of scores give; it has `log_odds` beside what every `Structure` has."""
        raise NotImplementedError

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        if scores.shape[-1] == 0:
            return scores
        found = self.structure(scores, mask)
        if not self.normalize:
            marginals: Tensor = found.marginals()
            return marginals
        # From logarithms: marginals that are all too small to be written still have a sum of one.
        return softmax(F.logsigmoid(found.log_odds()), found.allowed)

    def distribution(self, call: Call) -> Structure:
        """The distribution behind a recorded call: `attend.align.distribution(trace.call)`, to sample from, for its entropy."""
        tile = recorded(call).tile()
        with uncast(call.device):
            scores = call.scores(tiled=True)
            found: Structure = self.structure(scores, tile.mask()) if scores.shape[-1] else Nothing(scores)
        return found

    def extra_repr(self) -> str:
        return f"normalize={self.normalize}"


def recorded(call: Call) -> Call:
    """Refuse what is no call, such as the trace that holds one."""
    if not isinstance(call, Call):
        raise TypeError(refusal("call", type(call).__name__, "the call of a trace", "Fix: trace.call."))
    return call


class Nothing:
    """Rows without keys, (..., 0): to select nothing is certain."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores

    def log_partition(self) -> Tensor:
        return self.scores.sum(-1)

    def marginals(self) -> Tensor:
        return self.scores

    def entropy(self) -> Tensor:
        return self.scores.sum(-1)

    def sample(self, generator: Generator | None = None) -> Tensor:
        return torch.zeros_like(self.scores, dtype=torch.bool)

    def log_prob(self, selected: Tensor) -> Tensor:
        return (self.scores * selection(selected, self.sample())).sum(-1)


def selection(selected: Tensor, allowed: Tensor) -> Tensor:
    """Selections to be judged, booleans like the keys or with more leading axes; or a refusal."""
    if not isinstance(selected, Tensor) or selected.dtype != torch.bool:
        got = f"a tensor of {selected.dtype}" if isinstance(selected, Tensor) else type(selected).__name__
        raise TypeError(refusal("selected", got, "booleans, True for what is selected"))
    try:
        return selected.expand(torch.broadcast_shapes(selected.shape, allowed.shape))
    except RuntimeError:
        got = f"shape {tuple(selected.shape)}"
        raise ValueError(refusal("selected", got, f"a shape that broadcasts with {tuple(allowed.shape)}")) from None


def drawn(logits: Tensor, generator: Generator | None) -> Tensor:
    """Bernoulli variables with these log-odds, one number each; the last axis shares it."""
    numbers = torch.rand(logits.shape[:-1], generator=generator, dtype=torch.float64, device=logits.device)
    return numbers.unsqueeze(-1) < logits.double().sigmoid()
