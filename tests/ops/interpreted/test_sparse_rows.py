"""Rows under sparsemax and entmax by the kernels, run by Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import opcheck

import regard as rg
from regard.general.alignments.sparse import entmax
from regard.ops import sparse
from regard.ops.sparse import aligned, by_kernel
from regard.ops.triton import sparse_rows
from regard.ops.triton.sparse_rows import SparseRows
from tests.ops.sparse_cases import Rows, check, watched

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


@pytest.mark.parametrize("rows", CASES, ids=str)
def test_as_exact_as_the_equation_in_the_same_dtype(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    check(rows, "cpu", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [2.0, 1.5, 1.3])
def test_the_longest_row(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    check(Rows(alpha, n=sparse.LONGEST, rows=1, reach=0.3), "cpu", monkeypatch)


HAND = {
    "ties at the top": [3.0, 3.0, 3.0, 0.0, -5.0],
    "constant": [0.7] * 5,
    "constant and huge": [1e30] * 5,
    "one near another": [1.0, 1.0 - 1e-7, 0.0, 0.0, 0.0],
    "all but one at the threshold": [1.0, 0.0, 0.0, 0.0, 0.0],
    "huge range": [1e4, -1e4, 9999.5, 0.0, 1.0],
    "beyond float32 when shifted": [3e38, -3e38, 0.0, 3e38, 1.0],
    "one readable": [-math.inf, -math.inf, -2.0, -math.inf, -math.inf],
    "nothing readable": [-math.inf] * 5,
    "falling by halves": [-(2.0**-k) for k in range(5)],
}


@pytest.mark.parametrize("alpha", [2.0, 1.5, 1.3, 3.0])
def test_rows_made_by_hand(alpha: float) -> None:
    z = torch.tensor(list(HAND.values()))
    found, expected = aligned(z, None, alpha), entmax(z, None, alpha)
    for name, p, q in zip(HAND, found, expected, strict=True):
        assert torch.equal(p > 0, q > 0), name
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6, msg=name)


def test_thresholds_that_leave_out_one_key_a_step_are_exact() -> None:
    """The slowest rows: each mean drops the last key alone."""
    z = torch.zeros(1, 200, dtype=torch.float64)
    for k in range(1, 200):
        # Just above the threshold of the keys so far, so that it counts until the next is known.
        z[0, k] = 1.0 / (k + 1) * (1 - 0.5 / (k + 1)) + z[0, :k].mean()
    z = z.float()
    found = aligned(z, None, 2.0)
    torch.testing.assert_close(found, entmax(z, None, 2.0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("alpha", [2.0, 1.5, 1.3, 3.0])
@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_what_is_no_number_is_seen_in_its_row_alone(alpha: float, strange: float) -> None:
    z, mask = torch.randn(5, 7), torch.ones(5, 7, dtype=torch.bool)
    z[1, 3], z[2, 4], z[3, 0], z[3, 1] = strange, strange, strange, -math.inf
    mask[2, 4], mask[3, 5] = False, False
    z.requires_grad_()
    results = []
    for weights in (aligned, entmax):
        p = weights(z, mask, alpha)
        results.append((p, torch.autograd.grad(p[[0, 2, 4]].square().sum(), z)[0]))
    (p, dz), (q, expected) = results
    torch.testing.assert_close(p, q, equal_nan=True)
    torch.testing.assert_close(dz, expected)
    assert p.isnan().sum() == 7 + 5
    assert p[[0, 2, 4]].isfinite().all()


def test_rows_of_nothing_get_nothing() -> None:
    z = torch.randn(3, 5, requires_grad=True)
    mask = torch.zeros(3, 1, dtype=torch.bool)
    for alpha in (2.0, 1.5, 1.3, 3.0):
        p = aligned(z, mask, alpha)
        assert (p == 0).all()
        assert (torch.autograd.grad(p.sum(), z)[0] == 0).all()


@pytest.mark.parametrize("layout", ["transposed", "expanded", "heads"])
def test_any_strides(layout: str) -> None:
    z = {
        "transposed": torch.randn(5, 7).T,
        "expanded": torch.randn(1, 5).expand(7, 5),
        "heads": torch.randn(2, 7, 3, 5).transpose(1, 2),
    }[layout].requires_grad_()
    grad = torch.randn(z.shape[:-1]).unsqueeze(-1).expand(z.shape)
    mask = (torch.rand(z.shape[-1], z.shape[-2]) > 0.3).T
    for given in (None, mask):
        results = []
        for weights in (aligned, entmax):
            p = weights(z, given, 1.5)
            results.append((p, *torch.autograd.grad(p * torch.arange(5), z, grad)))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("scores", "mask"),
    [((2, 3, 5, 7), (2, 1, 5, 7)), ((2, 3, 5, 7), (3, 1, 7)), ((5, 7), (2, 5, 7)), ((2, 1, 7), (5, 1)), ((3, 1, 7), (2, 3, 1, 1))],
    ids=str,
)  # fmt: skip
def test_scores_and_masks_broadcast(scores: tuple[int, ...], mask: tuple[int, ...]) -> None:
    z, allowed = torch.randn(scores, requires_grad=True), torch.rand(mask) > 0.3
    results = []
    for weights in (aligned, entmax):
        p = weights(z, allowed, 2.0)
        results.append((p, torch.autograd.grad(p.square().sum(), z)[0]))
    torch.testing.assert_close(*results)


def test_programs_hold_several_short_rows_or_one_long_one() -> None:
    assert sparse_rows._blocks(8192, 2048) == ((8192,), {"BM": 1, "BN": 2048, "num_warps": 4})
    assert sparse_rows._blocks(19, 37) == ((2,), {"BM": 16, "BN": 64, "num_warps": 4})
    assert sparse_rows._blocks(100, 37) == ((7,), {"BM": 16, "BN": 64, "num_warps": 4})
    assert sparse_rows._blocks(10, 4096)[1]["num_warps"] == 8
    assert sparse_rows._blocks(10, 8192)[1]["num_warps"] == 16
    assert sparse_rows._blocks(10, 16_384)[1] == {"BM": 1, "BN": 16_384, "num_warps": 16}


@pytest.mark.parametrize("alpha", [2.0, 1.5, 1.3, 2.5, "learned"], ids=str)
def test_second_derivatives_are_those_of_the_equation(alpha: float | str) -> None:
    z = torch.randn(4, 5, requires_grad=True)
    learned = torch.tensor(1.4, requires_grad=True)
    at, leaves = (learned, [z, learned]) if alpha == "learned" else (alpha, [z])
    twice = []
    for weights in (aligned, entmax):
        first = torch.autograd.grad(weights(z, None, at).pow(3).sum(), leaves, create_graph=True)
        twice.append((*first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)))
    torch.testing.assert_close(*twice, rtol=1e-4, atol=1e-4)


def test_the_operators_are_well_behaved() -> None:
    z, mask = torch.randn(2, 3, 5, requires_grad=True), (torch.rand(1, 3, 5) > 0.3).view(torch.uint8)
    learned = torch.tensor(1.4, requires_grad=True)
    operators = torch.ops.regard
    for given in ((mask, None, 2.0), (None, None, 1.5), (mask, learned, 0.0)):
        opcheck(operators.sparse_rows, (z, *given))
        p = operators.sparse_rows(z.detach(), *given).detach()
        opcheck(operators.sparse_rows_backward, (torch.randn(2, 3, 5), p, given[1] and learned.detach(), given[2]))


@pytest.mark.parametrize("mapped", [(0, None), (1, 0), (None, 0), (0, 1)], ids=str)
def test_vmap_is_a_loop(mapped: tuple[int | None, int | None]) -> None:
    z, mask = torch.randn(3, 3, 5, 7), torch.rand(3, 3, 5, 7) > 0.3
    shapes = [x if d is not None else x[0] for x, d in zip((z, mask), mapped, strict=True)]
    found = torch.func.vmap(lambda z, mask: aligned(z, mask, 1.5), in_dims=mapped)(*shapes)
    for k in range(found.shape[0]):
        one = [x if d is None else x.select(d, k) for x, d in zip(shapes, mapped, strict=True)]
        assert torch.equal(found[k], aligned(*one, 1.5))


@pytest.mark.parametrize("learned", [False, True])
def test_gradients_may_come_in_batches(learned: bool) -> None:
    z, grads = torch.randn(2, 3, 5, requires_grad=True), torch.randn(4, 2, 3, 5)
    alpha = torch.tensor(1.4, requires_grad=True)
    leaves = [z, alpha] if learned else [z]
    p = aligned(z, None, alpha if learned else 2.0)
    together = torch.autograd.grad(p, leaves, grads, is_grads_batched=True, retain_graph=True)
    for k in range(4):
        torch.testing.assert_close(
            [x[k] for x in together], list(torch.autograd.grad(p, leaves, grads[k], retain_graph=True))
        )


def test_each_of_several_alphas_is_its_own() -> None:
    z, alphas = torch.randn(3, 5), torch.tensor([1.2, 1.5, 1.8])
    found = torch.func.vmap(lambda alpha: torch.ops.regard.sparse_rows(z[None], None, alpha, 0.0))(alphas)
    for k in range(3):
        torch.testing.assert_close(found[k, 0], entmax(z, None, alphas[k]))


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


@pytest.mark.parametrize(
    "align", [rg.Sparsemax(), rg.Entmax(), rg.Entmax(1.3), rg.Entmax(1.3, learnable=True)], ids=repr
)
def test_every_execution_by_panels_takes_it_and_the_dense_one_never(
    align: rg.Entmax, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, x = rg.Attention("general", align, query_dim=6, key_dim=6), torch.randn(2, 7, 6, requires_grad=True)
    taken = watched(monkeypatch)
    results = []
    for impl, launches in (("dense", 0), ("blockwise", 3)):
        with rg.execution(impl, panel=3):
            context = attend(x, x, mask=rg.Causal())
        results.append((context, *torch.autograd.grad(context.square().sum(), [x, *attend.parameters()])))
        # Several panels are computed again in the backward.
        assert taken.count("aligned") == 2 * launches
        assert taken.count("gradients") == launches
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_alpha_of_one_is_softmax_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = watched(monkeypatch)
    z = torch.randn(3, 5)
    assert torch.equal(entmax(z, None, 1.0, kernels=True), entmax(z, None, 1.0))
    assert taken == []


@pytest.mark.parametrize("align", [rg.Sparsemax(), rg.Entmax(1.3, learnable=True)], ids=repr)
def test_compiles_as_one_graph(align: rg.Entmax) -> None:
    attend, x = rg.Attention("general", align, query_dim=6, key_dim=6), torch.randn(2, 5, 6)
    with rg.execution("blockwise", panel=3):
        expected = attend(x, x)
        graphs = []

        def noted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
            graphs.append(graph.print_readable(print_output=False))
            return graph

        torch.testing.assert_close(torch.compile(attend, fullgraph=True, backend=noted)(x, x), expected)
        torch.testing.assert_close(torch.compile(attend, fullgraph=True, backend="aot_eager")(x, x), expected)
    assert "sparse_rows" in graphs[0]


def test_only_weights_are_kept() -> None:
    z = torch.randn(3, 5, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        p = SparseRows.apply(z[None], None, None, 2.0)
    assert len(kept) == 1
    assert torch.equal(kept[0], p)
