"""Fused execution of additive attention along edges: our own kernel, on CUDA devices with Triton."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.ops.axes import KERNEL_DTYPES
from regard.ops.edges import EdgeCall, EdgeMask
from regard.ops.forms import AdditiveForm
from regard.ops.ready import kernel_problem
from regard.ops.transforms import transformed

# Widths of which a tile of one edge and head fits the registers.
WIDEST = 1024


def why_not_edge_kernel(call: EdgeCall) -> str | None:
    """The reason why no kernel computes this call, or None."""
    form = call.form
    if call.device_type != "cuda":
        return "attention along edges has no fused execution on this device, only on CUDA"
    if not isinstance(form, AdditiveForm) or form.multi or form.weight is None:
        return "the scores along edges are not additive"
    if call.align.temperature_of_softmax is None:
        return f"alignment {type(call.align).__name__} is not a plain softmax"
    if _dtype(call) not in KERNEL_DTYPES:
        return f"{_dtype(call)}"
    if max(form.a.shape[-1], call.value.shape[-1]) > WIDEST:
        return f"more than {WIDEST} hidden units or features"
    return kernel_problem("graph_attend", form.activation.known) or None


def edge_attention_by_kernel(call: EdgeCall) -> Tensor:
    """Additive soft attention along edges by one operator, (..., Nq, d_v)."""
    form, heads, edges = call.form, call.lead, call.edges
    assert isinstance(form, AdditiveForm)
    assert form.weight is not None
    assert isinstance(call.mask, EdgeMask)
    if 0 in (call.nq, *heads) or len(edges) == 0:
        return call.value.new_zeros(*heads, call.nq, call.value.shape[-1])
    temperature = call.align.temperature_of_softmax
    assert temperature is not None
    dtype = _dtype(call)
    a, u = (_nodes_first(x.to(dtype), heads) for x in (form.a, form.u))
    # Where keys are values they are read once.
    same = call.value is form.u and not call.by_edge
    value = None if same else _nodes_first(call.value.to(dtype), heads)
    source = edges.source[edges.order]
    allowed = call.mask.allowed
    operands = (
        a,
        u,
        value,
        (form.weight.float() / temperature).expand(*heads, -1).reshape(-1, form.weight.shape[-1]),
        edges.order if call.by_edge else source,
        source if call.by_edge else None,
        edges.target[edges.order],
        edges.bounds,
        None if allowed is None else _mask_bytes(allowed, heads)[:, edges.order],
        call.seed if call.dropout > 0.0 else None,
        call.dropout,
        form.activation.spec,
    )
    if torch.compiler.is_compiling() or transformed():
        context: Tensor = torch.ops.regard.edge_kernel(*operands)[0]
    else:
        from regard.ops.triton.graph_attend import edge_kernel

        context = edge_kernel(*operands)
    return context.movedim(0, -2).reshape(*heads, call.nq, call.value.shape[-1])


def _dtype(call: EdgeCall) -> torch.dtype:
    form = call.form
    if not isinstance(form, AdditiveForm):
        return call.value.dtype
    return torch.promote_types(torch.promote_types(form.a.dtype, form.u.dtype), call.value.dtype)


def _nodes_first(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """(..., N, d) to (N, H, d)."""
    return x.expand(*heads, *x.shape[-2:]).reshape(math.prod(heads), *x.shape[-2:]).movedim(-2, 0)


def _mask_bytes(allowed: Tensor, heads: tuple[int, ...]) -> Tensor:
    """(..., E) to (H or 1, E)."""
    if allowed.dim() > 1:
        allowed = allowed.expand(*heads, allowed.shape[-1])
    return allowed.reshape(-1, allowed.shape[-1]).to(torch.uint8)
