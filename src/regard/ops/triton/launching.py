"""Launching a kernel again without asking what is known since the last time.

Triton asks of every argument of every launch how it is best compiled for, which takes the host 20 to 50 microseconds where an
attention of a few hundred tokens takes the device less. The answers depend on nothing but the types of tensors, whether they begin at a
multiple of 16 bytes, as nearly all do, and the numbers. So a launch whose types and numbers were there before takes the kernel that Triton
chose then, and hands it pointers.

Anything unusual goes through Triton as always: the interpreter, tensors that begin elsewhere, hooks of a profiler, another release.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

# Releases whose compiled kernels are launched as it is done here.
_KNOWN_RELEASE = re.match(r"3\.[67]\.", triton.__version__) is not None
# Launches that are remembered of a kernel: sequences of ever new lengths would fill the memory.
_MOST = 1024


def cdiv(x: int, y: int) -> int:
    """How many y hold x. Triton's own asks first whether it is being compiled."""
    return -(-x // y)


def power_of_2(x: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << (x - 1).bit_length() if x > 1 else 1


class quick:
    """A kernel that is launched as ever, `kernel[grid](*args, **constants)`, but quicker from the second time on.

    Its constants are the last of its parameters, and given by name.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        # By types and numbers: what was compiled, and its constants in order.
        self._known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        told = _told(args) if _is_usual(self.kernel) else None
        if told is None:
            self.kernel[grid](*args, **constants)
            return
        types, given = told
        key = (*types, *constants, *constants.values())
        found = self._known.get(key)
        if found is None:
            compiled = self.kernel[grid](*args, **constants)
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = compiled, tuple(constants[name] for name in self.kernel.arg_names[len(args) :])
            return
        compiled, last = found
        stream = torch._C._cuda_getCurrentRawStream(types[0])
        sides = (*grid, 1, 1)[:3]
        compiled.run(*sides, stream, compiled.function, compiled.packed_metadata, None, None, None, *given, *last)


class _Kinds:
    """Where arguments of some types are tensors, descriptors of tensors and numbers. One object stands for one tuple of types."""

    def __init__(self, kinds: tuple[type, ...]) -> None:
        tensors = (Tensor, Parameter)
        self.tensors = [k for k, kind in enumerate(kinds) if kind in tensors]
        self.descriptors = [k for k, kind in enumerate(kinds) if kind is TensorDescriptor]
        apart = (*tensors, TensorDescriptor)
        self.numbers = [k for k, kind in enumerate(kinds) if kind not in apart]
        # A pointer does not say what else a tensor of another class is.
        self.are_known = not any(issubclass(kinds[k], Tensor) for k in self.numbers)


_kinds = functools.lru_cache(_MOST)(_Kinds)


def _told(args: tuple[Any, ...]) -> tuple[list[Any], list[Any]] | None:
    """What a kernel is compiled for, and what it is handed; None where Triton has to look itself."""
    # One, True and 1.0 are equal, but not of one kind.
    kinds = _kinds(tuple(map(type, args)))
    if not kinds.are_known:
        return None
    device = torch._C._cuda_getDevice()
    told: list[Any] = [device, kinds]
    given = list(args)
    places = 0
    for k in kinds.tensors:
        x = given[k]
        # Triton refuses by name what is on no device; by its pointer alone it could not.
        if x.get_device() != device:
            return None
        given[k] = place = x.data_ptr()
        places |= place
        told.append(x.dtype)
    for k in kinds.descriptors:
        x = given[k]
        places |= x.base.data_ptr()
        told += (x.base.dtype, *x.block_shape)
    if places % 16:
        return None
    told += [given[k] for k in kinds.numbers]
    return told, given


def _is_usual(kernel: Any) -> bool:
    """Whether a kernel is compiled, not interpreted, by a known release, and nobody asked to be told of launches."""
    runtime = knobs.runtime
    watched = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
    return _KNOWN_RELEASE and type(kernel) is JITFunction and not watched
