"""Fused execution of additive attention along edges: our own kernel, on CUDA devices with Triton."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.ops.axes import KERNEL_DTYPES
from regard.ops.edges import EdgeCall, EdgeMask, by_row, inverse
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
    weight = form.weight.float()
    if isinstance(temperature, Tensor) or temperature != 1.0:
        weight = weight / temperature
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
        *_readers(call, source, len(u)),
        None if allowed is None else _mask_bytes(allowed, heads)[:, edges.order],
        call.seed if call.dropout > 0.0 else None,
        call.dropout,
        form.activation.spec,
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
