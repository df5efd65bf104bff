"""Fused execution of soft attention along edges: our own kernel, on CUDA devices with Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.ops.axes import KERNEL_DTYPES
from regard.ops.edges import EdgeCall, EdgeMask, by_row, inverse, nodes_first
from regard.ops.forms import AdditiveForm
from regard.ops.ready import kernel_problem
from regard.ops.segment import PRODUCT
from regard.ops.transforms import transformed

# Widths of which a tile of one edge and head fits the registers.
WIDEST = 1024


def why_not_edge_kernel(call: EdgeCall) -> str | None:
    """The reason why no kernel computes this call, or None."""
    if call.device_type != "cuda":
        return "attention along edges has no fused execution on this device, only on CUDA"
    reason = call.why_not_weighed()
    if reason is not None:
        return reason
    if call.align.temperature_of_softmax is None:
        return f"alignment {type(call.align).__name__} is not a plain softmax"
    if _dtype(call) not in KERNEL_DTYPES:
        return f"{_dtype(call)}"
    form = call.form
    if isinstance(form, AdditiveForm):
        width, act = form.a.shape[-1], form.activation.known
    else:
        width, act = form.query.shape[-1], PRODUCT
    if max(width, call.value.shape[-1]) > WIDEST:
        return f"more than {WIDEST} hidden units or features"
    return kernel_problem("graph_attend", act) or None


def edge_attention_by_kernel(call: EdgeCall) -> Tensor:
    """Soft attention along edges by one operator, (..., Nq, d_v)."""
    heads, edges = call.lead, call.edges
    assert isinstance(call.mask, EdgeMask)
    if 0 in (call.nq, *heads) or edges.count == 0:
        return call.value.new_zeros(*heads, call.nq, call.value.shape[-1])
    dtype = _dtype(call)
    a, u, weight, act = call.weighed()
    # Where keys are values they are read once.
    same = call.value is u and not call.by_edge
    a, u = (nodes_first(x.to(dtype), heads) for x in (a, u))
    value = None if same else nodes_first(call.value.to(dtype), heads)
    allowed = call.mask.allowed
    source, target = edges.sorted_ends() if _is_traced() else edges.ends
    operands = (
        a,
        u,
        value,
        weight.expand(*heads, -1).reshape(-1, weight.shape[-1]),
        edges.order if call.by_edge else source,
        source if call.by_edge else None,
        target,
        edges.bounds,
        *_readers(call, source, u.shape[0]),
        None if allowed is None else _mask_bytes(allowed, heads)[:, edges.order],
        call.seed if call.dropout > 0.0 else None,
        call.dropout,
        act,
    )
    if _is_traced():
        context: Tensor = torch.ops.regard.edge_kernel(*operands)[0]
    else:
        from regard.ops.triton.graph_attend import edge_kernel

        context = edge_kernel(*operands)
    return context.movedim(0, -2).reshape(*heads, call.nq, call.value.shape[-1])


def _is_traced() -> bool:
    """Whether a call must leave nothing behind, and go by a registered operator."""
    return torch.compiler.is_compiling() or transformed()


def _readers(
    call: EdgeCall, source: Tensor, n_keys: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Who reads each key, and each value where its edges are others; nothing where nobody will ask for gradients."""
    if not torch.is_grad_enabled():
        return None, None, None, None
    edges, n_sources = call.edges, call.value.shape[-2]
    of_sources = by_row(source, n_sources) if _is_traced() else edges.readers(n_sources)
    if not call.by_edge:
        return *of_sources, None, None
    # Every edge reads a key of its own.
    places = inverse(edges.order) if _is_traced() else edges.places
    return places, torch.arange(n_keys + 1, device=places.device), *of_sources


def _dtype(call: EdgeCall) -> torch.dtype:
    form = call.form
    query, key = (form.a, form.u) if isinstance(form, AdditiveForm) else (form.query, form.key)
    return torch.promote_types(torch.promote_types(query.dtype, key.dtype), call.value.dtype)


def _mask_bytes(allowed: Tensor, heads: tuple[int, ...]) -> Tensor:
    """(..., E) to (H or 1, E)."""
    if allowed.dim() > 1:
        allowed = allowed.expand(*heads, allowed.shape[-1])
    return allowed.reshape(-1, allowed.shape[-1]).to(torch.uint8)
