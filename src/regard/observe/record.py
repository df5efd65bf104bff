"""`record`: see every attention inside a model."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from regard._errors import refusal
from regard.general.attention import Attention
from regard.observe.adopt.multihead import AdoptedMultiheadAttention
from regard.observe.fields import ask, check_fields
from regard.observe.trace import ADOPT, Recorded, Trace
from regard.ops import hooks
from regard.ops.call import Call

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# `module` is also a name that people give: it is left out only below those that are known to add it.
_OF_MODULE = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)


def _is_wrapper(parent: nn.Module, name: str) -> bool:
    """Whether a child stands for its parent."""
    return name in _WRAPPERS or (name == "module" and isinstance(parent, _OF_MODULE))


def paths_of(model: nn.Module) -> dict[int, str]:
    """The path of each module by identity, without the segments that wrappers add."""
    if not isinstance(model, nn.Module):
        raise TypeError(refusal("model", type(model).__name__, "a torch.nn.Module"))
    paths = {id(model): ""}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        before, _, last = name.rpartition(".")
        if name:
            parent = modules[before]
            outer = paths[id(parent)]
            inner = "" if _is_wrapper(parent, last) else last
            paths[id(module)] = f"{outer}.{inner}".strip(".")
    return paths


def can_be_seen(model: nn.Module) -> bool:
    """Whether a model holds attention of this library, or that was adopted."""
    if any(isinstance(part, Attention | AdoptedMultiheadAttention) for part in model.modules()):
        return True
    if "transformers" not in sys.modules:
        return False
    from regard.observe.adopt.huggingface import NAME

    # Parts of a model share its configuration.
    configs = (getattr(part, "config", None) for part in model.modules())
    return any(getattr(config, "_attn_implementation", None) == NAME for config in configs)


_lock, _eager, _watching = threading.Lock(), ExitStack(), 0


@contextmanager
def observing() -> Iterator[None]:
    """Let compiled models run eagerly while anybody watches, since a compiled graph calls no observer."""
    global _watching
    with _lock:
        # The stance belongs to the process: the first to come sets it, the last to leave takes it back.
        if _watching == 0:
            _eager.enter_context(torch.compiler.set_stance("force_eager"))
        _watching += 1
    try:
        yield
    finally:
        with _lock:
            _watching -= 1
            if _watching == 0:
                _eager.close()


@contextmanager
def record(model: nn.Module, *fields: str, **with_argument: Any) -> Iterator[Trace]:
    """Record every attention of a model while it runs.

    The forward is unchanged, to the bit. Without fields, the trace keeps what each call was made of and computes on demand,
    differentiably. With fields (`"entropy"`, `"topk"`, … or `topk=8`, `mass_on=region`), they are computed at once and nothing
    else is kept. It warns where the model holds no attention, so that nothing could be recorded.

    Args:
        model: any module that holds attention of this library, however deep.
        *fields: names of fields to keep.
        **with_argument: fields that take an argument.

    Example:
        >>> import regard as rg
        >>> attend, x = rg.Attention("dot"), torch.randn(2, 5, 4)
        >>> with rg.record(attend) as trace:
        ...     context = attend(x, x)
        >>> trace.weights.shape
        torch.Size([2, 5, 5])
    """
    wanted = dict.fromkeys(fields) | with_argument
    check_fields(wanted)
    paths, trace = paths_of(model), Trace()

    def observe(module: nn.Module, call: Call) -> None:
        path = paths.get(id(module))
        if path is None:
            return
        entry = Recorded(path, call)
        if wanted:
            with torch.no_grad():
                entry = entry.computed(wanted)
        trace.add(entry)

    def asking(module: nn.Module, call: Call) -> Call:
        return ask(call, wanted) if id(module) in paths else call

    with observing():
        hooks.observers.append(observe)
        if wanted:
            hooks.askers.append(asking)
        try:
            yield trace
        finally:
            hooks.observers.remove(observe)
            if wanted:
                hooks.askers.remove(asking)
    if not len(trace) and not can_be_seen(model):
        why = f"the model holds no attention, so nothing was recorded. {ADOPT}"
        warnings.warn(f"record({type(model).__name__}): {why}", stacklevel=3)
