"""Models of transformers, through its own registry of attention functions.

Two functions are registered under one name: the attention, and the one that makes its mask. Without the second, models
would be given no mask at all and compute something else without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from regard._errors import refusal
from regard.general.masks import Causal, Mask, Pairs
from regard.observe.adopt.reading import attend, call_of, split
from regard.ops.activations import activation

NAME = "regard"
# What changes the result, comes with few models, and is not done here.
_NOT_DONE = ("s_aux", "cache", "head_mask", "indices", "block_indices")

_before: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers: heads (batch, heads, length, width) to contexts (batch, length, heads, width)."""
    for name in _NOT_DONE:
        if rest.get(name) is not None:
            what = f"{name!r} of {type(module).__name__}"
            raise NotImplementedError(f"adopt: {what} has no counterpart here. Fix: regard.unadopt(model).")
    groups = query.shape[1] // max(1, key.shape[1])
    if groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    mask, bias = _mask_and_bias(attention_mask, position_bias, key.shape[-2])
    if attention_mask is None and is_causal and query.shape[-2] > 1:
        mask = Causal()
    call = call_of(
        module,
        (query, key, value),
        mask=mask,
        bias=bias,
        dropout=float(dropout),
        scale=scaling,
        activation=None if softcap is None else activation(f"tanh:{float(softcap)!r}"),
    )
    context, call = attend(module, call)
    weights = call.weights().expand(*call.lead, call.nq, call.n) if rest.get("output_attentions") else None
    return context.transpose(1, 2).contiguous(), None if weights is None else weights.to(context.dtype)


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """A mask function of transformers: booleans, True where a query may attend a key; None for everything."""
    found: Tensor | None = sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})
    return found


def _mask_and_bias(given: Tensor | None, position_bias: Tensor | None, n: int) -> tuple[Mask | None, Tensor | None]:
    if given is None:
        return None, position_bias
    # A cache of fixed length has a mask for more keys than there are.
    given = given[..., :n]
    if given.dtype == torch.bool:
        return Pairs(given), position_bias
    allowed, bias = split(given)
    return Pairs(allowed), bias if position_bias is None else bias + position_bias


def _models(model: nn.Module) -> list[PreTrainedModel]:
    """The outermost transformers models inside a model."""
    found: list[PreTrainedModel] = []
    covered: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module) not in covered:
            found.append(module)
            covered |= {id(part) for part in module.modules()}
    return found


def adopt_transformers(model: nn.Module) -> tuple[list[Callable[[], None]], int]:
    """Adopt; also tell how to undo it, and how many models are now adopted."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    undo: list[Callable[[], None]] = []
    models = _models(model)
    for part in models:
        if part.config._attn_implementation == NAME:
            continue
        before = _implementations(part)
        if part._can_set_attn_implementation():
            part.set_attn_implementation(NAME)
        if part.config._attn_implementation != NAME:
            expected = "a model whose attention goes through transformers' AttentionInterface"
            raise NotImplementedError(refusal("model", type(part).__name__, expected))
        _before[part] = before
        undo.append(lambda part=part: _restore(part))  # type: ignore[misc]
    return undo, len(models)


def unadopt_transformers(model: nn.Module) -> None:
    """Undo it for everything inside."""
    for part in _models(model):
        if part.config._attn_implementation == NAME:
            _restore(part)


def _implementations(model: PreTrainedModel) -> dict[str, str]:
    """The attention of a model and of the models in it, as transformers wants to be told."""
    parts = {key: getattr(model.config, key, None) for key in model.config.sub_configs}
    named = {key: config._attn_implementation for key, config in parts.items() if config is not None}
    return {"": model.config._attn_implementation, **named}


def _restore(model: PreTrainedModel) -> None:
    # A copy of an adopted model is not in the books: it gets torch's own attention.
    model.set_attn_implementation(_before.pop(model, {"": "sdpa"}))
