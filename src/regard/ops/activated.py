"""Fused execution of the bilinear form under an activation, which may be the identity: our own kernel, on CUDA devices with Triton."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.ops.axes import KERNEL_DTYPES, four_axes, mask_axes, why_too_many
from regard.ops.call import Call
from regard.ops.forms import BilinearForm
from regard.ops.ready import kernel_problem
from regard.ops.transforms import transformed

# Widths of keys and values whose tiles fit a processor.
WIDEST = 256
_NARROWEST = 16


def why_not_activated(call: Call) -> str | None:
    """The reason why no kernel computes this call, or None."""
    form = call.form
    assert isinstance(form, BilinearForm)
    if call.device_type != "cuda":
        return f"activation {_activation(form)!r} on the scores has no fused execution on this device, only on CUDA"
    if form.multi:
        return "multi-dimensional weights"
    if call.align.rule(call) is None:
        return f"alignment {type(call.align).__name__} has no kernel"
    if call.first_key != 0:
        return "keys that begin in the middle of a sequence"
    if call.bias is not None:
        return "a bias on activated scores"
    if _dtype(call) not in KERNEL_DTYPES:
        return f"{_dtype(call)}"
    if max(form.query.shape[-1], call.value.shape[-1]) > WIDEST:
        return f"keys or values wider than {WIDEST}"
    return why_too_many(math.prod(call.lead)) or kernel_problem("bilinear_attend", _activation(form)) or None


def activated_kernel(call: Call) -> Tensor:
    """Attention with activated bilinear scores by one operator."""
    form, lead = call.form, call.lead
    assert isinstance(form, BilinearForm)
    if 0 in (call.n, call.nq, *lead):
        return call.value.new_zeros(*lead, call.nq, call.value.shape[-1])
    dtype = _dtype(call)
    # On a device half-precision products with a single column of values come out wrong: it gets company.
    width = call.value.shape[-1]
    value = torch.nn.functional.pad(call.value, (0, _NARROWEST - width)) if width == 1 else call.value
    q, k, v = (four_axes(x if x.dtype == dtype else x.to(dtype), lead) for x in (form.query, form.key, value))
    offset = bias = None
    if form.offset is not None:
        offset = four_axes(form.offset.float().expand(*lead, 1, 1), lead).squeeze(-1).squeeze(-1)
    if form.key_bias is not None:
        bias = four_axes(form.key_bias.float().unsqueeze(-2), lead).squeeze(-2)
    from regard.ops.triton.align import Align, temperature

    tau, (seed, position, numbers, kinds) = temperature(call), Align.of(call).flat()
    rate = (1.0 / tau.float()).reshape(1) if isinstance(tau, Tensor) else None
    number = 1.0 if isinstance(tau, Tensor) else 1.0 / float(tau)
    causal = getattr(call.mask, "is_plain_causal", False)
    allowed = None if call.mask is None or causal else call.tile().mask()
    mask = None if allowed is None else mask_axes(allowed, lead).to(torch.uint8)
    tensors = (q, k, v, offset, bias, rate, position, mask, seed)
    operands = (*tensors, causal, float(form.scale), number, _activation(form), numbers, kinds)
    if torch.compiler.is_compiling() or transformed():
        out: Tensor = torch.ops.regard.bilinear_attention(*operands)[0]
    else:
        from regard.ops.triton.bilinear_attend import bilinear_attention

        out = bilinear_attention(*operands)[0]
    out = out if width > 1 else out[..., :width]
    return out if len(lead) == 2 else out.reshape(*lead, *out.shape[2:])


def _activation(form: BilinearForm) -> str:
    return "identity" if form.activation is None else form.activation.known


def _dtype(call: Call) -> torch.dtype:
    """One dtype for everything that meets in a product; statistics are kept in float32 inside."""
    form = call.form
    assert isinstance(form, BilinearForm)
    return torch.promote_types(torch.promote_types(form.query.dtype, form.key.dtype), call.value.dtype)
