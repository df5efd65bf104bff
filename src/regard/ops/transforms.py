"""Which transforms of torch.func are at work, and forward-mode differentiation: of all of them, operators of ours know vmap alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, is_batchedtensor, is_legacy_batchedtensor
from torch.autograd import forward_ad


def transformed() -> bool:
    """Whether any transform is."""
    return torch._C._are_functorch_transforms_active() or _carries_tangents()


def only_mapped() -> bool:
    """Whether vmap is, and nothing else; while a graph is traced, nobody can say."""
    if torch.compiler.is_compiling() or not transformed() or _carries_tangents():
        return False
    return all(level.key() == TransformType.Vmap for level in get_interpreter_stack() or ())


def backward_or_mapped() -> bool:
    """Whether gradients are asked of torch.func, or vmap is alone at work: neither takes what is computed panel by panel."""
    if torch.compiler.is_compiling() or not transformed():
        return False
    return only_mapped() or any(x.key() == TransformType.Grad for x in get_interpreter_stack() or ())


def beyond_first() -> bool:
    """Whether they ask for more than first derivatives backward: for forward ones, or for derivatives of derivatives."""
    if torch.compiler.is_compiling() or not transformed():
        return False
    return _carries_tangents() or [x.key() for x in get_interpreter_stack() or ()].count(TransformType.Grad) > 1


def batched(x: Tensor) -> bool:
    """Whether x stands for several tensors, as the gradients of a vectorised Jacobian do, which no transform of the forward announced."""
    return is_batchedtensor(x) or is_legacy_batchedtensor(x)


def asks_for_more(grad: Tensor) -> bool:
    """Whether a backward is asked for more than one gradient as it is: for a graph of itself, or for several gradients at once."""
    return torch.is_grad_enabled() or batched(grad)


def _carries_tangents() -> bool:
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0
