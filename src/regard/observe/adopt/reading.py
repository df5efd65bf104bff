"""What the adapters share: from projected heads to a `Call`, and through it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.general.alignments import Soft
from regard.general.bound import Sizes
from regard.general.masks import Mask
from regard.ops import hooks
from regard.ops.activations import Activation
from regard.ops.call import Call
from regard.ops.dispatch import execute
from regard.ops.fill import where
from regard.ops.forms import BilinearForm
from regard.ops.random import draw_seed

_SOFT = Soft()


def call_of(
    module: nn.Module,
    heads: tuple[Tensor, Tensor, Tensor],
    *,
    mask: Mask | None,
    bias: Tensor | None,
    dropout: float,
    scale: float | None = None,
    activation: Activation | None = None,
) -> Call:
    """The call of a softmax over scaled dot products of queries, keys and values (batch, heads, length, width)."""
    q, k, v = heads
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    form = BilinearForm(q, k, scale=scale, activation=activation)
    return Call(
        form=form,
        value=v,
        align=_SOFT,
        query=q,
        key=k,
        mask=None if mask is None else mask.bind(Sizes(form.lead, *form.sizes)),
        bias=bias,
        dropout=dropout,
        training=module.training,
        seed=draw_seed(v.device) if dropout > 0.0 else None,
    )


def attend(module: nn.Module, call: Call) -> tuple[Tensor, Call]:
    """The context, and the call as it was made in the end."""
    call = hooks.changed(module, call)
    context = execute(call, "auto")
    hooks.seen(module, call)
    return context, call


def split(additive: Tensor) -> tuple[Tensor, Tensor]:
    """A mask that is added to the scores, as what may be attended and what remains to be added.

    Minus infinity forbids; so does the least number of the dtype, which some libraries write for it.
    """
    allowed = additive > torch.finfo(additive.dtype).min
    return allowed, where(allowed, additive, 0.0)
