"""`explain_dispatch`: which execution each attention of a model takes, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor, nn

from regard._errors import refusal
from regard.general.attention import Attention, dispatch_of, kind_of
from regard.observe.record import can_be_seen, observing, paths_of
from regard.observe.trace import ADOPT
from regard.ops import hooks
from regard.ops.call import Call
from regard.ops.dispatch import Dispatch

_BY_ITSELF = Dispatch("dense", "its mechanism reads scores or weights itself")


class Dispatches(Mapping[str, Dispatch]):
    """What each attention of a model takes, by its path, in the order of the calls; of one that was called several times, the last.

    Example:
        >>> taken = Dispatches([("read", Dispatch("dense", "asked for"))] * 2)
        >>> print(taken)
        read: dense: asked for (call 2 of 2)
    """

    def __init__(self, calls: list[tuple[str, Dispatch]]) -> None:
        self.calls: dict[str, list[Dispatch]] = {}  # all of them
        for path, dispatch in calls:
            self.calls.setdefault(path, []).append(dispatch)

    def __getitem__(self, path: str) -> Dispatch:
        return self.calls[path][-1]

    def __iter__(self) -> Iterator[str]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __str__(self) -> str:
        return "\n".join(self._line(path) for path in self)

    __repr__ = __str__

    def _line(self, path: str) -> str:
        number = len(self.calls[path])
        which = "" if number == 1 else f" (call {number} of {number})"
        return f"{path}: {self[path]}{which}".removeprefix(": ")


@overload
def explain_dispatch(
    module: Attention, *args: Any, device: str | torch.device | None = None, **kwargs: Any
) -> Dispatch: ...


@overload
def explain_dispatch(
    module: nn.Module, *args: Any, device: str | torch.device | None = None, **kwargs: Any
) -> Dispatches: ...


def explain_dispatch(
    module: nn.Module, *args: Any, device: str | torch.device | None = None, **kwargs: Any
) -> Dispatch | Dispatches:
    """Say which execution a call would take, and why.

    An `Attention` is not run. Any other module that holds some is run forward once, with interventions and in its mode, and is left as it
    was: no gradients, random state and buffers as before, nothing recorded. Asked under `torch.no_grad`, it tells what runs there.

    Args:
        module: the attention, or a model that holds some.
        *args: what it would be called with.
        device: a type of device to decide for, which need not be there, such as `"cuda"`; that of the values when not given. A
            model is explained where it is.
        **kwargs: likewise, such as `mask`.

    Returns:
        The execution of an attention; of a model a mapping from the path of each that was called, as `record` names it.

    Example:
        >>> print(explain_dispatch(Attention("dot"), torch.randn(5, 4), torch.randn(7, 4)))
        fused: plain bilinear scores under a softmax: one library call
        >>> from regard import SelfAttention
        >>> model = nn.Sequential(SelfAttention(4), SelfAttention(4))
        >>> print(explain_dispatch(model, torch.randn(2, 5, 4)))
        0.attention: fused: plain bilinear scores under a softmax: one library call
        1.attention: fused: plain bilinear scores under a softmax: one library call
    """
    if isinstance(module, Attention):
        return dispatch_of(module, *args, device=device, **kwargs)
    if not isinstance(module, nn.Module) or not can_be_seen(module):
        expected = "an Attention, or a module that holds some"
        raise TypeError(refusal("module", type(module).__name__, expected, ADOPT))
    tensors = [*module.parameters(), *module.buffers(), *_tensors((args, kwargs))]
    _check_device(device, tensors)
    paths, calls = paths_of(module), list[Dispatch]()
    found: list[tuple[str, Dispatch]] = []

    def observe(part: nn.Module, _: Call) -> None:
        # What was decided since the last call that was shown is of this one.
        dispatch = calls[-1] if calls else _BY_ITSELF
        calls.clear()
        if id(part) in paths:
            found.append((paths[id(part)], dispatch))

    devices = sorted({x.get_device() for x in tensors if x.is_cuda})
    with (
        observing(),
        _unchanged(module),
        torch.random.fork_rng(devices=devices),
        hooks.shown_only_to(observe, calls.append),
    ):
        module(*args, **kwargs)
    if not found:
        got = f"{type(module).__name__}, which called none of its attentions"
        raise ValueError(refusal("module", got, "one that calls an attention with these inputs"))
    return Dispatches(found)


def _tensors(given: object) -> Iterator[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(given)
    return (x for x in leaves if isinstance(x, Tensor))


def _check_device(device: str | torch.device | None, tensors: list[Tensor]) -> None:
    """Refuse another device than the model's: a model is run."""
    kind, own = kind_of(device), tensors[0].device.type if tensors else "cpu"
    if kind is not None and kind != own:
        fix = "Fix: move the model and its inputs there, or ask an Attention, which is not run."
        raise ValueError(refusal("device", repr(str(device)), f"the model's own, {own!r}", fix))


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Buffers as they were, also those that a forward changes, such as running means."""
    before = [(module, dict(module._buffers)) for module in model.modules()]
    held = [(x, x.detach().clone()) for x in model.buffers()]
    try:
        yield
    finally:
        for module, buffers in before:
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for x, value in held:
                # What is written to needlessly could not be read by a backward; not every operator counts its changes.
                if not torch.equal(x, value):
                    x.copy_(value)
