"""The CUDA kernels without a GPU: Triton's interpreter runs them, in a process of its own since it must be chosen first."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard as rg
from regard.ops.dispatch import Dispatch

HERE = Path(__file__).parent


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which this platform does not have"
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tier", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", sorted(path.name for path in (HERE / "interpreted").glob("test_*.py")))
def test_kernels_under_the_interpreter(file: str, tier: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-m",
        tier,
        str(HERE / "interpreted" / file),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=HERE.parents[1])
    if tier == "slow" and done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        pytest.skip("nothing slow here")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_every_stored_series_has_the_error_it_claims() -> None:
    sines = pytest.importorskip("regard.ops.triton.sine_fits")
    for fit in (*sines.BFLOAT16, *sines.FLOAT16):
        x = torch.linspace(-fit.limit, fit.limit, 20001, dtype=torch.float64)
        omega, c = (torch.tensor(part, dtype=torch.float64) for part in (fit.omega, fit.c))
        angle = x[:, None] * omega
        value = fit.alpha * x + angle.sin() @ c
        slope = fit.alpha + angle.cos() @ (c * omega)
        assert (value - x.tanh()).abs().max() <= fit.error
        assert (slope - (1 - x.tanh() ** 2)).abs().max() <= fit.slope_error


def test_wider_ranges_come_later_and_finer_inputs_get_finer_series() -> None:
    sines = pytest.importorskip("regard.ops.triton.sine_fits")
    for fits in (sines.BFLOAT16, sines.FLOAT16):
        limits = [fit.limit for fit in fits]
        assert limits == sorted(limits)
    assert max(f.error for f in sines.FLOAT16) < max(f.error for f in sines.BFLOAT16)


def on_a_gpu(attend: rg.Attention, n: int = 512, dtype: torch.dtype = torch.float32, **kwargs: object) -> Dispatch:
    """What an attention of n tokens of width 4 would run as, were there a GPU."""
    x = torch.randn(2, n, 4, dtype=dtype)
    return rg.explain_dispatch(attend.to(dtype), x, x, device="cuda", **kwargs)


def additive(align: object = "soft", hidden: int = 64, **kwargs: object) -> rg.Attention:
    return rg.Attention("additive", align, query_dim=4, key_dim=4, hidden_dim=hidden, **kwargs)


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@needs_triton
@pytest.mark.parametrize("align", [rg.Soft(0.5), rg.Hard("gumbel"), rg.Hard("reinforce"), rg.Local(3)], ids=repr)
def test_additive_scores_have_a_kernel_under(align: object) -> None:
    assert on_a_gpu(additive(align, dropout=0.1)).path == "fused"
    assert on_a_gpu(additive(align), bias=torch.zeros(512, 512, requires_grad=True)).path == "fused"


@needs_triton
@pytest.mark.parametrize(
    ("attend", "n", "dtype", "reason"),
    [
        (additive("reinforced"), 512, torch.float32, "alignment Reinforced has no kernel"),
        (additive(rg.Sparsemax()), 512, torch.float64, "torch.float64"),
        (additive(rg.Sparsemax(), activation="elu"), 512, torch.float32, "activation 'elu"),
        (additive(), 512, torch.float64, "torch.float64"),
        (additive(hidden=257), 512, torch.float32, "more than 256 hidden units"),
        (additive(activation="elu"), 512, torch.float32, "activation 'elu"),
    ],
    ids=["reinforced", "sparse double", "sparse activation", "double", "wide", "activation"],
)
def test_what_has_no_kernel_says_why(attend: rg.Attention, n: int, dtype: torch.dtype, reason: str) -> None:
    found = on_a_gpu(attend, n, dtype)
    assert found.path != "fused"
    assert reason in found.reason


@needs_triton
def test_more_pairs_than_a_kernel_counts() -> None:
    n = 50_000
    mask = torch.ones(1, 1, dtype=torch.bool).expand(n, n)
    assert "more than 2147483647 pairs" in on_a_gpu(additive(), n, mask=mask).reason


@needs_triton
@pytest.mark.parametrize("align", [rg.Sparsemax(), rg.Entmax(), rg.Entmax(1.3, learnable=True)], ids=repr)
def test_sparse_alignments_of_additive_scores_read_panels_of_a_kernel(align: rg.Entmax) -> None:
    name = type(align).__name__
    expected = f"additive scores under alignment {name}: 1 panel(s) of 65536 rows, scores by our kernel"
    assert on_a_gpu(additive(align, dropout=0.1)) == Dispatch("fused", expected)
    # A mask or bias is cut into panels, too, and hidden units come one after the other.
    n = 10_000
    mask = torch.ones(1, 1, dtype=torch.bool).expand(n, n)
    assert on_a_gpu(additive(align, hidden=1000), n, mask=mask, bias=torch.zeros(n, 1)).path == "fused"
    with rg.execution("fused"):
        assert on_a_gpu(additive(align)) == Dispatch("fused", "asked for")
        with pytest.raises(NotImplementedError, match=r"impl='fused' is not available here: torch.float64"):
            on_a_gpu(additive(align), dtype=torch.float64)


@needs_triton
@pytest.mark.parametrize("name", ["reinforced", "structured", "budget"])
def test_other_alignments_read_such_panels_blockwise_and_are_refused_by_name(name: str) -> None:
    attend = additive(name, **({"k": 2} if name == "budget" else {}))
    found, align = on_a_gpu(attend), type(attend.align).__name__
    assert found.path == "blockwise"
    assert found.reason == f"alignment {align} has no kernel; 1 panel(s) of 65536 rows, scores by our kernel"
    with rg.execution("fused"), pytest.raises(NotImplementedError, match=f"alignment {align} has no kernel"):
        on_a_gpu(attend)


def tanh(z: torch.Tensor) -> torch.Tensor:
    return z**3


def identity(z: torch.Tensor) -> torch.Tensor:
    return z**3


@needs_triton
@pytest.mark.parametrize("align", ["soft", "hard", "sparsemax"])
def test_a_function_of_ones_own_is_not_taken_for_the_kernel_of_that_name(align: str) -> None:
    general = rg.Attention("activated-general", align, query_dim=4, key_dim=4, activation=tanh)
    multi = additive(align, activation=tanh, features=4)
    for attend, n in ((additive(align, activation=tanh), 512), (general, 4096), (multi, 512)):
        found = on_a_gpu(attend, n)
        assert found.path == "blockwise"
        assert "our kernel" not in found.reason
    plain = on_a_gpu(rg.Attention("activated-general", query_dim=4, key_dim=4, activation=identity), 4096)
    assert "activation 'identity()'" in plain.reason


@needs_triton
@pytest.mark.parametrize(
    "attend",
    [
        additive(),
        additive(rg.Sparsemax()),
        additive(features=4),
        rg.Attention("activated-general", query_dim=4, key_dim=4),
        rg.Attention("activated-general", query_dim=4, key_dim=4, features=4),
    ],
    ids=["additive", "panels", "multi", "activated", "features"],
)
def test_more_leading_entries_than_a_launch_has(attend: rg.Attention) -> None:
    x = torch.zeros(1, 1, 1).expand(70_000, 16, 4)
    found = rg.explain_dispatch(attend, x, x, device="cuda")
    assert found.path == "blockwise"
    assert "more than 65535 leading entries" in found.reason
    assert "our kernel" not in found.reason


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_term_of_each_key_is_added_by_our_kernel(dtype: torch.dtype) -> None:
    found = on_a_gpu(rg.Attention(rg.NegativeL2()), 4096, dtype)
    assert found == Dispatch("fused", "bilinear scores under a softmax: our kernel")
    assert "one library call" in on_a_gpu(rg.Attention(rg.Cosine()), 4096, dtype).reason


@needs_triton
def test_a_term_of_each_key_goes_to_the_library_where_no_kernel_takes_it() -> None:
    attend, paths = rg.Attention(rg.NegativeL2()), []
    assert "one library call" in on_a_gpu(attend, 4096, torch.float64).reason
    x = torch.randn(1, 5000, 4)

    def function(y: torch.Tensor) -> torch.Tensor:
        paths.append(str(rg.explain_dispatch(attend.float(), y, x, device="cuda")))
        return y.sum()

    torch.func.grad(function)(x)
    torch.func.vmap(function)(x[None])
    assert "one library call" in paths[0]
    assert paths[1] == "fused: bilinear scores under a softmax: our kernel"


def test_on_a_gpu_a_small_call_that_draws_takes_a_kernel() -> None:
    x = torch.randn(2, 64, 16)
    sizes = {"query_dim": 16, "key_dim": 16, "hidden_dim": 16}
    plain, *drawing = (
        rg.Attention("additive", **sizes),
        rg.Attention("additive", "hard", **sizes),
        rg.Attention("additive", **sizes, dropout=0.1),
        rg.Attention("scaled-dot", dropout=0.1),
    )
    assert rg.explain_dispatch(plain, x, x, device="cuda").path == "dense"
    for attend in drawing:
        assert rg.explain_dispatch(attend, x, x, device="cuda").path == "fused"
        # One program alone would run over all keys of a single query.
        assert rg.explain_dispatch(attend, x[:, :1], x, device="cuda").path == "dense"
