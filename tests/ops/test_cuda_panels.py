"""Additive scores written out by the kernels on a GPU, and attention by panels of them: as exact as the equation in the same dtype."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from tests.ops.additive_cases import PANELS, WIDTH, Case
from tests.ops.additive_cases import check as check_attention
from tests.ops.panel_cases import Panel, check, watched
from tests.ops.sparse_cases import Rows
from tests.ops.sparse_cases import check as check_rows
from tests.ops.sparse_cases import watched as watched_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

F16, BF16 = torch.float16, torch.bfloat16
ACTIVATIONS = ("tanh", "sigmoid", "relu", "leaky_relu:0.1", "gelu", "identity")

SCORES = (
    *(Panel(act, nq=300, n=257, width=17) for act in ACTIVATIONS),
    *(Panel(act, reach="wide", nq=131, n=150) for act in ACTIVATIONS),
    *(Panel(act, reach="both", nq=131, n=300, width=8) for act in ("tanh", "sigmoid")),
    *(Panel(dtype=dtype, nq=130, n=333, width=64) for dtype in (F16, BF16)),
    Panel(dtype=F16, reach="wide"),
    Panel(nq=1, n=1, width=1),
    Panel(nq=1, n=5000, width=64),
    Panel(nq=5000, n=1, width=65),
    Panel(width=300, nq=65, n=70),
    Panel(width=1000, nq=3, n=5),
    Panel(leads=((3, 1), (2,), (3, 1)), nq=65, n=70),
    Panel(leads=((2,), (), (2,)), nq=65, n=70, dtype=BF16),
)


@pytest.mark.parametrize("panel", SCORES, ids=str)
def test_scores_are_as_exact_as_the_equation(panel: Panel, monkeypatch: pytest.MonkeyPatch) -> None:
    check(panel, "cuda", monkeypatch)


ATTENTIONS = (
    *(Case(name, mask="pairs", nq=300, n=257, hidden=33) for name in PANELS),
    Case("sparsemax", dtype=BF16, mask="padding", bias=True, nq=65, n=130, panel=17),
    Case("entmax", "sigmoid", F16, "causal", dropout=0.3, nq=65, n=130, panel=32),
    Case("entmax, learned", "gelu", mask="window", nq=65, n=130, panel=64),
)


@pytest.mark.parametrize("case", ATTENTIONS, ids=str)
def test_attention_is_as_exact_as_the_dense_execution(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, rows = watched(monkeypatch), watched_rows(monkeypatch)
    check_attention(case, "cuda")
    assert set(taken) == {"panel", "gradients"}
    assert set(rows) == {"aligned", "gradients"}


ROWS = (
    *(Rows(alpha, n=n, rows=70) for alpha in (2.0, 1.5, 1.3, 3.0) for n in (1, 37, 500, 1024, 2048)),
    *(Rows(alpha, n=n, rows=30, reach=reach) for alpha in (2.0, 1.5, 1.3) for n, reach in ((5000, 0.01), (8192, 1e4), (16_384, 1.0))),
    *(Rows(alpha, n=333, rows=130, dtype=dtype, mask="keys") for alpha in (2.0, 1.5, 1.3) for dtype in (F16, BF16)),
    *(Rows(alpha, n=300, rows=70, learned=True) for alpha in (1.1, 1.5, 1.9)),
)  # fmt: skip


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_sparse_rows_are_as_exact_as_the_equation(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    check_rows(rows, "cuda", monkeypatch)


def test_sparse_rows_too_long_for_a_program_are_aligned_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = watched_rows(monkeypatch)
    attend = rg.Attention("dot", "sparsemax").cuda()
    x = torch.randn(1, 16_385, WIDTH, device="cuda")
    with rg.execution("blockwise"):
        attend(x[:, :3], x)
        assert rows == []
        attend(x[:, :3], x[:, 1:])
    assert rows == ["aligned"]


@pytest.mark.parametrize("name", ["reinforced", "structured"])
def test_blockwise_alignments_read_scores_of_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = watched(monkeypatch)
    attend = rg.Attention("additive", name, query_dim=WIDTH, key_dim=WIDTH, hidden_dim=7).cuda().eval()
    x = torch.randn(2, 65, WIDTH, device="cuda")
    with rg.execution("blockwise", panel=17):
        found = attend(x, x)
    assert taken == ["panel"] * 4
    with rg.execution("dense"):
        torch.testing.assert_close(found, attend(x, x))


def test_compiles_as_one_graph() -> None:
    attend, x = Case("sparsemax").attention().cuda(), torch.randn(2, 40, WIDTH, device="cuda")
    with rg.execution("fused", panel=16):
        torch.testing.assert_close(torch.compile(attend, fullgraph=True)(x, x), attend(x, x))


def test_memory_grows_with_the_sequence_not_its_square() -> None:
    attend = Case("sparsemax", hidden=64).attention().cuda()
    peaks = []
    # Long enough that a panel is as large as it may be in both, and that no kernel holds a row of it.
    for n in (24_576, 65_536):
        x = torch.randn(1, n, WIDTH, device="cuda", requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with rg.execution("fused"):
            attend(x, x).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 1.5 * peaks[0]
