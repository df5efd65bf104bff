r"""Soft attention along edges, on a GPU: a program for each query, which reads its own edges; nothing of edges x width is kept.

$$e_{ij} = w \cdot \mathrm{act}(a_i + u_j), \qquad \alpha_{ij} = e^{e_{ij} - L_i}, \qquad c_i = \sum_{j \in N(i)} r_{ij}\, \alpha_{ij} v_j$$

with the dropout factors $r$ and $L_i = \log \sum_j e^{e_{ij}}$. Backward, from $g_i = dc_i$:

$$\delta_{ij} = \alpha_{ij} (r_{ij}\, g_i \cdot v_j - g_i \cdot c_i), \qquad da_i = w \odot \sum_j \delta_{ij}\, \mathrm{act}'(z_{ij}), \qquad
  dw = \sum_{ij} \delta_{ij}\, \mathrm{act}(z_{ij})$$

$$du_j = w \odot \sum_i \delta_{ij}\, \mathrm{act}'(z_{ij}), \qquad dv_j = \sum_i r_{ij}\, \alpha_{ij}\, g_i$$

Dot products are $e_{ij} = w \cdot (a_i \odot u_j)$; there $da_i$ has $u_j$ and $du_j$ has $a_i$ where $\mathrm{act}'$ stands.

The first line is computed by queries, which leave $\delta$ and $r\alpha$ of their edges, two numbers an edge and head; the second by
keys, which find their edges through the transposed order. No atomics: every sum has one owner and one order.

Edges are tiles (edges, heads, width), one load of whole rows a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.triton.activate import code_of, exp2, value, value_and_slope
from regard.ops.triton.align import FOR_DROPOUT, keep, uniform
from regard.ops.triton.launching import cdiv, power_of_2, quick

# In place of an activation: the hidden layer is the product of query and key.
PRODUCT = "product"
PRODUCT_CODE = tl.constexpr(-1)
LOG2E = tl.constexpr(1.4426950408889634)
# Numbers of a tile: enough to keep loads in flight, few enough for the registers.
TILE = 4096
# Programs that walk over the queries in the backward, each with one partial sum of w.
WALKERS = 2048


@triton.jit
def _rows(X, row, there, h, c, H, C):
    """Rows (edges) of X (rows, H, C) as (edges, heads, width) in float32; zeros where there is none."""
    at = X + row[:, None, None] * (H * C) + h[None, :, None] * C + c[None, None, :]
    return tl.load(at, mask=there[:, :, None] & (c < C)[None, None, :], other=0.0).to(tl.float32)


@triton.jit
def _row(X, row, h, c, H, C):
    """One row of X as (heads, width)."""
    inside = (h < H)[:, None] & (c < C)[None, :]
    return tl.load(X + row * (H * C) + h[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)


def _code(act: str) -> tuple[int, float]:
    """Code and slope below zero."""
    return (PRODUCT_CODE.value, 0.0) if act == PRODUCT else code_of(act)[:2]


@triton.jit
def _hidden(a, u, ACT: tl.constexpr, slope, DEVICE: tl.constexpr):
    """The hidden layer of pairs."""
    if ACT == PRODUCT_CODE:
        y = a * u
    else:
        y = value(a + u, ACT, slope, False, DEVICE)
    return y


@triton.jit
def _hidden_and_slopes(a, u, ACT: tl.constexpr, slope, DEVICE: tl.constexpr):
    """The hidden layer of pairs, and its derivatives by query and by key."""
    if ACT == PRODUCT_CODE:
        y, by_query, by_key = a * u, u, a
    else:
        y, by_query = value_and_slope(a + u, ACT, slope, DEVICE)
        by_key = by_query
    return y, by_query, by_key


@triton.jit
def _readable(MASK, e, end, h, smh, H, HAS_MASK: tl.constexpr):
    """Which edges which heads may read, (edges, heads)."""
    ok = (e < end)[:, None] & (h < H)[None, :]
    if HAS_MASK:
        ok = ok & (tl.load(MASK + e[:, None] + h[None, :] * smh, mask=ok, other=0) != 0)
    return ok


@triton.jit
def _kept(SEED, dropout, h, i, slot, DROP: tl.constexpr):
    """Dropout factors of the slots of query i, (edges, heads)."""
    if DROP:
        kept = keep(uniform(SEED, h[None, :], h[None, :] * 0, i, slot[:, None], FOR_DROPOUT), dropout)
    else:
        kept = 1.0
    return kept


@quick
@triton.jit
def forward_kernel(
    A, U, V, W, KEYS, VALUES, BOUNDS, MASK, SEED, C, LSE, smh, slope, dropout, H, D, DV,
    ACT: tl.constexpr, SHARED: tl.constexpr, HAS_MASK: tl.constexpr, DROP: tl.constexpr, DEVICE: tl.constexpr,
    BE: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d, c = tl.arange(0, BD), tl.arange(0, BV)
    row = i.to(tl.int64)
    begin, end = tl.load(BOUNDS + i).to(tl.int32), tl.load(BOUNDS + i + 1).to(tl.int32)
    a, w = _row(A, row, h, d, H, D), _row(W, 0, h, d, H, D)
    top = tl.full((BH,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BH,), dtype=tl.float32)
    acc = tl.zeros((BH, BV), dtype=tl.float32)
    for first in range(begin, end, BE):
        e = first + tl.arange(0, BE)
        ok = _readable(MASK, e, end, h, smh, H, HAS_MASK)
        u = _rows(U, tl.load(KEYS + e, mask=e < end, other=0), ok, h, d, H, D)
        s = tl.sum(_hidden(a[None, :, :], u, ACT, slope, DEVICE) * w[None, :, :], 2) * LOG2E
        s = tl.where(ok, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = exp2(s - safe[None, :], DEVICE)
        shrink = exp2(top - safe, DEVICE)
        mass = mass * shrink + tl.sum(p, 0)
        p = p * _kept(SEED, dropout, h, i, e - begin, DROP)
        if SHARED:
            v = u
        else:
            v = _rows(V, tl.load(VALUES + e, mask=e < end, other=0), ok, h, c, H, DV)
        acc = acc * shrink[:, None] + tl.sum(p[:, :, None] * v, 0)
        top = new
    # NaN is alive, so that it is seen in the result.
    alive = mass != 0
    mass = tl.where(alive, mass, 1.0)
    inside = (h < H)[:, None] & (c < DV)[None, :]
    tl.store(C + row * (H * DV) + h[:, None] * DV + c[None, :], acc / mass[:, None], mask=inside)
    tl.store(LSE + row * H + h, tl.where(alive, top + tl.log2(mass), float("-inf")), mask=h < H)


@quick
@triton.jit
def query_grad_kernel(
    A, U, V, W, KEYS, VALUES, BOUNDS, MASK, SEED, C, LSE, G, DA, DW, DELTA, ALPHA, smh, slope, dropout, NQ, H, D, DV,
    ACT: tl.constexpr, SHARED: tl.constexpr, HAS_MASK: tl.constexpr, DROP: tl.constexpr, DEVICE: tl.constexpr,
    BE: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradient of the queries; of w as one partial sum a program; delta and r alpha of the edges."""
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d, c = tl.arange(0, BD), tl.arange(0, BV)
    w = _row(W, 0, h, d, H, D)
    dw = tl.zeros((BH, BD), dtype=tl.float32)
    here = (h < H)[:, None] & (d < D)[None, :]
    origin = tl.program_id(0).to(tl.int64) * 0
    for i in range(tl.program_id(0), NQ, tl.num_programs(0)):
        row = origin + i
        begin, end = tl.load(BOUNDS + i).to(tl.int32), tl.load(BOUNDS + i + 1).to(tl.int32)
        a, g = _row(A, row, h, d, H, D), _row(G, row, h, c, H, DV)
        agreed = tl.sum(g * _row(C, row, h, c, H, DV), 1)
        lse = tl.load(LSE + row * H + h, mask=h < H, other=0.0)
        da = tl.zeros((BH, BD), dtype=tl.float32)
        for first in range(begin, end, BE):
            e = first + tl.arange(0, BE)
            ok = _readable(MASK, e, end, h, smh, H, HAS_MASK)
            u = _rows(U, tl.load(KEYS + e, mask=e < end, other=0), ok, h, d, H, D)
            y, t, _ = _hidden_and_slopes(a[None, :, :], u, ACT, slope, DEVICE)
            s = tl.sum(y * w[None, :, :], 2) * LOG2E
            p = tl.where(ok, exp2(s - lse[None, :], DEVICE), 0.0)
            if SHARED:
                v = u
            else:
                v = _rows(V, tl.load(VALUES + e, mask=e < end, other=0), ok, h, c, H, DV)
            kept = _kept(SEED, dropout, h, i, e - begin, DROP)
            delta = p * (tl.sum(v * g[None, :, :], 2) * kept - agreed[None, :])
            at = e.to(tl.int64)[:, None] * H + h[None, :]
            inside = (e < end)[:, None] & (h < H)[None, :]
            tl.store(DELTA + at, delta, mask=inside)
            tl.store(ALPHA + at, p * kept, mask=inside)
            da += tl.sum(delta[:, :, None] * t, 0)
            dw += tl.sum(delta[:, :, None] * y, 0)
        tl.store(DA + row * (H * D) + h[:, None] * D + d[None, :], (da * w).to(DA.dtype.element_ty), mask=here)
    tl.store(DW + tl.program_id(0).to(tl.int64) * (H * D) + h[:, None] * D + d[None, :], dw, mask=here)


@quick
@triton.jit
def key_grad_kernel(
    A, U, W, G, TARGETS, ORDER, BOUNDS, DELTA, ALPHA, DU, DV_OUT, slope, H, D, DV,
    ACT: tl.constexpr, OF_KEYS: tl.constexpr, OF_VALUES: tl.constexpr, SHARED: tl.constexpr, DEVICE: tl.constexpr,
    BE: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of one row of the keys, of the values, or of both where their edges are the same."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    d, c = tl.arange(0, BD), tl.arange(0, BV)
    begin, end = tl.load(BOUNDS + row).to(tl.int32), tl.load(BOUNDS + row + 1).to(tl.int32)
    u = _row(U, row, h, d, H, D) if OF_KEYS else tl.zeros((BH, BD), dtype=tl.float32)
    du = tl.zeros((BH, BD), dtype=tl.float32)
    dv = tl.zeros((BH, BV), dtype=tl.float32)
    for first in range(begin, end, BE):
        e = first + tl.arange(0, BE)
        there = (e < end)[:, None] & (h < H)[None, :]
        place = tl.load(ORDER + e, mask=e < end, other=0)
        target = tl.load(TARGETS + place, mask=e < end, other=0)
        at = place[:, None] * H + h[None, :]
        if OF_KEYS:
            delta = tl.load(DELTA + at, mask=there, other=0.0)
            a = _rows(A, target, there, h, d, H, D)
            _, _, t = _hidden_and_slopes(a, u[None, :, :], ACT, slope, DEVICE)
            # An edge that is not read teaches nothing, whatever its ends hold.
            du += tl.sum(tl.where((delta != 0)[:, :, None], delta[:, :, None] * t, 0.0), 0)
        if OF_VALUES:
            alpha = tl.load(ALPHA + at, mask=there, other=0.0)
            dv += tl.sum(alpha[:, :, None] * _rows(G, target, there, h, c, H, DV), 0)
    if OF_KEYS:
        du = du * _row(W, 0, h, d, H, D)
        if SHARED:
            du += dv
        at_d = row * (H * D) + h[:, None] * D + d[None, :]
        tl.store(DU + at_d, du.to(DU.dtype.element_ty), mask=(h < H)[:, None] & (d < D)[None, :])
    if OF_VALUES and not SHARED:
        at_c = row * (H * DV) + h[:, None] * DV + c[None, :]
        tl.store(DV_OUT + at_c, dv.to(DV_OUT.dtype.element_ty), mask=(h < H)[:, None] & (c < DV)[None, :])


class Operands(NamedTuple):
    """One call; edges stand sorted by query.

    Bounds say where the edges of each query begin and end; those after the last bound belong to nobody.
    """

    a: Tensor  # (Nq, H, D)
    u: Tensor  # (M, H, D)
    value: Tensor | None  # (M', H, d_v); None where the keys u are the values
    weight: Tensor  # (H, D)
    keys: Tensor  # (E,), row of u of each edge
    values: Tensor | None  # (E,), row of value of each edge; None where it is that of the key
    targets: Tensor  # (E,), query of each edge; some query where it belongs to nobody
    bounds: Tensor  # (Nq + 1,)
    # For the gradients of the keys: places of the edges sorted by key, and where those of each row of u begin and end.
    key_order: Tensor | None
    key_bounds: Tensor | None
    # The same for the values, where there are `values`.
    value_order: Tensor | None
    value_bounds: Tensor | None
    mask: Tensor | None  # bytes (H or 1, E)
    seed: Tensor | None
    dropout: float
    act: str

    @property
    def width(self) -> int:
        """d_v."""
        return self.u.shape[-1] if self.value is None else self.value.shape[-1]

    def tensors(self) -> tuple[Tensor, ...]:
        """All that kernels point to; what there is none of points somewhere else."""
        value = self.u if self.value is None else self.value
        values = self.keys if self.values is None else self.values
        mask = self.keys if self.mask is None else self.mask
        seed = self.keys if self.seed is None else self.seed
        return self.a, self.u, value, self.weight, self.keys, values, self.bounds, mask, seed

    def numbers(self) -> tuple[int, float, float]:
        step = 0 if self.mask is None or self.mask.shape[0] == 1 else self.mask.stride(0)
        return step, _code(self.act)[1], self.dropout

    def flags(self) -> dict[str, object]:
        return {
            "ACT": _code(self.act)[0], "SHARED": self.value is None, "HAS_MASK": self.mask is not None,
            "DROP": self.seed is not None, "DEVICE": self.a.device.type == "cuda",
        }  # fmt: skip

    def tile(self, rows: int) -> dict[str, int]:
        """Edges, heads and widths of a tile: as many edges as rows have on average, as far as they fit."""
        heads, width = self.weight.shape
        blocks = {"BD": power_of_2(width), "BV": power_of_2(self.width)}
        widest = max(blocks.values())
        h = min(power_of_2(heads), max(1, TILE // 2 // widest))
        # At least a few, for the sake of rows that are longer than most.
        usual = power_of_2(max(8, len(self.keys) // max(1, rows)))
        edges = max(1, min(usual, TILE // (h * widest)))
        warps = max(1, min(4, edges * h * widest // 512))
        return {"BE": edges, "BH": h, **blocks, "num_warps": warps}


def contiguous(x: Operands) -> Operands:
    """Rows side by side, as kernels read them, in one dtype; w in float32."""
    value = None if x.value is None else x.value.contiguous()
    return x._replace(a=x.a.contiguous(), u=x.u.contiguous(), value=value, weight=x.weight.float().contiguous())


def forward(x: Operands) -> tuple[Tensor, Tensor]:
    """Contexts (Nq, H, d_v) in float32, and the logarithm to base 2 of what the exponentials add up to, (Nq, H)."""
    x = contiguous(x)
    nq, heads, width = x.a.shape
    context = torch.empty(nq, heads, x.width, device=x.a.device)
    lse = torch.empty(nq, heads, device=x.a.device)
    tile = x.tile(nq)
    forward_kernel[(nq, cdiv(heads, tile["BH"]))](
        *x.tensors(), context, lse, *x.numbers(), heads, width, x.width, **x.flags(), **tile
    )
    return context, lse


def _zeros_of_edges(count: int, heads: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two (E, H), each from a multiple of 16 bytes on, as a launch expects."""
    size = count * heads
    both = torch.zeros(2, size + -size % 4, device=device)[:, :size].view(2, count, heads)
    return both[0], both[1]


def backward(x: Operands, context: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a, u, value (empty where there is none) and weight, in their dtypes."""
    dtype_of_weight, x = x.weight.dtype, contiguous(x)
    grad = grad.float().contiguous()
    (nq, heads, width), count = x.a.shape, len(x.keys)
    device, tile = x.a.device, x.tile(nq)
    walkers, groups = min(nq, WALKERS), cdiv(heads, tile["BH"])
    da, du = torch.empty_like(x.a), torch.empty_like(x.u)
    dvalue = x.u.new_empty(0) if x.value is None else torch.empty_like(x.value)
    dw = torch.empty(walkers, heads, width, device=device)
    # Edges that belong to nobody are left at zero.
    delta, alpha = _zeros_of_edges(count, heads, device)
    query_grad_kernel[(walkers, groups)](
        *x.tensors(),
        context,
        lse,
        grad,
        da,
        dw,
        delta,
        alpha,
        *x.numbers(),
        nq,
        heads,
        width,
        x.width,
        **x.flags(),
        **tile,
    )
    # One pass where an edge reads its key and its value at the same row.
    passes = [(x.key_order, x.key_bounds, True, x.values is None)]
    if x.values is not None:
        passes.append((x.value_order, x.value_bounds, False, True))
    for order, bounds, of_keys, of_values in passes:
        assert order is not None
        assert bounds is not None
        rows = len(bounds) - 1
        if rows == 0:
            continue
        flags = {"ACT": _code(x.act)[0], "SHARED": x.value is None, "DEVICE": device.type == "cuda"}
        key_grad_kernel[(rows, groups)](
            x.a, x.u, x.weight, grad, x.targets, order, bounds, delta, alpha, du, dvalue, _code(x.act)[1],
            heads, width, x.width, OF_KEYS=of_keys, OF_VALUES=of_values, **flags, **x.tile(rows),
        )  # fmt: skip
    return da, du, dvalue, dw.sum(0).to(dtype_of_weight)
