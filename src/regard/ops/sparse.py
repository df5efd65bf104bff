"""Sparse weights of complete rows by an operator: kernels on CUDA, where Triton is and a row fits a program, Newton's steps on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from regard.ops import sparse_rows
from regard.ops.axes import KERNEL_DTYPES, spread
from regard.ops.ready import loaded
from regard.ops.transforms import only_mapped, transformed
from regard.ops.triton.mapped import fold, one_by_one

# Keys of a row that a program holds.
LONGEST = 16_384


def by_kernel(scores: Tensor, alpha: float | Tensor) -> bool:
    """Whether an operator aligns these rows."""
    if scores.dim() < 2 or scores.numel() == 0 or _differentiated_otherwise():
        return False
    if isinstance(alpha, Tensor) and (alpha.dim() > 0 or alpha.device != scores.device):
        return False
    if on_device(scores):
        return scores.dtype in KERNEL_DTYPES and scores.shape[-1] <= LONGEST and loaded("sparse_rows")
    return scores.device.type == "cpu" and scores.dtype in sparse_rows.DTYPES


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
        found = SparseRows.apply(rows, read, learned, fixed)  # type: ignore[no-untyped-call]
    return found.view(shape)


def _by(x: Tensor) -> Any:
    """What computes where a tensor is."""
    if not on_device(x):
        return sparse_rows
    from regard.ops.triton import sparse_rows as kernels

    return kernels


def _aligned(scores: Tensor, mask: Tensor | None, learned: Tensor | None, alpha: float) -> Tensor:
    found: Tensor = _by(scores).aligned(scores, mask, learned, alpha)
    return found


def _gradients(grad: Tensor, weights: Tensor, learned: Tensor | None, alpha: float) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _by(weights).gradients(grad, weights, learned, alpha)
    return found


def _equation(grad: Tensor, weights: Tensor, learned: Tensor | None, alpha: float) -> tuple[Tensor, Tensor]:
    """The same gradients as what autograd differentiates."""
    at = alpha if learned is None else learned
    inside = weights > 0
    p = torch.where(inside, weights, 1.0)
    s = torch.where(inside, p ** (2 - at), 0.0)
    apart = torch.where(inside, grad - (s * grad.masked_fill(~inside, 0.0)).sum(-1, keepdim=True) / _some(s), 0.0)
    if learned is None:
        return s * apart, grad.new_empty(0)
    turned = torch.where(inside, p * (1 / (at - 1) - p.log()), 0.0)
    return s * apart, ((turned * apart).sum() / (at - 1)).to(learned.dtype).reshape(learned.shape)


def _some(s: Tensor) -> Tensor:
    """Sums of rows, one where there is nothing to sum."""
    total = s.sum(-1, keepdim=True)
    return torch.where(total > 0, total, 1.0)


# Registered without the wrapper of torch.library.custom_op, which costs the host a little on every call.
_library = torch.library.Library("regard", "FRAGMENT")
_library.define("sparse_rows(Tensor scores, Tensor? mask, Tensor? learned, float alpha) -> Tensor")
_library.define("sparse_rows_backward(Tensor grad, Tensor weights, Tensor? learned, float alpha) -> (Tensor, Tensor)")


def _forward_fake(scores: Tensor, mask: Tensor | None, learned: Tensor | None, alpha: float) -> Tensor:
    return torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)


def _gradients_fake(grad: Tensor, weights: Tensor, learned: Tensor | None, alpha: float) -> tuple[Tensor, Tensor]:
    of_alpha = torch.empty(0, device=weights.device) if learned is None else torch.empty_like(learned)
    return torch.empty(weights.shape, dtype=weights.dtype, device=weights.device), of_alpha


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, learned, ctx.alpha = inputs
    ctx.save_for_backward(output, learned)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _through(torch.ops.regard.sparse_rows_backward, ctx, grad)


def _through(operator: Any, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # Asked for a graph of the backward, or for a batch of gradients, autograd gets the equation, which it differentiates and maps.
    operator = _equation if torch.is_grad_enabled() or is_legacy_batchedtensor(grad) else operator
    of_scores, of_alpha = operator(grad, *ctx.saved_tensors, ctx.alpha)
    return of_scores, None, of_alpha if ctx.needs_input_grad[2] else None, None


def _no_double_backward(ctx: object, *grads: Tensor) -> None:
    raise NotImplementedError(
        "the gradient of sparse weights by an operator has no derivative of its own. Fix: use impl='dense'."
    )


_library.impl("sparse_rows", _aligned, "CompositeExplicitAutograd")
_library.impl("sparse_rows_backward", _gradients, "CompositeExplicitAutograd")
torch.library.register_fake("regard::sparse_rows", _forward_fake, lib=_library)
torch.library.register_fake("regard::sparse_rows_backward", _gradients_fake, lib=_library)
torch.library.register_autograd("regard::sparse_rows", _backward, setup_context=_remember, lib=_library)
torch.library.register_autograd("regard::sparse_rows_backward", _no_double_backward, lib=_library)


def _mapped(info: Any, in_dims: Any, scores: Tensor, mask: Tensor | None, learned: Tensor | None, alpha: float) -> Any:
    size, (of_scores, of_mask, of_alpha, _) = info.batch_size, in_dims
    if of_alpha is not None:
        # A program has one alpha.
        (weights,), (dim,) = one_by_one(_alone, size, in_dims, (scores, mask, learned, alpha))
        return weights, dim
    length = scores.shape[1 if of_scores == 0 else 0]
    folded = fold(scores, of_scores, size, length), fold(mask, of_mask, size, length, shared=True)
    return torch.ops.regard.sparse_rows(*folded, learned, alpha).unflatten(0, (size, -1)), 0


def _mapped_back(info: Any, in_dims: Any, grad: Tensor, weights: Tensor, learned: Tensor | None, alpha: float) -> Any:
    size, (of_grad, of_weights, *_) = info.batch_size, in_dims
    if learned is not None:
        # The rows of one entry are summed up, not those of all.
        return one_by_one(torch.ops.regard.sparse_rows_backward, size, in_dims, (grad, weights, learned, alpha))
    length = weights.shape[1 if of_weights == 0 else 0]
    folded = fold(grad, of_grad, size, length), fold(weights, of_weights, size, length)
    found, nothing = torch.ops.regard.sparse_rows_backward(*folded, learned, alpha)
    return (found.unflatten(0, (size, -1)), nothing), (0, None)


def _alone(*args: Any) -> tuple[Tensor]:
    return (torch.ops.regard.sparse_rows(*args),)


torch.library.register_vmap("regard::sparse_rows", _mapped, lib=_library)
torch.library.register_vmap("regard::sparse_rows_backward", _mapped_back, lib=_library)


class SparseRows(torch.autograd.Function):
    """The same operator for eager mode, where the registered one takes the host longer."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        weights = _aligned(*inputs)
        _remember(ctx, inputs, weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _through(torch.ops.regard.sparse_rows_backward if transformed() else _gradients, ctx, grad)
