"""Structured attention: weights that are the marginals of a distribution over which keys are selected together."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

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
        tile = call.tile()
        with uncast(call.device):
            found: Structure = self.structure(call.scores(tiled=True), tile.mask())
        return found

    def extra_repr(self) -> str:
        return f"normalize={self.normalize}"


def drawn(logits: Tensor, generator: Generator | None) -> Tensor:
    """Bernoulli variables with these log-odds, one number each; the last axis shares it."""
    numbers = torch.rand(logits.shape[:-1], generator=generator, dtype=torch.float64, device=logits.device)
    return numbers.unsqueeze(-1) < logits.double().sigmoid()
