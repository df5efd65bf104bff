"""Activated bilinear attention on a GPU: every width, mask, activation and dtype, as exact as the formula in the same dtype."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard as rg

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Every combination is three kernels to compile, so that few stand for all: each activation, mask, dtype and width of a tile occurs.
KINDS = [
    ("tanh", "none", F32, 64, 64),
    ("tanh", "none", BF16, 64, 64),
    ("tanh", "pairs", F16, 64, 64),
    ("gelu", "causal", F32, 5, 13),
    ("sigmoid", "none", F16, 5, 13),
    ("relu", "padding", BF16, 5, 13),
    ("leaky_relu:0.1", "causal", BF16, 64, 64),
    ("tanh:5.0", "window", F32, 5, 13),
    ("tanh", "none", F32, 100, 128),
    ("tanh", "none", F16, 128, 100),
    ("tanh", "causal", BF16, 200, 256),
]
# No multiples of 16, which would be compiled for again.
SIZES = ((17, 33), (300, 257), (257, 300))


def mask_of(kind: str, nq: int, n: int) -> object:
    pairs = torch.rand(2, nq, n, device="cuda") > 0.3
    pairs[:, 0] = False
    known = {
        "pairs": pairs,
        "causal": rg.Causal(),
        "padding": rg.Padding(torch.tensor([max(1, n // 2), n], device="cuda")),
        "window": rg.Window(9),
    }
    return known.get(kind)


def results(attend: rg.Attention, x: list[Tensor], mask: object, cotangent: Tensor) -> dict[str, Tensor]:
    """The context and every gradient by name."""
    leaves = [t.detach().clone().requires_grad_() for t in x]
    torch.manual_seed(7)
    context = attend(*leaves, mask=mask)
    wanted = {**dict(zip(("query", "key", "value"), leaves, strict=True)), **dict(attend.named_parameters())}
    found = torch.autograd.grad(context, list(wanted.values()), cotangent.to(context.dtype), allow_unused=True)
    grads = {name: torch.zeros_like(w) if g is None else g for (name, w), g in zip(wanted.items(), found, strict=True)}
    return {"context": context.detach(), **grads}


def pair(score: str, align: object, width: int, dtype: torch.dtype) -> tuple[rg.Attention, rg.Attention]:
    """The same attention in float64 and in a dtype."""
    made = []
    for kind in (torch.double, dtype):
        made.append(rg.Attention(rg.ActivatedGeneral(width, width, activation=score), align()).to(kind).cuda())
    wide, low = made
    with torch.no_grad():
        low.score.W.normal_().div_(width)
        low.score.b.fill_(0.25)
    wide.load_state_dict({name: p.double() for name, p in low.state_dict().items()})
    return wide, low


def check(wide: rg.Attention, low: rg.Attention, x: list[Tensor], mask: object) -> None:
    """The kernel against float64, within twice the error of the dense execution and one rounding; twice the same bits."""
    dtype = x[0].dtype
    # Weights are e^(t - L): what float32 rounds of L, about the logarithm of the number of keys, is relative in them.
    eps = torch.finfo(dtype).eps + torch.finfo(F32).eps * math.log(x[1].shape[-2])
    cotangent = torch.randn(*x[0].shape[:-1], x[2].shape[-1], device="cuda").to(dtype)
    with rg.execution("dense"):
        exact = results(wide, [t.double() for t in x], mask, cotangent.double())
        rival = results(low, x, mask, cotangent)
    with rg.execution("fused"):
        assert rg.explain_dispatch(low, *x, mask=mask).path == "fused"
        mine, again = (results(low, x, mask, cotangent) for _ in range(2))
    # A sum over all pairs has the rounding of the contexts in do · o, and a lone key teaches nothing but rounding.
    rows = (cotangent.double() * exact["context"]).abs().sum(-1)
    weight = wide.score.W.norm() if hasattr(wide.score, "W") else 1.0
    noise = {
        "score.b": rows.sum(),
        "align.log_temperature": rows.sum() / getattr(wide.align, "temperature", 1.0),
        "query": rows.norm() * weight,
        "key": rows.norm() * weight,
        "score.W": rows.norm() * x[0].double().norm(),
    }
    for name, ours in mine.items():
        assert torch.equal(ours, again[name]), f"{name}: two runs differ"
        assert ours.isfinite().all(), name
        reference = exact[name]
        natural = reference.norm() + noise.get(name, 0.0)
        budget = float(2 * ((rival[name].double() - reference).norm() + eps * natural))
        distance = float((ours.double() - reference).norm())
        assert distance <= budget, f"{name}: distance {distance:.2e}, budget {budget:.2e}, norm {reference.norm():.2e}"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)).replace("torch.", ""))
def test_kernels_are_as_exact_as_the_formula(
    kind: tuple[str, str, torch.dtype, int, int], sizes: tuple[int, int]
) -> None:
    (act, mask, dtype, d, d_v), (nq, n) = kind, sizes
    torch.manual_seed(nq + n)
    wide, low = pair(act, rg.Soft, d, dtype)
    x = [torch.randn(2, m, w, device="cuda", dtype=dtype) for m, w in ((nq, d), (n, d), (n, d_v))]
    check(wide, low, x, mask_of(mask, nq, n))


def test_one_query_and_one_key() -> None:
    wide, low = pair("tanh", rg.Soft, 64, F32)
    for nq, n in ((1, 33), (17, 1)):
        x = [torch.randn(2, m, 64, device="cuda") for m in (nq, n, n)]
        check(wide, low, x, None)


ALIGNMENTS = {
    "dropout": (rg.Soft, "pairs", 0.3, F32),
    "hard": (rg.Hard, "causal", 0.0, F16),
    "hard, reinforce": (lambda: rg.Hard("reinforce"), "none", 0.2, F32),
    "hard, gumbel": (lambda: rg.Hard("gumbel-straight-through", temperature=0.7), "none", 0.0, F32),
    "local": (lambda: rg.Local(6), "pairs", 0.0, F16),
    "local, predicted": (lambda: rg.Local(5, "predictive", query_dim=24), "padding", 0.2, F32),
    "local, renormalised": (lambda: rg.Local(5, "predictive", renormalize=True, query_dim=24), "none", 0.0, F32),
    "local, predicted, half precision": (lambda: rg.Local(5, "predictive", query_dim=24), "none", 0.2, F16),
    "local, predicted, causal": (lambda: rg.Local(5, "predictive", query_dim=24), "causal", 0.0, BF16),
    "local, the nearest key alone": (lambda: rg.Local(0, "predictive", query_dim=24), "none", 0.0, F32),
}


@pytest.mark.parametrize("name", ALIGNMENTS)
def test_every_alignment(name: str) -> None:
    align, mask, dropout, dtype = ALIGNMENTS[name]
    torch.manual_seed(0)
    wide, low = pair("gelu", align, 24, dtype)
    wide.dropout = low.dropout = dropout
    x = [torch.randn(2, m, w, device="cuda", dtype=dtype) for m, w in ((150, 24), (190, 24), (190, 40))]
    check(wide, low, x, mask_of(mask, 150, 190))


PLAIN = {
    "dot, hard": (rg.ScaledDot, rg.Hard, 0.0),
    "distance, dropout": (lambda: rg.NegativeL2(8.0), rg.Soft, 0.2),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_scores_where_the_library_call_cannot(name: str) -> None:
    score, align, dropout = PLAIN[name]
    torch.manual_seed(0)
    attend = rg.Attention(score(), align(), dropout=dropout)
    x = [torch.randn(2, m, w, device="cuda", dtype=F16) for m, w in ((150, 24), (190, 24), (190, 40))]
    check(attend, attend, x, rg.Causal())


def test_a_learned_temperature() -> None:
    torch.manual_seed(0)
    wide, low = pair("tanh", lambda: rg.Soft(temperature=0.2, learnable=True), 64, F32)
    x = [torch.randn(2, m, 64, device="cuda") for m in (70, 90, 90)]
    check(wide, low, x, None)


def test_small_gradients_of_many_keys_are_not_lost_in_float16() -> None:
    torch.manual_seed(0)
    wide, low = pair("tanh", rg.Soft, 128, F16)
    x = [torch.randn(1, m, w, device="cuda", dtype=F16) for m, w in ((65, 128), (8191, 128), (8191, 100))]
    leaves = [[t.to(kind).requires_grad_() for t in x] for kind in (torch.double, F16)]
    cotangent = torch.randn(1, 65, 100, device="cuda", dtype=F16) * 2.0**-10
    with rg.execution("dense"):
        exact = torch.autograd.grad(wide(*leaves[0]), leaves[0], cotangent.double())
    with rg.execution("fused"):
        ours = torch.autograd.grad(low(*leaves[1]), leaves[1], cotangent)
    for name, got, reference in zip(("query", "key", "value"), ours, exact, strict=True):
        # What float16 can hold of the result itself.
        held = (reference.to(F16).double() - reference).norm()
        distance = (got.double() - reference).norm()
        assert distance <= 2 * (held + torch.finfo(F16).eps * reference.norm()), name


def test_whole_graphs_are_compiled() -> None:
    _, low = pair("tanh", rg.Soft, 64, BF16)
    low.impl = "fused"
    x = [torch.randn(2, m, 64, device="cuda", dtype=BF16, requires_grad=True) for m in (70, 90, 90)]
    compiled = torch.compile(low, fullgraph=True)
    expected, got = low(*x), compiled(*x)
    torch.testing.assert_close(got, expected)
    for ours, theirs in zip(torch.autograd.grad(got.sum(), x), torch.autograd.grad(expected.sum(), x), strict=True):
        torch.testing.assert_close(ours, theirs)
