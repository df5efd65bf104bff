"""Parameters that are spread over processes (FSDP): put together to be judged and written down, and taken apart again.

By torch's `fully_shard`, which runs over any backend: over gloo on CPUs as over NCCL on GPUs. What is written down is as if nothing
had been spread, so that a run may go on with another strategy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from regard.transformer import DecoderLayer, EncoderLayer


class Spread:
    """The parameters of a module over the processes of a mesh; those of a layer come together in its turn, others for the whole update.

    A process may leave a parameter alone that another one uses. All of them then bring a gradient of it, if only zero; one that nobody
    uses has none, and the optimiser leaves it as it is.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.module = module
        self._names: dict[int, str] = {}  # of whole parameters
        owners = Counter(id(x) for part in module.modules() for x in part.parameters(recurse=False))
        for path, part in module.named_modules():
            # A parameter that several layers share would have to be in several places at once.
            alone = isinstance(part, EncoderLayer | DecoderLayer) and all(owners[id(x)] == 1 for x in part.parameters())
            if alone or part is module:
                # Before the hook that takes the parameters apart again.
                part.register_forward_hook(lambda part, given, result, path=path: self._bring_all(part, path, result))
                if part is not module:
                    fully_shard(part, mesh=mesh)
        fully_shard(module, mesh=mesh)

    def _bring_all(self, part: nn.Module, path: str, result: Tensor) -> Tensor:
        here = [(name, x) for name, x in part.named_parameters(path) if x.requires_grad and not isinstance(x, DTensor)]
        self._names |= {id(x): name for name, x in here}
        if not here or not torch.is_grad_enabled():
            return result
        brought: Tensor = _Bring.apply(result, *(x for _, x in here))  # type: ignore[no-untyped-call]
        return brought

    def used(self, loss: Tensor) -> Tensor:
        """Which parameters some process uses, in their order; every process must ask."""
        names = {self._names[k] for k in _leaves(loss) if k in self._names}
        found = [name in names for name, _ in self.module.named_parameters()]
        flags = torch.tensor(found, dtype=torch.int32, device=loss.device)
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
        return flags

    def leave_others(self, used: Tensor) -> None:
        """Take gradients of parameters away that nobody used."""
        for x, is_used in zip(self.module.parameters(), used.tolist(), strict=True):
            if not is_used:
                x.grad = None


class _Bring(torch.autograd.Function):
    """Hands a tensor on, and zeros to parameters."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return result.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, *(torch.zeros_like(x) for x in ctx.parameters)


def _leaves(loss: Tensor) -> set[int]:
    """Parameters that a loss was computed from."""
    found, seen, ahead = set(), set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        following = [after for after, _ in node.next_functions]
        ahead += following[:1] if node.name() == "_BringBackward" else following
    return found


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
