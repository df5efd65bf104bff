"""On a GPU the host never waits for the device: what an attention needs to know of its data stays there, forward and backward."""

from __future__ import annotations

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
@pytest.mark.parametrize("name", ["additive", "additive, features", "activated general", "negative L2", "scaled dot"])
def test_a_training_step_can_be_recorded_as_a_graph(name: str, dtype: torch.dtype) -> None:
    attend = CASES[name]().to("cuda", dtype)
    inputs = [torch.randn(2, N, WIDTH, device="cuda").to(dtype).requires_grad_() for _ in range(2)]

    def step() -> tuple[Tensor, ...]:
        context = attend(*inputs)
        return context, *torch.autograd.grad(context.float().square().sum(), inputs)

    with rg.execution("fused"):
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        # Replayed on other numbers, the last of them far beyond the range of a series.
        for scale in (1.0, 40.0):
            with torch.no_grad():
                for x in inputs:
                    x.copy_(torch.randn_like(x) * scale)
            graph.replay()
            for mine, theirs in zip(found, step(), strict=True):
                torch.testing.assert_close(mine, theirs)
