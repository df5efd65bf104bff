"""The multi-dimensional kernels on a GPU: as exact as the dense execution in the same dtype."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.ops.call import Call
from regard.ops.dispatch import choose, execute
from tests.ops import multi_cases as cases
from tests.ops.multi_cases import Case, check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

F16, BF16 = torch.float16, torch.bfloat16

# Few kinds, since each is compiled anew: every dtype, activation, mask, and tiles of one and of several blocks.
CASES = (
    Case(dtype=BF16, hidden=64, features=64, nq=300, n=257),
    Case(dtype=F16, hidden=48, features=100, nq=33, n=128, act="sigmoid", mask="pairs"),
    Case(hidden=64, features=64, nq=65, n=300, act="tanh:5.0", mask="causal"),
    Case(dtype=BF16, hidden=128, features=17, nq=64, n=77, mask="padding"),
    Case(dtype=F16, hidden=200, features=65, nq=40, n=50, act="leaky_relu:0.1", mask="causal and padding"),
    Case(hidden=100, features=33, nq=31, n=29, act="relu", mask="pairs", heads=True),
    Case(hidden=100, features=70, nq=77, n=130),
    Case(hidden=64, features=64, nq=300, n=257),
    Case(hidden=50, features=64, nq=65, n=77, act="gelu", mask="causal"),
    Case(hidden=7, features=64, nq=65, n=77, act="identity", align=cases.predictive),
    Case(hidden=20, features=16, nq=65, n=77, align=cases.tempered),
    Case(hidden=64, features=7, nq=65, n=77, act="leaky_relu:0.1"),
    Case(hidden=128, features=100, nq=65, n=77, align=cases.monotonic),
    Case(hidden=7, features=33, nq=65, n=77, align=cases.reinforced_choice),
    Case(dtype=BF16, hidden=3, features=1, nq=5, n=1, act="identity"),
    Case(dtype=BF16, hidden=0, features=64, nq=300, n=257, act="tanh:5.0"),
    Case(hidden=0, features=100, nq=65, n=130, act="tanh", mask="causal"),
    Case(dtype=F16, hidden=0, features=7, nq=33, n=64, act="sigmoid", mask="pairs"),
    Case(hidden=0, features=300, nq=9, n=40, act="gelu", mask="padding"),
    Case(dtype=BF16, hidden=0, features=16, nq=1, n=33, act="relu", mask="window"),
    Case(dtype=BF16, hidden=64, features=64, nq=65, n=77, dropout=0.3, mask="causal"),
    Case(dtype=BF16, hidden=200, features=65, nq=65, n=77, mask="causal"),
    Case(dtype=BF16, hidden=64, features=64, nq=65, n=80, align=cases.relaxed),
    Case(dtype=BF16, hidden=64, features=64, nq=77, n=77, align=cases.monotonic),
    Case(hidden=7, features=33, nq=65, n=77, align=cases.straight_through, mask="pairs", dropout=0.2),
    Case(hidden=7, features=33, nq=65, n=77, align=cases.predictive, mask="pairs"),
    Case(dtype=F16, hidden=7, features=33, nq=65, n=77, align=cases.predictive_normal, mask="padding"),
    Case(dtype=BF16, hidden=0, features=64, nq=65, n=77, dropout=0.3, mask="causal"),
    Case(hidden=0, features=64, nq=300, n=257, align=cases.straight_through),
    Case(hidden=0, features=33, nq=65, n=77, align=cases.reinforced_choice, mask="padding"),
    Case(dtype=BF16, hidden=0, features=33, nq=65, n=77, align=cases.relaxed, mask="pairs"),
    Case(dtype=F16, hidden=0, features=33, nq=300, n=257, align=cases.monotonic, mask="padding"),
    Case(hidden=0, features=7, nq=65, n=77, align=cases.predictive, mask="pairs"),
    Case(hidden=0, features=33, nq=65, n=77, align=cases.tempered),
)


# Every dtype, masks of tiles that are left out, tiles of features, and a ragged end of both sides.
PANELS = (
    Case(dtype=BF16, hidden=64, features=64, nq=257, n=257, mask="causal"),
    Case(dtype=BF16, hidden=48, features=100, nq=300, n=100, mask="pairs", heads=True),
    Case(dtype=F16, hidden=64, features=64, nq=300, n=257, mask="padding"),
    Case(hidden=64, features=33, nq=300, n=257, mask="causal and padding"),
    Case(hidden=7, features=33, nq=65, n=77, align=cases.straight_through, mask="pairs"),
)


@pytest.fixture(autouse=True)
def faults_belong_to_their_test() -> Iterator[None]:
    """A launch fails when the host waits for it, which may be in another test."""
    yield
    torch.cuda.synchronize()


def fused(call: Call) -> Tensor:
    assert choose(call, "fused").path == "fused"
    return execute(call, "fused")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_as_exact_as_the_dense_execution(case: Case) -> None:
    check(case, fused, "cuda")


@pytest.mark.parametrize("case", PANELS, ids=str)
def test_queries_come_in_panels_whose_parts_are_bounded(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    from regard.ops.triton import multi_product_grads

    monkeypatch.setattr(multi_product_grads, "PANEL", 2**13)
    monkeypatch.setattr(multi_product_grads, "PROGRAMS", 7)
    seen = cases.launches(monkeypatch, multi_product_grads, "grad_kernel")
    check(case, fused, "cuda")
    begins = [x["begin"] for x in seen]
    assert len(begins) > 2
    assert begins[: len(begins) // 2] == begins[len(begins) // 2 :] == sorted(set(begins))
    assert any(x["SPAN"] > 1 for x in seen)


def test_a_compiled_graph_holds_the_operator_whole() -> None:
    torch.manual_seed(0)
    attend = rg.Attention("additive", query_dim=8, key_dim=8, hidden_dim=16, features=8, impl="fused").cuda()
    x = torch.randn(2, 65, 8, device="cuda", requires_grad=True)
    expected = attend(x, x)
    found = torch.compile(attend, fullgraph=True)(x, x)
    assert torch.allclose(found, expected, atol=1e-6)
    given = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(y, x, given)[0] for y in (found, expected))
    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_memory_grows_with_the_sequence_not_its_square(dtype: torch.dtype) -> None:
    attend = (
        rg.Attention("additive", query_dim=16, key_dim=16, hidden_dim=64, features=64, impl="fused").cuda().to(dtype)
    )
    peaks = []
    # Long enough that the workspace of the library's products, up to 64 MiB, is in both.
    for n in (8192, 32768):
        query = torch.randn(1, n, 16, device="cuda", dtype=dtype, requires_grad=True)
        value = torch.randn(1, n, 64, device="cuda", dtype=dtype, requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(query, query, value).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 6 * peaks[0]


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_bilinear_features_are_as_exact_as_the_dense_execution(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    low = rg.Attention(rg.ActivatedGeneral(24, 24, features=5)).to(dtype).cuda()
    wide = copy.deepcopy(low).double()
    x = [torch.randn(2, n, d, device="cuda", dtype=dtype) for n, d in ((65, 24), (77, 24), (77, 5))]
    do = torch.randn(2, 65, 5, device="cuda", dtype=dtype)

    def found(attend: rg.Attention, impl: str) -> dict[str, Tensor]:
        like = next(attend.parameters()).dtype
        leaves = [y.to(like).requires_grad_() for y in x]
        named = dict(zip(("query", "key", "value"), leaves, strict=True)) | dict(attend.named_parameters())
        with rg.execution(impl):
            context = attend(*leaves)
        return {"o": context} | dict(
            zip(named, torch.autograd.grad(context, list(named.values()), do.to(like)), strict=True)
        )

    exact, rival, ours = found(wide, "dense"), found(low, "dense"), found(low, "fused")
    for name, reference in exact.items():
        distance, budget = (float((y[name].double() - reference).norm()) for y in (ours, rival))
        budget = 2 * (budget + torch.finfo(dtype).eps * float(reference.norm()))
        assert distance <= budget, f"{name}: distance {distance:.2e} beyond {budget:.2e}"
