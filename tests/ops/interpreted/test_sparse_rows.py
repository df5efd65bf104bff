"""Rows under sparsemax and entmax by the kernels, run by Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.ops import sparse
from regard.ops.sparse import by_kernel
from regard.ops.triton import sparse_rows
from tests.ops.sparse_battery import Battery
from tests.ops.sparse_cases import KERNELS, Rows, check

F16, BF16 = torch.float16, torch.bfloat16
ALPHAS = (2.0, 1.5, 1.3, 1.9, 3.0)


@pytest.fixture(autouse=True)
def _kernels_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA; what is not written is seen."""
    empty = torch.empty
    monkeypatch.setattr(sparse, "on_device", lambda x: True)

    def poisoned(*args, **kwargs) -> Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


CASES = (
    *(Rows(alpha) for alpha in ALPHAS),
    *(Rows(alpha, n=1, rows=3, mask="none") for alpha in ALPHAS),
    *(Rows(alpha, n=130, rows=70, reach=0.01, mask="none") for alpha in (2.0, 1.5, 1.3)),
    *(Rows(alpha, n=67, rows=33, reach=1e4, mask="keys") for alpha in (2.0, 1.5, 1.3)),
    *(Rows(alpha, n=600, rows=5, reach=0.1, mask="shared") for alpha in (2.0, 1.5, 1.3)),
    *(Rows(alpha, n=31, mask="queries", dtype=dtype) for alpha in (2.0, 1.5, 1.3) for dtype in (F16, BF16)),
    *(Rows(alpha, n=2500, rows=2, reach=reach) for alpha in (2.0, 1.5) for reach in (0.05, 3.0)),
    *(Rows(alpha, learned=True, reach=reach) for alpha in (1.1, 1.5, 1.9) for reach in (0.3, 3.0)),
)


class TestKernels(Battery):
    """All of it by the kernels."""

    module = KERNELS


@pytest.mark.parametrize("rows", CASES, ids=str)
def test_as_exact_as_the_equation_in_the_same_dtype(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    check(rows, "cpu", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [2.0, 1.5, 1.3])
def test_the_longest_row(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    check(Rows(alpha, n=sparse.LONGEST, rows=1, reach=0.3), "cpu", monkeypatch)


def test_programs_hold_several_short_rows_or_one_long_one() -> None:
    assert sparse_rows._blocks(8192, 2048) == ((8192,), {"BM": 1, "BN": 2048, "num_warps": 4})
    assert sparse_rows._blocks(19, 37) == ((2,), {"BM": 16, "BN": 64, "num_warps": 4})
    assert sparse_rows._blocks(100, 37) == ((7,), {"BM": 16, "BN": 64, "num_warps": 4})
    assert sparse_rows._blocks(10, 4096)[1]["num_warps"] == 8
    assert sparse_rows._blocks(10, 8192)[1]["num_warps"] == 16
    assert sparse_rows._blocks(10, 16_384)[1] == {"BM": 1, "BN": 16_384, "num_warps": 16}


def test_what_no_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    z = torch.randn(3, 5)
    assert by_kernel(z, 2.0)
    assert by_kernel(z.bfloat16(), torch.tensor(1.5))
    assert not by_kernel(z.double(), 2.0)
    assert not by_kernel(z[0], 2.0)
    assert not by_kernel(z[:, :0], 2.0)
    assert not by_kernel(z[:0], 2.0)
    assert not by_kernel(z, torch.tensor([1.5]))
    assert not by_kernel(torch.zeros(1, 1).expand(2, sparse.LONGEST + 1), 2.0)
    assert by_kernel(torch.zeros(1, 1).expand(2, sparse.LONGEST), 2.0)
    inside: list[bool] = []
    torch.func.grad(lambda z: inside.append(by_kernel(z, 2.0)) or z.sum())(z)
    torch.func.vmap(lambda z: inside.append(by_kernel(z, 2.0)) or z.sum())(z[None])
    with forward_ad.dual_level():
        inside.append(by_kernel(z, 2.0))
    assert inside == [False, True, False]
    monkeypatch.setattr(sparse, "loaded", lambda name: False)
    assert not by_kernel(z, 2.0)
