"""Fused execution of the additive form: our own kernels, on CUDA devices with Triton.

One kernel reads the values as it goes where the alignment can be told as a rule. Where weights need complete rows, panels of scores are
written by a kernel, and the alignment does the rest: memory is still linear in queries and keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.ops.asked import answer, room_along
from regard.ops.axes import KERNEL_DTYPES, flat, mask_bytes, spread, why_too_many
from regard.ops.call import Call
from regard.ops.folds import tempered
from regard.ops.forms import AdditiveForm
from regard.ops.ready import kernel_problem
from regard.ops.transforms import only_mapped, transformed

# A kernel counts the pairs of one leading entry in 32 bits.
_INDICES = (1 << 31) - 1


def why_not_kernel(call: Call) -> str | None:
    """The reason why no kernel computes this call, or None."""
    form = call.form
    assert isinstance(form, AdditiveForm)
    if call.device_type != "cuda":
        return "the additive form has no fused execution on this device, only on CUDA"
    if form.multi or form.weight is None:
        return "multi-dimensional weights"
    if transformed() and not mapped(call):
        return "torch.func takes no gradients of operators"
    if by_panels(call):
        named = f"alignment {type(call.align).__name__} has no kernel"
        return form.why_not_by_kernel("cuda") if call.align.reads_panels else named
    if call.first_key != 0:
        return "keys that begin in the middle of a sequence"
    strange = [x.dtype for x in (form.a, form.u, call.value) if x.dtype not in KERNEL_DTYPES]
    if strange:
        return f"{strange[0]}"
    if form.a.shape[-1] > 256 or call.value.shape[-1] > 256:
        return "more than 256 hidden units or features"
    if max(_pairs(call.mask), _pairs(call.bias)) > _INDICES:
        return f"a mask or bias of more than {_INDICES} pairs"
    return why_too_many(math.prod(call.lead)) or kernel_problem("attend", form.activation.known) or None


def mapped(call: Call) -> bool:
    """Whether vmap alone transforms a call that an operator of ours can fold its axis into: numbers are drawn by leading index."""
    return only_mapped() and call.seed is None and not by_panels(call)


def by_panels(call: Call) -> bool:
    """Whether additive scores would have to be written out, panel by panel, for an alignment that no kernel knows."""
    return isinstance(call.form, AdditiveForm) and not call.form.multi and call.align.rule(call) is None


def _pairs(x: object) -> int:
    """Queries times keys that a mask or bias is written out for."""
    shape = getattr(x, "shape", ())
    return math.prod(shape[-2:]) if len(shape) > 1 else 0


def additive_kernel(call: Call) -> Tensor:
    """Attention with additive scores by one operator."""
    form, lead = call.form, call.lead
    assert isinstance(form, AdditiveForm)
    assert form.weight is not None
    if 0 in (call.n, call.nq, *lead):
        return call.value.new_zeros(*lead, call.nq, call.value.shape[-1])
    from regard.ops.triton.align import Align

    # One dtype for everything that meets in a product; statistics are kept in float32 inside.
    dtype = torch.promote_types(torch.promote_types(form.a.dtype, form.u.dtype), call.value.dtype)
    a, u, w, mask, bias, causal = scoring_operands(call)
    a, u, v = a.to(dtype), u.to(dtype), flat(call.value.to(dtype), lead)
    align = Align.of(call)
    operands = (a, u, w, v, mask, bias, *align.flat(), causal, form.activation.spec)
    if torch.compiler.is_compiling() or transformed():
        out: Tensor = torch.ops.regard.additive(*operands)[0]
    else:
        from regard.ops.triton.additive_tile import Conditions
        from regard.ops.triton.attend import additive

        summary = None if call.asked is None else room_along(call, a, u, Conditions(mask, bias, causal, align))
        out = additive(*operands, summary=summary)[0]
        if summary is not None:
            answer(call, summary)
    return out.view(*lead, *out.shape[1:])


def scoring_operands(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool]:
    """What the tempered scores are made of: a (L, Nq, D), u (L, N, D), w (L or 1, D), mask, bias, and whether it is causal instead."""
    from regard.ops.triton.align import temperature

    form, lead = call.form, call.lead
    assert isinstance(form, AdditiveForm)
    assert form.weight is not None
    weight, bias, tau = form.weight, call.tile().bias(), temperature(call)
    if isinstance(tau, Tensor) or tau != 1.0:
        weight, bias = weight / tau, None if bias is None else tempered(bias, tau)
    dtype = torch.promote_types(form.a.dtype, form.u.dtype)
    a, u = (flat(x.to(dtype), lead) for x in (form.a, form.u))
    w = weight.float().reshape(1, -1) if weight.dim() == 1 else flat(weight.float()[..., None, :], lead).squeeze(1)
    causal = getattr(call.mask, "is_plain_causal", False)
    allowed = None if call.mask is None or causal else call.tile().mask()
    mask = None if allowed is None else mask_bytes(allowed, lead)
    return a, u, w, mask, None if bias is None else spread(bias.float(), lead), causal
