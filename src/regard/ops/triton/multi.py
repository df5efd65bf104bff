"""Multi-dimensional additive attention as one registered operator, with a matrix behind the hidden layer or without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.ops.transforms import asks_for_more
from regard.ops.triton import multi_product, multi_product_grads, multi_product_pair, multi_units
from regard.ops.triton.activate import supports
from regard.ops.triton.align import ALL, Align
from regard.ops.triton.mapped import fold, one_by_one, too_many, unfold
from regard.ops.triton.multi_parts import Operands

__all__ = ["multi_attend", "supports"]

_CALL = (
    "Tensor a, Tensor u, Tensor w, Tensor v, Tensor? mask, bool causal, str act, "
    "Tensor? seed, Tensor? position, float[] numbers, int[] kinds"
)
_library = torch.library.Library("regard", "FRAGMENT")
_library.define(f"multi_attend({_CALL}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"multi_attend_backward(Tensor grad, Tensor lse, Tensor soft, Tensor pick, Tensor reach, {_CALL}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)

Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
# Contexts (L, Nq, F) in the dtype of v, log-sum-exp; where the backward needs them softmax context, index of a choice, reach of windows.
Results = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def _operands(
    a: Tensor, u: Tensor, w: Tensor, v: Tensor, mask: Tensor | None, causal: bool, act: str,
    seed: Tensor | None, position: Tensor | None, numbers: list[float], kinds: list[int],
) -> Operands:  # fmt: skip
    """Of a (L, Nq, D), u (L, N, D), v (L, N, F); w (L or 1, D, F), or (L or 1, F) where the hidden units are the features.

    Mask bytes (L or 1, Nq or 1, N or 1); causal aligns the last query with the last key. Of `"tanh:c"` w has the factor c.
    """
    return Operands(a, u, w, v, mask, causal, act, Align.unflat(seed, position, numbers, kinds))


def _results(x: Operands) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Room for the first four results.

    In half precision contexts are too coarse for gradients, and stand beside the softmax context. What does not learn has no log-sum-exp.
    """
    shape = (x.lead, x.sizes[0], x.sizes[3])
    chooses = x.align.choice != ALL
    return (
        x.v.new_empty(shape),
        x.a.new_empty(shape if x.learns else (0,), dtype=torch.float32),
        x.a.new_empty(shape, dtype=torch.float32) if x.learns and (chooses or x.is_half) else None,
        x.a.new_empty(shape, dtype=torch.int32) if chooses else None,
    )


def _all_there(out: Tensor, lse: Tensor, soft: Tensor | None, pick: Tensor | None, reach: Tensor | None) -> Five:
    """A registered operator gives and takes tensors: what is not there is empty."""
    soft = lse.new_empty(0) if soft is None else soft
    pick, reach = (lse.new_empty(0, dtype=torch.int32) if x is None else x for x in (pick, reach))
    return out, lse, soft, pick, reach


def _forward(*call: object) -> Results:
    x = _operands(*call)  # type: ignore[arg-type]
    results, reach = _results(x), x.reach()
    kernels = multi_product if x.w.dim() == 3 else multi_units
    kernels.forward(x, reach, *results)
    return *results, reach


def _forward_registered(*call: object) -> Five:
    return _all_there(*_forward(*call))


def _forward_fake(*call: object) -> Five:
    x = _operands(*call)  # type: ignore[arg-type]
    local = x.align.position is not None
    reach = x.a.new_empty((2, x.lead, x.sizes[0]), dtype=torch.int32) if local else None
    return _all_there(*_results(x), reach)


def _gradients(
    grad: Tensor, lse: Tensor, soft: Tensor, pick: Tensor | None, reach: Tensor | None, *call: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of a, u, w, v, in their dtypes, and of the positions, None where there are none."""
    x = _operands(*call)  # type: ignore[arg-type]
    do = grad.float().contiguous()
    by_position: Tensor | None = None
    found: tuple[Tensor, ...]
    if x.w.dim() == 2:
        *found, by_position = multi_units.backward(x, reach, do, lse, soft, pick)  # type: ignore[assignment]
    elif x.learns and x.align.position is None:
        found = multi_product_grads.backward(x, do, lse, soft, pick)
    else:
        *found, by_position = multi_product_pair.backward(x, reach, do, lse, soft, pick)  # type: ignore[assignment]
    da, du, dw, dv = (g.to(like.dtype) for g, like in zip(found, (x.a, x.u, x.w, x.v), strict=True))
    position = x.align.position
    if position is not None and by_position is None:
        return da, du, dw, dv, torch.zeros_like(position)
    if position is not None and by_position is not None and position.shape[0] == 1:
        by_position = by_position.sum(0, keepdim=True)
    return da, du, dw, dv, by_position


def _gradients_registered(grad: Tensor, lse: Tensor, soft: Tensor, pick: Tensor, reach: Tensor, *call: object) -> Five:
    given = (x if x.numel() else None for x in (pick, reach))
    *found, by_position = _gradients(grad, lse, soft, *given, *call)
    return *found, lse.new_empty(0) if by_position is None else by_position  # type: ignore[return-value]


def _gradients_fake(grad: Tensor, lse: Tensor, soft: Tensor, pick: Tensor, reach: Tensor, *call: object) -> Five:
    x = _operands(*call)  # type: ignore[arg-type]
    da, du, dw, dv = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in (x.a, x.u, x.w, x.v))
    position = x.align.position
    of_position = lse.new_empty(0 if position is None else position.shape)
    return da, du, dw, dv, of_position


def _remember(ctx: Any, inputs: tuple[object, ...], output: Results) -> None:
    a, u, w, v, mask, ctx.causal, ctx.act, seed, position, ctx.numbers, ctx.kinds = inputs
    out, lse, soft, pick, reach = output
    ctx.mark_non_differentiable(*(x for x in output[1:] if x is not None))
    read = out if soft is None or not soft.numel() else soft
    ctx.save_for_backward(a, u, w, v, mask, seed, position, lse, read, pick, reach)


def _backward(ctx: Any, do: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    return _through(torch.ops.regard.multi_attend_backward, ctx, do)


def _through(gradients: Any, ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    a, u, w, v, mask, seed, position, *kept = ctx.saved_tensors
    if gradients is not _gradients:
        _, *kept = _all_there(a, *kept)
    da, du, dw, dv, by_position = gradients(
        do, *kept, a, u, w, v, mask, ctx.causal, ctx.act, seed, position, ctx.numbers, ctx.kinds
    )
    return da, du, dw, dv, None, None, None, None, None if position is None else by_position, None, None


def _no_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(
        "second derivatives of multi-dimensional attention are not available in the fused execution. "
        "Fix: use impl='dense', or run the forward inside regard.execution('dense')."
    )


_library.impl("multi_attend", _forward_registered, "CompositeExplicitAutograd")
_library.impl("multi_attend_backward", _gradients_registered, "CompositeExplicitAutograd")
torch.library.register_fake("regard::multi_attend", _forward_fake, lib=_library)
torch.library.register_fake("regard::multi_attend_backward", _gradients_fake, lib=_library)
torch.library.register_autograd("regard::multi_attend", _backward, setup_context=_remember, lib=_library)
torch.library.register_autograd("regard::multi_attend_backward", _no_double_backward, lib=_library)


@torch.library.register_vmap("regard::multi_attend", lib=_library)
def _(info: Any, in_dims: Any, a: Tensor, u: Tensor, w: Tensor, v: Tensor, mask: Tensor | None, *rest: Any) -> Any:
    causal, act, seed, position, *more = rest
    size, length = info.batch_size, a.shape[0 if in_dims[0] != 0 else 1]
    if seed is not None or too_many(size, length):
        return one_by_one(torch.ops.regard.multi_attend, size, in_dims, (a, u, w, v, mask, *rest))
    a, u, v = (fold(x, in_dims[k], size, length) for k, x in ((0, a), (1, u), (3, v)))  # type: ignore[assignment]
    w, mask, position = (fold(x, in_dims[k], size, length, shared=True) for k, x in ((2, w), (4, mask), (8, position)))  # type: ignore[assignment]
    found = torch.ops.regard.multi_attend(a, u, w, v, mask, causal, act, seed, position, *more)
    # The reach of a window has its two ends first.
    return unfold(found, size, (0, 0, 0, 0, 1))


class MultiAttend(torch.autograd.Function):
    """The same operator for eager mode, where the registered one spends as long on the host as the device on the work."""

    @staticmethod
    def forward(ctx: Any, *call: object) -> Results:
        results = _forward(*call)
        _remember(ctx, call, results)
        # No zeros are made for gradients that the others do not have.
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if do is None:
            # Whatever read the contexts gave them no gradient.
            return (None,) * len(ctx.needs_input_grad)
        # Asked for a graph of the backward, the registered operator refuses its derivative by name; several gradients it takes one by one.
        gradients = torch.ops.regard.multi_attend_backward if asks_for_more(do) else _gradients
        return _through(gradients, ctx, do)


def multi_attend(*call: object) -> Results:
    """The same by the quickest way to the kernels; None where the registered operator gives an empty tensor."""
    results: Results = MultiAttend.apply(*call)
    return results
