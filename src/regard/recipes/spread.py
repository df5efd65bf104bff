"""Parameters that are spread over processes (FSDP): put together to be judged and written down, and taken apart again.

By torch's `fully_shard`, which runs over any backend: over gloo on CPUs as over NCCL on GPUs. What is written down is as if nothing
had been spread, so that a run may go on with another strategy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from regard.transformer import DecoderLayer, EncoderLayer


def spread(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Spread the parameters of a module; those of a layer come together when it is its turn, all others for the whole update."""
    owners = Counter(id(x) for part in module.modules() for x in part.parameters(recurse=False))
    for part in module.modules():
        # A parameter that several layers share would have to be in several places at once.
        if isinstance(part, EncoderLayer | DecoderLayer) and all(owners[id(x)] == 1 for x in part.parameters()):
            fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Whole parameters on every process."""
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        # A layer that was called would otherwise let go of them.
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for k, part in enumerate(parts):
            part.reshard()
            # The outermost one keeps them until the backward anyway.
            part.set_reshard_after_forward(k > 0, recurse=False)


def of_all(loss: Tensor, module: nn.Module) -> Tensor:
    """The loss, with a gradient, if only zero, of every parameter: where one is used in some processes alone, all must bring it."""
    if not isinstance(module, FSDPModule):
        return loss
    layers = [part for part in module.modules() if isinstance(part, FSDPModule) and part is not module]
    # Those of a layer are used whenever it is called, and are not here when it is not.
    elsewhere = {id(x) for layer in layers for x in layer.parameters()}
    own = [x for x in module.parameters() if x.requires_grad and id(x) not in elsewhere]
    return loss + sum(x.flatten()[:0].sum() for x in own)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Whole parameters by name; every process must ask."""
    return {name: _whole(x) for name, x in module.state_dict().items()}


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state of an optimiser as if nothing were spread; every process must ask."""
    state = optimizer.state_dict()
    kept = {k: {name: _whole(x) for name, x in of_one.items()} for k, of_one in state["state"].items()}
    return {**state, "state": kept}


def place_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Give each process its part of a kept state."""
    parameters = [x for group in optimizer.param_groups for x in group["params"]]
    kept = {k: {name: _part(x, parameters[k]) for name, x in of_one.items()} for k, of_one in state["state"].items()}
    optimizer.load_state_dict({**state, "state": kept})


def _whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _part(x: Any, parameter: Tensor) -> Any:
    if not isinstance(parameter, DTensor) or not isinstance(x, Tensor) or x.shape != parameter.shape:
        return x
    return distribute_tensor(x.to(parameter.device), parameter.device_mesh, parameter.placements)
