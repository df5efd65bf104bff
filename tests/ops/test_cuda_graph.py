"""Attention along edges on a GPU: every kind of graph, activation and dtype, as exact as the formula in the same dtype."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.ops.dispatch import choose

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = ("leaky_relu", "tanh", "sigmoid", "relu", "gelu", "identity")


def edges_of(kind: str, n: int) -> Tensor:
    """Sources and targets; some nodes of most graphs have no edge."""
    if kind == "sparse":
        return torch.randint(n, (2, 5 * n), device="cuda")
    if kind == "star":
        return torch.stack([torch.arange(n, device="cuda"), torch.zeros(n, dtype=torch.long, device="cuda")])
    if kind == "from one":
        return torch.stack([torch.zeros(n, dtype=torch.long, device="cuda"), torch.arange(n, device="cuda")])
    return torch.cartesian_prod(torch.arange(n, device="cuda"), torch.arange(n, device="cuda")).T.contiguous()


def pair(dtype: torch.dtype, dim: int, heads: int, **options: object) -> tuple[rg.GraphAttention, rg.GraphAttention]:
    """The same layer in float64 and in a dtype."""
    torch.manual_seed(0)
    wide, low = (rg.GraphAttention(dim, heads, **options).to(kind).cuda() for kind in (torch.double, dtype))
    low.load_state_dict({name: p.to(dtype) for name, p in wide.state_dict().items()})
    wide.load_state_dict({name: p.double() for name, p in low.state_dict().items()})
    return wide, low


def results(layer: rg.GraphAttention, x: Tensor, edges: Tensor, cotangent: Tensor, **rest: object) -> dict[str, Tensor]:
    """The result and every gradient by name."""
    leaf = x.detach().clone().requires_grad_()
    torch.manual_seed(5)  # of dropout
    out = layer(leaf, edges, **rest)
    wanted = {"nodes": leaf, **dict(layer.named_parameters())}
    found = torch.autograd.grad(out, list(wanted.values()), cotangent.to(out.dtype), allow_unused=True)
    grads = {name: torch.zeros_like(w) if g is None else g for (name, w), g in zip(wanted.items(), found, strict=True)}
    return {"result": out.detach(), **grads}


def check(wide: rg.GraphAttention, low: rg.GraphAttention, x: Tensor, edges: Tensor, **rest: Tensor) -> None:
    """The kernel against float64, within twice the error of the dense execution and one rounding; twice the same bits."""
    # Weights are e^(s - L): what float32 rounds of L, no more than the logarithm of the degree, is relative in them.
    eps = torch.finfo(x.dtype).eps + torch.finfo(torch.float32).eps * math.log(len(x))
    cotangent = torch.randn(x.shape, device="cuda").to(x.dtype)
    # One sum may by chance be very near: the error of the formula is the largest of a few with a sign drawn for each node.
    signs = torch.randint(0, 2, (4, len(x), 1), device="cuda").to(x.dtype) * 2 - 1
    signs[0] = 1
    of_wide = {name: t.double() if t.is_floating_point() else t for name, t in rest.items()}
    with rg.execution("dense"):
        exact = [results(wide, x.double(), edges, cotangent * sign, **of_wide) for sign in signs]
        rival = [results(low, x, edges, cotangent * sign, **rest) for sign in signs]
    with rg.execution("fused"):
        mine, again = (results(low, x, edges, cotangent, **rest) for _ in range(2))
    # What a score learns is a difference of do · v and do · c: the rounding of those stays, whatever cancels in it.
    of_scores = max(one["W_K"].norm() for one in exact)
    # A bias of keys that are not values changes no weight: all of its gradient cancels.
    learnt_by_scores = ("W_Q", "b_Q", "W_E", "attention", *(("b_K",) if low.W_V is not None else ()))
    for name, ours in mine.items():
        assert torch.equal(ours, again[name]), f"{name}: two runs differ"
        assert ours.isfinite().all(), name
        reference = exact[0][name]
        natural = max(one[name].norm() for one in exact)
        natural = natural + (of_scores if name.startswith(learnt_by_scores) else 0.0)
        error = max((low[name].double() - one[name]).norm() for low, one in zip(rival, exact, strict=True))
        budget, distance = float(2 * (error + eps * natural)), float((ours.double() - reference).norm())
        assert distance <= budget, f"{name}: distance {distance:.2e}, budget {budget:.2e}, norm {reference.norm():.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["sparse", "star", "from one", "full"])
def test_every_kind_of_graph(kind: str, dtype: torch.dtype) -> None:
    wide, low = pair(dtype, 24, 3)
    n = 3000 if kind == "sparse" else 600 if kind != "full" else 90
    torch.manual_seed(1)
    check(wide, low, torch.randn(n, 24, device="cuda").to(dtype), edges_of(kind, n))


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_activation(act: str) -> None:
    def score(query_dim: int, key_dim: int) -> rg.Score:
        return rg.Additive(query_dim, key_dim, hidden_dim=7, activation=act, heads=2)

    wide, low = pair(torch.float32, 10, 2, score=score)
    torch.manual_seed(1)
    check(wide, low, torch.randn(50, 10, device="cuda"), edges_of("sparse", 50))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["sparse", "star", "full"])
def test_dot_products(kind: str, dtype: torch.dtype) -> None:
    wide, low = pair(dtype, 24, 3, score="scaled-dot")
    n = 3000 if kind == "sparse" else 600 if kind != "full" else 90
    torch.manual_seed(1)
    check(wide, low, torch.randn(n, 24, device="cuda").to(dtype), edges_of(kind, n))


@pytest.mark.parametrize("score", ["gatv2", "general"])
def test_masks_features_of_edges_and_dropout(score: str) -> None:
    wide, low = pair(torch.float32, 20, 4, edge_dim=3, dropout=0.3, score=score)
    torch.manual_seed(1)
    attr, mask = torch.randn(1000, 3, device="cuda"), torch.rand(1000, device="cuda") > 0.4
    x, edges = torch.randn(200, 20, device="cuda"), edges_of("sparse", 200)
    check(wide.train(), low.train(), x, edges, edge_attr=attr, mask=mask)


def test_auto_takes_the_kernel_and_whole_graphs_are_compiled() -> None:
    _, low = pair(torch.float32, 24, 3)
    x, edges = torch.randn(300, 24, device="cuda", requires_grad=True), edges_of("sparse", 300)
    with rg.record(low) as trace:
        expected = low(x, edges)
    assert choose(trace["attention"].call, "auto").path == "fused"
    got = torch.compile(low, fullgraph=True)(x, edges)
    torch.testing.assert_close(got, expected)
    (ours,), (theirs,) = torch.autograd.grad(got.sum(), x), torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(ours, theirs)
