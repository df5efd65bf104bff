"""Summaries of the weights of additive attention by a pass of a kernel, where the weights themselves would be most of the work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.ops.asked import is_summed, region_bytes, with_lead
from regard.ops.call import Call
from regard.ops.forms import AdditiveForm
from regard.ops.fused import why_not_fused
from regard.ops.kernels import scoring_operands


def can_summarise(call: Call, wanted: Mapping[str, Any]) -> bool:
    """Whether a kernel computes all of these fields, name to argument, of a call; nothing of it is differentiable."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return is_summed(call, wanted) and why_not_fused(call) is None


def summarised(call: Call, wanted: Mapping[str, Any]) -> dict[str, Tensor]:
    """The wanted fields, as (..., Nq, [...]), or (..., N) for what keys receive; a region has all leading axes."""
    from regard.ops.triton.additive_tile import Conditions
    from regard.ops.triton.summaries import summaries

    assert isinstance(call.form, AdditiveForm)
    a, u, w, mask, bias, causal = scoring_operands(call)
    # As exact as the context was.
    dtype = torch.promote_types(a.dtype, call.value.dtype)
    a, u, given = a.to(dtype), u.to(dtype), Conditions(mask, bias, causal)
    region, k = region_bytes(call, wanted.get("mass_on")), wanted.get("topk", 0)
    return with_lead(call, wanted, summaries(a, u, w, call.form.activation.spec, given, wanted, region, k))
