r"""Soft attention along edges: each query reads the keys of its own edges, and nothing of size edges x hidden is kept.

$$e_{ij} = w \cdot \mathrm{act}(a_i + u_j), \qquad \alpha_{ij} = \frac{e^{e_{ij}}}{\sum_{l \in N(i)} e^{e_{il}}}, \qquad
  c_i = \sum_{j \in N(i)} r_{ij}\, \alpha_{ij} v_j$$

with the dropout factors $r$. Backward, from $g_i = dc_i$, with $z_{ij} = a_i + u_j$ and $\alpha$ recomputed:

$$\delta_{ij} = \alpha_{ij} \Big(r_{ij}\, g_i \cdot v_j - \sum_l \alpha_{il} r_{il}\, g_i \cdot v_l\Big), \qquad
  t_{ij} = \delta_{ij}\, w \odot \mathrm{act}'(z_{ij})$$

$$da_i = \sum_j t_{ij}, \qquad du_j = \sum_i t_{ij}, \qquad dv_j = \sum_i r_{ij} \alpha_{ij} g_i, \qquad
  dw = \sum_{ij} \delta_{ij}\, \mathrm{act}(z_{ij})$$

Dot products are $e_{ij} = w \cdot (a_i \odot u_j)$, their scale in $w$; then $da_i$ has $u_j$ and $du_j$ has $a_i$ where
$\mathrm{act}'$ stands.

Queries of about one degree stand together (`segment_layout`), so that some of them and their keys are a full array (queries, degree).
Such a panel is as large as the cache likes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.ops.activations import activation
from regard.ops.segment_layout import SPARE_ELEMENTS, Layout, Step, kept, laid_out, steps

# In place of an activation: the hidden layer is the product of query and key.
PRODUCT = "product"

# Hidden layer of a panel: a few of them, with what they are gathered from, should stay in the cache of one core.
CPU_PANEL_BYTES = 1 << 19
GPU_PANEL_BYTES = 64 << 20


def spare_slots(row_elements: int) -> int:
    """Slots of a panel that may be computed for nothing, for rows of so many numbers."""
    return SPARE_ELEMENTS // row_elements


class _Read(NamedTuple):
    """What some queries read, slot by slot."""

    queries: Tensor  # (R,)
    keys: Tensor  # (R k,), row of u
    values: Tensor  # (R k,), row of the values
    asking: Tensor  # (R, 1, H, D)
    key: Tensor  # (R, k, H, D), and where there is an activation, what it is taken of
    hidden: Tensor  # (R, k, H, D)
    value: Tensor  # (R, k, H, d_v)
    alpha: Tensor  # (R, k, H), the weights
    factor: Tensor | None  # (R, k, H), of dropout


class _Given(NamedTuple):
    """What the operators are given."""

    a: Tensor
    u: Tensor
    value: Tensor | None
    weight: Tensor
    act: str
    keys: Tensor
    values: Tensor
    bounds: Tensor
    panel: int
    seed: Tensor | None
    dropout: float
    layout: Layout | None


class _Operands:
    """The operands in the dtype of the arithmetic, one row a node, and where edges stand."""

    def __init__(self, given: _Given) -> None:
        a, u, value, weight = given.a, given.u, given.value, given.weight
        self.dtype = torch.promote_types(a.dtype, torch.float32)
        self.heads, self.width = weight.shape
        self.a, self.u = (x.to(self.dtype).flatten(1).contiguous() for x in (a, u))
        self.value = None if value is None else value.to(self.dtype).flatten(1).contiguous()
        self.weight, self.act = weight.to(self.dtype), None if given.act == PRODUCT else activation(given.act)
        self.value_width = self.width if value is None else value.shape[-1]
        self.layout = given.layout or laid_out(given.bounds, spare_slots(self.u.shape[-1]))
        self.keys = given.keys.index_select(0, self.layout.slots)
        self.values = self.keys if value is None else given.values.index_select(0, self.layout.slots)
        budget = CPU_PANEL_BYTES if a.device.type == "cpu" else GPU_PANEL_BYTES
        self.steps = steps(self.layout.panels, self.u.shape[-1] * self.u.element_size(), budget, given.panel)
        self.seed, self.dropout = given.seed, given.dropout

    def factors(self) -> Iterator[Tensor | None]:
        """Dropout factors, step by step."""
        if self.seed is None:
            return repeat(None)
        return kept(self.layout.rows, self.steps, self.heads, self.seed, self.dropout, self.dtype)

    def by_heads(self, x: Tensor, step: Step) -> Tensor:
        """(R k, H d) to (R, k, H, d)."""
        return x.view(len(step), step.degree, self.heads, x.shape[-1] // self.heads)

    def read(self) -> Iterator[_Read]:
        """Step by step."""
        for step, factor in zip(self.steps, self.factors(), strict=False):
            queries, keys, values = self.layout.rows[step.queries], self.keys[step.slots], self.values[step.slots]
            key = self.by_heads(self.u.index_select(0, keys), step)
            asking = self.a.index_select(0, queries).view(len(step), 1, self.heads, self.width)
            value = key if self.value is None else self.by_heads(self.value.index_select(0, values), step)
            if self.act is None:
                hidden = key * asking
            else:
                key = key + asking if value is key else key.add_(asking)
                hidden = self.act(key)
            score = (hidden * self.weight).sum(-1)
            if step.has_empty:
                empty = self.layout.empty[step.slots].view(len(step), step.degree, 1)
                score = score.masked_fill_(empty, -math.inf)
            yield _Read(queries, keys, values, asking, key, hidden, value, score.softmax(1), factor)


def _layout(*parts: Tensor | None) -> Layout | None:
    rows, slots, empty, panels = parts
    if rows is None or slots is None or empty is None or panels is None:
        return None
    return Layout(rows, slots, empty, panels)


def _contexts(  # noqa: PLR0913
    a: Tensor,
    u: Tensor,
    value: Tensor | None,
    weight: Tensor,
    act: str,
    keys: Tensor,
    values: Tensor,
    bounds: Tensor,
    panel: int,
    seed: Tensor | None,
    dropout: float,
    rows: Tensor | None,
    slots: Tensor | None,
    empty: Tensor | None,
    panels: Tensor | None,
) -> Tensor:
    """Contexts (Nq, H, d_v) in float32 or wider.

    Args:
        a: (Nq, H, D).
        u: (M, H, D).
        value: (M', H, d_v); None where the keys u are the values.
        weight: (H, D).
        act: name of the activation, or `PRODUCT`.
        keys: row of u of each edge, edges sorted by query.
        values: row of value of each edge.
        bounds: (Nq + 1,), where the edges of each query begin and end.
        panel: queries of a panel; 0 for as many as suit the cache.
        seed: of the dropout; None where there is none.
        dropout: the share of weights that are dropped.
        rows: with the three that follow a `Layout`, where it is known.
        slots: see `rows`.
        empty: see `rows`.
        panels: see `rows`.
    """
    layout = _layout(rows, slots, empty, panels)
    x = _Operands(_Given(a, u, value, weight, act, keys, values, bounds, panel, seed, dropout, layout))
    context = x.a.new_zeros(a.shape[0], x.heads, x.value_width)
    for part in x.read():
        alpha = part.alpha if part.factor is None else part.alpha * part.factor
        context.index_copy_(0, part.queries, (part.value * alpha[..., None]).sum(1))
    return context


def _contexts_fake(a, u, value, weight, *edges):  # type: ignore[no-untyped-def]
    width = weight.shape[-1] if value is None else value.shape[-1]
    return a.new_empty(a.shape[0], weight.shape[0], width, dtype=torch.promote_types(a.dtype, torch.float32))


def _gradients(  # noqa: PLR0913
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
    seed: Tensor | None,
    dropout: float,
    rows: Tensor | None,
    slots: Tensor | None,
    empty: Tensor | None,
    panels: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `edge_attention` for a, u, value (empty where there is none) and weight, in their shapes and dtypes."""
    layout = _layout(rows, slots, empty, panels)
    x = _Operands(_Given(a, u, value, weight, act, keys, values, bounds, panel, seed, dropout, layout))
    grad = grad.to(x.dtype)
    da, du, dw = torch.zeros_like(x.a), torch.zeros_like(x.u), torch.zeros_like(x.weight)
    dv = None if x.value is None else torch.zeros_like(x.value)
    for part in x.read():
        g = grad.index_select(0, part.queries).unsqueeze(1)  # (R, 1, H, d_v)
        agreement = (part.value * g).sum(-1)
        agreement = agreement if part.factor is None else agreement.mul_(part.factor)
        alpha = part.alpha
        delta = alpha * (agreement - (alpha * agreement).sum(1, keepdim=True))
        dw += (part.hidden * delta[..., None]).sum((0, 1))
        if x.act is None:
            t = delta[..., None] * x.weight
            da.index_copy_(0, part.queries, (t * part.key).sum(1).flatten(1))
            t = t.mul_(part.asking)
        else:
            assert x.act.derivative is not None
            t = x.act.derivative(part.key).mul_(delta[..., None]).mul_(x.weight)
            da.index_copy_(0, part.queries, t.sum(1).flatten(1))
        passed = (alpha if part.factor is None else alpha * part.factor)[..., None] * g
        if dv is None:
            du.index_add_(0, part.keys, t.add_(passed).view(-1, du.shape[-1]))
        else:
            du.index_add_(0, part.keys, t.view(-1, du.shape[-1]))
            dv.index_add_(0, part.values, passed.view(-1, dv.shape[-1]))
    of_value = grad.new_zeros(0, dtype=a.dtype) if value is None or dv is None else dv.view_as(value).to(value.dtype)
    return da.view_as(a).to(a.dtype), du.view_as(u).to(u.dtype), of_value, dw.to(weight.dtype)


def _gradients_fake(grad, a, u, value, weight, *edges):  # type: ignore[no-untyped-def]
    of_value = a.new_empty(0) if value is None else torch.empty_like(value)
    return torch.empty_like(a), torch.empty_like(u), of_value, torch.empty_like(weight)


def _remember(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.act, keys, values, bounds, ctx.panel, seed, ctx.dropout, rows, slots, empty, panels = inputs
    ctx.save_for_backward(*tensors, keys, values, bounds, seed, rows, slots, empty, panels)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    a, u, value, weight, keys, values, bounds, seed, *layout = ctx.saved_tensors
    da, du, dv, dw = edge_attention_backward(
        grad, a, u, value, weight, ctx.act, keys, values, bounds, ctx.panel, seed, ctx.dropout, *layout
    )
    return da, du, None if value is None else dv, dw, *(None,) * 11


def _no_double_backward(ctx: object, *grads: Tensor) -> None:
    raise NotImplementedError(
        "second derivatives of attention along edges are not available in the blockwise execution. "
        "Fix: use impl='dense', or run the forward inside regard.execution('dense')."
    )


# Registered without torch.library.custom_op, whose wrapper imports the whole compiler on its first call.
_library = torch.library.Library("regard", "FRAGMENT")
_GIVEN = (
    "Tensor a, Tensor u, Tensor? value, Tensor weight, str act, Tensor keys, Tensor values, Tensor bounds, int panel, "
    "Tensor? seed, float dropout, Tensor? rows, Tensor? slots, Tensor? empty, Tensor? panels"
)
_library.define(f"edge_attention({_GIVEN}) -> Tensor")
_library.define(f"edge_attention_backward(Tensor grad, {_GIVEN}) -> (Tensor, Tensor, Tensor, Tensor)")
_library.impl("edge_attention", _contexts, "CompositeExplicitAutograd")
_library.impl("edge_attention_backward", _gradients, "CompositeExplicitAutograd")
torch.library.register_fake("regard::edge_attention", _contexts_fake, lib=_library)
torch.library.register_fake("regard::edge_attention_backward", _gradients_fake, lib=_library)
torch.library.register_autograd("regard::edge_attention", _backward, setup_context=_remember, lib=_library)
torch.library.register_autograd("regard::edge_attention_backward", _no_double_backward, lib=_library)

edge_attention: Any = torch.ops.regard.edge_attention.default
edge_attention_backward: Any = torch.ops.regard.edge_attention_backward.default
