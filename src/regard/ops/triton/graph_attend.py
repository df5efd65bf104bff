"""Soft attention along edges as one registered operator."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.ops.transforms import asks_for_more
from regard.ops.triton import activate, graph
from regard.ops.triton.graph import Operands


def supports(act: str) -> bool:
    """Whether the kernel knows an activation, or the product in place of one."""
    return act == graph.PRODUCT or (activate.supports(act) and not act.startswith("tanh:"))


_library = torch.library.Library("regard", "FRAGMENT")
_OPERANDS = (
    "Tensor a, Tensor u, Tensor? value, Tensor weight, Tensor keys, Tensor? values, Tensor targets, Tensor bounds, "
    "Tensor? key_order, Tensor? key_bounds, Tensor? value_order, Tensor? value_bounds, "
    "Tensor? mask, Tensor? seed, float dropout, str act"
)
_library.define(f"edge_kernel({_OPERANDS}) -> (Tensor, Tensor)")
_library.define(
    f"edge_kernel_backward(Tensor grad, Tensor context, Tensor lse, {_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _forward(*operands):
    """Contexts (Nq, H, d_v) and the logarithm of what is divided by (Nq, H), both in float32."""
    return graph.forward(Operands(*operands))


def _forward_fake(*operands):
    x = Operands(*operands)
    shape = x.a.shape[:2]
    return x.a.new_empty(*shape, x.width, dtype=torch.float32), x.a.new_empty(shape, dtype=torch.float32)


def _gradients(grad: Tensor, context: Tensor, lse: Tensor, *operands):
    """Gradients of a, u, value (empty where there is none) and weight, in their dtypes."""
    return graph.backward(Operands(*operands), context, lse, grad)


def _gradients_fake(grad: Tensor, context: Tensor, lse: Tensor, *operands):
    x = Operands(*operands)
    of_value = x.u.new_empty(0) if x.value is None else x.value.new_empty(x.value.shape)
    return x.a.new_empty(x.a.shape), x.u.new_empty(x.u.shape), of_value, x.weight.new_empty(x.weight.shape)


def _remember(ctx, inputs, output):
    *tensors, dropout, act = inputs
    ctx.numbers = dropout, act
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _):
    return _through(torch.ops.regard.edge_kernel_backward, ctx, grad)


def _through(gradients, ctx, grad):
    *operands, context, lse = ctx.saved_tensors
    da, du, dv, dw = gradients(grad, context, lse, *operands, *ctx.numbers)
    return da, du, None if operands[2] is None else dv, dw, *(None,) * (len(ctx.needs_input_grad) - 4)


def _no_double_backward(ctx: object, *grads: Tensor) -> None:
    raise NotImplementedError(
        "second derivatives of attention along edges are not available in the fused execution. "
        "Fix: use impl='dense', or run the forward inside regard.execution('dense')."
    )


_library.impl("edge_kernel", _forward, "CompositeExplicitAutograd")
_library.impl("edge_kernel_backward", _gradients, "CompositeExplicitAutograd")
torch.library.register_fake("regard::edge_kernel", _forward_fake, lib=_library)
torch.library.register_fake("regard::edge_kernel_backward", _gradients_fake, lib=_library)
torch.library.register_autograd("regard::edge_kernel", _backward, setup_context=_remember, lib=_library)
torch.library.register_autograd("regard::edge_kernel_backward", _no_double_backward, lib=_library)


class EdgeKernel(torch.autograd.Function):
    """The same operator for eager mode, where the registered one spends as long on the host as the device on the work."""

    @staticmethod
    def forward(ctx, *operands):
        output = _forward(*operands)
        _remember(ctx, operands, output)
        # No zeros are made for a gradient that the second does not have.
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx, grad, _):
        if grad is None:
            # Whatever read the contexts gave them no gradient.
            return (None,) * len(ctx.needs_input_grad)
        # Asked for a graph of the backward, the registered operator refuses its derivative by name; several gradients it takes one by one.
        gradients = torch.ops.regard.edge_kernel_backward if asks_for_more(grad) else _gradients
        return _through(gradients, ctx, grad)


def edge_kernel(*operands: object) -> Tensor:
    """Contexts of `Operands` by the quickest way to the kernels."""
    context: Tensor = EdgeKernel.apply(*operands)[0]
    return context
