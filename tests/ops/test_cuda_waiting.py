"""On a GPU the host never waits for the device: what an attention needs to know of its data stays there, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import regard as rg

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTH, N = 16, 200
CASES: dict[str, Callable[[], rg.Attention]] = {
    "additive": lambda: rg.Attention("additive", query_dim=WIDTH, key_dim=WIDTH, hidden_dim=WIDTH),
    "additive, dropout": lambda: rg.Attention("additive", query_dim=WIDTH, key_dim=WIDTH, hidden_dim=WIDTH, dropout=0.2),
    "additive, hard": lambda: rg.Attention("additive", "hard", query_dim=WIDTH, key_dim=WIDTH, hidden_dim=WIDTH),
    "additive, local": lambda: rg.Attention(
        rg.Additive(WIDTH, WIDTH, WIDTH), rg.Local(5, "predictive", query_dim=WIDTH)
    ),
    "additive, sparsemax": lambda: rg.Attention("additive", "sparsemax", query_dim=WIDTH, key_dim=WIDTH, hidden_dim=WIDTH),
    "additive, features": lambda: rg.Attention(rg.Additive(WIDTH, WIDTH, WIDTH, features=WIDTH)),
    "activated general": lambda: rg.Attention("activated-general", query_dim=WIDTH, key_dim=WIDTH),
    "negative L2": lambda: rg.Attention("negative-l2"),
    "cosine": lambda: rg.Attention("cosine"),
    "scaled dot": lambda: rg.Attention("scaled-dot"),
}  # fmt: skip


@pytest.fixture
def nobody_waits() -> Iterator[Callable[[], None]]:
    """From when it is called, waiting for the device is an error."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def step(attend: rg.Attention, x: Tensor, mask: rg.Mask | None) -> None:
    attend(x, x, mask=mask).square().sum().backward()


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_training_step(name: str, dtype: torch.dtype, padded: bool, nobody_waits: Callable[[], None]) -> None:
    attend = CASES[name]().to("cuda", dtype)
    # Within the range of a series, and far beyond.
    inputs = [(torch.randn(2, N, WIDTH, device="cuda") * scale).to(dtype).requires_grad_() for scale in (1.0, 40.0)]
    masks = [rg.Padding(torch.tensor([N, N - 30], device="cuda")) if padded else None for _ in range(2)]
    with rg.execution("fused"):
        for x, mask in zip(inputs, masks, strict=True):
            step(attend, x, mask)
        nobody_waits()
        for x, mask in zip(inputs, masks, strict=True):
            step(attend, x, mask)


def test_waiting_is_noticed(nobody_waits: Callable[[], None]) -> None:
    nobody_waits()
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device="cuda").item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in CASES if "dropout" not in name and "hard" not in name])
def test_a_training_step_can_be_recorded_as_a_graph(name: str, dtype: torch.dtype) -> None:
    attend = CASES[name]().to("cuda", dtype)
    graphed = copy.deepcopy(attend)
    x, y = (torch.randn(2, N, WIDTH, device="cuda").to(dtype).requires_grad_() for _ in range(2))
    with rg.execution("fused"):
        torch.cuda.make_graphed_callables(graphed, (torch.randn_like(x).requires_grad_(),) * 2)
        # Replayed on other numbers, the second of them far beyond the range of a series.
        for scale in (1.0, 40.0):
            inputs = [(z * scale).detach().requires_grad_() for z in (x, y)]
            expected, found = attend(*inputs), graphed(*inputs)
            torch.testing.assert_close(found, expected)
            for mine, theirs in zip(*(torch.autograd.grad(z.sum(), inputs) for z in (found, expected)), strict=True):
                torch.testing.assert_close(mine, theirs)
