"""The one place where an attention meets its observers: what changes calls, what asks something of them, and what looks at them.

`regard.observe` fills these lists; attention modules only call `changed`, `asked` and `seen`. The model itself is never modified.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from regard.ops.call import Call

Intervention = Callable[[nn.Module, Call], Call]
Observer = Callable[[nn.Module, Call], None]

interventions: list[Intervention] = []
askers: list[Intervention] = []
observers: list[Observer] = []
_aside = threading.local()
# Threads share these lists: one that leaves must not shift what another is reading, which therefore reads a copy.


def changed(module: nn.Module, call: Call) -> Call:
    """The call after all interventions, in the order in which they were entered."""
    if not interventions or torch.compiler.is_compiling() or getattr(_aside, "on", False):
        return call
    for intervene in tuple(interventions):
        call = intervene(module, call)
    return call


@contextmanager
def aside() -> Iterator[None]:
    """No interventions in this thread meanwhile; those of others, and the list, stay as they are."""
    before, _aside.on = getattr(_aside, "on", False), True
    try:
        yield
    finally:
        _aside.on = before


@contextmanager
def shown_only_to(observe: Observer, decided: Callable[[Any], None]) -> Iterator[None]:
    """Show the calls of this thread to one observer, and what was decided of each before it, and neither show nor tell others anything."""
    before = getattr(_aside, "only", None)
    _aside.only = (observe, decided)
    # A list that is not empty lets every call be made; of other threads it observes nothing.
    observers.append(_nobody)
    try:
        yield
    finally:
        observers.remove(_nobody)
        _aside.only = before


def _nobody(module: nn.Module, call: Call) -> None:
    pass


def decided(dispatch: object) -> None:
    """Tell who explains this thread's calls what execution is about to run."""
    only = getattr(_aside, "only", None)
    if only is not None:
        only[1](dispatch)


def asked(module: nn.Module, call: Call) -> Call:
    """The call with what is asked of it, so that an execution may find it on its way; whoever asks first is heard."""
    if not askers or torch.compiler.is_compiling() or _inside_backward() or getattr(_aside, "only", None) is not None:
        return call
    for ask in tuple(askers):
        call = call if call.asked is not None else ask(module, call)
    return call


def seen(module: nn.Module, call: Call) -> None:
    """Show the call to all observers; a recomputation inside a backward is not shown again."""
    if not observers or torch.compiler.is_compiling() or _inside_backward():
        return
    only = getattr(_aside, "only", None)
    if only is not None:
        only[0](module, call)
        return
    call = call.seen()
    for observe in tuple(observers):
        observe(module, call)


def _inside_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
