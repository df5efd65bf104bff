"""Counter-based randomness: the number drawn for a position depends on nothing but the seed and the position.

Philox 4x32-10 (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405), keyed by the seed, counting
(key index / 4, query index, leading index, feature and purpose). Whoever computes the weight of query i on key j, in
whatever order, on whatever device, draws the same number for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from regard.ops.places import are_known

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

# What a number is drawn for; part of the counter, so that dropout and sampling never share a number.
SAMPLE, DROPOUT, SELECT, PERMUTE = range(4)
_PURPOSES = 4


def draw_seed(device: torch.device) -> Tensor:
    """A fresh 63-bit seed from torch's generator, left on the device."""
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


def philox(seed: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words (held in int64) for each counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(_ROUNDS):
        # A 32 x 32 bit product wraps in int64, but its two halves come out right.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniform(
    seed: Tensor, lead: tuple[int, ...], features: int | None, i: range | Tensor, j: range, purpose: int
) -> Tensor:
    """Numbers in (0, 1) of shape (*lead, [features], len(i), len(j)), float32, of queries i and keys j.

    Example:
        >>> whole = uniform(torch.tensor([7]), (2,), None, range(3), range(10), SAMPLE)
        >>> tile = uniform(torch.tensor([7]), (2,), None, range(1, 3), range(5, 9), SAMPLE)
        >>> torch.equal(whole[:, 1:, 5:9], tile)
        True
    """
    shape = _shape(lead, features, i, j)
    if not isinstance(i, Tensor) and not are_known(*shape):
        drawn: Tensor = torch.ops.regard.uniform(seed, *_flat(lead, features, i, j), purpose)
        return drawn.reshape(shape)
    if j.stop == j.start:
        return torch.empty(shape, device=seed.device)
    return numbers(_in_order(_words(seed, lead, features, i, j, purpose), j)).reshape(shape)


def at_least(
    p: float, seed: Tensor, lead: tuple[int, ...], features: int | None, i: range | Tensor, j: range, purpose: int
) -> Tensor:
    """Which of the numbers of `uniform` are no smaller than a probability; without making them.

    Example:
        >>> where = torch.tensor([7]), (2,), None, range(3), range(10), DROPOUT
        >>> torch.equal(at_least(0.3, *where), uniform(*where) >= 0.3)
        True
    """
    shape, least = _shape(lead, features, i, j), least_word(p)
    if not isinstance(i, Tensor) and not are_known(*shape):
        kept: Tensor = torch.ops.regard.at_least(p, seed, *_flat(lead, features, i, j), purpose)
        return kept.reshape(shape)
    if j.stop == j.start:
        return torch.empty(shape, dtype=torch.bool, device=seed.device)
    return _in_order([word >= least for word in _words(seed, lead, features, i, j, purpose)], j).reshape(shape)


def _shape(lead: tuple[int, ...], features: int | None, i: range | Tensor, j: range) -> tuple[int, ...]:
    rows = len(i) if isinstance(i, Tensor) else i.stop - i.start
    return (*lead, *(() if features is None else (features,)), rows, j.stop - j.start)


def _flat(lead: tuple[int, ...], features: int | None, i: range | Tensor, j: range) -> tuple[int, ...]:
    """The same places as numbers, as an operator takes them (ops.drawn): queries are counted on there, not named one by one."""
    assert not isinstance(i, Tensor)
    leads, rows = math.prod(lead), i.stop - i.start
    return leads, 1 if features is None else features, i.start, rows, j.start, j.stop - j.start


def _words(
    seed: Tensor, lead: tuple[int, ...], features: int | None, i: range | Tensor, j: range, purpose: int
) -> Sequence[Tensor]:
    """The four words of every group of keys, (leads, features, queries, groups)."""
    device = seed.device
    groups = torch.arange(j.start // 4, (j.stop - 1) // 4 + 1, device=device)
    rows = (i if isinstance(i, Tensor) else torch.arange(i.start, i.stop, device=device))[:, None]
    feature = purpose_of(purpose, torch.arange(1 if features is None else features, device=device)[:, None, None])
    index = torch.arange(math.prod(lead), device=device)[:, None, None, None]
    # As numbers, not as indices, whose products a compiler for GPUs may take for 32 bits wide.
    nothing = seed & 0
    words = philox(seed, (groups + nothing, rows + nothing, index + nothing, feature + nothing))
    whole: list[Tensor] = torch.broadcast_tensors(*words)
    return whole


def _in_order(words: Sequence[Tensor], j: range) -> Tensor:
    """What is known of words, key by key."""
    first = j.start // 4 * 4
    return torch.stack(list(words), -1).flatten(-2)[..., j.start - first : j.stop - first]


def numbers(words: Tensor) -> Tensor:
    """Numbers in (0, 1) from 32-bit words."""
    # 23 bits and a half step: exactly representable in float32, so never rounded to 0 or 1.
    return ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23


def least_word(probability: float) -> int:
    """The smallest 32-bit word whose number is no smaller than a probability, as float32 has it."""
    return math.ceil(float(torch.tensor(probability, dtype=torch.float32)) * 2.0**23 - 0.5) << 9


def purpose_of(purpose: int, feature: Tensor) -> Tensor:
    """The part of a counter that says what a number is drawn for."""
    return feature * _PURPOSES + purpose


def gumbel(numbers: Tensor) -> Tensor:
    """Standard Gumbel noise from uniform numbers."""
    return -torch.log(-torch.log(numbers))
