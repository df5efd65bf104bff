"""The table of executions is asked of the code, for devices that need not be there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import regard as rg

DOCS = Path(__file__).resolve().parents[2] / "docs"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


executions = load("executions")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="kernels need Triton")


@needs_triton
def test_every_cell_says_what_a_call_takes() -> None:
    page = executions.page()
    assert page.count("\n| ") == 2 * (1 + len(executions.SCORES) + len(executions.EDGE_SCORES))
    for title in executions.DEVICES.values():
        assert f"**{title}**" in page
    cpu, gpu = page.split(f"**{executions.DEVICES['cuda']}**")
    assert "| activated general | blockwise; banded (window); padded (padding) | blockwise |" in cpu
    assert "| activated general | fused; banded (window); blockwise (float64) | fused; blockwise (float64) |" in gpu
    assert "| additive (GATv2), along edges | fused; blockwise (float64) |" in gpu
    assert "| — |" in gpu
    (sparse,) = (line for line in gpu.splitlines() if line.startswith("| additive |"))
    assert sparse.endswith(" | fused; blockwise (float64) | blockwise |")


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ("aaaa", "a"),
        ("aaab", "a; b (half with causal)"),
        ("aabb", "a; b (half)"),
        ("abab", "a; b (causal)"),
        ("", "—"),
    ],
)
def test_exceptions_are_told_by_what_decides(paths: str, expected: str) -> None:
    cases = [(dtype, mask) for dtype in ("float", "half") for mask in ("none", "causal")]
    assert executions.told(dict(zip(cases, paths, strict=False))) == expected


def test_what_is_explained_once_is_not_told_again() -> None:
    masks = ("none", "causal", "window")
    cases = {("float32", mask): "fused" for mask in masks} | {("float64", mask): "blockwise" for mask in masks}
    cases |= {("half", mask): "fused" for mask in masks}
    cases |= {(dtype, "window"): "banded" for dtype in ("float32", "half", "float64")}
    assert executions.told(cases) == "fused; banded (window); blockwise (float64)"


@needs_triton
def test_a_decision_for_a_device_that_is_not_there() -> None:
    x = torch.randn(1, 5000, 8)
    attend = rg.Attention("activated-general", query_dim=8, key_dim=8)
    assert rg.explain_dispatch(attend, x[:, :3000], x[:, :3000], device="cuda").path == "dense", "small for a GPU"
    assert rg.explain_dispatch(attend, x, x, device="cpu").path == "blockwise"
    gpu = rg.explain_dispatch(attend, x, x, device="cuda")
    assert str(gpu) == "fused: activated bilinear scores under a softmax: our kernel"
    assert rg.explain_dispatch(attend, x, x).path == "blockwise", "nothing is assumed any longer"
    hard = rg.Attention("dot", "hard")
    assert (
        str(rg.explain_dispatch(hard, x, x, device="cuda")) == "fused: bilinear scores under alignment Hard: our kernel"
    )
    wide = rg.Attention("dot")
    assert "one library call" in str(rg.explain_dispatch(wide, x, x, device="cuda"))


@needs_triton
@pytest.mark.parametrize(
    "attend", [rg.Attention("dot", "hard"), rg.Attention("activated-general", query_dim=8, key_dim=8)]
)
def test_transforms_of_functions_take_the_equation_on_any_device(attend: rg.Attention) -> None:
    x = torch.randn(1, 3000, 8)
    paths = []

    def function(y: torch.Tensor) -> torch.Tensor:
        paths.append(rg.explain_dispatch(attend, y, x, device="cuda").path)
        return y.sum()

    torch.func.grad(function)(x)
    assert paths == ["dense"]


@needs_triton
@pytest.mark.parametrize(
    ("attend", "path"),
    [
        (rg.Attention("additive", query_dim=8, key_dim=8, hidden_dim=8), "fused"),
        (rg.Attention("additive", query_dim=8, key_dim=8, hidden_dim=8, features=8), "fused"),
        (rg.Attention("activated-general", "local-monotonic", query_dim=8, key_dim=8, window=3), "fused"),
        (rg.Attention("additive", query_dim=8, key_dim=8, hidden_dim=8, dropout=0.1), "dense"),
        (rg.Attention("additive", rg.Hard("gumbel"), query_dim=8, key_dim=8, hidden_dim=8), "dense"),
        (rg.Attention("additive", "sparsemax", query_dim=8, key_dim=8, hidden_dim=8), "dense"),
    ],
    ids=["additive", "multi", "activated", "dropout", "random", "panels"],
)
def test_vmap_alone_takes_kernels_that_draw_nothing(attend: rg.Attention, path: str) -> None:
    x, paths = torch.randn(2, 1, 5000, 8), []

    def function(y: torch.Tensor) -> torch.Tensor:
        paths.append(rg.explain_dispatch(attend, y, y, device="cuda").path)
        return y.sum()

    torch.func.vmap(function, randomness="different")(x)
    torch.func.vmap(torch.func.grad(function), randomness="different")(x)
    assert paths == [path, "dense"]


def test_a_device_has_a_type() -> None:
    x = torch.randn(2, 3, 4)
    with pytest.raises(ValueError, match=r"device.*'tpu'.*'cpu' or 'cuda'"):
        rg.explain_dispatch(rg.Attention("dot"), x, x, device="tpu")
