"""Fused execution of multi-dimensional bilinear scores: features are heads that read one number each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.ops.activated import activated_kernel, why_not_activated
from regard.ops.activations import activation
from regard.ops.call import Call, Mask
from regard.ops.forms import BilinearForm


@dataclass(frozen=True)
class _ForFeatures:
    """A mask with an axis of features before its last two."""

    mask: Mask

    @property
    def is_plain_causal(self) -> bool:
        return getattr(self.mask, "is_plain_causal", False)

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, nq, n = self.mask.shape
        return (*lead, 1, nq, n) if lead else (nq, n)

    def tile(self, i: range, j: range, device: torch.device) -> Tensor:
        allowed = self.mask.tile(i, j, device)
        return allowed.unsqueeze(-3) if allowed.dim() > 2 else allowed

    def keys(self, device: torch.device) -> Tensor | None:
        keys = self.mask.keys(device)
        return None if keys is None else keys.unsqueeze(-2)

    def rows(self, device: torch.device) -> Tensor | None:
        rows = self.mask.rows(device)
        return None if rows is None else rows.unsqueeze(-2)


def as_heads(call: Call) -> Call:
    """The same attention with the features among the leading axes, (..., F), and values one wide."""
    form = call.form
    assert isinstance(form, BilinearForm)
    form = replace(
        form,
        activation=form.activation or activation("identity"),
        query_bias=None if form.query_bias is None else form.query_bias.unsqueeze(-2),
        key_bias=None if form.key_bias is None else form.key_bias.unsqueeze(-2),
        multi=False,
    )
    mask = None if call.mask is None else _ForFeatures(call.mask)
    return call.with_(form=form, value=call.value.mT[..., None], mask=mask)


def why_not_features(call: Call) -> str | None:
    """The reason why no kernel computes this multi-dimensional bilinear call, or None."""
    if call.device_type != "cuda":
        return "multi-dimensional weights have no fused execution on this device, only on CUDA"
    # Numbers are drawn by feature, which heads are not.
    if call.align.temperature_of_softmax is None or call.dropout > 0.0:
        return "multi-dimensional weights of bilinear scores, other than by a softmax without dropout"
    return why_not_activated(as_heads(call))


def features_kernel(call: Call) -> Tensor:
    """Softmax attention with a weight for every feature, by the kernel of activated scores."""
    return activated_kernel(as_heads(call)).squeeze(-1).mT
