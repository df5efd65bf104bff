"""Rows under sparsemax and entmax on a CPU, by Newton's steps: held to the equation, as the kernels are, and to the package."""

from __future__ import annotations

import math

import entmax as published
import pytest
import torch
from torch.autograd import forward_ad

from regard.general.alignments.sparse import entmax
from regard.ops import sparse, sparse_rows
from regard.ops.sparse import aligned, by_kernel
from tests.ops.sparse_battery import Battery
from tests.ops.sparse_cases import TORCH, Rows, check

F64, F16, BF16 = torch.float64, torch.float16, torch.bfloat16
ALPHAS = (2.0, 1.5, 1.3, 1.9, 3.0)

CASES = (
    *(Rows(alpha, mask=mask) for alpha in ALPHAS for mask in ("pairs", "none")),
    *(Rows(alpha, n=1, rows=3, mask="none") for alpha in ALPHAS),
    *(Rows(alpha, n=131, rows=71, reach=0.01, mask="none") for alpha in ALPHAS),
    *(Rows(alpha, n=67, rows=31, reach=1e4, mask="keys") for alpha in ALPHAS),
    *(Rows(alpha, n=601, rows=5, reach=0.1, mask="shared") for alpha in ALPHAS),
    *(Rows(alpha, n=97, mask="queries", dtype=dtype) for alpha in (2.0, 1.5, 1.3) for dtype in (F64, F16, BF16)),
    *(Rows(alpha, n=2503, rows=7, reach=reach) for alpha in ALPHAS for reach in (1e-4, 0.05, 3.0)),
    *(Rows(alpha, n=6007, rows=47, mask="none") for alpha in (2.0, 1.5, 1.3)),
    *(Rows(alpha, n=n, learned=True, reach=reach) for alpha in (1.05, 1.5, 1.9, 1.99) for n, reach in ((37, 0.3), (337, 3.0))),
)  # fmt: skip


class TestTorch(Battery):
    """All of it by torch."""

    module = TORCH


@pytest.mark.parametrize("rows", CASES, ids=str)
def test_as_exact_as_the_equation_in_the_same_dtype(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    check(rows, "cpu", monkeypatch, TORCH)


@pytest.mark.parametrize("n", [7, 1031])
@pytest.mark.parametrize("alpha", [2.0, 1.5, 1.3, 1.9, 3.0])
def test_agrees_with_the_published_package(alpha: float, n: int) -> None:
    torch.manual_seed(n)
    z = torch.randn(13, n, dtype=F64).requires_grad_()
    theirs = {1.5: published.entmax15, 2.0: published.sparsemax}.get(
        alpha, lambda z, dim: published.entmax_bisect(z, alpha, dim=dim, n_iter=100)
    )
    grad = torch.randn(13, n, dtype=F64)
    p, q = aligned(z, None, alpha), theirs(z, dim=-1)
    torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(*(torch.autograd.grad(x, z, grad)[0] for x in (p, q)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("alpha", [2.0, 1.5, 1.3, 3.0])
def test_gradients_are_those_of_finite_differences(alpha: float) -> None:
    z = torch.randn(3, 5, dtype=F64, requires_grad=True)
    allowed = torch.rand(3, 5) > 0.3
    assert torch.autograd.gradcheck(lambda z: aligned(z, allowed, alpha), z)
    learned = torch.tensor(1.4, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z, at: aligned(z, allowed, at), (z, learned))


@pytest.mark.parametrize("alpha", [*ALPHAS, 1.001, 1.99, 10.0])
@pytest.mark.parametrize("reach", [1e-6, 1e-2, 1.0, 30.0])
def test_few_steps_are_enough(alpha: float, reach: float, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    real = sparse_rows._Rows.sums
    monkeypatch.setattr(sparse_rows._Rows, "sums", lambda *args: steps.append(1) or real(*args))
    for z in (torch.randn(61, 1009), torch.rand(61, 1009), torch.zeros(61, 1009), -torch.rand(61, 1009).log()):
        steps.clear()
        aligned(reach * z, None, alpha)
        # First for the largest of every few keys, then for all.
        assert len(steps) <= (2 * sparse_rows.PATIENCE if alpha <= 2 else 300)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("reach", [1e-2, 1.0, 30.0])
def test_a_bracket_ends_where_steps_do(alpha: float, reach: float, monkeypatch: pytest.MonkeyPatch) -> None:
    z = reach * torch.randn(31, 211, dtype=F64)
    expected = entmax(z, None, alpha)
    for patience in (0, 1, 12):
        monkeypatch.setattr(sparse_rows, "PATIENCE", patience)
        torch.testing.assert_close(aligned(z, None, alpha), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("alpha", [2.0, 1.5, 1.3])
def test_gradients_that_are_no_numbers_outside_the_support_are_not_read(alpha: float) -> None:
    z = torch.tensor([[0.0, -0.1, -50.0], [1.0, 1.2, 0.9]]).requires_grad_()
    p = aligned(z, None, alpha)
    grad = torch.tensor([[0.5, -1.0, math.nan], [1.0, 2.0, 3.0]])
    (found,) = torch.autograd.grad(p, z, grad)
    (expected,) = torch.autograd.grad(entmax(z, None, alpha), z, grad.nan_to_num())
    torch.testing.assert_close(found, expected)
    assert found[0, 2] == 0


@pytest.mark.parametrize("dtype", [torch.float32, F64, F16])
def test_masks_hide_whatever_there_is(dtype: torch.dtype) -> None:
    z = torch.randn(2, 5, 7).to(dtype)
    mask = torch.rand(2, 5, 7) > 0.4
    strange = z.masked_fill(~mask, math.nan)
    strange[0] = z[0].masked_fill(~mask[0], math.inf)
    for alpha in ALPHAS:
        assert torch.equal(aligned(strange, mask, alpha), aligned(z, mask, alpha))


@pytest.mark.parametrize("queries", [1, 11])
@pytest.mark.parametrize("leads", [1, 3])
def test_several_tiles_are_one(leads: int, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    z, mask = torch.randn(3, 11, 67, requires_grad=True), torch.rand(leads, queries, 67) > 0.3
    alpha = torch.tensor(1.4, requires_grad=True)
    results = []
    for tile in (1 << 18, 67 * 2, 1):
        monkeypatch.setattr(sparse_rows, "TILE", tile)
        p = aligned(z, mask, alpha)
        results.append((p, *torch.autograd.grad(p.square().sum(), (z, alpha))))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_what_is_no_number_is_seen_in_long_rows_too(alpha: float) -> None:
    z, mask = torch.randn(3, 101), torch.rand(3, 101) > 0.3
    z[0, 5], z[1, 70], mask[0, 5], mask[1, 70] = math.nan, math.inf, True, True
    torch.testing.assert_close(aligned(z, mask, alpha), entmax(z, mask, alpha), equal_nan=True)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradients_of_a_row_sum_to_zero_whatever_they_have_in_common(alpha: float) -> None:
    z = torch.randn(7, 101, dtype=F64, requires_grad=True)
    (found,) = torch.autograd.grad(aligned(z, None, alpha), z, 1e6 + torch.randn(7, 101, dtype=F64))
    assert (found.sum(-1).abs() <= 1e-12 * found.abs().sum(-1)).all()


def test_what_is_left_to_the_equation() -> None:
    z = torch.randn(3, 5)
    assert all(by_kernel(z.to(dtype), 2.0) for dtype in sparse_rows.DTYPES)
    assert by_kernel(z, torch.tensor(1.5))
    assert by_kernel(torch.zeros(1, 1).expand(2, sparse.LONGEST + 1), 2.0)
    assert not by_kernel(z[0], 2.0)
    assert not by_kernel(z[:, :0], 2.0)
    assert not by_kernel(z.to("meta"), 2.0)
    assert not by_kernel(z, torch.tensor([1.5]))
    inside: list[bool] = []
    torch.func.grad(lambda z: inside.append(by_kernel(z, 2.0)) or z.sum())(z)
    torch.func.vmap(lambda z: inside.append(by_kernel(z, 2.0)) or z.sum())(z[None])
    with forward_ad.dual_level():
        inside.append(by_kernel(z, 2.0))
    assert inside == [False, True, False]
