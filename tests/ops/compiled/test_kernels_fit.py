"""Every kernel as its launcher asks for it, compiled for Hopper: it compiles, and a block of it fits a processor."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from typing import Any

import pytest
import torch

import regard.ops.triton
from regard.ops.triton import additive_exact
from tests.ops.compiled.hopper import REGISTERS, SHARED, Kernel, kernels_of, launched
from tests.ops.compiled.launches import (
    BF16,
    F16,
    F32,
    Case,
    Launch,
    additive,
    buckets,
    case,
    edges,
    features,
    panel,
    rows,
    scores,
    summary,
    told,
    units,
)

# Bytes a thread may keep in local memory: in a softmax of up to 64 columns, and in any other call. Kernels that are not named keep none.
STACK = {
    # Scores, weights and contexts of a tile in float32, what is multiplied in three parts, in a fallback in two, and, beyond a plain
    # softmax, numbers drawn by position: moved once a tile, not in the loops over hidden units.
    "additive_exact.forward_kernel": (32, 1792),
    "additive_grads.key_grad_kernel": (512, 1216),
    "additive_grads.query_grad_kernel": (64, 1088),
    "bilinear.forward_kernel": (0, 320),
    "bilinear.key_grad_kernel": (256, 384),
    "bilinear.query_grad_kernel": (0, 256),
    "bilinear_aligned.forward_kernel": (0, 64),
    "bilinear_aligned.key_grad_kernel": (0, 384),
    "bilinear_aligned.query_grad_kernel": (0, 128),
    # Scores of 128 x 256 pairs, beside contexts, values or sums of them.
    "additive_sine.forward_kernel": (0, 1408),
    "additive_sine.panel_kernel": (640, 640),
    "summaries_sine.rows_kernel": (256, 256),
    "summaries.rows_kernel": (0, 192),
    "summaries.keys_kernel": (0, 64),
    # Sums over all of its tokens that a program keeps to the end.
    "multi_product.forward_kernel": (0, 64),
    "multi_product_grads.grad_kernel": (128, 448),
    "multi_product_pair.key_grad_kernel": (0, 960),
    "multi_product_pair.query_grad_kernel": (0, 1792),
    # Two or three chunks, unrolled.
    "hashed._forward": (128, 704),
    "hashed._of_queries": (1216, 1344),
    "hashed._of_keys": (896, 1024),
    "graph.query_grad_kernel": (0, 64),
    # The longest rows under an alpha that is learned or above 2: two exponentials for each number a step.
    "sparse_rows.forward_kernel": (64, 64),
    "sparse_rows.backward_kernel": (0, 256),
}

# What sums and slots of a summary displace beside the contexts of a plain softmax.
BESIDE = {"additive_exact.forward_kernel": 192}


def budget(kernel: Kernel, x: Case) -> int:
    launch, given = x
    widest = max(given.get(name, 0) for name in ("hidden", "width", "values", "chunk"))
    plain = given.get("align", "soft") == "soft" and not any(given.get(name) for name in ("dropout", "mask", "bias"))
    usual, most = STACK.get(kernel.name, (0, 0))
    return (BESIDE.get(kernel.name, usual) if launch is summary else usual) if plain and widest <= 64 else most


def check(x: Case) -> None:
    launch, given = x
    launch(**given)
    kernels = launched()
    assert kernels
    for kernel in kernels:
        assert kernel.shared <= SHARED, f"{kernel} does not fit the shared memory of a block"
        assert kernel.threads * kernel.registers <= REGISTERS, f"{kernel} does not fit the registers of a block"
        assert kernel.stack <= budget(kernel, x), f"{kernel}: more than {budget(kernel, x)} bytes of stack"


# Every kernel once, those with most to hold in what decides their tiles.
SAMPLE = (
    case(additive),
    case(additive, dtype=F16, hidden=16, values=16),
    case(additive, values=256, act="relu"),
    case(additive, dtype=BF16, values=16, act="identity", align="scaled"),
    case(panel, hidden=16, act="sigmoid"),
    case(summary, act="relu", k=3),
    case(summary, dtype=BF16, hidden=16),
    case(scores, act="identity"),
    case(scores, dtype=F16, terms=True),
    case(scores, dtype=BF16, act="relu", align="added"),
    case(features, dtype=BF16),
    case(features, dtype=BF16, align="window"),
    case(features, dtype=BF16, matrix=False, align="window"),
    case(edges),
    case(edges, act="product"),
    case(buckets, chunk=16, width=16, values=16, rounds=2),
    case(rows, alpha=2.0, mask=True),
    case(rows, alpha=1.5, n=16_384),
    case(rows, alpha=1.5, learned=True),
    case(units),
)


@pytest.mark.parametrize("x", SAMPLE, ids=told)
def test_a_block_fits_a_processor(x: Case) -> None:
    check(x)


def grid(launch: Launch, axes: dict[str, tuple[Any, ...]], **others: tuple[Any, ...]) -> list[Case]:
    """All that meets of the axes, which decide tiles; the other arguments walk through their values meanwhile."""
    walks = {name: itertools.cycle(values) for name, values in others.items()}
    return [
        case(launch, **dict(zip(axes, at, strict=True)), **{name: next(walk) for name, walk in walks.items()})
        for at in itertools.product(*axes.values())
    ]


# Cycles of lengths that have no common factor with those of the axes meet in more ways. Tiles of 80 columns are those of 128.
FLOATS, WIDTHS = (F32, F16, BF16), (16, 64, 80, 256)
ACTS = ("tanh", "sigmoid", "relu", "leaky_relu:0.1", "gelu", "identity", "tanh")
WAYS = ("soft", "scaled", "noise", "sampled", "soft", "added", "straight", "window", "reinforce", "largest", "soft")
CHOICES = ("straight", "sampled", "reinforce", "largest")
MASKS, FLAGS = ("", "mask", "", "causal"), (False, False, True, False)
FULL = (
    *grid(additive, {"dtype": FLOATS, "values": WIDTHS}, hidden=(64, 16, 256, 80)),
    *grid(additive, {"values": WIDTHS, "dtype": FLOATS}, align=WAYS, act=ACTS, mask=MASKS, bias=(True, False), dropout=FLAGS),
    *grid(panel, {"dtype": FLOATS}, hidden=(256, 16, 1000), act=("tanh", "gelu", "relu")),
    *grid(summary, {"dtype": FLOATS, "hidden": (16, 256)}, act=("tanh", "tanh", "gelu", "sigmoid"), mask=MASKS, k=(0, 16, 3, 8, 1)),
    *grid(scores, {"dtype": FLOATS, "width": WIDTHS}, values=(64, 256, 16, 128), act=ACTS, mask=MASKS, terms=FLAGS),
    *grid(scores, {"values": WIDTHS, "dtype": FLOATS}, width=(64, 16, 256, 128), align=WAYS, act=ACTS, mask=MASKS, dropout=FLAGS),
    *grid(features, {"dtype": (F32,), "hidden": (16, 64, 128)}, values=(16, 256), align=WAYS[1:], mask=MASKS, dropout=FLAGS),
    *grid(features, {"dtype": (F16, BF16), "hidden": (16, 64, 128, 256)}, values=(16, 80, 256), act=ACTS, mask=MASKS),
    *grid(features, {"align": ("window", "added", "scaled"), "dtype": FLOATS}, hidden=(64, 128, 80), values=(80, 256, 16, 64),
          act=ACTS, mask=MASKS, dropout=FLAGS),
    *grid(features, {"matrix": (False,), "values": (16, 80), "dtype": FLOATS}, act=ACTS, mask=MASKS, dropout=FLAGS),
    *grid(features, {"dtype": (F32,), "matrix": (True, False), "align": CHOICES}, mask=MASKS, dropout=FLAGS),
    *grid(edges, {"dtype": FLOATS, "values": (16, 80, 1024)}, hidden=(16, 128), heads=(8, 1, 5, 2), by_edge=FLAGS,
          mask=(True, False), dropout=FLAGS, act=("product", *ACTS)),
    *grid(buckets, {"dtype": (F16, BF16), "chunk": (16, 64, 128)}, width=(64, 128), values=(128, 64), rounds=(1, 3),
          ahead=FLAGS, across=(True, False, False)),
    *grid(buckets, {"dtype": (F32,), "chunk": (16, 64)}, rounds=(3, 1), ahead=FLAGS),
    *grid(rows, {"dtype": FLOATS, "n": (37, 4096, 16_384), "alpha": (2.0, 1.5, 1.3, 3.0)}, mask=FLAGS),
    *grid(rows, {"learned": (True,), "n": (37, 4096, 16_384)}, mask=FLAGS),
    *grid(units, {"dtype": FLOATS, "width": (1, 80, 1024, 4096)}),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("x", FULL, ids=told)
def test_a_block_fits_a_processor_whatever_is_asked(x: Case) -> None:
    check(x)


def test_the_sample_has_every_kernel_of_the_package() -> None:
    names = [module.name for module in pkgutil.iter_modules(regard.ops.triton.__path__)]
    modules = [importlib.import_module(f"regard.ops.triton.{name}") for name in names]
    for launch, given in SAMPLE:
        launch(**given)
    assert {kernel.name for kernel in launched()} == kernels_of(*modules)


def test_tiles_that_do_not_fit_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = additive_exact.blocks
    monkeypatch.setattr(additive_exact, "blocks", lambda *given: {**blocks(*given), "BN": 256})
    with pytest.raises(AssertionError, match=r"forward_kernel: .* does not fit the shared memory of a block"):
        check(case(additive, values=256, act="relu"))


def test_the_arithmetic_is_that_of_the_device() -> None:
    additive()
    constants = " ".join(kernel.constants for kernel in launched())
    assert "PRECISION=tf32x3, FAST=True" in constants
    assert torch.empty(3, device="cuda")[1:].data_ptr() % 16 == 4, "pointers are aligned as they are on a device"
