r"""Multi-dimensional additive attention: one alignment a feature, the hidden layer times a matrix on the tensor cores.

$$e_{ijf} = \sum_d W_{df}\, h_{ijd}, \quad h_{ijd} = \mathrm{act}(a_{id} + u_{jd}), \qquad
  L_{if} = \log \sum_j e^{e_{ijf}}, \qquad o_{if} = \sum_j e^{e_{ijf} - L_{if}} v_{jf}$$

for a softmax over all keys; other alignments change it as `multi_parts` says. Backward, with $P = e^{e - L}$ and
$G_{ijf} = P_{ijf} (do_{if} v_{jf} - do_{if} o_{if})$:

$$da_{id} = \sum_{jf} W_{df} G_{ijf}\, \mathrm{act}'_{ijd}, \quad du_{jd} = \sum_{if} W_{df} G_{ijf}\, \mathrm{act}'_{ijd}, \quad
  dW_{df} = \sum_{ij} h_{ijd} G_{ijf}, \quad dv_{jf} = \sum_i P_{ijf}\, do_{if}$$

A tile is of R C pairs: C queries that the program owns, R keys of those that it runs over. It holds pairs as columns,
(hidden or features) x (R C). Columns of one query are C apart, and a thread of a tensor-core product holds every eighth column:
with C a multiple of eight, sums over the keys stay within a thread, and so does the state of a softmax. Gradients are those of
`multi_product_grads`, or of `multi_product_pair` where that does not serve.

In half precision a bounded hidden layer and the columns of W, divided by their largest entries, meet in float16. What has no bound
meets in bfloat16 where the inputs are, else in tf32, which has the precision of float16 and the range of float32; so does what the
backward multiplies. Of float32 inputs a bounded hidden layer and W are two float16 each, the second what the first leaves out: three products
on the tensor cores, and what is missing is below the rounding of float32. What has no bound, and what the backward multiplies, is taken
apart into bfloat16 (`bfloat_parts`), or where it is too wide for registers multiplied in three products of tf32. All sums are float32. Features are cut into tiles of their own programs; gradients of a and u are then one
partial sum a tile. No atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.ops.triton.bfloat_parts import cut, product
from regard.ops.triton.launching import cdiv, power_of_2, quick
from regard.ops.triton.multi_parts import (
    LOG2E,
    Operands,
    activate,
    allowed,
    block_of,
    bump_of,
    changed,
    exp2,
    gained,
    keys_of,
    noise,
    place,
    query_side,
    within,
)

# Programs that sum the gradient of W, each over its queries: enough for every processor, few enough to hold their sums.
PROGRAMS = 1024


@triton.jit
def shrunk(w, AXIS: tl.constexpr, SCALED: tl.constexpr):
    """W as the scores' product takes it, hidden units along an axis, and what it leaves out of each feature's scores in base 2."""
    if SCALED:
        # The largest entry of each feature becomes one: nothing overflows, whatever the temperature was.
        top = tl.max(tl.abs(w), AXIS)
        top = tl.where(top > 0, top, 1.0)
        w /= tl.expand_dims(top, AXIS)
        factor = top * LOG2E
    else:
        factor = tl.zeros_like(tl.max(w, AXIS)) + LOG2E
    return w, factor


@triton.jit
def in_pieces(x, PIECES: tl.constexpr, PRODUCT: tl.constexpr):
    """Something as a product takes it: as it is, or in two float16 or three bfloat16 that add up to it."""
    first = x.to(PRODUCT)
    second, third = first, first
    if PIECES == 2:
        second = (x - first.to(tl.float32)).to(PRODUCT)
    if PIECES == 3:
        first, second, third = cut(x)
    return first, second, third


@triton.jit
def scored(x1, x2, x3, y1, y2, y3, PIECES: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr):
    """The product of x and y; that of their second float16 is below the rounding of float32."""
    if PIECES == 3:
        e = product(x1, x2, x3, y1, y2, y3, FAST)
    elif PIECES == 2:
        e = tl.dot(x1, y1, tl.dot(x1, y2, tl.dot(x2, y1)))
    else:
        e = tl.dot(x1, y1, input_precision=PRECISION)
    return e


@triton.jit
def pinned(x, beside, DEVICE: tl.constexpr):
    """Something in the layout of what stands beside it; without that the compiler computes it anew for every layout it is needed in."""
    if DEVICE:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f,f", [x, beside], dtype=tl.float32, is_pure=True, pack=1)
    return x


@quick
@triton.jit
def forward_kernel(
    A, U, W, V, MASK, SEED, POSITION, LOW, HIGH, spl, heat, window, dropout, first,
    sal, sam, sad, sul, sun, sud, swl, swd, swf, svl, svn, svf, sml, smm, smn, rate, slope, NQ, N, D, F,
    O, LSE, SOFT, PICK,
    ACT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, FAST: tl.constexpr, QUICK: tl.constexpr,
    NOISE: tl.constexpr, CHOICE: tl.constexpr, LEARNS: tl.constexpr, LOCAL: tl.constexpr, GAUSSIAN: tl.constexpr, DROP: tl.constexpr,
    SCALED: tl.constexpr, PIECES: tl.constexpr, PRODUCT: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Contexts and log-sum-exp (L, Nq, F) of C queries and one tile of features, running over the keys.

    Of a choice the context is the value of one key, `PICK`, and `SOFT` that of the softmax whose gradient it has. A context in half
    precision stands in `SOFT` as it is.
    """
    lead, tile, block = place(tl.program_id(0), NQ, F, C, BF, 1)
    m = block * C + tl.arange(0, C)
    d = tl.arange(0, BD)
    f = tile * BF + tl.arange(0, BF)
    m_in, d_in, f_in = m < NQ, d < D, f < F
    a = block_of(A + lead * sal, d, m, d_in, m_in, sad, sam) * rate
    w, factor = shrunk(block_of(W + lead * swl, f, d, f_in, d_in, swf, swd), 1, SCALED)
    w1, w2, w3 = in_pieces(w, PIECES, PRODUCT)
    position, low, high = query_side(POSITION + lead * spl, LOW + lead * NQ, HIGH + lead * NQ, m, m_in, LOCAL)
    feature, i = f[:, None, None], (first + m)[None, None, :]
    U += lead * sul
    V += lead * svl
    MASK += lead * sml
    top = tl.full((BF, C), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BF, C), dtype=tl.float32)
    acc = tl.zeros((BF, C), dtype=tl.float32)
    best = tl.full((BF, C), float("-inf"), dtype=tl.float32)
    pick = tl.full((BF, C), -1, dtype=tl.int32)
    read = tl.zeros((BF, C), dtype=tl.float32)
    broken = tl.zeros((BF, C), dtype=tl.int32)
    begin, end = keys_of(low, high, block, N, N - NQ, C, R, CAUSAL, LOCAL)
    for start in range(begin, end, R):
        n = start + tl.arange(0, R)
        n_in = n < N
        j = n[None, :, None]
        ok = allowed(MASK, n, m, n_in, m_in, smn, smm, N - NQ, False, CAUSAL, HAS_MASK)
        ok = within(ok, low, high, n, m, False, LOCAL)
        # A tile that the mask forbids as a whole is left out; without a mask there is no branch.
        reached = True
        if HAS_MASK:
            reached = tl.max(tl.max(ok.to(tl.int32), 1), 0) > 0
        if reached:
            u = block_of(U, d, n, d_in, n_in, sud, sun) * rate
            v = block_of(V, f, n, f_in, n_in, svf, svn)[:, :, None]
            bump = bump_of(position[None, None, :], j, window, GAUSSIAN)
            z = tl.reshape(u[:, :, None] + a[:, None, :], (BD, R * C))
            h, _ = activate(z, slope, ACT, QUICK, FAST)
            h1, h2, h3 = in_pieces(h, PIECES, PRODUCT)
            e = scored(w1, w2, w3, h1, h2, h3, PIECES, PRECISION, FAST)
            t = tl.reshape(e, (BF, R, C)) * factor[:, None, None]
            t = changed(t, bump, SEED, lead, feature, i, j, heat, NOISE, GAUSSIAN)
            if LOCAL:
                t = tl.where((position == position)[None, None, :], t, float("nan"))
            t = tl.where(ok[None, :, :], t, float("-inf"))
            x = gained(v, bump, SEED, lead, feature, i, j, dropout, DROP, GAUSSIAN, FAST)
            if LEARNS:
                new = tl.maximum(top, tl.max(t, 1))
                safe = tl.where(new == float("-inf"), 0.0, new)
                p = exp2(t - safe[:, None, :], FAST)
                rescale = exp2(top - safe, FAST)
                mass = mass * rescale + tl.sum(p, 1)
                acc = acc * rescale + tl.sum(p * x, 1)
                top = new
            if CHOICE:
                if CHOICE == 2 and not NOISE:
                    t += noise(SEED, lead, feature, i, j, heat)
                largest = tl.max(t, 1)
                # The first of equals, in this block as between blocks.
                at = tl.min(tl.where(ok[None, :, :] & (t == largest[:, None, :]), j, 2147483647), 1)
                better = largest > best
                read = tl.where(better, tl.sum(tl.where(j == at[:, None, :], x, 0.0), 1), read)
                pick = tl.where(better, at, pick)
                best = tl.maximum(best, largest)
                broken = tl.maximum(broken, tl.max((t != t).to(tl.int32), 1))
    # NaN is neither zero nor another number: it stays alive, and so is seen in the result.
    alive = mass != 0
    at = (lead * NQ + m[None, :]) * F + f[:, None]
    inside = f_in[:, None] & m_in[None, :]
    soft = tl.where(alive, acc / tl.where(alive, mass, 1.0), 0.0)
    if CHOICE:
        # NaN is no choice.
        tl.store(O + at, tl.where(broken > 0, float("nan"), read), mask=inside)
        tl.store(PICK + at, tl.where(broken > 0, -1, pick), mask=inside)
    else:
        tl.store(O + at, soft, mask=inside)
    if WIDE:
        tl.store(SOFT + at, soft, mask=inside)
    if LEARNS:
        # Infinity for a row that reads nothing: its weights are then zero in the backward.
        tl.store(LSE + at, tl.where(alive, top + tl.log2(tl.where(alive, mass, 1.0)), float("inf")), mask=inside)


def is_narrow(x: Operands) -> bool:
    """Whether registers hold a hidden layer of float32 in parts."""
    return x.sizes[2] <= 64


def tile(x: Operands) -> dict[str, int]:
    """Tile sizes and warps; wide layers take fewer features at a time, so that registers hold them."""
    _, _, width, features = x.sizes
    bd, bf = (max(16, power_of_2(size)) for size in (width, features))
    if not x.is_half:
        # Measured on an H200: 0.56 ms, with a second stage 0.60, with half of the features at a time 1.69.
        most, stages = (64, 1) if is_narrow(x) or x.is_bounded else (32, 2)
        return {"R": 8, "C": 8, "BD": bd, "BF": min(bf, most), "num_warps": 4, "num_stages": stages}
    most = 32 if bd > 128 and x.a.dtype == torch.float16 else 64
    # Measured on an H200: 0.98 ms, where 8 queries a tile take 1.28.
    c = 16 if x.a.dtype == torch.bfloat16 and max(bd, bf) <= 64 else 8
    return {"R": 8, "C": c, "BD": bd, "BF": min(bf, most), "num_warps": 8 if bd > 64 else 4, "num_stages": 3}


def arithmetic(x: Operands, apart: bool = True) -> dict[str, object]:
    """The dtypes in which the products meet, in how many pieces if `apart`, and whether W is divided by its largest entries before."""
    pieces = 1
    if apart and not x.is_half:
        pieces = 2 if x.is_bounded else 3 if is_narrow(x) else 1
    wide = tl.bfloat16 if x.on_device and x.a.dtype == torch.bfloat16 else tl.float32
    return {
        **x.flags(),
        "SCALED": x.is_half or pieces == 2,
        "PIECES": pieces,
        "PRODUCT": tl.float16 if pieces == 2 or (x.is_half and x.is_bounded) else wide,
        "BACK": wide,
        "PRECISION": ("tf32" if x.is_half else "tf32x3") if x.on_device else "ieee",
    }


def forward(
    x: Operands, reach: Tensor | None, out: Tensor, lse: Tensor, soft: Tensor | None, pick: Tensor | None
) -> None:
    """Write what the alignment has of these, (L, Nq, F), contiguous; the first in any precision, the rest in float32 and int32."""
    nq, _, _, features = x.sizes
    shape = tile(x)
    # What there is none of points somewhere else.
    given = (lse if y is None else y for y in (soft, pick))
    grid = x.lead * cdiv(features, shape["BF"]) * cdiv(nq, shape["C"])
    forward_kernel[(grid,)](*x.arguments(reach), out, lse, *given, **arithmetic(x), WIDE=soft is not None, **shape)
