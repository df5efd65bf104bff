"""Parameters that are spread over processes (FSDP): put together to be judged and written down, and taken apart again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def gathered(module: nn.Module) -> AbstractContextManager[None]:
    """Whole parameters on every process."""
    root = _root(module)
    if root is None:
        return nullcontext()
    whole: AbstractContextManager[None] = root.summon_full_params(root, writeback=False)
    return whole


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Whole parameters by name; every process must ask."""
    root = _root(module)
    if root is None:
        return module.state_dict()
    with _whole_states(root):
        weights: dict[str, Tensor] = root.state_dict()
    return weights


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state of an optimiser as if nothing were spread; every process must ask."""
    root = _root(module)
    if root is None:
        return optimizer.state_dict()
    with _whole_states(root):
        state: dict[str, Any] = root.optim_state_dict(root, optimizer)
    return state


def place_optimizer_state(module: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Give each process its part of a kept state."""
    root = _root(module)
    if root is not None:
        with _whole_states(root):
            state = root.optim_state_dict_to_load(root, optimizer, state)
    optimizer.load_state_dict(state)


def _root(module: nn.Module) -> Any:
    """The outermost module that is spread, inside what Fabric puts around it."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    inner = getattr(module, "_forward_module", module)
    return inner if isinstance(inner, FullyShardedDataParallel) else None


def _whole_states(root: Any) -> AbstractContextManager[Any]:
    from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType

    # The process that writes has them all, on the CPU; when they are read every process has read the file.
    states: AbstractContextManager[Any] = root.state_dict_type(
        root,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=False),
    )
    return states
