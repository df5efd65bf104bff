"""Summaries of the weights of additive attention by a kernel, where the weights themselves would be most of the work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.ops.call import Call
from regard.ops.forms import AdditiveForm
from regard.ops.fused import why_not_fused
from regard.ops.kernels import scoring_operands

_NAMES = frozenset({"entropy", "log_sum_exp", "expected_position", "mass_on", "topk", "mass_received"})
# Slots of a row live in registers.
_MOST = 16


def can_summarise(call: Call, wanted: Mapping[str, Any]) -> bool:
    """Whether a kernel computes all of these fields, name to argument, of a call; nothing of it is differentiable."""
    form = call.form
    if type(call) is not Call or not isinstance(form, AdditiveForm) or form.multi or form.weight is None:
        return False
    if (
        not wanted
        or not set(wanted) <= _NAMES
        or call.align.temperature_of_softmax is None
        or 0 in (call.n, call.nq, *call.lead)
    ):
        return False
    # The scores that are summed up are those before the temperature.
    if "log_sum_exp" in wanted and call.align.temperature_of_softmax != 1.0:
        return False
    if "topk" in wanted and not 1 <= wanted["topk"] <= min(_MOST, call.n):
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return why_not_fused(call) is None


def summarised(call: Call, wanted: Mapping[str, Any]) -> dict[str, Tensor]:
    """The wanted fields, as (..., Nq, [...]), or (..., N) for what keys receive; a region has all leading axes."""
    from regard.ops.triton.additive_tile import Conditions
    from regard.ops.triton.summaries import summaries

    assert isinstance(call.form, AdditiveForm)
    a, u, w, mask, bias, causal = scoring_operands(call)
    region = wanted.get("mass_on")
    if region is not None:
        region = region.expand(*call.lead, call.n) if region[..., 0].numel() > 1 else region
        region = region.reshape(-1, call.n).to(torch.uint8)
    # As exact as the context was.
    dtype = torch.promote_types(a.dtype, call.value.dtype)
    found = summaries(
        a.to(dtype),
        u.to(dtype),
        w,
        call.form.activation.spec,
        Conditions(mask, bias, causal),
        wanted,
        region,
        wanted.get("topk", 0),
    )
    return {name: found[name].view(*call.lead, *found[name].shape[1:]) for name in wanted}
