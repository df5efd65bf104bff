"""Points in a square, and the polygon that holds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from regard.recipes.planted.task import Batch


@dataclass(frozen=True)
class ConvexHull:
    """Say the positions of the points that span the convex hull, counter-clockwise, from the one that stands first in the input.

    The task of Vinyals et al. 2015, https://arxiv.org/abs/1506.03134, with a stop symbol, position n, at the end.
    """

    n: int = 10

    @property
    def dim(self) -> int:
        """Width of a token."""
        return 2

    @property
    def classes(self) -> int:
        """The positions, and the stop symbol."""
        return self.n + 1

    def draw(self, count: int, generator: Generator) -> Batch:
        """Inputs `tokens` (count, n, 2), points of the unit square; target (count, m), positions, then n once, then -1."""
        points = torch.rand(count, self.n, 2, generator=generator, device=generator.device)
        return Batch({"tokens": points}, hull(points))


def hull(points: Tensor) -> Tensor:
    """Positions (B, m) of the hull of points (B, n, 2), n once at its end, then -1: by going round, all examples at once."""
    count, n, _ = points.shape
    points = points.double()
    rows = torch.arange(count, device=points.device)
    # The lowest point, the leftmost of equals, is on the hull.
    lowest = points[..., 1] == points[..., 1].amin(-1, keepdim=True)
    start = torch.where(lowest, points[..., 0], torch.inf).argmin(-1)
    found = [start]
    done = torch.zeros_like(start, dtype=torch.bool)
    for _ in range(n - 1):
        here = points[rows, found[-1]].unsqueeze(1)
        to = points - here
        # The next point is the one that has no other on its right: every cross product with the others is >= 0.
        cross = to[:, :, None, 0] * to[:, None, :, 1] - to[:, :, None, 1] * to[:, None, :, 0]
        here_itself = (to == 0).all(-1)
        left = ((cross >= 0) | here_itself[:, None, :]).all(-1) & ~here_itself
        # Of points in one line the farthest.
        following = torch.where(left, to.square().sum(-1), -1.0).argmax(-1)
        done = done | (following == start)
        if bool(done.all()):
            break
        found.append(torch.where(done, found[-1], following))
    round_ = torch.stack(found, 1)
    length = 1 + (round_[:, 1:] != round_[:, :-1]).sum(-1)
    index = torch.arange(round_.shape[1], device=points.device)
    inside = index < length[:, None]
    first = torch.where(inside, round_, n).argmin(-1)
    turned = round_.gather(1, (index + first[:, None]) % length[:, None])
    turned = torch.where(inside, turned, -1)
    turned = torch.cat([turned, turned.new_full((count, 1), -1)], 1)
    turned[rows, length] = n
    return turned


def area(points: Tensor, positions: Tensor) -> Tensor:
    """Area (B,) of the polygon with corners at the positions (B, m); what is not a position of a point is left out."""
    n = points.shape[1]
    real = (positions >= 0) & (positions < n)
    corner = points.double().gather(1, positions.clamp(0, n - 1).unsqueeze(-1).expand(-1, -1, 2))
    # What is left out stands where the first corner stands, at the end, and so adds nothing.
    order = real.int().sort(dim=-1, descending=True, stable=True).indices
    corner = corner.gather(1, order.unsqueeze(-1).expand_as(corner))
    kept = real.gather(1, order)
    corner = torch.where(kept.unsqueeze(-1), corner, corner[:, :1])
    after = corner.roll(-1, 1)
    return (corner[..., 0] * after[..., 1] - corner[..., 1] * after[..., 0]).sum(-1).abs() / 2


def same_polygon(found: Tensor, target: Tensor) -> Tensor:
    """Whether two sequences of positions, of different lengths perhaps, are the same up to padding."""
    m = max(found.shape[1], target.shape[1])
    a, b = (torch.nn.functional.pad(x, (0, m - x.shape[1]), value=-1) for x in (found, target))
    return (a == b).all(-1)
