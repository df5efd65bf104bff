"""Pointer network: the attention is the answer."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.encoders import RecurrentEncoder
from regard.feature.parts import ScoreLike, attentions, masked_input
from regard.general.alignments.base import masked, readable
from regard.general.scores.base import vector, width
from regard.ops import hooks
from regard.ops.call import Call
from regard.ops.dispatch import wants_dense
from regard.ops.fill import where
from regard.query.parts import in_range, uncast


class Pointed(NamedTuple):
    """What was decoded: positions, -1 after the end, and the log-probability of the whole."""

    positions: Int[Tensor, "*b m"]
    log_prob: Float[Tensor, "*b"]


class _Step(NamedTuple):
    """What decoding carries along, one row for each sequence (and each path of a beam)."""

    state: Tensor  # (R, h)
    given: Tensor  # (R, d), what is read next
    open: Tensor  # (R, N'), which positions may still be pointed at
    done: Tensor  # (R,)


@register(
    name="pointer",
    zh="指针网络",
    path="query/reading",
    equation="p(c_m = j | c_1 … c_{m−1}, X) = softmax_j(w · tanh(W2 e_j + W1 d_m))",
    paper="Vinyals, Fortunato & Jaitly, Pointer Networks, NeurIPS 2015",
    year=2015,
    time="M N d",
    memory="M N (the distributions are the output)",
    choose="the output is a sequence of positions of the input: sorting, tours, hulls, spans, copying",
    avoid="the output comes from a fixed vocabulary",
)
class PointerNetwork(nn.Module):
    r"""A decoder whose output are positions of the input (Vinyals et al. 2015, https://arxiv.org/abs/1506.03134).

    $$u_{mj} = \mathrm{score}(d_m, e_j) = w \cdot \tanh(W_1 d_m + W_2 e_j + b), \qquad
      p(c_m = j \mid c_{<m}, X) = \mathrm{softmax}_j(u_m)$$

    with encoder states $e_j$ and decoder states $d_m$, which read the token that was pointed at before, $x_{c_{m-1}}$. Nothing is
    summed: the distribution is the output. Calling the module gives the log-probabilities of a decoder that is told the right positions
    (teacher forcing); `decode` points by itself, greedily or with a beam. The weights of the attention `pointer` are these
    probabilities.

    Args:
        dim: width of the tokens.
        hidden_dim: $h$, width of encoder and decoder states.
        score: a name, a class, a function of the widths of query and key, or a ready-made score.
        encoder: a module that takes tokens (..., N, d) and a mask (..., N) and has `out_dim`; a GRU in one direction when None.
        revisit: whether a position may be pointed at more than once.
        stop: whether there is one more position, N, a learned one, that ends the sequence.
        **options: arguments of a score given by name; `impl` has no effect, since the weights themselves are wanted.

    Example:
        >>> point = PointerNetwork(3, 8)
        >>> tokens = torch.randn(2, 5, 3)
        >>> point(tokens, torch.tensor([[0, 1, 2], [4, 2, 0]])).shape  # log-probabilities of three steps
        torch.Size([2, 3, 5])
        >>> point.decode(tokens).positions.sort(-1).values.tolist()
        [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        score: ScoreLike = "additive",
        encoder: nn.Module | None = None,
        revisit: bool = False,
        stop: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        dim, h = width("dim", dim), width("hidden_dim", hidden_dim)
        self.encoder = RecurrentEncoder(dim, h, bidirectional=False) if encoder is None else encoder
        out_dim = getattr(self.encoder, "out_dim", h)
        self.begin = nn.Linear(out_dim, h)
        self.cell = nn.GRUCell(dim, h)
        self.start = vector(dim)
        self.revisit = bool(revisit)
        self.stop = vector(out_dim) if stop else None
        self.pointer = attentions({"pointer": (h, out_dim)}, score, None, options)["pointer"]
        if self.pointer.score.features is not None:
            raise ValueError(refusal("score", "a multi-dimensional score", "one number for each position"))

    def forward(
        self,
        tokens: Float[Tensor, "b n d"],
        positions: Int[Tensor, "b m"],
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b m n1"]:
        """Log-probabilities of every position at every step, when the steps before went as they should.

        Args:
            tokens: (B, N, d).
            positions: the right ones (B, M); N where a sequence stops, -1 after its end.
            mask: True for real tokens, (B, N).

        Returns:
            (B, M, N), or (B, M, N + 1) with a stop symbol; minus infinity where a position may not be pointed at.
        """
        tokens, mask = masked_input(tokens, mask, "tokens")
        self._check(tokens, positions)
        keys, step = self._start(tokens, mask)
        states, opened = [], []
        for m in range(positions.shape[1]):
            states.append(self.cell(step.given, step.state))
            opened.append(step.open)
            step = self._moved(tokens, step, states[-1], positions[:, m])
        if not states:
            return tokens.new_zeros(len(tokens), 0, keys.shape[-2])
        return self._log_probabilities(torch.stack(states, 1), keys, torch.stack(opened, 1))

    def loss(
        self,
        tokens: Float[Tensor, "b n d"],
        positions: Int[Tensor, "b m"],
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, ""]:
        """The mean over sequences of the negative log-probability of the right positions."""
        found = self(tokens, positions, mask)
        real = positions >= 0
        picked = found.gather(-1, positions.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        total: Tensor = -where(real, picked, 0.0).sum(-1).mean()
        return total

    @torch.no_grad()
    def decode(
        self,
        tokens: Float[Tensor, "b n d"],
        mask: Bool[Tensor, "b n"] | None = None,
        *,
        steps: int | None = None,
        beam: int = 1,
    ) -> Pointed:
        """Point at one position after the other.

        Args:
            tokens: (B, N, d).
            mask: True for real tokens, (B, N).
            steps: the most positions of a sequence; N when not given, and one more for a stop symbol.
            beam: number of paths that are followed; 1 is greedy.

        Returns:
            Positions (B, steps), N for the stop symbol and -1 after the end, which comes when a sequence has stopped or has nothing
            left to point at; and their log-probabilities (B,).
        """
        tokens, mask = masked_input(tokens, mask, "tokens")
        beam, batch = width("beam", beam), len(tokens)
        keys, step = self._start(tokens, mask)
        steps = keys.shape[-2] if steps is None else width("steps", steps)
        tokens, keys = (x.repeat_interleave(beam, 0) for x in (tokens, keys))
        step = _Step(*(x.repeat_interleave(beam, 0) for x in step))
        positions = step.done.new_zeros(batch * beam, 0, dtype=torch.long)
        # At first all paths are one.
        total = step.state.new_full((batch, beam), -math.inf)
        total[:, 0] = 0.0
        total = total.flatten()
        for _ in range(steps):
            state = self.cell(step.given, step.state)
            done = step.done | ~step.open.any(-1)
            found = self._log_probabilities(state.unsqueeze(1), keys, step.open.unsqueeze(1)).squeeze(1)
            # What has ended goes on in one way only: the last column.
            found = torch.cat([found.masked_fill(done[:, None], -math.inf), _where_done(done, found)], -1)
            every = (total[:, None] + found).view(batch, beam * found.shape[-1])
            best, index = every.topk(beam, -1)
            total = best.flatten()
            path, chosen = index // found.shape[-1], (index % found.shape[-1]).flatten()
            row = (path + torch.arange(batch, device=path.device)[:, None] * beam).flatten()
            chosen = where(chosen != found.shape[-1] - 1, chosen, -1)
            positions = torch.cat([positions[row], chosen[:, None]], -1)
            step = self._moved(tokens, _Step(*(x[row] for x in step)), state[row], chosen)
        best = total.view(batch, beam).argmax(-1) if batch else total.new_zeros(0, dtype=torch.long)
        row = best + torch.arange(batch, device=best.device) * beam
        return Pointed(positions[row], total[row])

    def _start(self, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, _Step]:
        """What may be pointed at (B, N', h), and the decoder before its first step."""
        keys = self.encoder(tokens, mask)
        batch, n = tokens.shape[:2]
        real = keys.new_ones(batch, n, dtype=torch.bool) if mask is None else mask
        # The state of the last real token is that of the whole.
        last = where(real, torch.arange(n, device=keys.device), -1)
        last = last.amax(-1) if n else last.sum(-1) - 1
        pooled = (keys * (torch.arange(n, device=keys.device) == last[:, None]).unsqueeze(-1)).sum(-2)
        state = torch.tanh(self.begin(pooled))
        if self.stop is not None:
            keys = torch.cat([keys, self.stop.expand(batch, 1, -1)], 1)
            real = torch.cat([real, real.any(-1, keepdim=True)], 1)
        done = real.new_zeros(batch)
        return keys, _Step(state, self.start.expand(batch, -1), real, done)

    def _moved(self, tokens: Tensor, step: _Step, state: Tensor, chosen: Tensor) -> _Step:
        """After pointing at `chosen` (R,), -1 for nothing."""
        n = tokens.shape[1]
        hot = torch.arange(step.open.shape[-1], device=chosen.device) == chosen[:, None]
        # The stop symbol is no token, and is never used up.
        given = (tokens * hot[:, :n].unsqueeze(-1)).sum(1)
        used = hot & (torch.arange(step.open.shape[-1], device=chosen.device) < n)
        still = step.open if self.revisit else step.open & ~used
        return _Step(state, given, still, step.done | (chosen < 0) | (chosen >= n))

    def _log_probabilities(self, states: Tensor, keys: Tensor, opened: Tensor) -> Tensor:
        """Of states (B, M, h) and keys (B, N', h) under booleans (B, M, N')."""
        call = hooks.changed(self.pointer, self.pointer.call(states, keys, mask=opened))
        with uncast(call.device):
            found = _log_weights(call)
        hooks.seen(self.pointer, call)
        return found.to(call.value.dtype)

    def _check(self, tokens: Tensor, positions: Tensor) -> None:
        if tokens.dim() != 3:
            raise ValueError(refusal("tokens", f"shape {tuple(tokens.shape)}", "(batch, N, d)"))
        if positions.dtype.is_floating_point or positions.dim() != 2 or len(positions) != len(tokens):
            got = f"a tensor of {positions.dtype}, shape {tuple(positions.shape)}"
            raise ValueError(refusal("positions", got, f"integers ({len(tokens)}, M)"))
        n, stop = tokens.shape[1], self.stop is not None
        expected = f"positions of {{n}} tokens, {'{n} to stop, ' if stop else ''}-1 after the end"
        in_range("positions", positions, -1, n + stop, expected, n=n)

    def extra_repr(self) -> str:
        return f"revisit={self.revisit}, stop={self.stop is not None}"


def _log_weights(call: Call) -> Tensor:
    """The logarithm of the weights; minus infinity, with zero gradients, where there is none."""
    tile, shape = call.tile(), (*call.lead, call.nq, call.n)
    scores, allowed = call.scores(tiled=not wants_dense()).expand(shape), tile.mask()
    temperature = call.align.temperature_of_softmax
    if temperature is None:
        # Somebody intervened.
        weights = call.align.weights(scores, allowed, tile).expand(shape)
        return where(weights > 0, where(weights > 0, weights, 1.0).log(), -math.inf)
    e = masked(scores / temperature, allowed)
    can = readable(e, None)
    safe = where(can.any(-1, keepdim=True), e, 0.0)
    return where(can, safe.log_softmax(-1), -math.inf)


def _where_done(done: Tensor, found: Tensor) -> Tensor:
    """One more column: certain for what has ended, impossible for what has not."""
    return where(done, found.new_zeros(done.shape), -math.inf).unsqueeze(-1)
