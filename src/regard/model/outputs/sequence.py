"""A sequence of tokens by a recurrent network, each read for."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.feature.parts import masked_mean
from regard.general.scores.base import vector, width
from regard.model.batch import Batch
from regard.model.naming import Available
from regard.model.outputs.base import Read, target_of
from regard.model.outputs.decoding import TokenDecoder, a_share, read_paths
from regard.ops.fill import kept_rows


class SequenceDecoder(TokenDecoder):
    r"""A recurrent decoder that reads at every step (Luong et al. 2015, https://arxiv.org/abs/1508.04025).

    $$s_t = \mathrm{GRU}(x_{t-1}, s_{t-1}), \qquad c_t = \mathrm{read}(s_t), \qquad
      \hat y_t = W_y \tanh(W_c [c_t; s_t])$$

    with $x_{t-1}$ the token before. With `feeding`, $x_{t-1}$ also holds $c_{t-1}$ (Bahdanau et al. 2015,
    https://arxiv.org/abs/1409.0473): then every step waits for the one before; without, all steps of a known target are read at once.
    Of several layers the last one asks. The first state is made from the mean of the features.

    Args:
        count: number of output tokens; the last one ends a sequence.
        dim: width of their vectors.
        hidden_dim: width of the state, which asks.
        context_dim: width of the features, and of what is read.
        feeding: whether the state sees what was read before.
        layers: of the GRU.
        dropout: of vectors, between layers and before the logits, while training.
        smoothing: share of the target that is spread over all tokens.

    Example:
        >>> decoder = SequenceDecoder(11, 4, 8, 6)
        >>> decoder.end
        10
    """

    def __init__(
        self,
        count: int,
        dim: int,
        hidden_dim: int,
        context_dim: int,
        feeding: bool = False,
        layers: int = 1,
        dropout: float = 0.0,
        smoothing: float = 0.0,
    ) -> None:
        super().__init__(width("count", count) - 1, smoothing)
        self.feeding, layers = bool(feeding), width("layers", layers)
        dim, h, d_c = width("dim", dim), width("hidden_dim", hidden_dim), width("context_dim", context_dim)
        self.table = nn.Embedding(count, dim)
        self.begin = nn.Linear(d_c, layers * h)
        self.start = vector(dim)
        between = a_share("dropout", dropout) if layers > 1 else 0.0
        self.network = nn.GRU(dim + (d_c if feeding else 0), h, layers, batch_first=True, dropout=between)
        self.joined = nn.Linear(d_c + h, h)
        self.dropout = nn.Dropout(a_share("dropout", dropout))
        self.linear = nn.Linear(h, count)

    def forward(self, read: Read, found: Available, batch: Batch) -> Float[Tensor, "b m v"]:
        """Logits of every step, when the steps before went as they should."""
        target = target_of(batch)
        state = self.first(found)
        before = torch.cat([self.vectors(None, len(target)), self.vectors(target[:, :-1], len(target))], 1)
        if not self.feeding:
            states, _ = self.network(before, state)
            return self.logits(read(states), states)
        logits, context = [], before.new_zeros(len(before), 1, self.begin.in_features)
        for t in range(before.shape[1]):
            states, state = self.network(torch.cat([before[:, t : t + 1], context], -1), state)
            context = read(states, start=t)
            logits.append(self.logits(context, states))
        return torch.cat(logits, 1)

    def decoding(self, read: Read, found: Available) -> _Step:
        return _Step(self, read, found)

    def first(self, found: Available) -> Float[Tensor, "l b h"]:
        """The state before the first step, from the mean of the features."""
        name, features = next(iter(found.inputs.items()))
        if features.shape[-1] != self.begin.in_features:
            expected = f"context_dim={self.begin.in_features}"
            raise ValueError(refusal("features", f"width {features.shape[-1]} of {name!r}", expected))
        mask = found.masks.get(name)
        state: Tensor = torch.tanh(self.begin(masked_mean(kept_rows(features, mask), mask)))
        each: Tensor = state.unflatten(-1, (self.network.num_layers, -1))
        return each.transpose(0, 1).contiguous()

    def vectors(self, tokens: Tensor | None, count: int) -> Float[Tensor, "b m d"]:
        """Of tokens (B, M), or of the start."""
        vectors = self.start.expand(count, 1, -1) if tokens is None else self.table(tokens.clamp(min=0))
        dropped: Tensor = self.dropout(vectors)
        return dropped

    def logits(self, context: Float[Tensor, "b m dc"], states: Float[Tensor, "b m h"]) -> Float[Tensor, "b m v"]:
        """Of what was read, and of the states that asked."""
        logits: Tensor = self.linear(self.dropout(torch.tanh(self.joined(torch.cat([context, states], -1)))))
        return logits


class _Step:
    """The decoder in the middle of decoding: a state and a context for each path."""

    def __init__(self, decoder: SequenceDecoder, read: Read, found: Available) -> None:
        self.decoder, self.read = decoder, read
        self.state = decoder.first(found)
        self.context = self.state.new_zeros(self.state.shape[1], 1, decoder.begin.in_features)
        self.t, self.paths = 0, 1

    def step(self, tokens: Tensor) -> Tensor:
        decoder = self.decoder
        x = decoder.vectors(None if self.t == 0 else tokens, len(tokens))
        x = torch.cat([x, self.context], -1) if decoder.feeding else x
        states, self.state = decoder.network(x, self.state)
        self.context = read_paths(self.read, states, self.paths, self.t)
        self.t += 1
        return decoder.logits(self.context, states).squeeze(1)

    def spread(self, times: int) -> None:
        self.paths = times
        self.state, self.context = (
            self.state.repeat_interleave(times, 1),
            self.context.repeat_interleave(times, 0),
        )

    def reorder(self, rows: Tensor) -> None:
        self.state, self.context = self.state[:, rows], self.context[rows]
