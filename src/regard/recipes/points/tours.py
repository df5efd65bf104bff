"""The shortest way round some points: exactly, by dynamic programming over the sets of points already seen."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.ops.fill import where


def shortest_tour(points: Float[Tensor, "b n 2"]) -> Int[Tensor, "b n"]:
    r"""Positions of the shortest closed tour, from the first point, in the direction in which the second one stands earlier than the last.

    Held & Karp (1962, https://doi.org/10.1137/0110015): with $C(S, j)$ the length of the shortest path from point 0 through all of $S$
    that ends in $j \in S$,

    $$C(S, j) = \min_{i \in S \setminus j} C(S \setminus j, i) + d_{ij}$$

    Time $2^n n^2$ for each example, all of them at once.

    Example:
        >>> square = torch.tensor([[[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]])
        >>> shortest_tour(square).tolist()
        [[0, 2, 1, 3]]
    """
    count, n, _ = points.shape
    if n < 3:
        return torch.arange(n).expand(count, n)
    distance = torch.cdist(points.double(), points.double())
    others = n - 1
    # cost[S][:, j]: over the points 1 … n-1, of which S is a set of bits.
    cost = torch.full((1 << others, count, others), torch.inf, dtype=torch.double)
    before = torch.zeros((1 << others, count, others), dtype=torch.long)
    for j in range(others):
        cost[1 << j, :, j] = distance[:, 0, j + 1]
    for members in range(1, 1 << others):
        if members & (members - 1) == 0:
            continue
        for j in (k for k in range(others) if members >> k & 1):
            through = cost[members & ~(1 << j)] + distance[:, 1:, j + 1]
            cost[members, :, j], before[members, :, j] = through.min(-1)
    rows = torch.arange(count)
    left = torch.full((count,), (1 << others) - 1)
    last = (cost[-1] + distance[:, 1:, 0]).argmin(-1)
    backwards = [last]
    for _ in range(others - 1):
        previous = before[left, rows, last]
        left, last = left - (1 << last), previous
        backwards.append(last)
    tour = torch.stack([*backwards, torch.full_like(last, -1)], 1).flip(1) + 1
    turned = torch.cat([tour[:, :1], tour[:, 1:].flip(1)], 1)
    return torch.where((tour[:, 1] < tour[:, -1]).unsqueeze(1), tour, turned)


def length(points: Float[Tensor, "b n 2"], tour: Int[Tensor, "b n"]) -> Float[Tensor, " b"]:
    """Of closed tours (B,); infinite where a point is left out or seen twice."""
    n = points.shape[1]
    whole = (
        (tour.sort(-1).values == torch.arange(n, device=tour.device)).all(-1)
        if tour.shape[1] == n
        else tour.new_zeros(len(tour)) > 0
    )
    corner = points.double().gather(1, tour.clamp(0, n - 1).unsqueeze(-1).expand(-1, -1, 2))
    steps = (corner - corner.roll(-1, 1)).norm(dim=-1).sum(-1)
    return where(whole, steps, torch.inf)
