r"""What a softmax looks at, without its weights: sums over the keys of each row, a tile of scores at a time.

Scores come times $\log_2 e$, as $\sigma$. With $p_j = 2^{\sigma_j - m}$, $m$ the largest so far, a row keeps $\sum p$,
$\sum p\,(\sigma - m)$, $\sum p\,j$ and the mass on a region; all shrink by $2^{m - m'}$ when the maximum grows to $m'$, the second
after $(m - m') \sum p$ was added. Then

$$L = \ln 2 \, \big(m + \log_2 \sum p\big), \qquad H = \ln 2 \, \Big(\log_2 \sum p - \frac{\sum p\,(\sigma - m)}{\sum p}\Big),
  \qquad \mathrm{E}[j] = \frac{\sum p\,j}{\sum p}$$

The k largest scores of a row stand in k slots; a tile hands its largest over while one of its rows has a larger one than it holds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import triton
import triton.language as tl
from torch import Tensor

from regard.ops.triton.launching import power_of_2

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def no_sums(BM: tl.constexpr):
    """Largest score, mass, spread, place and mass on a region of rows that have seen nothing."""
    zero = tl.zeros((BM,), dtype=tl.float32)
    return zero + float("-inf"), zero, zero, zero, zero


@triton.jit
def no_slots(K, BM: tl.constexpr, SLOTS: tl.constexpr):
    """Scores and keys of empty slots; no score is larger than what stands in those beyond k."""
    held = tl.where((tl.arange(0, SLOTS) < K)[None, :], float("-inf"), float("inf")) + tl.zeros(
        (BM, SLOTS), dtype=tl.float32
    )
    return held, tl.full((BM, SLOTS), -1, dtype=tl.int32)


@triton.jit
def add_tile(
    s, n, n_in, REGION, top, mass, spread, place, on,
    ENTROPY: tl.constexpr, PLACE: tl.constexpr, HAS_REGION: tl.constexpr,
):  # fmt: skip
    """The sums with a tile of scores added, -inf where a pair is not allowed; and the largest of each row of the tile."""
    highest = tl.max(s, 1)
    new = tl.maximum(top, highest)
    safe = tl.where(new == float("-inf"), 0.0, new)
    below = s - safe[:, None]
    p = tl.exp2(below)
    rescale = tl.exp2(top - safe)
    spread, place, on = add_sums(
        p, below, n, n_in, REGION, top - safe, rescale, mass, spread, place, on, ENTROPY, PLACE, HAS_REGION
    )
    mass = mass * rescale + tl.sum(p, 1)
    return new, mass, spread, place, on, highest


@triton.jit
def add_sums(
    p, below, n, n_in, REGION, shift, rescale, mass, spread, place, on,
    ENTROPY: tl.constexpr, PLACE: tl.constexpr, HAS_REGION: tl.constexpr,
):  # fmt: skip
    """Spread, place and mass on a region with the weights p of a tile added, which are powers `below` of any base.

    `shift` is the power of that base by which what stood there shrinks, `mass` what it was before.
    """
    if ENTROPY:
        shift = tl.where(shift == float("-inf"), 0.0, shift)
        # Where p is 0 its logarithm only has to be finite.
        spread = rescale * (spread + shift * mass) + tl.sum(p * tl.maximum(below, -1e4), 1)
    if PLACE:
        place = place * rescale + tl.sum(p * n[None, :].to(tl.float32), 1)
    if HAS_REGION:
        inside = tl.load(REGION + n, mask=n_in, other=0) != 0
        on = on * rescale + tl.sum(tl.where(inside[None, :], p, 0.0), 1)
    return spread, place, on


@triton.jit
def add_largest(s, n, highest, held, key, SLOTS: tl.constexpr):
    """The slots with what a tile of scores has to offer; `highest` is the largest of each of its rows."""
    slot = tl.arange(0, SLOTS)
    least = tl.min(held, 1)
    wins = highest > least
    more = tl.max(wins.to(tl.int32), 0)
    while more > 0:
        first = tl.min(tl.where(s == highest[:, None], n[None, :], 2147483647), 1)
        of_slot = tl.min(tl.where(held == least[:, None], slot[None, :], SLOTS), 1)
        put = wins[:, None] & (slot[None, :] == of_slot[:, None])
        held = tl.where(put, highest[:, None], held)
        key = tl.where(put, first[:, None], key)
        # A row that hands nothing over now has nothing larger later.
        s = tl.where(n[None, :] == first[:, None], float("-inf"), s)
        highest, least = tl.max(s, 1), tl.min(held, 1)
        wins = highest > least
        more = tl.max(wins.to(tl.int32), 0)
    return held, key


@triton.jit
def write_sums(
    top, mass, spread, place, on, at, m_in, ENTROPIES, PLACES, ON,
    ENTROPY: tl.constexpr, PLACE: tl.constexpr, HAS_REGION: tl.constexpr,
):  # fmt: skip
    """What was asked for of some rows; their log-sum-exp in base 2 is given back. NaN counts as mass, so that it is seen."""
    alive = mass != 0
    total = tl.where(alive, mass, 1.0)
    if ENTROPY:
        tl.store(ENTROPIES + at, tl.where(alive, (tl.log2(total) - spread / total) * LN2, 0.0), mask=m_in)
    if PLACE:
        tl.store(PLACES + at, tl.where(alive, place / total, float("nan")), mask=m_in)
    if HAS_REGION:
        tl.store(ON + at, on / total, mask=m_in)
    return tl.where(alive, top + tl.log2(total), float("-inf"))


@triton.jit
def write_largest(held, key, lse, at, m_in, LARGEST, K, SLOTS: tl.constexpr):
    """The k largest weights and their keys, (rows, k, 2), from the largest down; 0 at key -1 where there are fewer."""
    slot = tl.arange(0, SLOTS)
    held = tl.where((slot < K)[None, :], held, float("-inf"))
    mine, other = held[:, :, None], held[:, None, :]
    before = (other > mine) | ((other == mine) & (slot[None, None, :] < slot[None, :, None]))
    rank = tl.sum(before.to(tl.int32), 2)
    # No score is larger than NaN, nor smaller: a row of them holds none, but is not one with nothing to read.
    nothing = tl.where(lse != lse, lse, 0.0)
    weight = tl.where(key >= 0, tl.exp2(held - tl.where(lse == float("-inf"), 0.0, lse)[:, None]), nothing[:, None])
    to = LARGEST + (at[:, None] * K + rank) * 2
    slots = m_in[:, None] & (slot < K)[None, :]
    tl.store(to, weight, mask=slots)
    tl.store(to + 1, key.to(tl.float32), mask=slots)


@dataclass(frozen=True)
class Summary:
    """What is wanted of every row, and where it goes."""

    names: Collection[str] = ()
    region: Tensor | None = None  # bytes (L or 1, N)
    k: int = 0
    found: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self, like: Tensor) -> tuple[Tensor, ...]:
        """REGION, ENTROPIES, PLACES, ON, LARGEST; `like`, never touched, for what nobody wants."""
        region = like if self.region is None else self.region
        return region, *(self.found.get(name, like) for name in ("entropy", "expected_position", "mass_on", "topk"))

    def numbers(self) -> tuple[int, int]:
        """Leading stride of the region, and how many of the largest."""
        return 0 if self.region is None or len(self.region) == 1 else self.region.stride(0), self.k

    def flags(self) -> dict[str, bool | int]:
        """What of a row is asked for, at compile time."""
        return {
            "ENTROPY": "entropy" in self.names,
            "PLACE": "expected_position" in self.names,
            "HAS_REGION": "mass_on" in self.names,
            "TOPS": self.k > 0,
            "SLOTS": power_of_2(max(1, self.k)),
        }
