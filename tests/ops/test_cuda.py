"""The additive kernels on a GPU: every width, mask, activation and dtype, as exact as the formula in the same dtype."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

import regard as rg

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ACTIVATIONS = ("tanh", "sigmoid", "relu", "leaky_relu", "gelu", "identity")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MASKS = ("none", "pairs", "causal", "padding", "causal and padding", "window")
WIDTHS = (1, 3, 16, 48, 64, 65, 100, 128, 129, 200, 256)


def grid() -> list[tuple[str, torch.dtype, str, int, int, int, int]]:
    """A seeded sample; every width of values with every dtype is in it."""
    draw = random.Random(0)
    cases = []
    for d_v, dtype in itertools.product(WIDTHS, DTYPES):
        for _ in range(4):
            act, mask = draw.choice(ACTIVATIONS), draw.choice(MASKS)
            cases.append(
                (
                    act,
                    dtype,
                    mask,
                    draw.choice(WIDTHS),
                    d_v,
                    draw.choice((1, 17, 64, 300)),
                    draw.choice((1, 33, 128, 257)),
                )
            )
    return cases


def mask_of(name: str, nq: int, n: int) -> object:
    pairs = torch.rand(2, nq, n, device="cuda") > 0.3
    padding = rg.Padding(torch.tensor([max(1, n // 2), n], device="cuda"))
    known = {
        "pairs": pairs,
        "causal": rg.Causal(),
        "padding": padding,
        "causal and padding": rg.Causal() & padding,
        "window": rg.Window(9),
    }
    return known.get(name)


def with_gradients(attend: rg.Attention, x: list[Tensor], mask: object, cotangent: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in x]
    wanted = [*leaves, *attend.parameters()]
    context = attend(*leaves, mask=mask)
    found = torch.autograd.grad(context, wanted, cotangent.to(context.dtype), allow_unused=True)
    return [context.detach(), *(torch.zeros_like(w) if g is None else g for g, w in zip(found, wanted, strict=True))]


def distance(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm().clamp(min=1e-12))


@pytest.mark.parametrize("case", grid(), ids=lambda case: "-".join(map(str, case)).replace("torch.", ""))
def test_kernels_are_as_exact_as_the_formula(case: tuple[str, torch.dtype, str, int, int, int, int]) -> None:
    act, dtype, mask_name, hidden, d_v, nq, n = case
    torch.manual_seed(hash((hidden, d_v, nq, n)) % 1000)
    width = 24
    wide = rg.Attention("additive", query_dim=width, key_dim=width, hidden_dim=hidden, activation=act).double().cuda()
    low = rg.Attention("additive", query_dim=width, key_dim=width, hidden_dim=hidden, activation=act).to(dtype).cuda()
    low.load_state_dict({name: p.to(dtype) for name, p in wide.state_dict().items()})
    wide.load_state_dict({name: p.double() for name, p in low.state_dict().items()})
    x = [torch.randn(2, m, d, device="cuda", dtype=dtype) for m, d in ((nq, width), (n, width), (n, d_v))]
    mask, cotangent = mask_of(mask_name, nq, n), torch.randn(2, nq, d_v, device="cuda", dtype=torch.double).to(dtype)
    with rg.execution("dense"):
        exact = with_gradients(wide, [t.double() for t in x], mask, cotangent)
        rival = with_gradients(low, x, mask, cotangent)
    with rg.execution("fused"):
        assert rg.explain_dispatch(low, *x, mask=mask).path == "fused"
        mine, again = (with_gradients(low, x, mask, cotangent) for _ in range(2))
    rounding = torch.finfo(dtype).eps
    for k, (ours, twice, reference, same) in enumerate(zip(mine, again, exact, rival, strict=True)):
        assert torch.equal(ours, twice), f"{k}: two runs differ"
        assert ours.isfinite().all()
        if reference.norm() > 1e-9 * max(1.0, float(exact[0].norm())):
            assert distance(ours, reference) <= 2 * (distance(same, reference) + 2 * rounding), k
