r"""What kernels share of alignments: numbers drawn by position, Gumbel noise, dropout, and the window of local attention.

The device functions give, for a tile, what `Tile.uniform`, `Tile.keep` and `Local` give for it in torch; numbers are equal to the
last bit. `Align` is an alignment as what a kernel is launched with. Kernels compute

$$t_j = e_j + G_j / \tau + b_j, \qquad p = \mathrm{softmax}(t) \text{ over the window}, \qquad o = \sum_j r_j p_j v_j$$

from scores that are already divided by the temperature, with $r_j$ the dropout factor, times $e^{b_j}$ where the Gaussian is scaled.
With $x_j = r_j\, do \cdot v_j$ the gradient is $dt_j = p_j (x_j - \sum_l p_l x_l)$; the position gets $\sum_j dt_j\, \partial b_j$
where the Gaussian is added, $\sum_j p_j x_j\, \partial b_j$ where it scales, $\partial b_j = (j - p) / \sigma^2$.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.call import Call
from regard.ops.random import DROPOUT, SAMPLE
from regard.ops.triton.launching import cdiv, quick

# Choices: all keys, the one with the largest score, the one with the largest score and noise.
ALL, LARGEST, SAMPLED = range(3)
# Where a Gaussian enters: nowhere, in the softmax, after it.
FLAT, ADDED, SCALED = range(3)
# Keys whose queries are brought together without an order among them.
TOGETHER = 4

FOR_SAMPLE, FOR_DROPOUT = tl.constexpr(SAMPLE), tl.constexpr(DROPOUT)
PURPOSES = tl.constexpr(4)


@triton.jit
def _between(word):
    """The number in (0, 1) that a random word stands for."""
    return ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def uniform(SEED, lead, feature, i, j, PURPOSE: tl.constexpr):
    """Numbers in (0, 1) of the weights of queries i on keys j in features; the four broadcast, as int32."""
    zero = (i + j + feature) * 0
    w0, w1, w2, w3 = tl.philox(
        tl.load(SEED), zero + j // 4, zero + i, zero + lead.to(tl.int32), zero + feature * PURPOSES + PURPOSE
    )
    word = zero + j % 4
    return _between(tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3)))


@triton.jit
def uniform_tile(SEED, lead, feature, i, start, PURPOSE: tl.constexpr, BN: tl.constexpr):
    """The same for queries i (BM) and the keys from `start`, a multiple of 4, (BM, BN): four numbers from each draw."""
    group = start // 4 + tl.arange(0, BN // 4)[None, :]
    zero = (i[:, None] + group) * 0
    w0, w1, w2, w3 = tl.philox(
        tl.load(SEED),
        zero + group,
        zero + i[:, None],
        zero + lead.to(tl.int32),
        zero + feature * PURPOSES + PURPOSE,
    )
    return _between(tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (i.shape[0], BN)))


@triton.jit
def gumbel(numbers):
    """Standard Gumbel noise from uniform numbers."""
    return -tl.log(-tl.log(numbers))


@triton.jit
def keep(numbers, dropout):
    """Dropout factors from uniform numbers: 0 or 1 / (1 - p)."""
    # No number reaches 1, so with p = 1 all are dropped, whatever they would be divided by.
    return tl.where(numbers >= dropout, 1.0, 0.0) / tl.maximum(1.0 - dropout, 1e-9)


@triton.jit
def inside(position, j, window):
    """Whether key j lies in the window around a position; the two broadcast."""
    return (j >= tl.ceil(position - window)) & (j <= tl.floor(position + window))


@triton.jit
def log_gaussian(position, j, window):
    """Exponent of the Gaussian at key j."""
    distance = (j - position) / (0.5 * window)
    return -0.5 * distance * distance


@triton.jit
def log_gaussian_slope(position, j, window):
    """Derivative of the exponent by the position."""
    return (j - position) / (0.25 * window * window)


@triton.jit
def noise_of(SEED, lead, i, start, rate, BN: tl.constexpr):
    """Gumbel noise of a tile, over the temperature."""
    return rate * gumbel(uniform_tile(SEED, lead, 0, i, start, FOR_SAMPLE, BN))


@triton.jit
def gains(
    x, SEED, lead, i, start, position, n, dropout, window, DROP: tl.constexpr, GAUSSIAN: tl.constexpr, BN: tl.constexpr
):
    """Some x of a tile times what its softmax weights are multiplied by: dropout factors, and a Gaussian that scales."""
    if DROP:
        x = x * keep(uniform_tile(SEED, lead, 0, i, start, FOR_DROPOUT, BN), dropout)
    if GAUSSIAN == 2:
        x = x * tl.exp(log_gaussian(position[:, None], n[None, :], window))
    return x


@triton.jit
def span(position, m_in, window, end, BN: tl.constexpr):
    """From the first block of keys to the last key that the windows of some queries reach."""
    there = m_in & (position == position)
    low = tl.min(tl.where(there, tl.ceil(position - window), float("inf")), 0)
    high = tl.max(tl.where(there, tl.floor(position + window), float("-inf")), 0)
    last = end * 1.0
    first = tl.maximum(tl.minimum(low, last), 0.0).to(tl.int32)
    return first // BN * BN, tl.minimum(tl.maximum(high + 1.0, 0.0), last).to(tl.int32)


@quick
@triton.jit
def rank_kernel(POSITION, RANK, spl, NQ, places, STEP: tl.constexpr, BM: tl.constexpr):
    """In which few keys each position lies, counted on from row to row; what is no number is in the first."""
    lead = tl.program_id(1)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    place = tl.load(POSITION + lead.to(tl.int64) * spl + m, mask=m < NQ, other=0.0) / STEP
    last = places - 1
    place = tl.where(place < last, tl.where(place > 0.0, place, 0.0), tl.where(place == place, last * 1.0, 0.0))
    tl.store(RANK + lead.to(tl.int64) * NQ + m, lead * places + tl.minimum(place.to(tl.int32), last), mask=m < NQ)


@triton.jit
def first_largest(x, n, BIG: tl.constexpr):
    """The largest of each row of a tile, and the first key that has it."""
    top = tl.max(x, 1)
    return top, tl.min(tl.where(x == top[:, None], n[None, :], BIG), 1)


class Align(NamedTuple):
    """An alignment, and dropout, as what a kernel is launched with."""

    seed: Tensor | None = None  # (1,), int64
    position: Tensor | None = None  # (L or 1, Nq), float32
    rate: float = 1.0  # 1 / temperature, of the noise; scores come divided already
    window: float = 0.0
    dropout: float = 0.0
    first_query: int = 0  # place of the first query among those of all ranks
    noise: bool = False
    choice: int = ALL
    learns: bool = True
    gaussian: int = FLAT
    scattered: bool = False  # positions in no order; `order` brings near ones together

    @classmethod
    def of(cls, call: Call) -> Align:
        """The alignment of a call whose rule is known; the temperature of its scores is `temperature(call)`."""
        rule = call.align.rule(call)
        assert rule is not None
        random = rule.noise or rule.choice == "sampled" or call.dropout > 0.0
        position = rule.position
        if position is not None:
            shared = math.prod(position.shape[:-1]) == 1
            lead = (1,) if shared else call.lead
            position = position.float().expand(*lead, call.nq).reshape(-1, call.nq).contiguous()
        return cls(
            call.seed if random else None,
            position,
            rate=1.0 / rule.temperature if isinstance(rule.temperature, float) else 1.0,
            window=float(rule.window),
            dropout=float(call.dropout),
            first_query=call.first_query if random else 0,
            noise=rule.noise,
            choice=("", "largest", "sampled").index(rule.choice),
            learns=rule.learns and torch.is_grad_enabled(),
            gaussian=("", "added", "scaled").index(rule.gaussian),
            scattered=rule.position is not None and not rule.ordered,
        )

    @property
    def is_plain(self) -> bool:
        """Whether it is a softmax over all keys, and nothing else."""
        return self.seed is None and self.position is None and self.choice == ALL

    @property
    def is_softmax(self) -> bool:
        """Whether it is a softmax over all keys, with or without dropout."""
        return not self.noise and self.position is None and self.choice == ALL

    def order(self, n: int) -> Tensor | None:
        """Queries by position, (L or 1, Nq), so that a block of them reads one stretch of n keys; None where they stand so already.

        Positions in the same few keys stay in the order of the queries. All rows are sorted as one, which takes a single sort of
        integers; no result depends on the order, but for the rounding of sums.
        """
        if self.position is None or not self.scattered:
            return None
        lead, nq = self.position.shape
        rank = torch.empty(lead * nq, dtype=torch.int32, device=self.position.device)
        block = 1024
        rank_kernel[(cdiv(nq, block), lead)](
            self.position, rank, self.position.stride(0), nq, n // TOGETHER + 1, STEP=TOGETHER, BM=block
        )
        order = torch.empty(lead, nq, dtype=torch.int32, device=rank.device)
        return torch.remainder(rank.sort(stable=True).indices.view(lead, nq), nq, out=order)

    def flat(self) -> tuple[Tensor | None, Tensor | None, list[float], list[int]]:
        """The same as arguments of a registered operator: Tensor? seed, Tensor? position, float[] numbers, int[] kinds."""
        kinds = [
            self.first_query,
            int(self.noise),
            self.choice,
            int(self.learns),
            self.gaussian,
            int(self.scattered),
        ]
        return self.seed, self.position, [self.rate, self.window, self.dropout], kinds

    @classmethod
    def unflat(cls, seed: Tensor | None, position: Tensor | None, numbers: list[float], kinds: list[int]) -> Align:
        (rate, window, dropout), (first, noise, choice, learns, gaussian, scattered) = numbers, kinds
        return cls(
            seed,
            position,
            rate,
            window,
            dropout,
            first,
            bool(noise),
            choice,
            bool(learns),
            gaussian,
            bool(scattered),
        )

    def arguments(self, like: Tensor) -> tuple[Tensor | float | int, ...]:
        """SEED, POSITION, its leading stride, rate, window, dropout, first query. What is not there is `like`, never read."""
        position = like if self.position is None else self.position
        stride = position.stride(0) if self.position is not None and position.shape[0] > 1 else 0
        seed = like if self.seed is None else self.seed
        return seed, position, stride, self.rate, self.window, self.dropout, self.first_query

    def flags(self) -> dict[str, bool | int]:
        """NOISE, CHOICE, LEARNS, LOCAL, GAUSSIAN, DROP: the compile-time part."""
        return {
            "NOISE": self.noise,
            "CHOICE": self.choice,
            "LEARNS": self.learns,
            "LOCAL": self.position is not None,
            "GAUSSIAN": self.gaussian,
            "DROP": self.dropout > 0.0,
        }


def temperature(call: Call) -> float | Tensor:
    """What the scores of a call are divided by."""
    rule = call.align.rule(call)
    assert rule is not None
    return 1.0 if rule.temperature is None else rule.temperature


def why_not_align(call: Call) -> str | None:
    """The reason why kernels do not know the alignment of a call, or None."""
    rule = call.align.rule(call)
    if rule is None:
        return f"alignment {type(call.align).__name__} has no kernel"
    if call.first_key != 0:
        return "keys that begin in the middle of a sequence"
    return None
