"""Attention among tokens that hash alike, as a call."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regard.ops.buckets import Buckets, HashedMask
from regard.ops.call import Call
from regard.ops.chunks import attend
from regard.ops.forms import BilinearForm, wide


@dataclass(frozen=True)
class HashedCall(Call):
    """An attention among tokens that hash alike. Any execution computes it from its mask; `chunked` in time linear in N."""

    buckets: Buckets = field(kw_only=True)

    def why_not_chunked(self) -> str | None:
        """The reason why this call is not computed by chunks, or None."""
        form = self.form
        if not isinstance(form, BilinearForm) or not form.is_plain or form.multi:
            return "the scores are not plain products"
        if self.bias is not None or form.key_bias is not None:
            return "a bias"
        if self.align.temperature_of_softmax is None:
            return f"alignment {type(self.align).__name__} is not a plain softmax"
        if not isinstance(self.mask, HashedMask) or self.mask.others is not None:
            return "a mask of pairs that is no band"
        if 0 in self.value.shape:
            return "an empty axis"
        if self.buckets.chunks == 1:
            return "one chunk holds them all"
        return None

    def chunked(self) -> Tensor:
        """The result (..., N, d_v), by chunks."""
        form, mask, temperature = self.form, self.mask, self.align.temperature_of_softmax
        assert isinstance(form, BilinearForm)
        assert isinstance(mask, HashedMask)
        assert temperature is not None
        mask = replace(mask, buckets=mask.buckets.over(self.lead))
        half = self.device_type == "cuda" and self.value.dtype in (torch.float16, torch.bfloat16)
        # On tensor cores a product of halves is summed in float32; elsewhere only wide operands are.
        dtype = self.value.dtype if half else torch.promote_types(wide(form.query).dtype, wide(self.value).dtype)
        query = form.query if form.scale == 1.0 else form.query * form.scale
        query = query if isinstance(temperature, float) and temperature == 1.0 else query / temperature
        q, k, v = (
            x.to(dtype).expand(*self.lead, *x.shape[-2:]).reshape(-1, *x.shape[-2:])
            for x in (query, form.key, self.value)
        )
        context = attend(q, k, v, mask, self.dropout, self.seed)
        return context.reshape(*self.lead, *context.shape[-2:])
