"""Sparse weights of complete rows by a kernel: on CUDA, where Triton is and a row fits the registers of a program."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.ops.axes import KERNEL_DTYPES, spread
from regard.ops.ready import loaded
from regard.ops.transforms import only_mapped, transformed

# Keys of a row that a program holds.
LONGEST = 16_384


def by_kernel(scores: Tensor, alpha: float | Tensor) -> bool:
    """Whether a kernel aligns these rows."""
    known = on_device(scores) and scores.dtype in KERNEL_DTYPES and scores.dim() > 1
    if not known or not 0 < scores.shape[-1] <= LONGEST or scores.numel() == 0:
        return False
    if isinstance(alpha, Tensor) and (alpha.dim() > 0 or alpha.device != scores.device):
        return False
    return not _differentiated_otherwise() and loaded("sparse_rows")


def on_device(x: Tensor) -> bool:
    """Whether there are kernels where a tensor is."""
    return x.device.type == "cuda"


def _differentiated_otherwise() -> bool:
    """Whether a transform or forward mode, neither of which knows operators of ours, is at work."""
    if torch.compiler.is_compiling():
        return transformed()
    return forward_ad._current_level >= 0 or (transformed() and not only_mapped())


def aligned(scores: Tensor, mask: Tensor | None, alpha: float | Tensor) -> Tensor:
    """Weights of scores (..., Nq, N) under entmax, in their dtype; zeros where nothing is allowed."""
    shape = scores.shape if mask is None else torch.broadcast_shapes(scores.shape, mask.shape)
    lead = tuple(shape[:-2])
    rows = scores.expand(shape).reshape(-1, *shape[-2:])
    read = None if mask is None else spread(mask, lead).view(torch.uint8)
    learned, fixed = (alpha, 0.0) if isinstance(alpha, Tensor) else (None, alpha)
    if torch.compiler.is_compiling() or transformed():
        found: Tensor = torch.ops.regard.sparse_rows(rows, read, learned, fixed)
    else:
        from regard.ops.triton.sparse_rows import SparseRows

        found = SparseRows.apply(rows, read, learned, fixed)  # type: ignore[no-untyped-call]
    return found.view(shape)
