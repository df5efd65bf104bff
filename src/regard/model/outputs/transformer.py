"""A sequence of tokens by a Transformer, each read for."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.general.scores.base import vector, width
from regard.model.batch import Batch
from regard.model.naming import Available
from regard.model.outputs.base import Read, target_of
from regard.model.outputs.decoding import TokenDecoder, a_share, read_paths
from regard.transformer.decoder import TransformerDecoder
from regard.transformer.feedforward import FeedForward
from regard.transformer.models import TokenEmbedding
from regard.transformer.positions import PositionLike


class TransformerSequenceDecoder(TokenDecoder):
    r"""Layers of causal self-attention, whose states ask the task's attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

    $$s = \mathrm{decoder}(x_{<t}), \qquad s \leftarrow \mathrm{LN}(s + W_c\, \mathrm{read}(s)), \qquad
      s \leftarrow \mathrm{LN}(s + \mathrm{FFN}(s)), \qquad \hat y_t = E s_t$$

    with $x_{t-1} = \sqrt d\, E_{y_{t-1}}$. What is read is read once, after the layers, so that any attention can be the task's, and a
    token has one alignment with the input; `SequenceToSequence` is the Transformer that reads in every layer. Told the steps before,
    all are computed at once; alone, each step is computed from the cache of those before.

    Args:
        count: number of output tokens; the last one ends a sequence.
        dim: width of their vectors and of the states, which ask.
        heads: of the self-attention.
        layers: how many.
        context_dim: width of what is read; `dim` when not given.
        position: as in `TransformerDecoder`.
        dropout: of vectors, and of what each part adds, while training.
        smoothing: share of the target that is spread over all tokens.
        **options: of each layer, such as `feedforward_dim`.

    Example:
        >>> decoder = TransformerSequenceDecoder(11, 8, heads=2, layers=1)
        >>> decoder.end
        10
    """

    def __init__(
        self,
        count: int,
        dim: int,
        heads: int,
        layers: int = 2,
        *,
        context_dim: int | None = None,
        position: PositionLike = "sinusoidal",
        dropout: float = 0.0,
        smoothing: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(width("count", count) - 1, smoothing)
        self.dropout = a_share("dropout", dropout)
        self.table, self.start = TokenEmbedding(count, dim), vector(dim)
        self.decoder = TransformerDecoder(
            dim, heads, layers, cross=False, position=position, dropout=dropout, **options
        )
        self.map = nn.Linear(dim if context_dim is None else width("context_dim", context_dim), dim)
        self.norm_read, self.norm_feedforward = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.feedforward = FeedForward(dim, options.get("feedforward_dim") or 4 * dim, dropout=dropout)

    def forward(self, read: Read, found: Available, batch: Batch) -> Float[Tensor, "b m v"]:
        """Logits of every step, when the steps before went as they should."""
        target = target_of(batch)
        before = torch.cat([self.vectors(None, len(target)), self.vectors(target[:, :-1], len(target))], 1)
        # No real token comes after padding, and none sees a later one: padding needs no mask.
        states = self.decoder(before)
        return self.logits(read(states), states)

    def decoding(self, read: Read, found: Available) -> _Step:
        return _Step(self, read)

    def vectors(self, tokens: Tensor | None, count: int) -> Float[Tensor, "b m d"]:
        """Of tokens (B, M), or of the start."""
        vectors = self.start.expand(count, 1, -1) if tokens is None else self.table(tokens.clamp(min=0))
        return self._dropped(vectors)

    def logits(self, context: Float[Tensor, "b m dc"], states: Float[Tensor, "b m d"]) -> Float[Tensor, "b m v"]:
        """Of what was read, and of the states that asked."""
        states = self.norm_read(states + self._dropped(self.map(context)))
        states = self.norm_feedforward(states + self._dropped(self.feedforward(states)))
        return self.table.logits(states)

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class _Step:
    """The decoder in the middle of decoding: a cache of the steps so far."""

    def __init__(self, decoder: TransformerSequenceDecoder, read: Read) -> None:
        self.decoder, self.read = decoder, read
        self.cache = decoder.decoder.cache()
        self.paths = 1

    def step(self, tokens: Tensor) -> Tensor:
        decoder, t = self.decoder, self.cache.length
        x = decoder.vectors(None if t == 0 else tokens, len(tokens))
        states = decoder.decoder(x, cache=self.cache)
        return decoder.logits(read_paths(self.read, states, self.paths, t), states).squeeze(1)

    def spread(self, times: int) -> None:
        self.paths = times
        self.cache.spread(times)

    def reorder(self, rows: Tensor) -> None:
        self.cache.reorder(rows)
