"""What is asked of a call before it is executed, and found on the way to its contexts.

Whoever records named fields asks for them (`Call.asked`). A kernel that computes the contexts of a softmax of additive scores sums its rows
up in the same pass, and leaves what it found there. Any other execution leaves nothing, and the fields are computed afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regard.ops.call import Call
from regard.ops.forms import AdditiveForm

if TYPE_CHECKING:
    from regard.ops.triton.additive_tile import Conditions
    from regard.ops.triton.summary_tile import Summary

_NAMES = frozenset({"entropy", "log_sum_exp", "expected_position", "mass_on", "topk", "mass_received"})
# Slots of a row live in registers.
_MOST = 16


def is_summed(call: Call, wanted: Mapping[str, Any]) -> bool:
    """Whether fields are sums over the weights of a softmax of additive scores, or the largest of them."""
    form = call.form
    if type(call) is not Call or not isinstance(form, AdditiveForm) or form.multi or form.weight is None:
        return False
    if not wanted or not set(wanted) <= _NAMES or call.align.temperature_of_softmax is None:
        return False
    if 0 in (call.n, call.nq, *call.lead):
        return False
    # The scores that are summed up are those before the temperature.
    if "log_sum_exp" in wanted and call.align.temperature_of_softmax != 1.0:
        return False
    return "topk" not in wanted or (type(wanted["topk"]) is int and 1 <= wanted["topk"] <= min(_MOST, call.n))


def room_along(call: Call, a: Tensor, u: Tensor, given: Conditions) -> Summary | None:
    """Room for what is asked of a call, if it is found beside its contexts; a (L, Nq, D) and u (L, N, D) are its operands."""
    asked = call.asked
    # Rows that nobody will read are left as they come, and are not to be summed up.
    if asked is None or getattr(call.mask, "is_cleared", False) or not is_summed(call, asked.wanted):
        return None
    from regard.ops.triton.summaries import room_for, same_pass

    assert isinstance(call.form, AdditiveForm)
    if not same_pass(a, call.form.activation.spec, given):
        return None
    return room_for(a, u, asked.wanted, region_bytes(call, asked.region), asked.wanted.get("topk", 0), along=True)


def answer(call: Call, summary: Summary) -> None:
    """Leave what was found where whoever asked looks for it."""
    assert call.asked is not None
    call.asked.found.update(with_lead(call, call.asked.wanted, summary.found))


def answered(call: Call, wanted: Mapping[str, Any]) -> Mapping[str, Tensor] | None:
    """The wanted fields, if the execution of a call found just these."""
    asked = call.asked
    if asked is None or not asked.found or asked.wanted.keys() != wanted.keys():
        return None
    for name, x in wanted.items():
        other = asked.wanted[name]
        if x is not other and (isinstance(x, Tensor) or isinstance(other, Tensor) or x != other):
            return None
    return asked.found


def region_bytes(call: Call, region: Tensor | None) -> Tensor | None:
    """A region that has all leading axes of a call, as (L or 1, N)."""
    if region is None:
        return None
    region = region.expand(*call.lead, call.n) if region[..., 0].numel() > 1 else region
    found: Tensor = region.reshape(-1, call.n)
    return found.byte()


def with_lead(call: Call, wanted: Mapping[str, Any], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What was found for L entries, with the leading axes of the call."""
    return {name: found[name].view(*call.lead, *found[name].shape[1:]) for name in wanted}
