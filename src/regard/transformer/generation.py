"""Generating tokens one after the other: the likeliest at each step, the likeliest whole, or drawn."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard._errors import refusal
from regard.general.scores.base import width
from regard.ops.forms import wide


class Generated(NamedTuple):
    """What was generated, `end` after the end; and the log-probability that the model gives to each whole."""

    tokens: Int[Tensor, "b m"]
    log_prob: Float[Tensor, " b"]


@runtime_checkable
class Decoding(Protocol):
    """A model in the middle of decoding: what it keeps of each row."""

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (R, V) of what follows, after these tokens (R, m) too."""
        ...

    def spread(self, times: int) -> None:
        """Let every row become so many, one beside the other."""
        ...

    def reorder(self, rows: Tensor) -> None:
        """Go on with these rows (R,), each from among those that its own became."""
        ...


class _Picked(NamedTuple):
    chosen: Tensor  # (R,)
    total: Tensor  # (R,)
    rows: Tensor | None  # (R,), where each goes on from; None for its own


@dataclass(frozen=True)
class Greedy:
    """The likeliest token at every step.

    Example:
        >>> Greedy()
        Greedy()
    """

    paths = 1

    def pick(self, log_p: Tensor, total: Tensor) -> _Picked:
        best, chosen = log_p.max(-1)
        return _Picked(chosen, total + best, None)

    def score(self, total: Tensor, lengths: Tensor) -> Tensor:
        return total


@dataclass(frozen=True)
class Beam:
    r"""The likeliest whole among so many that are followed side by side.

    Wholes are compared by $\log p / ((5 + \text{length}) / 6)^{\alpha}$ (Wu et al. 2016, https://arxiv.org/abs/1609.08144).

    Args:
        paths: how many are followed.
        penalty: $\alpha$; 0 compares probabilities, which favours the short.

    Example:
        >>> Beam(4, penalty=0.6)
        Beam(paths=4, penalty=0.6)
    """

    paths: int = 4
    penalty: float = 0.0

    def __post_init__(self) -> None:
        width("paths", self.paths)
        if not isinstance(self.penalty, int | float) or not math.isfinite(self.penalty):
            raise ValueError(refusal("penalty", repr(self.penalty), "a finite number"))

    def pick(self, log_p: Tensor, total: Tensor) -> _Picked:
        every = (total[:, None] + log_p).view(-1, self.paths * log_p.shape[-1])
        best, index = every.topk(self.paths, -1)
        path = index // log_p.shape[-1] + torch.arange(len(every), device=index.device)[:, None] * self.paths
        return _Picked((index % log_p.shape[-1]).flatten(), best.flatten(), path.flatten())

    def score(self, total: Tensor, lengths: Tensor) -> Tensor:
        return total / ((5 + lengths.to(total.dtype)) / 6) ** self.penalty


@dataclass(frozen=True)
class Sample:
    """Tokens drawn from the model's distribution, or from its likeliest part.

    Args:
        temperature: below 1 sharpens the distribution, above 1 flattens it.
        top_k: keep so many of the likeliest; all when None.
        top_p: keep the fewest that have this probability together (Holtzman et al. 2020, https://arxiv.org/abs/1904.09751); all
            when None.

    Example:
        >>> Sample(temperature=0.8, top_p=0.9)
        Sample(temperature=0.8, top_k=None, top_p=0.9)
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    paths = 1

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, int | float) or not self.temperature > 0:
            fix = "Fix: Greedy() is its limit at 0."
            raise ValueError(refusal("temperature", repr(self.temperature), "a number > 0", fix))
        if self.top_k is not None:
            width("top_k", self.top_k)
        if self.top_p is not None and not (isinstance(self.top_p, int | float) and 0 < self.top_p <= 1):
            raise ValueError(refusal("top_p", repr(self.top_p), "a probability, above 0 and at most 1"))

    def pick(self, log_p: Tensor, total: Tensor) -> _Picked:
        chosen = self.distribution(log_p).multinomial(1).squeeze(-1)
        return _Picked(chosen, total + log_p.gather(-1, chosen[:, None]).squeeze(-1), None)

    def distribution(self, log_p: Float[Tensor, "*b v"]) -> Float[Tensor, "*b v"]:
        """What is drawn from: tempered, then cut, then normalised."""
        log_p = log_p / self.temperature
        if self.top_k is not None and self.top_k < log_p.shape[-1]:
            least = log_p.topk(self.top_k, -1).values[..., -1:]
            log_p = log_p.masked_fill(log_p < least, -math.inf)
        p = log_p.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = p.sort(-1, descending=True)
            # A token stays if those before it do not yet have enough: the first one always does.
            stays = ordered.cumsum(-1) - ordered < self.top_p
            p = p * torch.zeros_like(stays).scatter(-1, order, stays)
        return p / p.sum(-1, keepdim=True)

    def score(self, total: Tensor, lengths: Tensor) -> Tensor:
        return total


How = Greedy | Beam | Sample


@torch.no_grad()
def generate(
    model: Decoding, prompt: Int[Tensor, "b m"], *, steps: int, end: int | None = None, how: How | None = None
) -> Generated:
    """Generate after a prompt.

    Args:
        model: in the middle of decoding, before the prompt.
        prompt: (B, M), at least one token, all of them real.
        steps: the most tokens that are generated.
        end: the token that ends a sequence; None generates `steps` of them.
        how: `Greedy()`, `Beam(paths)` or `Sample(temperature, top_k, top_p)`.

    Returns:
        Tokens (B, at most `steps`), without the prompt, and their log-probabilities (B,).
    """
    how = Greedy() if how is None else how
    if not isinstance(how, Greedy | Beam | Sample):
        raise TypeError(refusal("how", type(how).__name__, "Greedy(), Beam(…) or Sample(…)"))
    if not isinstance(prompt, Tensor):
        raise TypeError(refusal("prompt", type(prompt).__name__, "a tensor of integers (batch, M >= 1)"))
    if prompt.dim() != 2 or prompt.dtype.is_floating_point or prompt.shape[-1] < 1:
        raise ValueError(refusal("prompt", f"shape {tuple(prompt.shape)}, {prompt.dtype}", "integers (batch, M >= 1)"))
    batch, paths, steps = len(prompt), how.paths, width("steps", steps)
    log_p = wide(model.step(prompt)).log_softmax(-1)
    end = None if end is None else a_token("end", end, log_p.shape[-1])
    total = log_p.new_zeros(batch, paths)
    if paths > 1:
        model.spread(paths)
        log_p = log_p.repeat_interleave(paths, 0)
        # At first all paths are one.
        total[:, 1:] = -math.inf
    total = total.flatten()
    tokens, done = prompt.new_zeros(batch * paths, 0), torch.zeros_like(total, dtype=torch.bool)
    for t in range(steps):
        if end is not None:
            log_p = torch.where(done[:, None], _certain(end, log_p), log_p)
        chosen, total, rows = how.pick(log_p, total)
        if rows is not None:
            tokens, done = tokens[rows], done[rows]
            model.reorder(rows)
        tokens = torch.cat([tokens, chosen[:, None]], -1)
        if end is not None:
            done = done | (chosen == end)
            if bool(done.all()):
                break
        if t + 1 < steps:
            log_p = wide(model.step(chosen[:, None])).log_softmax(-1)
    length = (~_after(tokens, end)).sum(-1)
    best = how.score(total, length).view(batch, paths).argmax(-1) if batch else total.long()
    row = best + torch.arange(batch, device=best.device) * paths
    return Generated(tokens[row], total[row])


def a_token(name: str, value: int, vocabulary: int) -> int:
    """Check that a token is one of the vocabulary."""
    token = value if isinstance(value, bool) or not hasattr(value, "__index__") else operator.index(value)
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary:
        raise ValueError(refusal(name, repr(value), f"a token, from 0 to {vocabulary - 1}"))
    return token


def _certain(token: int, like: Tensor) -> Tensor:
    """Log-probabilities of one token and no other."""
    return torch.where(torch.arange(like.shape[-1], device=like.device) == token, 0.0, -math.inf).to(like.dtype)


def _after(tokens: Tensor, end: int | None) -> Tensor:
    """Which tokens stand after the first end."""
    ends = torch.zeros_like(tokens, dtype=torch.bool) if end is None else tokens == end
    return (ends.cumsum(-1) - ends.long()) > 0
