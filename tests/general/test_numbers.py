"""Numbers at the edge: NaN is seen, and half precision does not lose a large term."""

from __future__ import annotations

import pytest
import torch

import regard as rg

ALIGNMENTS = [rg.Soft(), rg.Sparsemax(), rg.Entmax(1.5), rg.Entmax(1.3), rg.Local(2)]


@pytest.mark.parametrize("impl", ["auto", "dense", "blockwise"])
@pytest.mark.parametrize("align", ALIGNMENTS, ids=repr)
def test_nan_in_a_bias_is_seen_in_the_result(align: rg.Alignment, impl: str) -> None:
    bias = torch.zeros(3, 5)
    bias[1, 1] = torch.nan
    out = rg.Attention(rg.Dot(), align, impl=impl)(torch.randn(2, 3, 4), torch.randn(2, 5, 4), bias=bias)
    assert out[:, 1].isnan().any()
    assert out[:, (0, 2)].isfinite().all()


def test_distances_beyond_half_precision_keep_their_weights() -> None:
    query = (50 * torch.randn(2, 3, 64)).half()
    key = (query.repeat(1, 2, 1) + torch.randn(2, 6, 64)).half()
    attend = rg.Attention(rg.NegativeL2())
    exact = rg.Attention(rg.NegativeL2(), impl="dense")(query.double(), key.double())
    assert rg.explain_dispatch(attend, query, key).path != "fused"
    assert (attend(query, key).double() - exact).norm() <= 2e-3 * exact.norm()


@pytest.mark.parametrize("alpha", [1.000001, 1.0001, 1.01])
def test_entmax_close_to_softmax_sums_to_one(alpha: float) -> None:
    attend = rg.Attention(rg.Dot(), rg.Entmax(alpha))
    with rg.record(attend) as trace:
        attend(torch.randn(2, 3, 4), torch.randn(2, 50, 4))
    assert torch.allclose(trace.weights.sum(-1), torch.ones(2, 3), atol=1e-6, rtol=0)


def test_a_bias_function_must_give_numbers() -> None:
    query, key = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    with pytest.raises(TypeError, match="bias: got a function that gives NoneType, expected one that gives"):
        rg.Attention(rg.Dot())(query, key, bias=lambda i, j: None)
    with pytest.raises(TypeError, match=r"bias: got a function that gives a tensor of torch\.bool"):
        rg.Attention(rg.Dot())(query, key, bias=lambda i, j: i >= j)


def test_executions_may_be_left_in_any_order() -> None:
    first, second = rg.execution("dense"), rg.execution("blockwise")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert rg.explain_dispatch(rg.Attention(rg.Dot()), torch.randn(3, 4), torch.randn(5, 4)).path == "blockwise"
    second.__exit__(None, None, None)
    assert rg.explain_dispatch(rg.Attention(rg.Dot()), torch.randn(3, 4), torch.randn(5, 4)).path == "fused"


HARD = [rg.Hard(gradient) for gradient in ("gumbel", "straight-through", "reinforce")]


@pytest.mark.parametrize("impl", [("dense", None), ("blockwise", 2)], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("align", HARD, ids=repr)
def test_a_draw_among_scores_that_are_nan_is_nan(
    align: rg.Alignment, training: bool, impl: tuple[str, int | None]
) -> None:
    bias = torch.zeros(4, 9)
    bias[1, 7] = bias[2, 8] = torch.nan
    readable = torch.ones(4, 9, dtype=torch.bool)
    readable[2, 8] = False
    attend = rg.Attention(rg.Dot(), align).train(training)
    with rg.execution(impl[0], panel=impl[1]):
        out = attend(torch.randn(2, 4, 4), torch.randn(2, 9, 4), mask=readable, bias=bias)
    assert out[:, 1].isnan().all()
    assert out[:, (0, 2, 3)].isfinite().all()
