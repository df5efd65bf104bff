"""Associative scans: every prefix of a product in a depth of log N, and the log-space products to take them with."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard.ops.fill import where

Combine = Callable[[Tensor, Tensor], Tensor]


def scan(x: Tensor, combine: Combine, *, reverse: bool = False) -> Tensor:
    """All prefixes of x_0 ∘ x_1 ∘ … along the first axis; with `reverse`, all suffixes … ∘ x_{N-1}.

    Neighbours are joined in pairs, the pairs scanned, and what lies between them filled in: 2 log N steps, 2 N products.

    Args:
        x: (N, ...), one element each.
        combine: an associative product, of elements side by side; it need not be commutative.
        reverse: suffixes instead of prefixes.

    Example:
        >>> scan(torch.tensor([1, 2, 3, 4, 5]), torch.add).tolist()
        [1, 3, 6, 10, 15]
    """
    if reverse:
        return scan(x.flip(0), lambda a, b: combine(b, a)).flip(0)
    if len(x) < 2:
        return x
    odd = scan(combine(x[:-1:2], x[1::2]), combine)
    even = torch.cat([x[:1], combine(odd[: (len(x) - 1) // 2], x[2::2])])
    woven = torch.stack([even[: len(odd)], odd], 1).flatten(0, 1)
    return torch.cat([woven, even[len(odd) :]])


def log_sum_exp(x: Tensor, axis: int) -> Tensor:
    """Log-sum-exp whose gradient is zero, not NaN, where everything is minus infinity."""
    alive = (x != -math.inf).any(axis, keepdim=True)
    return where(alive.squeeze(axis), where(alive, x, 0.0).logsumexp(axis), -math.inf)


def log_convolution(a: Tensor, b: Tensor) -> Tensor:
    r"""The product of polynomials (N, K, ...), cut off after K terms: $c_n = \log \sum_{i \le n} e^{a_i + b_{n-i}}$."""
    size = a.shape[1]
    n = torch.arange(size, device=a.device)
    none = b.new_full((1, 1, *(1,) * (b.dim() - 2)), -math.inf).expand(len(b), size - 1, *b.shape[2:])
    shifted = torch.cat([none, b], 1)[:, n[:, None] - n + size - 1]
    return log_sum_exp(a.unsqueeze(1) + shifted, 2)


def shifted(x: Tensor, by: int, fill: Tensor) -> Tensor:
    """The elements of x (N, ...) moved along its first axis by one, `fill` (...) coming in: by 1, what lies before; by -1, after."""
    edge = fill.expand(1, *x.shape[1:])
    return torch.cat([edge, x[:-1]]) if by > 0 else torch.cat([x[1:], edge])


def followed(maps: Tensor, last: Tensor) -> Tensor:
    """The state in front of each map, when the last one is given the state `last` and each hands its result down.

    Args:
        maps: (N, ..., K), whole numbers below K: what map n makes of each state.
        last: (...), where it begins, at N - 1.

    Returns:
        (N, ...), the state that map n is given.

    Example:
        >>> up = torch.tensor([[1, 2, 2]] * 3)
        >>> followed(up, torch.tensor(0)).tolist()
        [2, 1, 0]
    """
    states = torch.arange(maps.shape[-1], device=maps.device).expand_as(maps[0]) if len(maps) else maps
    chained = scan(maps, lambda a, b: a.gather(-1, b), reverse=True)
    before = shifted(chained, -1, states) if len(maps) else maps
    return before.gather(-1, last[..., None].expand(*before.shape[:-1], 1)).squeeze(-1)
