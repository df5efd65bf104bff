"""Kernels that are launched again: what would be compiled anew asks Triton, and nothing else is handed on than Triton would hand on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
from triton import knobs  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from regard.ops.triton.launching import cdiv, power_of_2, quick  # noqa: E402

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def plain(X, Y, n, scale, BLOCK: triton.language.constexpr, TWICE: triton.language.constexpr):
    i = triton.language.program_id(0) * BLOCK + triton.language.arange(0, BLOCK)
    x = triton.language.load(X + i, mask=i < n, other=0.0)
    x = x + x if TWICE else x
    triton.language.store(Y + i, x * scale, mask=i < n)


class Triton:
    """Counts what goes through Triton, and keeps what was launched without it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        compiled = SimpleNamespace(
            run=lambda *given: self.launched.append(given), function="code", packed_metadata="meta"
        )

        def run(kernel: object, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
            self.asked.append((grid, *args))
            return compiled

        monkeypatch.setattr(JITFunction, "run", run)
        # Tensors without a GPU are on device -1.
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Triton:
    return Triton(monkeypatch)


def test_the_second_launch_hands_pointers_to_what_was_compiled(asked: Triton) -> None:
    kernel, x, y = quick(JITFunction(plain)), torch.zeros(64), torch.zeros(64)
    kernel[(3, 2)](x, y, 64, 0.5, TWICE=True, BLOCK=32)
    again = torch.zeros(64)
    kernel[(5,)](again, y, 64, 0.5, TWICE=True, BLOCK=32)
    assert asked.asked == [((3, 2), x, y, 64, 0.5)]
    expected = (5, 1, 1, "stream", "code", "meta", None, None, None, again.data_ptr(), y.data_ptr(), 64, 0.5, 32, True)
    assert asked.launched == [expected], "constants in the order of the parameters"


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(64, dtype=torch.float16)},
        {"n": 65},
        {"n": True, "before": {"n": 1}},
        {"n": 1.0, "before": {"n": 1}},
        {"scale": 0.25},
        {"BLOCK": 64},
        {"TWICE": False},
    ],
    ids=["dtype", "size", "bool", "float", "scale", "constant", "flag"],
)
def test_another_type_or_number_asks_triton(asked: Triton, other: dict[str, Any]) -> None:
    kernel, y = quick(JITFunction(plain)), torch.zeros(64)
    given = {"x": torch.zeros(64), "n": 64, "scale": 0.5, "BLOCK": 32, "TWICE": True} | other.pop("before", {})

    def launch(x: Tensor, n: Any, scale: float, **constants: Any) -> None:
        kernel[(1,)](x, y, n, scale, **constants)

    for _ in range(2):
        launch(**given)
    assert (len(asked.asked), len(asked.launched)) == (1, 1)
    launch(**given | other)
    assert (len(asked.asked), len(asked.launched)) == (2, 1)


def test_what_begins_elsewhere_or_is_another_class_is_left_to_triton(asked: Triton) -> None:
    class Other(Tensor):
        pass

    kernel, y = quick(JITFunction(plain)), torch.zeros(64)
    for x in (torch.zeros(65)[1:], torch.zeros(64).as_subclass(Other)):
        for _ in range(2):
            kernel[(1,)](x, y, 64, 0.5, BLOCK=32, TWICE=True)
    assert (len(asked.asked), len(asked.launched)) == (4, 0)


def test_what_is_not_on_the_device_is_left_to_triton(asked: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x, y = quick(JITFunction(plain)), torch.zeros(64), torch.zeros(64)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0)
    for _ in range(2):
        kernel[(1,)](x, y, 64, 0.5, BLOCK=32, TWICE=True)
    assert (len(asked.asked), len(asked.launched)) == (2, 0)


def test_a_profiler_is_told_of_every_launch(asked: Triton) -> None:
    kernel, x, y = quick(JITFunction(plain)), torch.zeros(64), torch.zeros(64)
    heard = print
    knobs.runtime.launch_enter_hook.add(heard)
    try:
        for _ in range(2):
            kernel[(1,)](x, y, 64, 0.5, BLOCK=32, TWICE=True)
    finally:
        knobs.runtime.launch_enter_hook.remove(heard)
    assert (len(asked.asked), len(asked.launched)) == (2, 0)


def test_ever_new_lengths_do_not_fill_the_memory(asked: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.ops.triton.launching._MOST", 3)
    kernel, x, y = quick(JITFunction(plain)), torch.zeros(64), torch.zeros(64)
    for n in range(20):
        kernel[(1,)](x, y, n, 0.5, BLOCK=32, TWICE=True)
        assert len(kernel._known) <= 3


def test_sizes_are_tritons() -> None:
    for x in range(1, 70):
        assert power_of_2(x) == triton.next_power_of_2(x)
        assert [cdiv(x, y) for y in (1, 3, 16, 64)] == [triton.cdiv(x, y) for y in (1, 3, 16, 64)]
    assert cdiv(0, 4) == 0


@gpu
@pytest.mark.gpu
def test_on_a_gpu_every_launch_computes_what_it_is_given() -> None:
    kernel = quick(triton.jit(plain))
    for dtype in (torch.float32, torch.bfloat16):
        for start in (0, 1, 8):
            for n in (1, 16, 100):
                for twice in (False, True):
                    x = torch.randn(128, device="cuda", dtype=dtype)[start:][:n]
                    y = torch.full_like(x, torch.nan)
                    kernel[(cdiv(n, 32),)](x, y, n, 0.5, BLOCK=32, TWICE=twice)
                    assert torch.equal(y, x if twice else x * 0.5)
    x = torch.randn(64, device="cuda")
    for _ in range(3):
        kernel[(2,)](x, torch.empty_like(x), 64, 0.5, BLOCK=32, TWICE=True)
        with pytest.raises(ValueError, match="cpu tensor"):
            kernel[(2,)](x.cpu(), torch.empty_like(x), 64, 0.5, BLOCK=32, TWICE=True)
