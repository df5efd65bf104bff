"""Output models: from what was read to an answer, and how far the answer is from the target."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard._errors import refusal
from regard.feature.parts import masked_mean
from regard.general.scores.base import vector, width
from regard.model.batch import Batch
from regard.model.naming import Available
from regard.ops.fill import kept_rows

Read = Callable[..., Tensor]


class Output(nn.Module):
    """What every output model is.

    A plain one is called with the context and what there is beside it. A `stepwise` one is called with a function `read(state, start)`
    that asks and reads, and owns the loop.
    """

    stepwise = False

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        """A number that training makes small."""
        raise NotImplementedError

    def decide(self, prediction: Tensor) -> Tensor:
        """The answer."""
        raise NotImplementedError


class Classifier(Output):
    r"""Logits of classes, $W c + b$; of the mean over the real tokens where there is a context for each.

    Args:
        dim: width of the context.
        classes: number of classes.
        dropout: on the context, while training.

    Example:
        >>> from regard.model.naming import Available
        >>> Classifier(8, 3)(torch.randn(2, 8), Available({}, {}, {})).shape
        torch.Size([2, 3])
    """

    def __init__(self, dim: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(width("dim", dim), width("classes", classes))

    def forward(self, context: Float[Tensor, "b *n d"], found: Available) -> Float[Tensor, "b c"]:
        if context.dim() == 3:
            mask = next((m for m in found.masks.values() if m.shape == context.shape[:2]), None)
            context = masked_mean(kept_rows(context, mask), mask)
        logits: Tensor = self.linear(self.dropout(context))
        return logits

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(prediction, target_of(batch))

    def decide(self, prediction: Tensor) -> Tensor:
        return prediction.argmax(-1)


class Decoded(NamedTuple):
    """Sequences, -1 after the end of each, and their log-probabilities."""

    tokens: Int[Tensor, "b m"]
    log_prob: Float[Tensor, " b"]


class SequenceDecoder(Output):
    r"""A recurrent decoder that reads at every step (Luong et al. 2015, https://arxiv.org/abs/1508.04025).

    $$s_t = \mathrm{GRU}(x_{t-1}, s_{t-1}), \qquad c_t = \mathrm{read}(s_t), \qquad
      \hat y_t = W_y \tanh(W_c [c_t; s_t])$$

    with $x_{t-1}$ the token before. With `feeding`, $x_{t-1}$ also holds $c_{t-1}$ (Bahdanau et al. 2015,
    https://arxiv.org/abs/1409.0473): then every step waits for the one before; without, all steps of a known target are read at once.

    Args:
        count: number of output tokens; the last one ends a sequence.
        dim: width of their vectors.
        hidden_dim: width of the state, which asks.
        context_dim: width of what is read.
        feeding: whether the state sees what was read before.

    Example:
        >>> decoder = SequenceDecoder(11, 4, 8, 6)
        >>> decoder.end
        10
    """

    stepwise = True

    def __init__(self, count: int, dim: int, hidden_dim: int, context_dim: int, feeding: bool = False) -> None:
        super().__init__()
        self.end = width("count", count) - 1
        self.feeding = bool(feeding)
        self.table = nn.Embedding(count, width("dim", dim))
        self.begin = nn.Linear(context_dim, hidden_dim)
        self.start = vector(dim)
        self.network = nn.GRU(dim + (context_dim if feeding else 0), hidden_dim, batch_first=True)
        self.joined = nn.Linear(context_dim + hidden_dim, hidden_dim)
        self.linear = nn.Linear(hidden_dim, count)

    def forward(self, read: Read, found: Available, batch: Batch) -> Float[Tensor, "b m v"]:
        """Logits of every step, when the steps before went as they should."""
        target = target_of(batch)
        state = self._state(found)
        before = self._vectors(target[:, :-1])
        if not self.feeding:
            states, _ = self.network(before, state)
            return self._logits(read(states), states)
        logits, context = [], before.new_zeros(len(before), 1, self.begin.in_features)
        for t in range(before.shape[1]):
            states, state = self.network(torch.cat([before[:, t : t + 1], context], -1), state)
            context = read(states, start=t)
            logits.append(self._logits(context, states))
        return torch.cat(logits, 1)

    @torch.no_grad()
    def generate(self, read: Read, found: Available, steps: int) -> Decoded:
        """The likeliest token after the other, until the end or so many steps."""
        state = self._state(found)
        batch = state.shape[1]
        vectors = self._vectors(state.new_zeros(batch, 0, dtype=torch.long))
        context = vectors.new_zeros(batch, 1, self.begin.in_features)
        done = torch.zeros(batch, dtype=torch.bool, device=state.device)
        tokens, total = [], state.new_zeros(batch)
        for t in range(steps):
            x = torch.cat([vectors, context], -1) if self.feeding else vectors
            states, state = self.network(x, state)
            context = read(states, start=t)
            best, chosen = self._logits(context, states).squeeze(1).log_softmax(-1).max(-1)
            total = total + torch.where(done, 0.0, best)
            tokens.append(torch.where(done, -1, chosen))
            done = done | (chosen == self.end)
            vectors = self.table(chosen).unsqueeze(1)
        return Decoded(torch.stack(tokens, 1), total)

    def loss(self, prediction: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(prediction.flatten(0, 1), target_of(batch).flatten(), ignore_index=-1)

    def decide(self, prediction: Tensor) -> Tensor:
        return prediction.argmax(-1)

    def _state(self, found: Available) -> Tensor:
        """The first state (1, B, h), from the mean of the features."""
        name, features = next(iter(found.inputs.items()))
        mask = found.masks.get(name)
        return torch.tanh(self.begin(masked_mean(kept_rows(features, mask), mask))).unsqueeze(0)

    def _vectors(self, tokens: Tensor) -> Tensor:
        """Of the start and of these tokens, (B, 1 + M, d)."""
        start = self.start.expand(len(tokens), 1, -1)
        return torch.cat([start, self.table(tokens.clamp(min=0))], 1)

    def _logits(self, context: Tensor, states: Tensor) -> Tensor:
        logits: Tensor = self.linear(torch.tanh(self.joined(torch.cat([context, states], -1))))
        return logits


def target_of(batch: Batch) -> Tensor:
    """The target, or a refusal."""
    if batch.target is None:
        raise ValueError(
            refusal("batch", "no target", "a target, to compute a loss or to tell a decoder the steps before")
        )
    return batch.target
