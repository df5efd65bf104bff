"""Kernels compiled for Hopper where there is no GPU, by the package's own launchers, and what they take of a processor.

Tensors have no memory and say that they are on a device, so that launchers choose tiles, warps, stages and arithmetic as they do there;
a launch then compiles and does nothing else. Pointers are as aligned as allocations are on a device, and slices as they are in them.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from regard.ops import tiles
from regard.ops.triton import launching

WARP = 32
# What one block may have on a processor of compute capability 9.0: 227 KiB of shared memory, 64 Ki registers.
SHARED, REGISTERS = 232_448, 65_536
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class _Driver:
    """What Triton asks of a device before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, WARP)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Device(TorchFunctionMode):
    """Tensors of the device `meta` that say they are on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function == torch.Tensor.device.__get__:
            return torch.device("cuda", 0)
        if function == torch.Tensor.get_device:
            return 0
        if "device" in kwargs:
            kwargs["device"] = "meta"
        return function(*("meta" if isinstance(x, torch.device) else x for x in args), **kwargs)


@dataclass(frozen=True)
class Kernel:
    """What the compiler made of one launch."""

    name: str  # module.function
    constants: str
    threads: int
    registers: int  # of a thread
    stack: int  # bytes of a thread in local memory, where registers do not suffice
    shared: int  # bytes of a block

    def __str__(self) -> str:
        figures = (
            f"{self.threads} threads, {self.registers} registers, {self.stack} bytes of stack, {self.shared} shared"
        )
        return f"{self.name}: {figures} ({self.constants})"


_launched: list[tuple[JITFunction, Any, dict[str, Any]]] = []


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches compile; what is asked of the device that is not there has an answer."""
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        _launched.append((self, compiled, kwargs))
        return compiled

    monkeypatch.setattr(JITFunction, "run", compile_only)
    # Every launch is compiled, none is remembered.
    monkeypatch.setattr(launching, "_KNOWN_RELEASE", False)
    monkeypatch.setattr(triton.runtime.driver, "_active", _Driver())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    # Tiles that somebody measured here are not those of others.
    monkeypatch.setattr(tiles, "_known", dict)
    _launched.clear()
    with _Device():
        yield


def launched() -> list[Kernel]:
    """The kernels since the last time."""
    found = []
    for function, compiled, kwargs in _launched:
        registers, stack = _registers_and_stack(compiled)
        meta, constants = compiled.metadata, ", ".join(f"{name}={x}" for name, x in kwargs.items() if x is not False)
        found.append(Kernel(name_of(function), constants, meta.num_warps * WARP, registers, stack, meta.shared))
    _launched.clear()
    return found


def name_of(function: JITFunction) -> str:
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


_taken: dict[str, tuple[int, int]] = {}


def _registers_and_stack(compiled: Any) -> tuple[int, int]:
    """As the assembler notes them in its code."""
    if compiled.hash not in _taken:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        usage = dict(re.findall(r"\b(REG|STACK):(\d+)", told))
        _taken[compiled.hash] = int(usage["REG"]), int(usage["STACK"])
    return _taken[compiled.hash]


def kernels_of(*modules: Any) -> set[str]:
    """The kernels of some modules: what is launched quickly, and functions for a device that no other of them calls."""
    things = [x for module in modules for x in vars(module).values()]
    kernels = {x.kernel for x in things if isinstance(x, launching.quick)}
    functions = kernels | {x for x in things if isinstance(x, JITFunction)}
    called = set()
    for f in functions:
        names = set(re.findall(r"\w+", f.src)) - {f.__name__}
        called |= {f.__globals__[name] for name in names if isinstance(f.__globals__.get(name), JITFunction)}
    return {name_of(f) for f in functions - called}
