"""Fused execution: torch's scaled dot-product attention, guarded, for the plain bilinear softmax; our kernels for other scores.

The library call gives NaN for a row with nothing to attend to, and takes one width for keys and values on the CPU. Both
are mended here. A term of each key (negative squared distance) is added by our kernel where there is one; elsewhere it becomes columns of
the keys, three in half precision, that add up to it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.ops.activated import activated_kernel, why_not_activated
from regard.ops.axes import four_axes, mask_axes
from regard.ops.blockwise import blockwise
from regard.ops.call import Call
from regard.ops.edge_kernel import edge_attention_by_kernel, why_not_edge_kernel
from regard.ops.edges import EdgeCall
from regard.ops.features import features_kernel, why_not_features
from regard.ops.fill import kept, where
from regard.ops.forms import BilinearForm
from regard.ops.kernels import additive_kernel, by_panels, mapped, why_not_kernel
from regard.ops.multi import multi_kernel, why_not_multi
from regard.ops.near import span
from regard.ops.places import are_known
from regard.ops.transforms import beyond_first, transformed

# Above this a mask or bias that must be written out makes the call quadratic in memory: blockwise is better.
WRITTEN_MASK_ELEMENTS = 1 << 26
# From here on panels beside the keys that they reach are worth it, where those are so many times fewer than all.
WORTH_A_PANEL, NARROW, NARROW_ROWS = 1 << 20, 4, 64
# On a GPU the library has kernels for vectors of so many numbers and multiples, and writes all pairs out for others.
WIDTHS_OF_DEVICE = 8


def why_not_fused(call: Call) -> str | None:
    """The reason why this call has no fused execution, or None."""
    if isinstance(call, EdgeCall):
        return why_not_edge_kernel(call)
    if not isinstance(call.form, BilinearForm):
        return why_not_multi(call) if call.form.multi else why_not_kernel(call)
    if not call.form.is_plain:
        return why_not_features(call) if call.form.multi else why_not_activated(call)
    reason = why_not_library(call)
    # What the library call does not know, the kernel of activated scores does: the identity is an activation.
    return reason if reason is None or why_not_activated(call) is not None else None


def why_not_library(call: Call) -> str | None:
    """The reason why the library's attention does not compute this call with plain bilinear scores, or None."""
    assert isinstance(call.form, BilinearForm)
    if call.align.temperature_of_softmax is None:
        return f"alignment {type(call.align).__name__} is not a plain softmax"
    if call.form.key_bias is not None and torch.float16 in (call.form.key.dtype, call.value.dtype):
        return "a term of each key that float16 may not hold"
    if call.dropout > 0.0:
        return "dropout is drawn by position, which the library call cannot do"
    if _needs_bias_gradient(call):
        return "the bias needs a gradient"
    if beyond_first():
        return "the library call has no derivatives but the first, backward"
    if call.form.key_bias is not None and why_not_activated(call) is None and (not transformed() or mapped(call)):
        return "a term of each key, which our kernel adds"
    return None


def why_not_worthwhile(call: Call) -> str | None:
    """The reason why a fused execution exists but costs more memory than the blockwise one, or None."""
    if call.mask is not None or call.bias is not None:
        allowed = None if call.mask is None else _whole_mask_shape(call)
        written = max(math.prod(allowed or ()), _bias_elements(call))
        if not are_known(written):
            # The library call at any size: panels of a graph that is for all sizes would be as large as the graph is long.
            return None
        if written > WRITTEN_MASK_ELEMENTS and not by_panels(call):
            return f"a mask or bias of {written} elements would have to be written out"
        if call.device_type == "cpu" and written >= WORTH_A_PANEL and _is_narrow(call):
            return "few keys near each query: panels beside them"
    if 0 in call.form.sizes or 0 in call.lead:
        return "an empty axis"
    return None


def _is_narrow(call: Call) -> bool:
    """Whether queries in the middle of a long input may attend few of its keys."""
    middle = call.nq // 2
    return NARROW * len(span(call, range(middle, min(middle + NARROW_ROWS, call.nq)))) <= call.n


def fused(call: Call, rows: int | None = None) -> Tensor:
    """Attention by one library call, or by our kernels for other scores and alignments; in panels of so many rows where there are any."""
    if isinstance(call, EdgeCall):
        return edge_attention_by_kernel(call)
    form = call.form
    if not isinstance(form, BilinearForm):
        if by_panels(call):
            return blockwise(call, rows)
        return multi_kernel(call) if form.multi else additive_kernel(call)
    if not form.is_plain:
        return features_kernel(call) if form.multi else activated_kernel(call)
    return by_library(call) if why_not_library(call) is None else activated_kernel(call)


def by_library(call: Call) -> Tensor:
    """Softmax attention with plain bilinear scores by one library call."""
    form = call.form
    assert isinstance(form, BilinearForm)
    lead, sizes = call.lead, form.sizes
    if 0 in sizes or 0 in lead:
        # Nothing to compute, but the equation knows what zero gradients go back to.
        return call.read(call.weights())
    query, key, value, scale = form.query, form.key, call.value, form.scale
    if form.key_bias is not None:
        query, key = _with_key_bias(query, key, form.key_bias / scale)
    temperature = call.align.temperature_of_softmax
    if isinstance(temperature, Tensor):
        query = query / temperature.to(query.dtype)
    elif temperature is not None:
        scale = scale / temperature
    width = value.shape[-1]
    if query.shape[-1] != width and value.is_cpu:
        common = max(query.shape[-1], width)
        query, key, value = (F.pad(x, (0, common - x.shape[-1])) for x in (query, key, value))
    dtype = value.dtype
    if query.dtype != dtype or key.dtype != dtype:
        query, key = query.to(dtype), key.to(dtype)
    q, k, v = four_axes(query, lead), four_axes(key, lead), four_axes(value, lead)
    mask, alive = _mask_and_rows(call, dtype)
    causal = mask is None and call.mask is not None
    context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    if not torch.compiler.is_compiling() and not transformed():
        _once_differentiable(context)
    if len(lead) != 2:
        context = context.reshape(*lead, sizes[0], -1)
    if context.shape[-1] != width:
        context = context[..., :width]
    return context if alive is None else kept(context, alive)


def _once_differentiable(context: Tensor) -> None:
    """Refuse second derivatives by name, where torch's own refusal would name an operator that nobody called."""
    node = context.grad_fn
    # Where the library writes the equation out, its derivatives are of every order.
    if node is not None and node.name().startswith("ScaledDotProduct"):
        node.register_hook(_guarded)


def _guarded(grads: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
    if not torch.is_grad_enabled() or transformed():
        return None
    return tuple(None if grad is None else _Once.apply(grad) for grad in grads)  # type: ignore[no-untyped-call]


class _Once(torch.autograd.Function):
    """A gradient as it is, which has no gradient itself."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise NotImplementedError(
            "second derivatives of plain bilinear scores are not available in the fused execution, torch's own attention. "
            "Fix: use impl='dense', or run the forward inside regard.execution('dense')."
        )


def _with_key_bias(query: Tensor, key: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Append columns so that the product of the longer vectors carries a term of each key."""
    columns = []
    for _ in range(1 if key.dtype in (torch.float32, torch.float64) else 3):
        column = rest.to(key.dtype)
        rest = rest - column.to(rest.dtype)
        columns.append(column)
    if key.device.type != "cpu":
        columns += [torch.zeros_like(columns[0])] * (-(key.shape[-1] + len(columns)) % WIDTHS_OF_DEVICE)
    ones = query.new_ones(*query.shape[:-1], len(columns))
    extra = torch.stack(columns, -1).expand(*key.shape[:-1], len(columns))
    return torch.cat([query, ones], -1), torch.cat([key, extra], -1)


def _mask_and_rows(call: Call, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """The library's mask (None: everything, or causal), and which rows have anything to attend to."""
    if call.bias is None and (call.mask is None or getattr(call.mask, "is_plain_causal", False)):
        return None, None
    if call.bias is None:
        return _shared_mask_and_rows(call, dtype)
    tile = call.tile()
    allowed, bias = tile.mask(), tile.bias()
    temperature = call.align.temperature_of_softmax
    assert bias is not None
    assert temperature is not None
    bias = bias / temperature
    if allowed is not None:
        bias = where(allowed, bias, -math.inf)
    # NaN counts as alive, so that it is seen in the result.
    alive = bias.amax(-1, keepdim=True) != -math.inf
    # On the CPU the library adds a wide bias to half-precision products; rounded, it would move the weights.
    dtype = torch.promote_types(dtype, torch.float32) if bias.device.type == "cpu" else dtype
    return mask_axes(where(alive, bias, 0.0).to(dtype), call.lead), alive


def _shared_mask_and_rows(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The mask as what is added to the scores, and its rows; once for all calls that share it."""
    cleared = getattr(call.mask, "is_cleared", False)
    # While a graph is traced, sizes may be symbols, which are no keys.
    traced = torch.compiler.is_compiling() or not all(type(size) is int for size in call.lead)
    memo = {} if traced else getattr(call.mask, "memo", {})
    key = None if traced else (dtype, call.lead, cleared)
    if key not in memo:
        allowed = call.tile().mask()
        assert allowed is not None
        alive = allowed.any(-1, keepdim=True)
        added = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(alive & ~allowed, -math.inf)
        memo[key] = mask_axes(added, call.lead), None if cleared else alive
    found: tuple[Tensor, Tensor | None] = memo[key]
    return found


def _whole_mask_shape(call: Call) -> tuple[int, ...] | None:
    """Shape of the mask that the library call would get; None where it needs none."""
    if call.bias is None and getattr(call.mask, "is_plain_causal", False):
        return None
    assert call.mask is not None
    return call.mask.shape


def _bias_elements(call: Call) -> int:
    if call.bias is None:
        return 0
    if isinstance(call.bias, Tensor):
        return math.prod(call.bias.shape)
    return math.prod(getattr(call.bias, "lead", ())) * call.nq * call.n


def _needs_bias_gradient(call: Call) -> bool:
    if call.bias is None or not torch.is_grad_enabled():
        return False
    # A function of indices may close over parameters; unless it says that it does not, only calling it would tell.
    # Nor does a tensor inside of a transform say what is asked of the one it stands for.
    if getattr(call.bias, "requires_grad", True) or transformed():
        return True
    # The bias is divided by the temperature.
    temperature = call.align.temperature_of_softmax
    return isinstance(temperature, Tensor) and temperature.requires_grad
