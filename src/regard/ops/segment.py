r"""Additive soft attention along edges: each query reads the keys of its own edges, and nothing of size edges x hidden is kept.

$$e_{ij} = w \cdot \mathrm{act}(a_i + u_j), \qquad \alpha_{ij} = \frac{e^{e_{ij}}}{\sum_{l \in N(i)} e^{e_{il}}}, \qquad
  c_i = \sum_{j \in N(i)} \alpha_{ij} v_j$$

Backward, from $g_i = dc_i$, with $z_{ij} = a_i + u_j$ and $\alpha$ recomputed:

$$\delta_{ij} = \alpha_{ij} \Big(g_i \cdot v_j - \sum_l \alpha_{il}\, g_i \cdot v_l\Big), \qquad
  t_{ij} = \delta_{ij}\, w \odot \mathrm{act}'(z_{ij})$$

$$da_i = \sum_j t_{ij}, \qquad du_j = \sum_i t_{ij}, \qquad dv_j = \sum_i \alpha_{ij} g_i, \qquad
  dw = \sum_{ij} \delta_{ij}\, \mathrm{act}(z_{ij})$$

Edges come sorted by query. Queries of one degree stand together, so that some of them and their keys are a full array (rows,
degree): the softmax is an ordinary one, and the sums over keys need neither padding nor scattering. There are at most
$\sqrt{2E}$ different degrees. Such a panel is as large as the cache likes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from regard.ops.activations import activation

# Hidden layer of a panel: a few of them, with what they are gathered from, should stay in the cache of one core.
CPU_PANEL_BYTES = 1 << 19
GPU_PANEL_BYTES = 64 << 20


class _Panel(NamedTuple):
    """Queries of one degree, and the places of their edges."""

    rows: Tensor  # (R,)
    edges: Tensor  # (R k,)
    degree: int


def _panels(bounds: Tensor, row_bytes: int, most: int) -> Iterator[_Panel]:
    """Queries by degree, as many at once as fit the budget, or as were asked for; those without edges are left out."""
    budget = CPU_PANEL_BYTES if bounds.device.type == "cpu" else GPU_PANEL_BYTES
    degrees, rows = bounds.diff().sort(stable=True)
    degrees, counts = torch.unique_consecutive(degrees, return_counts=True)
    begin = 0
    for degree, count in zip(degrees.tolist(), counts.tolist(), strict=True):
        begin, end = begin + count, begin + count
        if degree == 0:
            continue
        step = most if most else max(1, budget // (row_bytes * degree))
        within = torch.arange(degree, device=bounds.device)
        for first in range(end - count, end, step):
            part = rows[first : min(first + step, end)]
            yield _Panel(part, (bounds[part][:, None] + within).flatten(), degree)


class _Operands:
    """The operands in the dtype of the arithmetic, one row a node."""

    def __init__(self, a: Tensor, u: Tensor, value: Tensor | None, weight: Tensor, act: str) -> None:
        dtype = torch.promote_types(a.dtype, torch.float32)
        self.heads, self.width = weight.shape
        self.a, self.u = (x.to(dtype).flatten(1).contiguous() for x in (a, u))
        self.value = None if value is None else value.to(dtype).flatten(1).contiguous()
        self.weight, self.act = weight.to(dtype), activation(act)
        self.value_width = self.width if value is None else value.shape[-1]
        self.row_bytes = self.u.shape[-1] * self.u.element_size()

    def by_heads(self, x: Tensor, panel: _Panel) -> Tensor:
        """(R k, H d) to (R, k, H, d)."""
        return x.view(len(panel.rows), panel.degree, self.heads, x.shape[-1] // self.heads)

    def gathered(self, panel: _Panel, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The hidden layer before its activation and after it, the values, (R, k, H, d), and the weights (R, k, H) of a panel."""
        key = self.by_heads(self.u.index_select(0, keys), panel)
        asking = self.a.index_select(0, panel.rows).view(len(panel.rows), 1, self.heads, self.width)
        if self.value is None:
            value, z = key, key + asking
        else:
            value, z = self.by_heads(self.value.index_select(0, values), panel), key.add_(asking)
        hidden = self.act(z)
        return z, hidden, value, (hidden * self.weight).sum(-1).softmax(1)


@torch.library.custom_op("regard::edge_attention", mutates_args=())
def edge_attention(
    a: Tensor,
    u: Tensor,
    value: Tensor | None,
    weight: Tensor,
    act: str,
    keys: Tensor,
    values: Tensor,
    bounds: Tensor,
    panel: int,
) -> Tensor:
    """Contexts (Nq, H, d_v) in float32 or wider.

    Args:
        a: (Nq, H, D).
        u: (M, H, D).
        value: (M', H, d_v); None where the keys u are the values.
        weight: (H, D).
        act: name of the activation.
        keys: row of u of each edge, edges sorted by query.
        values: row of value of each edge.
        bounds: (Nq + 1,), where the edges of each query begin and end.
        panel: queries of a panel; 0 for as many as suit the cache.
    """
    x = _Operands(a, u, value, weight, act)
    context = x.a.new_zeros(a.shape[0], x.heads, x.value_width)
    for part in _panels(bounds, x.row_bytes, panel):
        _, _, read, alpha = x.gathered(part, keys.index_select(0, part.edges), values.index_select(0, part.edges))
        context.index_copy_(0, part.rows, (read * alpha[..., None]).sum(1))
    return context


@edge_attention.register_fake
def _(a, u, value, weight, act, keys, values, bounds, panel):  # type: ignore[no-untyped-def]
    width = weight.shape[-1] if value is None else value.shape[-1]
    return a.new_empty(a.shape[0], weight.shape[0], width, dtype=torch.promote_types(a.dtype, torch.float32))


@torch.library.custom_op("regard::edge_attention_backward", mutates_args=())
def edge_attention_backward(
    grad: Tensor,
    a: Tensor,
    u: Tensor,
    value: Tensor | None,
    weight: Tensor,
    act: str,
    keys: Tensor,
    values: Tensor,
    bounds: Tensor,
    panel: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `edge_attention` for a, u, value (empty where there is none) and weight, in their shapes and dtypes."""
    x = _Operands(a, u, value, weight, act)
    assert x.act.derivative is not None
    grad = grad.to(x.a.dtype)
    da, du, dw = torch.zeros_like(x.a), torch.zeros_like(x.u), torch.zeros_like(x.weight)
    dv = None if x.value is None else torch.zeros_like(x.value)
    for part in _panels(bounds, x.row_bytes, panel):
        of_keys, of_values = keys.index_select(0, part.edges), values.index_select(0, part.edges)
        z, hidden, read, alpha = x.gathered(part, of_keys, of_values)
        g = grad.index_select(0, part.rows).unsqueeze(1)  # (R, 1, H, d_v)
        agreement = (read * g).sum(-1)
        delta = alpha * (agreement - (alpha * agreement).sum(1, keepdim=True))
        dw += (hidden * delta[..., None]).sum((0, 1))
        t = x.act.derivative(z).mul_(delta[..., None]).mul_(x.weight)
        da.index_copy_(0, part.rows, t.sum(1).flatten(1))
        passed = alpha[..., None] * g
        if dv is None:
            du.index_add_(0, of_keys, t.add_(passed).view(-1, du.shape[-1]))
        else:
            du.index_add_(0, of_keys, t.view(-1, du.shape[-1]))
            dv.index_add_(0, of_values, passed.view(-1, dv.shape[-1]))
    of_value = grad.new_zeros(0, dtype=a.dtype) if value is None or dv is None else dv.view_as(value).to(value.dtype)
    return da.view_as(a).to(a.dtype), du.view_as(u).to(u.dtype), of_value, dw.to(weight.dtype)


@edge_attention_backward.register_fake
def _(grad, a, u, value, weight, act, keys, values, bounds, panel):  # type: ignore[no-untyped-def]
    of_value = a.new_empty(0) if value is None else torch.empty_like(value)
    return torch.empty_like(a), torch.empty_like(u), of_value, torch.empty_like(weight)


def _remember(ctx, inputs, output):  # type: ignore[no-untyped-def]
    a, u, value, weight, ctx.act, keys, values, bounds, ctx.panel = inputs
    ctx.save_for_backward(a, u, value, weight, keys, values, bounds)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    a, u, value, weight, *edges = ctx.saved_tensors
    da, du, dv, dw = edge_attention_backward(grad, a, u, value, weight, ctx.act, *edges, ctx.panel)
    return da, du, None if value is None else dv, dw, *(None,) * 5


def _no_double_backward(ctx: object, *grads: Tensor) -> None:
    raise NotImplementedError(
        "second derivatives of attention along edges are not available in the blockwise execution. "
        "Fix: use impl='dense', or run the forward inside regard.execution('dense')."
    )


edge_attention.register_autograd(_backward, setup_context=_remember)
edge_attention_backward.register_autograd(_no_double_backward)
