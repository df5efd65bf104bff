r"""Additive soft attention, exactly, in float32: forward and backward, one activation per hidden unit and pair.

$$s_{ij} = \sum_d w_d\, \mathrm{act}(a_{id} + u_{jd}), \qquad L_i = \log \sum_j e^{s_{ij}}, \qquad o_i = \sum_j e^{s_{ij} - L_i} v_j$$

Backward, with $P = e^{s - L}$, $D_i = do_i \cdot o_i$ and $G_{ij} = P_{ij}(do_i \cdot v_j - D_i)$:

$$da_{id} = w_d \sum_j G_{ij}\, \mathrm{act}'(z_{ijd}), \quad du_{jd} = w_d \sum_i G_{ij}\, \mathrm{act}'(z_{ijd}), \quad
  dw_d = \sum_{ij} G_{ij}\, \mathrm{act}(z_{ijd}), \quad dv_j = \sum_i P_{ij}\, do_i$$

For tanh, $\tanh(a+u) = 1 - 2r$ with $r = 1/(1 + e^{2a} e^{2u})$: the exponentials are per token, and two hidden units share a
reciprocal, $w_1/x_1 + w_2/x_2 = (w_1 x_2 + w_2 x_1)/(x_1 x_2)$. A tile in which that could overflow computes each pair's own
exponential instead. No atomics: a program owns its rows, sums over programs are finished by the launcher.

`skip` is a device integer: a nonzero value makes every program return at once, so that a faster path may take over without
the host knowing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# act codes
TANH, SIGMOID, RELU, LEAKY, GELU, IDENTITY = range(6)
CODES = {"tanh": TANH, "sigmoid": SIGMOID, "relu": RELU, "leaky_relu": LEAKY, "gelu": GELU, "identity": IDENTITY}

# Two reciprocals are shared while |a| + |u| stays below this: (1 + e^42)^2 is still a float32.
SHARED_RANGE = tl.constexpr(21.0)


@triton.jit
def _reciprocal(x, FAST: tl.constexpr):
    """1/x by the special-function unit, within one unit in the last place; the interpreter divides."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def _activate(z, ACT: tl.constexpr, slope):
    """Value and derivative."""
    if ACT == 0:
        # From e^-2|z|, so that neither saturated side loses its derivative to cancellation.
        e = tl.exp(-2.0 * tl.abs(z))
        h = (1.0 - e) / (1.0 + e)
        h = tl.where(z < 0, -h, h)
        g = 4.0 * e / ((1.0 + e) * (1.0 + e))
    elif ACT == 1:
        e = tl.exp(-tl.abs(z))
        h = tl.where(z < 0, e, 1.0) / (1.0 + e)
        g = e / ((1.0 + e) * (1.0 + e))
    elif ACT == 2:
        h = tl.maximum(z, 0.0)
        g = tl.where(z > 0, 1.0, 0.0)
    elif ACT == 3:
        h = tl.where(z > 0, z, slope * z)
        g = tl.where(z > 0, 1.0, slope)
    elif ACT == 4:
        cdf = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        h = z * cdf
        g = cdf + z * tl.exp(-0.5 * z * z) * 0.3989422804014327
    else:
        h = z
        g = z * 0.0 + 1.0
    return h, g


@triton.jit
def _tile_scores(
    A,
    U,
    W,
    m,
    n,
    m_in,
    n_in,
    sad,
    sam,
    sud,
    sun,
    shared: tl.constexpr,
    slope,
    D,
    ACT: tl.constexpr,
    FAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Scores of a tile. For tanh and sigmoid A and U hold exponentials while `shared`, raw sums otherwise."""
    s = tl.zeros((BM, BN), dtype=tl.float32)
    if shared:
        total = 0.0
        for d in range(0, D, 2):
            w1, w2 = tl.load(W + d), tl.load(W + d + 1)
            a1 = tl.load(A + d * sad + m * sam, mask=m_in, other=0.0)
            a2 = tl.load(A + (d + 1) * sad + m * sam, mask=m_in, other=0.0)
            u1 = tl.load(U + d * sud + n * sun, mask=n_in, other=0.0)
            u2 = tl.load(U + (d + 1) * sud + n * sun, mask=n_in, other=0.0)
            x1 = 1.0 + a1[:, None] * u1[None, :]
            x2 = 1.0 + a2[:, None] * u2[None, :]
            s += (w1 * x2 + w2 * x1) * _reciprocal(x1 * x2, FAST)
            total += w1 + w2
        s = total - (2.0 if ACT == 0 else 1.0) * s
    else:
        for d in range(0, D):
            w = tl.load(W + d)
            a = tl.load(A + d * sad + m * sam, mask=m_in, other=0.0).to(tl.float32)
            u = tl.load(U + d * sud + n * sun, mask=n_in, other=0.0).to(tl.float32)
            h, g = _activate(a[:, None] + u[None, :], ACT, slope)
            s += w * h
    return s


@triton.jit
def _largest(TOP, at, inside, SHARE: tl.constexpr):
    """The largest magnitude in a block of tokens, where reciprocals may be shared at all."""
    if SHARE:
        return tl.max(tl.load(TOP + at, mask=inside, other=0.0), 0)
    return 0.0


@triton.jit
def _allowed(MASK, m, n, m_in, n_in, smm, smn, offset, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr):
    ok = m_in[:, None] & n_in[None, :]
    if CAUSAL:
        ok = ok & (n[None, :] <= m[:, None] + offset)
    if HAS_MASK:
        ok = ok & (tl.load(MASK + m[:, None] * smm + n[None, :] * smn, mask=ok, other=0) != 0)
    return ok


@triton.jit
def forward_kernel(
    A, U, EA, EU, AMAX, UMAX, W, V, MASK, O, LSE, SKIP,
    sal, sad, sam, sul, sud, sun, swl, svl, svn, svd, sml, smm, smn, sol, som, sod,
    slope, NQ, N, D, DV,
    ACT: tl.constexpr, SHARE: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    if tl.load(SKIP) != 0:
        return
    lead = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    m_in = m < NQ
    c = tl.arange(0, BV)
    A += lead * sal
    EA += lead * sal
    U += lead * sul
    EU += lead * sul
    W += lead * swl
    V += lead * svl
    MASK += lead * sml
    offset = N - NQ
    top = tl.full((BM,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, BV), dtype=tl.float32)
    a_top = _largest(AMAX + lead * NQ, m, m_in, SHARE)
    end = N
    if CAUSAL:
        end = tl.minimum(N, tl.program_id(0) * BM + BM + offset)
    for start in range(0, end, BN):
        n = start + tl.arange(0, BN)
        n_in = n < N
        u_top = _largest(UMAX + lead * N, n, n_in, SHARE)
        # A comparison with NaN is false, so NaN takes the plain path and comes out as NaN.
        shared = a_top + u_top <= SHARED_RANGE
        if SHARE and shared:
            s = _tile_scores(EA, EU, W, m, n, m_in, n_in, sad, sam, sud, sun, True, slope, D, ACT, FAST, BM, BN)
        else:
            s = _tile_scores(A, U, W, m, n, m_in, n_in, sad, sam, sud, sun, False, slope, D, ACT, FAST, BM, BN)
        ok = _allowed(MASK, m, n, m_in, n_in, smm, smn, offset, CAUSAL, HAS_MASK)
        s = tl.where(ok, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp(s - safe[:, None])
        rescale = tl.exp(top - safe)
        mass = mass * rescale + tl.sum(p, 1)
        v = tl.load(V + n[:, None] * svn + c[None, :] * svd, mask=n_in[:, None] & (c[None, :] < DV), other=0.0)
        acc = acc * rescale[:, None]
        acc = tl.dot(p, v.to(tl.float32), acc, input_precision=PRECISION)
        top = new
    alive = mass > 0
    out = tl.where(alive[:, None], acc / tl.where(alive, mass, 1.0)[:, None], 0.0)
    tl.store(
        O + lead * sol + m[:, None] * som + c[None, :] * sod,
        out.to(O.dtype.element_ty),
        mask=m_in[:, None] & (c[None, :] < DV),
    )
    tl.store(LSE + lead * NQ + m, tl.where(alive, top + tl.log(tl.where(alive, mass, 1.0)), float("-inf")), mask=m_in)


@triton.jit
def _grad_tile(
    A, U, EA, EU, W, V, DO, MASK, m, n, m_in, n_in, c, lse, delta, shared,
    sad, sam, sud, sun, svn, svd, sgm, sgd, smm, smn, offset, slope, D, DV,
    ACT: tl.constexpr, SHARE: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """P and G of a tile, and the do and v it was computed from."""
    if SHARE and shared:
        s = _tile_scores(EA, EU, W, m, n, m_in, n_in, sad, sam, sud, sun, True, slope, D, ACT, FAST, BM, BN)
    else:
        s = _tile_scores(A, U, W, m, n, m_in, n_in, sad, sam, sud, sun, False, slope, D, ACT, FAST, BM, BN)
    ok = _allowed(MASK, m, n, m_in, n_in, smm, smn, offset, CAUSAL, HAS_MASK) & (lse > float("-inf"))[:, None]
    p = tl.where(ok, tl.exp(s - tl.where(lse > float("-inf"), lse, 0.0)[:, None]), 0.0)
    do = tl.load(DO + m[:, None] * sgm + c[None, :] * sgd, mask=m_in[:, None] & (c[None, :] < DV), other=0.0).to(
        tl.float32
    )
    v = tl.load(V + n[:, None] * svn + c[None, :] * svd, mask=n_in[:, None] & (c[None, :] < DV), other=0.0).to(
        tl.float32
    )
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    g = tl.where(ok, p * (dp - delta[:, None]), 0.0)
    return p, g, do


@triton.jit
def _two_slopes(EA, EU, d, m, n, m_in, n_in, sad, sam, sud, sun, FAST: tl.constexpr):
    """Reciprocals of two hidden units from one division."""
    a1 = tl.load(EA + d * sad + m * sam, mask=m_in, other=0.0)
    a2 = tl.load(EA + (d + 1) * sad + m * sam, mask=m_in, other=0.0)
    u1 = tl.load(EU + d * sud + n * sun, mask=n_in, other=0.0)
    u2 = tl.load(EU + (d + 1) * sud + n * sun, mask=n_in, other=0.0)
    x1 = 1.0 + a1[:, None] * u1[None, :]
    x2 = 1.0 + a2[:, None] * u2[None, :]
    inverse = _reciprocal(x1 * x2, FAST)
    return x2 * inverse, x1 * inverse


@triton.jit
def query_grad_kernel(
    A, U, EA, EU, AMAX, UMAX, W, V, DO, MASK, LSE, DELTA, DA, DW, SKIP,
    sal, sad, sam, sul, sud, sun, swl, svl, svn, svd, sgl, sgm, sgd, sml, smm, smn, stl, std, stt,
    slope, NQ, N, D, DV,
    ACT: tl.constexpr, SHARE: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradient of a (D, Nq) by rows that a program owns, and of w as one partial sum a program."""
    if tl.load(SKIP) != 0:
        return
    lead = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    m_in = m < NQ
    c = tl.arange(0, BV)
    A += lead * sal
    EA += lead * sal
    U += lead * sul
    EU += lead * sul
    W += lead * swl
    V += lead * svl
    DO += lead * sgl
    MASK += lead * sml
    DA += lead * stl
    DW += (lead * tl.num_programs(0) + tl.program_id(0)) * D
    offset = N - NQ
    lse = tl.load(LSE + lead * NQ + m, mask=m_in, other=float("-inf"))
    delta = tl.load(DELTA + lead * NQ + m, mask=m_in, other=0.0)
    a_top = _largest(AMAX + lead * NQ, m, m_in, SHARE)
    end = N
    if CAUSAL:
        end = tl.minimum(N, tl.program_id(0) * BM + BM + offset)
    for start in range(0, end, BN):
        n = start + tl.arange(0, BN)
        n_in = n < N
        u_top = _largest(UMAX + lead * N, n, n_in, SHARE)
        shared = a_top + u_top <= SHARED_RANGE
        p, g, do = _grad_tile(
            A, U, EA, EU, W, V, DO, MASK, m, n, m_in, n_in, c, lse, delta, shared,
            sad, sam, sud, sun, svn, svd, sgm, sgd, smm, smn, offset, slope, D, DV,
            ACT, SHARE, CAUSAL, HAS_MASK, PRECISION, FAST, BM, BN,
        )  # fmt: skip
        if SHARE and shared:
            gain = 4.0 if ACT == 0 else 1.0
            back = 2.0 if ACT == 0 else 1.0
            for d in range(0, D, 2):
                w1, w2 = tl.load(W + d), tl.load(W + d + 1)
                r1, r2 = _two_slopes(EA, EU, d, m, n, m_in, n_in, sad, sam, sud, sun, FAST)
                g1, g2 = g * r1, g * r2
                at1, at2 = DA + d * std + m * stt, DA + (d + 1) * std + m * stt
                tl.store(at1, tl.load(at1, mask=m_in) + gain * w1 * tl.sum(g1 - g1 * r1, 1), mask=m_in)
                tl.store(at2, tl.load(at2, mask=m_in) + gain * w2 * tl.sum(g2 - g2 * r2, 1), mask=m_in)
                tl.store(DW + d, tl.load(DW + d) + tl.sum(tl.sum(g - back * g1, 1), 0))
                tl.store(DW + d + 1, tl.load(DW + d + 1) + tl.sum(tl.sum(g - back * g2, 1), 0))
        else:
            for d in range(0, D):
                w = tl.load(W + d)
                a = tl.load(A + d * sad + m * sam, mask=m_in, other=0.0).to(tl.float32)
                u = tl.load(U + d * sud + n * sun, mask=n_in, other=0.0).to(tl.float32)
                h, t = _activate(a[:, None] + u[None, :], ACT, slope)
                at = DA + d * std + m * stt
                tl.store(at, tl.load(at, mask=m_in) + w * tl.sum(g * t, 1), mask=m_in)
                tl.store(DW + d, tl.load(DW + d) + tl.sum(tl.sum(g * h, 1), 0))


@triton.jit
def key_grad_kernel(
    A, U, EA, EU, AMAX, UMAX, W, V, DO, MASK, LSE, DELTA, DU, DV_OUT, SKIP,
    sal, sad, sam, sul, sud, sun, swl, svl, svn, svd, sgl, sgm, sgd, sml, smm, smn, stl, std, stt,
    slope, NQ, N, D, DV,
    ACT: tl.constexpr, SHARE: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Gradients of u (D, N) and v (N, d_v) by keys that a program owns."""
    if tl.load(SKIP) != 0:
        return
    lead = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    n_in = n < N
    c = tl.arange(0, BV)
    A += lead * sal
    EA += lead * sal
    U += lead * sul
    EU += lead * sul
    W += lead * swl
    V += lead * svl
    DO += lead * sgl
    MASK += lead * sml
    DU += lead * stl
    offset = N - NQ
    u_top = _largest(UMAX + lead * N, n, n_in, SHARE)
    dv = tl.zeros((BN, BV), dtype=tl.float32)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(0, (tl.program_id(0) * BN - offset) // BM * BM)
    for start in range(begin, NQ, BM):
        m = start + tl.arange(0, BM)
        m_in = m < NQ
        lse = tl.load(LSE + lead * NQ + m, mask=m_in, other=float("-inf"))
        delta = tl.load(DELTA + lead * NQ + m, mask=m_in, other=0.0)
        a_top = _largest(AMAX + lead * NQ, m, m_in, SHARE)
        shared = a_top + u_top <= SHARED_RANGE
        p, g, do = _grad_tile(
            A, U, EA, EU, W, V, DO, MASK, m, n, m_in, n_in, c, lse, delta, shared,
            sad, sam, sud, sun, svn, svd, sgm, sgd, smm, smn, offset, slope, D, DV,
            ACT, SHARE, CAUSAL, HAS_MASK, PRECISION, FAST, BM, BN,
        )  # fmt: skip
        dv = tl.dot(tl.trans(p), do, dv, input_precision=PRECISION)
        if SHARE and shared:
            gain = 4.0 if ACT == 0 else 1.0
            for d in range(0, D, 2):
                w1, w2 = tl.load(W + d), tl.load(W + d + 1)
                r1, r2 = _two_slopes(EA, EU, d, m, n, m_in, n_in, sad, sam, sud, sun, FAST)
                at1, at2 = DU + d * std + n * stt, DU + (d + 1) * std + n * stt
                t1, t2 = g * (r1 - r1 * r1), g * (r2 - r2 * r2)
                tl.store(at1, tl.load(at1, mask=n_in) + gain * w1 * tl.sum(t1, 0), mask=n_in)
                tl.store(at2, tl.load(at2, mask=n_in) + gain * w2 * tl.sum(t2, 0), mask=n_in)
        else:
            for d in range(0, D):
                w = tl.load(W + d)
                a = tl.load(A + d * sad + m * sam, mask=m_in, other=0.0).to(tl.float32)
                u = tl.load(U + d * sud + n * sun, mask=n_in, other=0.0).to(tl.float32)
                h, t = _activate(a[:, None] + u[None, :], ACT, slope)
                at = DU + d * std + n * stt
                tl.store(at, tl.load(at, mask=n_in) + w * tl.sum(g * t, 0), mask=n_in)
    inside = n_in[:, None] & (c[None, :] < DV)
    tl.store(DV_OUT + (lead * N + n[:, None]) * DV + c[None, :], dv.to(DV_OUT.dtype.element_ty), mask=inside)


class Exact:
    """Operands of one call, (L, N, D) and w (L or 1, D).

    `prepare` lays them out for speed: hidden unit first, so that a tile reads contiguous tokens, with the exponentials that
    share reciprocals. Without it they are read as they are, for a fallback that should cost nothing when it is not taken.
    """

    def __init__(self, a: Tensor, u: Tensor, w: Tensor, act: str, prepare: bool) -> None:
        name, _, parameter = act.partition(":")
        self.code, self.slope = CODES[name], float(parameter or 0.2) if name == "leaky_relu" else 0.0
        self.width, self.nq, self.n = a.shape[-1], a.shape[1], u.shape[1]
        self.share = prepare and self.code in (TANH, SIGMOID)
        pad = self.width % 2 if prepare else 0
        if prepare:
            a, u = (torch.nn.functional.pad(x.float(), (0, pad)).mT.contiguous().mT for x in (a, u))
        self.a, self.u = a, u
        self.w = torch.nn.functional.pad(w.float(), (0, pad)) if pad else w.float().contiguous()
        self.ea, self.eu, self.a_top, self.u_top = a, u, a, u
        if self.share:
            rate = 2.0 if self.code == TANH else 1.0
            self.ea, self.eu = ((x.mT * rate).exp().mT for x in (a, u))
            self.a_top, self.u_top = (x.mT.abs().amax(1) for x in (a, u))

    def operands(self) -> tuple[Tensor, ...]:
        return self.a, self.u, self.ea, self.eu, self.a_top, self.u_top, self.w

    def strides(self) -> tuple[int, ...]:
        """Leading, hidden and token strides of a and u, leading stride of w."""
        return (
            *(x.stride(k) for x in (self.a, self.u) for k in (0, 2, 1)),
            self.w.stride(0) if self.w.shape[0] > 1 else 0,
        )


def mask_arguments(mask: Tensor | None, like: Tensor) -> tuple[Tensor, int, int, int]:
    """A mask (L or 1, Nq or 1, N or 1) of bytes with strides of 0 where it broadcasts."""
    if mask is None:
        return like, 0, 0, 0
    strides = [stride if size > 1 else 0 for stride, size in zip(mask.stride(), mask.shape, strict=True)]
    return mask, strides[0], strides[1], strides[2]


def blocks(dv: int, backward: bool) -> dict[str, int]:
    """Tile sizes and warps.

    Three tf32 passes hold every operand of a product twice, as what a tf32 can hold and as the rest. With values of 128 columns a second
    stage of them no longer fits into the shared memory of a processor (227 KiB on Hopper), with 256 not even half as many keys.
    """
    wide = max(16, triton.next_power_of_2(dv))
    m, n = (64, 64) if backward else (64, 128)
    if wide > 128:
        m, n = (32, 32) if backward else (64, 64)
    return {"BM": m, "BN": n, "BV": wide, "num_warps": 4, "num_stages": 2 if wide <= 64 else 1}


def arithmetic(on: Tensor) -> dict[str, object]:
    """What only the device has: three tf32 passes, float32-exact on tensor cores, and the fast reciprocal."""
    device = on.device.type == "cuda"
    return {"PRECISION": "tf32x3" if device else "ieee", "FAST": device}


def forward(x: Exact, v: Tensor, mask: Tensor | None, causal: bool, out: Tensor, lse: Tensor, skip: Tensor) -> None:
    """Write out (L, Nq, d_v) and lse (L, Nq), unless `skip` is nonzero on the device."""
    length, dv = x.a.shape[0], v.shape[-1]
    given, sml, smm, smn = mask_arguments(mask, x.w)
    tile = blocks(dv, False)
    forward_kernel[(triton.cdiv(x.nq, tile["BM"]), length)](
        *x.operands(), v, given, out, lse, skip,
        *x.strides(), *v.stride(), sml, smm, smn, *out.stride(),
        x.slope, x.nq, x.n, x.w.shape[-1], dv,
        ACT=x.code, SHARE=x.share, CAUSAL=causal, HAS_MASK=mask is not None, **arithmetic(v), **tile,
    )  # fmt: skip


def backward(
    x: Exact,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    lse: Tensor,
    do: Tensor,
    delta: Tensor,
    skip: Tensor,
    into: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Add to the gradients of a and u, and write that of v, unless `skip` is nonzero; give that of w (L, D).

    The first two of `into` have the shape of a and u, in float32, with as many hidden units as the operands; the third is
    contiguous.
    """
    length, dv = x.a.shape[0], v.shape[-1]
    given, sml, smm, smn = mask_arguments(mask, x.w)
    tile = blocks(dv, True)
    da, du, dvalue = into
    grid_q, grid_k = triton.cdiv(x.nq, tile["BM"]), triton.cdiv(x.n, tile["BN"])
    width = x.w.shape[-1]
    dw = torch.zeros(length, grid_q, width, device=v.device)
    flags = {"ACT": x.code, "SHARE": x.share, "CAUSAL": causal, "HAS_MASK": mask is not None, **arithmetic(v)}
    for kernel, grid, first, second, target in (
        (query_grad_kernel, grid_q, da, dw, da),
        (key_grad_kernel, grid_k, du, dvalue, du),
    ):
        kernel[(grid, length)](
            *x.operands(), v, do, given, lse, delta, first, second, skip,
            *x.strides(), *v.stride(), *do.stride(), sml, smm, smn, *(target.stride(k) for k in (0, 2, 1)),
            x.slope, x.nq, x.n, width, dv, **flags, **tile,
        )  # fmt: skip
    return dw.sum(1)[:, : x.width]
