"""Whether there are kernels: Triton is imported here, on first use, also while a graph is being compiled."""

from __future__ import annotations

import importlib
import importlib.util
import sys


def loaded(kernels: str) -> bool:
    """Register the operators of a module of `regard.ops.triton`; False where Triton is not installed."""
    module = f"regard.ops.triton.{kernels}"
    if module in sys.modules:
        return True
    if importlib.util.find_spec("triton") is None:
        return False
    importlib.import_module(module)
    return True


def kernel_problem(kernels: str, activation: str) -> str:
    """Why kernels do not know an activation; empty if they do, and are then registered."""
    if not loaded(kernels):
        return "Triton is not installed"
    known = importlib.import_module(f"regard.ops.triton.{kernels}").supports(activation)
    return "" if known else f"activation {activation!r} has no kernel"


# What torch.compiler.assume_constant_result does, without its import of the whole compiler.
loaded._dynamo_marked_constant = True  # type: ignore[attr-defined]
kernel_problem._dynamo_marked_constant = True  # type: ignore[attr-defined]
