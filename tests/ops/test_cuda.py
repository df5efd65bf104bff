"""The additive kernels on a GPU: widths, masks, activations, dtypes and alignments, as exact as the dense execution in the same dtype.

A kernel is compiled for each activation, dtype, kind of mask and alignment. The quick cases share few of these; the sample behind the mark
`slow` does not, and is best spread over processes.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import regard as rg
from tests.ops.additive_cases import ALIGNMENTS, WIDTH, Case, check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ACTIVATIONS = ("tanh", "sigmoid", "relu", "leaky_relu", "gelu", "identity")
MASKS = ("none", "pairs", "causal", "padding", "causal and padding", "window")
WIDTHS = (1, 3, 16, 48, 64, 65, 100, 128, 129, 200, 256)
SIZES = ((17, 33), (300, 257))


def quick() -> list[Case]:
    sizes = ((300, 1), *SIZES)
    cases = [
        Case("soft", "tanh", F32, "none", hidden, 16, *size) for hidden, size in zip((65, 3, 256), sizes, strict=True)
    ]
    cases += [
        Case("soft", "tanh", F16, "causal", hidden, 65, *size) for hidden, size in zip((16, 200), SIZES, strict=True)
    ]
    cases += [
        Case("soft", "relu", BF16, "pairs", hidden, 256, *size) for hidden, size in zip((3, 129), SIZES, strict=True)
    ]
    cases += [Case("soft", "tanh", BF16, "padding", 64, 64, *size, dropout=0.3) for size in SIZES]
    for name, dtype, mask, p, bias in (
        ("straight-through", F32, "pairs", 0.3, False),
        ("gumbel", BF16, "none", 0.0, True),
        ("predictive", F32, "none", 0.3, False),
        ("predictive, often empty", F32, "pairs", 0.0, False),
    ):
        cases += [Case(name, "tanh", dtype, mask, 33, 20, *size, p, bias) for size in SIZES]
    return cases


def sample() -> list[Case]:
    """Every width of values with every dtype, and every alignment, the rest drawn."""
    draw = random.Random(0)
    cases = []
    for d_v, dtype in itertools.product(WIDTHS, (F32, F16, BF16)):
        act, mask, hidden = draw.choice(ACTIVATIONS), draw.choice(MASKS), draw.choice(WIDTHS)
        cases.append(
            Case("soft", act, dtype, mask, hidden, d_v, draw.choice((1, 17, 64, 300)), draw.choice((1, 33, 128, 257)))
        )
    for name, dtype in itertools.product(ALIGNMENTS, (F32, F16, BF16)):
        act, mask, p = draw.choice(ACTIVATIONS), draw.choice(MASKS), draw.choice((0.0, 0.3))
        cases.append(Case(name, act, dtype, mask, 33, 20, 64, 131, p, draw.random() < 0.5))
    return cases


@pytest.mark.parametrize("case", quick(), ids=str)
def test_kernels_are_as_exact_as_the_dense_execution(case: Case) -> None:
    check(case, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("case", sample(), ids=str)
def test_kernels_are_as_exact_as_the_dense_execution_in_a_sample(case: Case) -> None:
    check(case, "cuda")


@pytest.mark.parametrize("name", ["soft", "gumbel", "predictive"])
def test_the_kernel_is_the_path_taken(name: str) -> None:
    attend = Case(name, dropout=0.2).attention().cuda()
    x = torch.randn(2, 5, WIDTH, device="cuda")
    with rg.execution("fused"):
        assert rg.explain_dispatch(attend, x, x).path == "fused"


def test_compiles_as_one_graph() -> None:
    attend, x = Case("predictive").attention().cuda().eval(), torch.randn(2, 40, WIDTH, device="cuda")
    with rg.execution("fused"):
        torch.testing.assert_close(torch.compile(attend, fullgraph=True, backend="aot_eager")(x, x), attend(x, x))


def test_vmap_is_a_loop() -> None:
    attend, x = Case("predictive").attention().cuda(), torch.randn(3, 2, 40, WIDTH, device="cuda")
    with rg.execution("fused"):
        together = torch.func.vmap(lambda y: attend(y, y))(x)
        torch.testing.assert_close(together, torch.stack([attend(y, y) for y in x]))
