"""`torch.nn.MultiheadAttention`, computed through a `Call`.

The instance changes its class, to a subclass with another `forward` and nothing of its own. The encoder layers of torch
compute attention without calling it when a model is in evaluation and nothing is hooked: a hook that does nothing keeps
them from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._errors import refusal
from regard.general.masks import Band, Mask, Pairs
from regard.observe.adopt.reading import attend, call_of, split


class AdoptedMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` that can be recorded and changed; its arguments and results are torch's own."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested or key.is_nested or value.is_nested:
            fix = "Fix: build the encoder with enable_nested_tensor=False, or pass a padded tensor and its mask."
            raise NotImplementedError(refusal("query", "a nested tensor", "a padded one in an adopted model", fix))
        if is_causal and attn_mask is None:
            raise RuntimeError(refusal("attn_mask", None, "the causal mask, of which is_causal is only a hint"))
        batched = query.dim() == 3
        query, key, value = (self._batch_first(x, batched) for x in (query, key, value))
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        q, k, v = self._heads(query, key, value)
        hinted = is_causal and key_padding_mask is None and not need_weights
        allowed, bias = self._masks(key_padding_mask, None if hinted else attn_mask, len(q), k.shape[-2])
        # torch aligns the first query with the first key.
        mask = Band(-math.inf, q.shape[-2] - k.shape[-2]) if hinted else allowed
        dropout = self.dropout if self.training else 0.0
        call = call_of(self, (q, k, v), mask=mask, bias=bias, dropout=dropout)
        context, call = attend(self, call)
        output = F.linear(context.transpose(1, 2).flatten(-2), self.out_proj.weight, self.out_proj.bias)
        output = output if self.batch_first or not batched else output.transpose(0, 1)
        weights = None
        if need_weights:
            weights = call.weights()
            if call.dropout > 0.0:
                weights = weights * call.tile().keep(weights.dtype)
            weights = weights.expand(*call.lead, call.nq, call.n).to(output.dtype)
            weights = weights.mean(1) if average_attn_weights else weights
        if not batched:
            output, weights = output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output, weights

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project, add the learned and the zero key where there are any, and split: (batch, heads, length, width)."""
        if self._qkv_same_embed_dim:
            matrices = self.in_proj_weight.chunk(3)
        else:
            matrices = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = map(F.linear, (query, key, value), matrices, biases)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(len(k), 1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(len(v), 1, -1)], 1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        return q, k, v

    def _masks(
        self, key_padding: Tensor | None, pairs: Tensor | None, batch: int, n: int
    ) -> tuple[Mask | None, Tensor | None]:
        """What may be attended, and what is added to the scores. In torch's masks True means *ignore*."""
        allowed, bias = None, None
        shaped = (
            ("key_padding_mask", None if key_padding is None else key_padding[:, None, None, :]),
            ("attn_mask", pairs if pairs is None or pairs.dim() == 2 else pairs.unflatten(0, (batch, self.num_heads))),
        )
        for name, x in shaped:
            if x is None:
                continue
            # The learned and the zero key are for everybody.
            x = F.pad(x, (0, n - x.shape[-1]))
            if x.dtype == torch.bool:
                kept, more = ~x, None
            elif x.dtype.is_floating_point:
                kept, more = split(x)
            else:
                raise TypeError(refusal(name, f"a tensor of {x.dtype}", "booleans or floating-point numbers"))
            allowed = kept if allowed is None else allowed & kept
            if more is not None:
                bias = more if bias is None else bias + more
        return None if allowed is None else Pairs(allowed), bias


class AdoptedTransformerEncoder(nn.TransformerEncoder):
    """`nn.TransformerEncoder` that does not turn padded inputs into nested tensors, which only the fast path takes."""

    @property
    def use_nested_tensor(self) -> bool:  # type: ignore[override]
        return False


_ADOPTED: dict[type[nn.Module], type[nn.Module]] = {
    nn.MultiheadAttention: AdoptedMultiheadAttention,
    nn.TransformerEncoder: AdoptedTransformerEncoder,
}
_ORIGINAL = {adopted: original for original, adopted in _ADOPTED.items()}


def _stay_off_the_fast_path(module: nn.Module, args: object) -> None:
    """Do nothing: a layer with a hook inside calls its attention."""


def adopt_torch(model: nn.Module) -> tuple[list[Callable[[], None]], int]:
    """Adopt; also tell how to undo it, and how many attentions are now adopted."""
    undo: list[Callable[[], None]] = []
    for module in model.modules():
        if type(module) in _ADOPTED:
            module.__class__ = _ADOPTED[type(module)]
            if isinstance(module, AdoptedMultiheadAttention):
                module.register_forward_pre_hook(_stay_off_the_fast_path)
            undo.append(lambda module=module: _unadopt(module))  # type: ignore[misc]
    return undo, sum(isinstance(module, AdoptedMultiheadAttention) for module in model.modules())


def unadopt_torch(model: nn.Module) -> None:
    """Undo it for everything inside."""
    for module in model.modules():
        _unadopt(module)


def _unadopt(module: nn.Module) -> None:
    if type(module) in _ORIGINAL:
        module.__class__ = _ORIGINAL[type(module)]
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _stay_off_the_fast_path]:
            del hooks[key]
