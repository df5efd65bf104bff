"""Fused execution of the multi-dimensional additive form: our own kernels, one softmax for every feature."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.ops.axes import KERNEL_DTYPES, flat, mask_bytes, why_too_many
from regard.ops.call import Call
from regard.ops.forms import AdditiveForm
from regard.ops.ready import kernel_problem
from regard.ops.transforms import transformed

# Hidden units before a matrix beyond which a tile of pairs does not fit the registers of a processor.
WIDEST, WIDEST_HALF = 128, 256


def why_not_multi(call: Call) -> str | None:
    """The reason why no kernel computes this multi-dimensional call, or None."""
    form = call.form
    assert isinstance(form, AdditiveForm)
    if call.device_type != "cuda":
        return "the additive form has no fused execution on this device, only on CUDA"
    if call.bias is not None:
        return "a bias on multi-dimensional scores"
    if form.a.dtype not in KERNEL_DTYPES or call.value.dtype not in KERNEL_DTYPES:
        return f"{torch.promote_types(form.a.dtype, call.value.dtype)}"
    problem = why_too_many(math.prod(call.lead)) or kernel_problem("multi", form.activation.known)
    if problem:
        return problem
    from regard.ops.triton.align import why_not_align

    reason = why_not_align(call)
    if reason is not None or form.weight is None:
        return reason
    dtype = _dtype(call)
    widest = WIDEST if dtype == torch.float32 else WIDEST_HALF
    if form.a.shape[-1] > widest:
        return f"more than {widest} hidden units before a matrix, in {dtype}"
    return None


def multi_kernel(call: Call) -> Tensor:
    """Attention with a weight for every feature by one operator."""
    from regard.ops.triton.align import Align

    form, lead = call.form, call.lead
    assert isinstance(form, AdditiveForm)
    if 0 in (call.n, call.nq, call.value.shape[-1], *lead):
        return call.value.new_zeros(*lead, call.nq, call.value.shape[-1])
    dtype = _dtype(call)
    a, u, v = (flat(x.to(dtype), lead) for x in (form.a, form.u, call.value))
    causal = getattr(call.mask, "is_plain_causal", False)
    mask = None
    if call.mask is not None and not causal:
        mask = mask_bytes(call.mask.tile(range(call.nq), range(call.n), call.device), lead)
    operands = (a, u, _weight(call), v, mask, causal, form.activation.spec, *Align.of(call).flat())
    if torch.compiler.is_compiling() or transformed():
        out: Tensor = torch.ops.regard.multi_attend(*operands)[0]
    else:
        from regard.ops.triton.multi import multi_attend

        out = multi_attend(*operands)[0]
    return out.to(call.value.dtype).view(*lead, *out.shape[1:])


def _dtype(call: Call) -> torch.dtype:
    """One dtype for everything that meets; statistics are kept in float32 inside."""
    form, rule = call.form, call.align.rule(call)
    assert isinstance(form, AdditiveForm)
    if rule is not None and rule.choice:
        # Half-precision products would choose another key where two are close.
        return torch.float32
    return torch.promote_types(torch.promote_types(form.a.dtype, form.u.dtype), call.value.dtype)


def _weight(call: Call) -> Tensor:
    """What the hidden layer is multiplied by, (L or 1, D, F), or (1, F) where its units are the features, in float32."""
    from regard.ops.triton.align import temperature

    form = call.form
    assert isinstance(form, AdditiveForm)
    # Of c tanh(z / c) the kernel computes the hyperbolic tangent alone.
    name, _, bound = form.activation.spec.partition(":")
    factor = (float(bound) if name == "tanh" and bound else 1.0) / temperature(call)
    if form.weight is None:
        return call.value.new_ones(1, call.value.shape[-1], dtype=torch.float32) * factor
    weight = form.weight.float() * factor
    return weight[None] if weight.dim() == 2 else flat(weight, call.lead)
