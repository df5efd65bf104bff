"""Which transforms of torch.func are at work: of all of them, operators of ours know vmap alone."""

from __future__ import annotations

import torch
from torch._C._functorch import TransformType, get_interpreter_stack


def transformed() -> bool:
    """Whether any transform is."""
    return torch._C._are_functorch_transforms_active()


def only_mapped() -> bool:
    """Whether vmap is, and nothing else; while a graph is traced, nobody can say."""
    if torch.compiler.is_compiling() or not transformed():
        return False
    return all(level.key() == TransformType.Vmap for level in get_interpreter_stack() or ())
