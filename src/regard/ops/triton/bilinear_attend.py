"""Activated bilinear attention as one registered operator, whatever the alignment."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.ops.transforms import asks_for_more
from regard.ops.triton import bilinear, bilinear_aligned
from regard.ops.triton.activate import supports
from regard.ops.triton.align import ALL, Align
from regard.ops.triton.bilinear import Operands
from regard.ops.triton.mapped import fold, one_by_one, too_many, unfold

__all__ = ["bilinear_attention", "supports"]

# Registered without the wrapper of torch.library.custom_op, which costs the host a little on every call.
_library = torch.library.Library("regard", "FRAGMENT")
_OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor? offset, Tensor? key_bias, Tensor? rate, Tensor? position, "
    "Tensor? mask, Tensor? seed, bool causal, float scale, float number, str act, float[] numbers, int[] kinds"
)
_LEARNED, _TENSORS = 7, 9
_library.define(f"bilinear_attention({_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    "bilinear_attention_backward(Tensor grad, Tensor? grad_lse, Tensor out, Tensor lse, Tensor soft, Tensor pick, "
    f"{_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _parts(operands) -> tuple[Operands, Align]:
    """What decides the scores, and what decides the weights beside them."""
    q, k, v, offset, key_bias, rate, position, mask, seed, causal, scale, number, act, numbers, kinds = operands
    x = Operands(q, k, v, offset, key_bias, rate, mask, causal, scale, number, act)
    return x, Align.unflat(seed, position, numbers, kinds)


# Contexts (B, H, Nq, d_v) in the dtype of v, log-sum-exp (B, H, Nq) in float32; what the softmax would read, and the keys chosen.
Results = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def _forward(*operands) -> Results:
    x, align = _parts(operands)
    if not align.is_plain:
        return bilinear_aligned.forward(x, align)
    return *bilinear.forward(x), None, None


def _all_there(out: Tensor, lse: Tensor, soft: Tensor | None, pick: Tensor | None) -> tuple[Tensor, ...]:
    """A registered operator gives and takes tensors: what is not there is empty."""
    soft = lse.new_empty(0) if soft is None else soft
    return out, lse, soft, lse.new_empty(0, dtype=torch.int32) if pick is None else pick


def _forward_registered(*operands):
    return _all_there(*_forward(*operands))


def _forward_fake(*operands):
    x, align = _parts(operands)
    b, h, nq, _, _, dv = x.sizes
    single = align.choice != ALL or align.position is not None
    return (
        x.v.new_empty(b, h, nq, dv),
        x.v.new_empty(b, h, nq, dtype=torch.float32),
        x.v.new_empty((b, h, nq, dv) if align.choice != ALL and align.learns else (0,), dtype=torch.float32),
        x.v.new_empty((b, h, nq) if single else (0,), dtype=torch.int32),
    )


def _gradients(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, soft: Tensor | None, pick: Tensor | None, *operands
):
    """Gradients of the first seven operands, in their dtypes; None where there is none."""
    x, align = _parts(operands)
    do = grad.to(out.dtype)
    if align.is_plain:
        return *bilinear.backward(x, out, lse, do, grad_lse), None
    found, position = bilinear_aligned.backward(x, align, (out, lse, soft, pick), do, grad_lse)
    return *found, position


def _gradients_registered(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, soft: Tensor, pick: Tensor, *operands
):
    found = _gradients(
        grad, grad_lse, out, lse, soft if soft.numel() else None, pick if pick.numel() else None, *operands
    )
    return tuple(lse.new_empty(0) if x is None else x for x in found)


def _gradients_fake(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, soft: Tensor, pick: Tensor, *operands
):
    given = operands[:_LEARNED]
    return tuple(
        grad.new_empty(0 if x is None else x.shape, dtype=torch.float32 if x is None else x.dtype) for x in given
    )


def _remember(ctx, inputs, output):
    ctx.numbers = inputs[_TENSORS:]
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.mark_non_differentiable(*(x for x in output[2:] if x is not None))


def _backward(ctx, do, dlse, *_):
    *operands, out, lse, soft, pick = ctx.saved_tensors
    do = torch.zeros_like(out) if do is None else do
    dlse = None if dlse is None else torch.where(lse > -torch.inf, dlse, 0.0)
    if asks_for_more(do):
        # Asked for a graph of the backward, the registered operator refuses its derivative by name; several gradients it takes one by one.
        results = _all_there(out, lse, soft, pick)
        grads = torch.ops.regard.bilinear_attention_backward(do, dlse, *results, *operands, *ctx.numbers)
    else:
        grads = _gradients(do, dlse, out, lse, soft, pick, *operands, *ctx.numbers)
    found = (None if x is None else g for x, g in zip(operands[:_LEARNED], grads, strict=True))
    return (*found, *(None,) * 8)


def _registered_backward(ctx, *grads):
    with torch.enable_grad():
        return _backward(ctx, *grads)


def _no_double_backward(ctx: object, *grads: Tensor) -> None:
    raise NotImplementedError(
        "second derivatives of the activated bilinear form are not available in the fused execution. "
        "Fix: use impl='dense', or run the forward inside regard.execution('dense')."
    )


_library.impl("bilinear_attention", _forward_registered, "CompositeExplicitAutograd")
_library.impl("bilinear_attention_backward", _gradients_registered, "CompositeExplicitAutograd")
torch.library.register_fake("regard::bilinear_attention", _forward_fake, lib=_library)
torch.library.register_fake("regard::bilinear_attention_backward", _gradients_fake, lib=_library)
torch.library.register_autograd(
    "regard::bilinear_attention", _registered_backward, setup_context=_remember, lib=_library
)
torch.library.register_autograd("regard::bilinear_attention_backward", _no_double_backward, lib=_library)


@torch.library.register_vmap("regard::bilinear_attention", lib=_library)
def _(info, in_dims, *operands):
    q, k, v, offset, key_bias, rate, position, mask, seed, *rest = operands
    size, dims = info.batch_size, in_dims
    batch, heads = [n for axis, n in enumerate(q.shape) if axis != dims[0]][:2]
    # The kernel has one rate for all.
    if seed is not None or dims[5] is not None or too_many(size, batch * heads):
        return one_by_one(torch.ops.regard.bilinear_attention, size, in_dims, operands)
    q, k, v, offset, key_bias = (fold(x, dims[n], size, batch) for n, x in enumerate((q, k, v, offset, key_bias)))
    position = fold(position, dims[6], size, batch * heads, shared=True)
    mask = fold(mask, dims[7], size, batch, shared=True)
    found = torch.ops.regard.bilinear_attention(q, k, v, offset, key_bias, rate, position, mask, seed, *rest)
    return unfold(found, size, (0,) * 4)


class BilinearAttention(torch.autograd.Function):
    """The same operator for eager mode, where the registered one spends as long on the host as the device on the work."""

    @staticmethod
    def forward(ctx, *operands):
        output = _forward(*operands)
        _remember(ctx, operands, output)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx, *grads):
        return _backward(ctx, *grads)


def bilinear_attention(*operands: object) -> Results:
    """The same by the quickest way to the kernels; None where the registered operator gives an empty tensor."""
    found: Results = BilinearAttention.apply(*operands)
    return found
