"""The tensors that a part of a call holds: itself, a module, a mask, an activation, or a function of the user's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType

from torch import Tensor, nn

# Masks are made of masks, but not of many.
_DEEPEST = 8


def tensors_of(part: object, depth: int = 0) -> Iterator[Tensor]:
    """The tensors that a part says what it says by, as far as they can be found."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, nn.Module):
        yield from _of_module(part)
    elif isinstance(part, FunctionType | MethodType | partial):
        yield from _of_function(part)
    elif isinstance(part, tuple):
        yield from (x for x in part if isinstance(x, Tensor))
    elif part is not None and depth < _DEEPEST and type(part).__module__.startswith("regard."):
        for other in getattr(part, "__dict__", {}).values():
            yield from tensors_of(other, depth + 1)


def _of_module(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    for part in module.modules():
        yield from (x for x in vars(part).values() if isinstance(x, Tensor))
        # While training a module may write to its buffers itself, and mostly does not read them.
        if not part.training:
            yield from part.buffers(recurse=False)


def _of_function(function: FunctionType | MethodType | partial[object]) -> Iterator[Tensor]:
    """What a function was made with, and the globals that it names; not what these are made of."""
    if isinstance(function, partial):
        yield from _held([*function.args, *function.keywords.values()])
        function = function.func  # type: ignore[assignment]
    if isinstance(function, MethodType):
        yield from _held([function.__self__])
        function = function.__func__  # type: ignore[assignment]
    if isinstance(function, FunctionType):
        yield from _held(_contents(function))
        yield from _held([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()])
        known = function.__globals__
        yield from _held([known[name] for name in function.__code__.co_names if name in known])


def _contents(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue


def _held(parts: Iterable[object]) -> Iterator[Tensor]:
    for part in parts:
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, nn.Module):
            yield from part.parameters()
