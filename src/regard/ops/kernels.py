"""Fused execution of the additive form: our own kernels, on CUDA devices with Triton."""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor

from regard.ops.call import Call
from regard.ops.forms import AdditiveForm

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def kernel_problem(activation: str) -> str:
    """Why there is no kernel for an activation; empty if there is one, which is then registered.

    Triton is imported here, on first use, also while a graph is being compiled.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    from regard.ops.triton.attend import supports

    return "" if supports(activation) else f"activation {activation!r} has no kernel"


# What torch.compiler.assume_constant_result does, without its import of the whole compiler.
kernel_problem._dynamo_marked_constant = True  # type: ignore[attr-defined]


def why_not_kernel(call: Call) -> str | None:
    """The reason why no kernel computes this call, or None."""
    form = call.form
    assert isinstance(form, AdditiveForm)
    if call.device.type != "cuda":
        return "the additive form has no fused execution on this device, only on CUDA"
    if form.multi or form.weight is None:
        return "multi-dimensional weights"
    if call.align.temperature_of_softmax is None:
        return f"alignment {type(call.align).__name__} is not a plain softmax"
    if call.bias is not None:
        return "a bias on additive scores"
    if call.dropout > 0.0:
        return "dropout on additive scores"
    if form.a.dtype not in _DTYPES:
        return f"{form.a.dtype}"
    if form.a.shape[-1] > 256 or call.value.shape[-1] > 256:
        return "more than 256 hidden units or features"
    return kernel_problem(form.activation.spec) or None


def additive_kernel(call: Call) -> Tensor:
    """Softmax attention with additive scores by one operator."""
    form, lead = call.form, call.lead
    assert isinstance(form, AdditiveForm)
    assert form.weight is not None
    if 0 in (call.n, call.nq, *lead):
        return call.value.new_zeros(*lead, call.nq, call.value.shape[-1])
    weight = form.weight
    temperature = call.align.temperature_of_softmax
    if isinstance(temperature, Tensor) or (temperature is not None and temperature != 1.0):
        weight = weight / temperature
    dtype = torch.promote_types(form.a.dtype, form.u.dtype)
    # One dtype for everything that meets in a product; statistics are kept in float32 inside.
    value = call.value.to(torch.promote_types(dtype, call.value.dtype))
    a, u, v = (_flat(x.to(value.dtype), lead) for x in (form.a, form.u, value))
    w = weight.float().reshape(1, -1) if weight.dim() == 1 else _flat(weight.float()[..., None, :], lead).squeeze(1)
    causal = getattr(call.mask, "is_plain_causal", False)
    allowed = None if call.mask is None or causal else call.tile().mask()
    mask = None if allowed is None else _mask_bytes(allowed, lead)
    operands = (a, u, w, v, mask, causal, form.activation.spec)
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.regard.additive_soft(*operands)[0]
    else:
        from regard.ops.triton.attend import additive_soft

        out = additive_soft(*operands)[0]
    return out.view(*lead, *out.shape[1:])


def _flat(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    return x.expand(*lead, *x.shape[-2:]).reshape(math.prod(lead), *x.shape[-2:])


def _mask_bytes(allowed: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(L or 1, Nq or 1, N or 1): written out over the leading axes only where it differs along them."""
    allowed = allowed.reshape((1,) * (len(lead) + 2 - allowed.dim()) + tuple(allowed.shape))
    if any(size > 1 for size in allowed.shape[:-2]):
        allowed = allowed.expand(*lead, *allowed.shape[-2:])
    return allowed.reshape(-1, *allowed.shape[-2:]).to(torch.uint8)
