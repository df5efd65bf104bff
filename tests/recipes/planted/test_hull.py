"""The convex hull of points, its area, and when two answers are one."""

from __future__ import annotations

import pytest
import torch

from regard.recipes.planted.hull import ConvexHull, area, hull, same_polygon


def slow_hull(points: list[list[float]]) -> set[int]:
    """A point is a corner unless it lies within a triangle, or on a line, of others: looked for one by one."""

    def cross(o: list[float], a: list[float], b: list[float]) -> float:
        return (a[0] - o[0]) * (b[1] - o[1]) - (a[1] - o[1]) * (b[0] - o[0])

    corners = set()
    n = len(points)
    for p in range(n):
        others = [k for k in range(n) if k != p]
        inside = any(
            all(
                cross(points[x], points[y], points[p]) * cross(points[x], points[y], points[z]) >= 0 for x, y, z in rest
            )
            for a in others
            for b in others
            for c in others
            if a < b < c
            for rest in [((a, b, c), (b, c, a), (c, a, b))]
        )
        if not inside:
            corners.add(p)
    return corners


@pytest.mark.parametrize("n", [3, 5, 9])
def test_the_hull_is_that_of_the_definition(n: int) -> None:
    batch = ConvexHull(n).draw(17, torch.Generator().manual_seed(n))
    for points, target in zip(batch.inputs["tokens"], batch.target.tolist(), strict=True):
        found = [k for k in target if 0 <= k < n]
        assert set(found) == slow_hull(points.tolist())
        assert len(set(found)) == len(found)
        assert found[0] == min(found)
        assert target[len(found)] == n
        assert all(k == -1 for k in target[len(found) + 1 :])
        corners = points.double()[found]
        turn = (corners.roll(-1, 0) - corners, corners.roll(-2, 0) - corners.roll(-1, 0))
        assert (turn[0][:, 0] * turn[1][:, 1] - turn[0][:, 1] * turn[1][:, 0] > 0).all(), "counter-clockwise"


def test_points_in_a_line_and_a_square() -> None:
    square = torch.tensor([[[0.5, 0.5], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.5, 0.0]]])
    assert hull(square).tolist() == [[1, 4, 2, 3, 6]]
    assert area(square, hull(square)).item() == pytest.approx(1.0)


def test_area_leaves_out_what_is_no_point() -> None:
    points = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    for positions in ([0, 1, 2, 3, -1], [3, 0, -1, 1, 2], [0, 2, 1]):
        assert area(points, torch.tensor([positions])).item() == pytest.approx(0.5)
    assert area(points, torch.tensor([[-1, -1]])).item() == 0.0


def test_sameness_ignores_padding_only() -> None:
    a = torch.tensor([[1, 2, 5], [1, 2, 5]])
    b = torch.tensor([[1, 2, 5, -1], [2, 1, 5, -1]])
    assert same_polygon(a, b).tolist() == [True, False]
