r"""Additive soft attention in half precision, as dot-product attention in a sine basis.

On a bounded range tanh is a line plus a few sines (sine_fits), and a sine of a sum separates:

$$\tanh(a + u) \approx \alpha (a + u) + \sum_k c_k \big( \sin\omega_k a \cos\omega_k u + \cos\omega_k a \sin\omega_k u \big)$$

$$s_{ij} = \phi(a_i) \cdot \psi(u_j) + \beta_j + \text{const}_i, \qquad
  \phi(a) = w_d c_k (\sin\omega_k a_d, \cos\omega_k a_d), \quad \psi(u) = (\cos\omega_k u_d, \sin\omega_k u_d), \quad \beta_j = \alpha\, w \cdot u_j$$

The constant of a row cancels in the softmax. What remains is a matrix product of inner width 2KD, on the tensor cores.

Backward, with $G = P \odot (do\, v^\top - D)$: $d\phi = G\psi$ and $d\psi = G^\top\phi$ are matrix products as well. Their inner width does not
fit on a chip, so P and G are written by panels of query rows, in half precision, and read by library products; then

$$da_d = w_d \sum_k c_k\omega_k (d\phi^s \cos\omega_k a - d\phi^c \sin\omega_k a), \qquad
  du_d = \sum_k \omega_k (d\psi^s \cos\omega_k u - d\psi^c \sin\omega_k u) + \alpha w_d\, d\beta$$

Dropout multiplies the weights that are read and, in G, what they read. The range is measured on the device (`plan`), which picks the series there; the host never waits. Out of range `terms` is 0:
these kernels return at once and leave the result to the exact ones.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from regard.ops.triton.additive_tile import Conditions, allowed, mask_arguments
from regard.ops.triton.align import FOR_DROPOUT, keep, uniform_tile
from regard.ops.triton.launching import cdiv, power_of_2, quick
from regard.ops.triton.sine_fits import BFLOAT16, FLOAT16, Fit

HALVES = (torch.float16, torch.bfloat16)

# Rows of a backward panel are chosen so that P and G of a panel stay below this many elements.
PANEL_ELEMENTS = 1 << 27

FORWARD_TILE = {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 3}
PANEL_TILE = {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 3}


def uses_sines(a: Tensor, act: str, given: Conditions) -> bool:
    """Whether there is a sine basis for a call; whether its range allows it, only the device knows."""
    return a.dtype in HALVES and act == "tanh" and a.numel() > 0 and given.bias is None and given.align.is_softmax


@triton.jit
def _sincos(x, FAST: tl.constexpr):
    if FAST:
        # The hardware's sine is exact to 2^-21 within half a turn; bring the argument there first.
        turns = x * 0.15915494309189535
        turns = turns - tl.extra.cuda.libdevice.rint(turns)
        x = turns * 6.283185307179586
        s = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        c = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        s, c = tl.sin(x), tl.cos(x)
    return s, c


@quick
@triton.jit
def range_kernel(A, U, TOPS, A_ROWS, U_ROWS, D, BR: tl.constexpr, BD: tl.constexpr):
    """Largest magnitude of each hidden unit on either side, as the bits of a float, so that NaN counts as largest."""
    program, split = tl.program_id(0), tl.cdiv(A_ROWS, BR)
    is_key = program >= split
    X, rows = A, A_ROWS
    if is_key:
        X, rows, program, TOPS = U, U_ROWS, program - split, TOPS + D
    r = program * BR + tl.arange(0, BR)
    d = tl.arange(0, BD)
    x = tl.load(X + r[:, None].to(tl.int64) * D + d[None, :], mask=(r[:, None] < rows) & (d[None, :] < D), other=0.0)
    bits = tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)
    tl.atomic_max(TOPS + d, tl.max(bits, 0), mask=d < D)


@quick
@triton.jit
def plan_kernel(
    TOPS,
    W,
    FITS,
    LIMITS,
    ALPHAS,
    COUNTS,
    TERMS,
    SERIES,
    SCALES,
    D,
    LEADS,
    F: tl.constexpr,
    K2: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
):
    """Choose the first series whose range covers the data; write its number of terms (0: none) and coefficients."""
    d = tl.arange(0, BD)
    inside = d < D
    a = tl.load(TOPS + d, mask=inside, other=0).to(tl.float32, bitcast=True)
    u = tl.load(TOPS + D + d, mask=inside, other=0).to(tl.float32, bitcast=True)
    reach = tl.max(tl.where(inside, a + u, 0.0), 0)
    bad = tl.max(tl.where(inside & ((a != a) | (u != u)), 1, 0), 0)
    largest = 1e-30
    for lead in range(0, LEADS):
        w = tl.load(W + lead * D + d, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(w), 0))
        bad = tl.maximum(bad, tl.max(tl.where(w != w, 1, 0), 0))
    chosen = -1
    for f in range(F - 1, -1, -1):
        chosen = tl.where(reach <= tl.load(LIMITS + f), f, chosen)
    chosen = tl.where((bad > 0) | (largest > 1e30), -1, chosen)
    at = tl.maximum(chosen, 0)
    tl.store(TERMS, tl.where(chosen >= 0, tl.load(COUNTS + at), 0))
    k = tl.arange(0, BK)
    tl.store(SERIES + k, tl.load(FITS + at * K2 + k, mask=k < K2, other=0.0), mask=k < K2)
    tl.store(SCALES, tl.load(ALPHAS + at))
    tl.store(SCALES + 1, largest)


@quick
@triton.jit
def features_kernel(
    A, U, W, PHI, PSI, BIAS, TERMS, SERIES, SCALES, TOPS, sw, A_ROWS, U_ROWS, NQ, N, D,
    KMAX: tl.constexpr, FAST: tl.constexpr, BR: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Features of some tokens of either side: (rows, KMAX, 2, DP); the first `terms` of them are written. Two zeros for the prologue."""
    program, split = tl.program_id(0), tl.cdiv(A_ROWS, BR)
    tl.store(
        TOPS + tl.arange(0, 2), tl.zeros((2,), dtype=tl.int32), mask=(tl.zeros((2,), dtype=tl.int32) + program) == 0
    )
    terms = tl.load(TERMS)
    if terms == 0:
        return
    d = tl.arange(0, DP)
    if program < split:
        r = program * BR + tl.arange(0, BR)
        inside = (r[:, None] < A_ROWS) & (d[None, :] < D)
        x = tl.load(A + r[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        w = tl.load(W + (r // NQ)[:, None] * sw + d[None, :], mask=inside, other=0.0)
        at = PHI + r[:, None].to(tl.int64) * (KMAX * 2 * DP) + d[None, :]
        gain = w / tl.load(SCALES + 1)
        for k in range(0, terms):
            s, c = _sincos(x * tl.load(SERIES + 2 * k), FAST)
            weight = gain * tl.load(SERIES + 2 * k + 1)
            tl.store(at + (2 * k) * DP, (s * weight).to(PHI.dtype.element_ty), mask=r[:, None] < A_ROWS)
            tl.store(at + (2 * k + 1) * DP, (c * weight).to(PHI.dtype.element_ty), mask=r[:, None] < A_ROWS)
    else:
        r = (program - split) * BR + tl.arange(0, BR)
        inside = (r[:, None] < U_ROWS) & (d[None, :] < D)
        x = tl.load(U + r[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        w = tl.load(W + (r // N)[:, None] * sw + d[None, :], mask=inside, other=0.0)
        tl.store(BIAS + r, tl.load(SCALES) * tl.sum(w * x, 1), mask=r < U_ROWS)
        at = PSI + r[:, None].to(tl.int64) * (KMAX * 2 * DP) + d[None, :]
        for k in range(0, terms):
            s, c = _sincos(x * tl.load(SERIES + 2 * k), FAST)
            tl.store(at + (2 * k) * DP, tl.where(inside, c, 0.0).to(PSI.dtype.element_ty), mask=r[:, None] < U_ROWS)
            tl.store(at + (2 * k + 1) * DP, s.to(PSI.dtype.element_ty), mask=r[:, None] < U_ROWS)


@triton.jit
def product(PHI, PSI, row, column, inner, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A tile of phi psi^T, read by the copy engine: rows beyond the tensor come as zeros, those of the next lead are masked later."""
    s = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, inner, BK):
        s = tl.dot(PHI.load([row, k]), PSI.load([column, k]).T, s)
    return s


@quick
@triton.jit
def forward_kernel(
    PHI, PSI, BIAS, V, MASK, O, LSE, TERMS, SCALES,
    svl, svn, svd, sml, smm, smn, sol, som, sod, NQ, N, DV, SEED, dropout, first_query,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, DROP: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    terms = tl.load(TERMS)
    if terms == 0:
        return
    inner = terms * 2 * DP
    lead = tl.program_id(1).to(tl.int64)
    scale = tl.load(SCALES + 1) * 1.4426950408889634
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    m_in = m < NQ
    c = tl.arange(0, BV)
    row, column = (lead * NQ).to(tl.int32) + tl.program_id(0) * BM, (lead * N).to(tl.int32)
    BIAS += lead * N
    V += lead * svl
    MASK += lead * sml
    offset = N - NQ
    top = tl.full((BM,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, BV), dtype=tl.float32)
    end = N
    if CAUSAL:
        end = tl.minimum(N, tl.program_id(0) * BM + BM + offset)
    for start in range(0, end, BN):
        n = start + tl.arange(0, BN)
        n_in = n < N
        s = product(PHI, PSI, row, column + start, inner, BM, BN, BK)
        s = s * scale + tl.load(BIAS + n, mask=n_in, other=0.0)[None, :] * 1.4426950408889634
        ok = allowed(MASK, m, n, m_in, n_in, smm, smn, offset, CAUSAL, HAS_MASK)
        s = tl.where(ok, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - safe[:, None])
        rescale = tl.exp2(top - safe)
        mass = mass * rescale + tl.sum(p, 1)
        if DROP:
            p = p * keep(uniform_tile(SEED, lead, 0, first_query + m, start, FOR_DROPOUT, BN), dropout)
        v = tl.load(V + n[:, None] * svn + c[None, :] * svd, mask=n_in[:, None] & (c[None, :] < DV), other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
        top = new
    alive = mass > 0
    out = tl.where(alive[:, None], acc / tl.where(alive, mass, 1.0)[:, None], 0.0)
    tl.store(
        O + lead * sol + m[:, None] * som + c[None, :] * sod,
        out.to(O.dtype.element_ty),
        mask=m_in[:, None] & (c[None, :] < DV),
    )
    # Kept in base 2 divided out, so that the backward of either path reads natural logarithms.
    tl.store(
        LSE + lead * NQ + m,
        tl.where(alive, (top + tl.log2(tl.where(alive, mass, 1.0))) * 0.6931471805599453, float("-inf")),
        mask=m_in,
    )


@quick
@triton.jit
def panel_kernel(
    PHI, PSI, BIAS, V, DO, MASK, LSE, DELTA, P, G, TERMS, SCALES, TOPS, first,
    svl, svn, svd, sgl, sgm, sgd, sml, smm, smn, NQ, N, DV, PANEL, SEED, dropout, first_query,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, DROP: tl.constexpr, DP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """P after dropout and G of a panel of query rows, (L, PANEL, N) each; G is multiplied by a power of two to suit half precision."""
    terms = tl.load(TERMS)
    lead = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    m = first + row
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    m_in, n_in = (m < NQ) & (row < PANEL), n < N
    where = (lead * PANEL + row[:, None]) * N + n[None, :]
    inside = (row < PANEL)[:, None] & n_in[None, :]
    if terms == 0:
        return
    c = tl.arange(0, BV)
    at_row = (lead * NQ).to(tl.int32) + first + tl.program_id(0) * BM
    at_column = (lead * N).to(tl.int32) + tl.program_id(1) * BN
    s = product(PHI, PSI, at_row, at_column, terms * 2 * DP, BM, BN, BK)
    s = s * tl.load(SCALES + 1) + tl.load(BIAS + lead * N + n, mask=n_in, other=0.0)[None, :]
    lse = tl.load(LSE + lead * NQ + m, mask=m_in, other=float("-inf"))
    delta = tl.load(DELTA + lead * NQ + m, mask=m_in, other=0.0)
    ok = allowed(MASK + lead * sml, m, n, m_in, n_in, smm, smn, N - NQ, CAUSAL, HAS_MASK)
    ok = ok & (lse > float("-inf"))[:, None]
    p = tl.where(ok, tl.exp(s - tl.where(lse > float("-inf"), lse, 0.0)[:, None]), 0.0)
    do = tl.load(
        DO + lead * sgl + m[:, None] * sgm + c[None, :] * sgd, mask=m_in[:, None] & (c[None, :] < DV), other=0.0
    )
    v = tl.load(V + lead * svl + n[:, None] * svn + c[None, :] * svd, mask=n_in[:, None] & (c[None, :] < DV), other=0.0)
    x = tl.dot(do, tl.trans(v))
    read = p
    if DROP:
        r = keep(uniform_tile(SEED, lead, 0, first_query + m, tl.program_id(1) * BN, FOR_DROPOUT, BN), dropout)
        x, read = x * r, p * r
    g = tl.where(ok, p * (x - delta[:, None]), 0.0) * _gain(TOPS, N)
    tl.store(P + where, read.to(P.dtype.element_ty), mask=inside)
    tl.store(G + where, g.to(G.dtype.element_ty), mask=inside)


@quick
@triton.jit
def prologue_kernel(
    DO, O, V, DELTA, TOPS, sgl, sgm, sgd, sol, som, sod, svl, svn, svd, NQ, N, DV, Q_BLOCKS,
    BR: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The delta = do · o of some queries; the largest squared norms of do and v, as the bits of floats."""
    program, lead = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BV)
    if program < Q_BLOCKS:
        r = program * BR + tl.arange(0, BR)
        inside = (r[:, None] < NQ) & (c[None, :] < DV)
        do = tl.load(DO + lead * sgl + r[:, None] * sgm + c[None, :] * sgd, mask=inside, other=0.0).to(tl.float32)
        o = tl.load(O + lead * sol + r[:, None] * som + c[None, :] * sod, mask=inside, other=0.0).to(tl.float32)
        tl.store(DELTA + lead * NQ + r, tl.sum(do * o, 1), mask=r < NQ)
        tl.atomic_max(TOPS, tl.max(tl.sum(do * do, 1), 0).to(tl.int32, bitcast=True))
    else:
        r = (program - Q_BLOCKS) * BR + tl.arange(0, BR)
        inside = (r[:, None] < N) & (c[None, :] < DV)
        v = tl.load(V + lead * svl + r[:, None] * svn + c[None, :] * svd, mask=inside, other=0.0).to(tl.float32)
        tl.atomic_max(TOPS + 1, tl.max(tl.sum(v * v, 1), 0).to(tl.int32, bitcast=True))


@triton.jit
def _gain(TOPS, N):
    """A power of two that brings typical entries of G, about |do| |v| / N, near one."""
    do = tl.load(TOPS).to(tl.float32, bitcast=True)
    v = tl.load(TOPS + 1).to(tl.float32, bitcast=True)
    # Half of the logarithm of the squares, and no more than half precision can hold.
    exponent = tl.log2(tl.minimum(N, 16384).to(tl.float32)) - 0.5 * (tl.log2(do + 1e-37) + tl.log2(v + 1e-37))
    exponent = tl.floor(tl.minimum(tl.maximum(exponent, -100.0), 100.0))
    return tl.exp2(tl.where(exponent == exponent, exponent, 0.0))


@triton.jit
def _features_grad(
    X, W, DF, DBIAS, DX, DW, SERIES, SCALES, terms, gain, block, sw, rows, per_lead, D,
    KMAX: tl.constexpr, IS_KEY: tl.constexpr, FAST: tl.constexpr, BR: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    r = block * BR + tl.arange(0, BR)
    d = tl.arange(0, DP)
    inside = (r[:, None] < rows) & (d[None, :] < D)
    x = tl.load(X + r[:, None].to(tl.int64) * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    w = tl.load(W + (r // per_lead)[:, None] * sw + d[None, :], mask=inside, other=0.0)
    at = DF + r[:, None].to(tl.int64) * (KMAX * 2 * DP) + d[None, :]
    undo = 1.0 / gain
    if IS_KEY:
        undo = undo * tl.load(SCALES + 1)
    dx = tl.zeros((BR, DP), dtype=tl.float32)
    dw = tl.zeros((BR, DP), dtype=tl.float32)
    for k in range(0, terms):
        omega, coefficient = tl.load(SERIES + 2 * k), tl.load(SERIES + 2 * k + 1)
        s, c = _sincos(x * omega, FAST)
        first = tl.load(at + (2 * k) * DP, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(at + (2 * k + 1) * DP, mask=inside, other=0.0).to(tl.float32)
        if IS_KEY:
            dx += omega * (second * c - first * s)
        else:
            dx += coefficient * omega * (first * c - second * s)
            dw += coefficient * (first * s + second * c)
    if IS_KEY:
        alpha = tl.load(SCALES)
        dbias = tl.load(DBIAS + r, mask=r < rows, other=0.0)[:, None] / gain
        dx = dx * undo + alpha * w * dbias
        dw = alpha * x * dbias
    else:
        dx = dx * w * undo
        dw = dw * undo
    # Without a series nothing was written that could be read; the exact kernels add to these zeros.
    dx, dw = tl.where(terms == 0, 0.0, dx), tl.where(terms == 0, 0.0, dw)
    tl.store(DX + r[:, None].to(tl.int64) * D + d[None, :], dx, mask=inside)
    tl.store(DW + tl.program_id(0) * D + d, tl.sum(tl.where(inside, dw, 0.0), 0), mask=d < D)


@quick
@triton.jit
def features_grad_kernel(
    A, U, W, DPHI, DPSI, DBIAS, DA, DU, DW, TERMS, SERIES, SCALES, TOPS, sw, A_ROWS, U_ROWS, NQ, N, D,
    KMAX: tl.constexpr, FAST: tl.constexpr, BR: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Gradient of some tokens of either side from that of their features; of w as one partial sum a program."""
    terms, gain = tl.load(TERMS), _gain(TOPS, N)
    program, split = tl.program_id(0), tl.cdiv(A_ROWS, BR)
    if program < split:
        _features_grad(
            A,
            W,
            DPHI,
            DBIAS,
            DA,
            DW,
            SERIES,
            SCALES,
            terms,
            gain,
            program,
            sw,
            A_ROWS,
            NQ,
            D,
            KMAX,
            False,
            FAST,
            BR,
            DP,
        )
    else:
        block = program - split
        _features_grad(
            U, W, DPSI, DBIAS, DU, DW, SERIES, SCALES, terms, gain, block, sw, U_ROWS, N, D, KMAX, True, FAST, BR, DP
        )


@functools.cache
def _tables(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The series for a dtype as device tensors: (fits, terms, 2), limits, slopes of the line, numbers of terms."""
    fits: tuple[Fit, ...] = BFLOAT16 if dtype == torch.bfloat16 else FLOAT16
    most = max(len(fit.c) for fit in fits)
    series = torch.zeros(len(fits), most, 2)
    for k, fit in enumerate(fits):
        series[k, : len(fit.c), 0] = torch.tensor(fit.omega)
        series[k, : len(fit.c), 1] = torch.tensor(fit.c)
    limits = torch.tensor([fit.limit for fit in fits])
    alphas = torch.tensor([fit.alpha for fit in fits])
    counts = torch.tensor([len(fit.c) for fit in fits], dtype=torch.int32)
    return series.to(device), limits.to(device), alphas.to(device), counts.to(device)


def plan_size(dtype: torch.dtype) -> int:
    """Numbers of a plan: how many terms, in a place of 4; two scales, in a place of 4; the longest series."""
    return 8 + 2 * max(len(fit.c) for fit in (BFLOAT16 if dtype == torch.bfloat16 else FLOAT16))


class Sine:
    """Features of one call by the plan that the device chose for them; a `fresh` plan it chooses here."""

    def __init__(self, a: Tensor, u: Tensor, w: Tensor, plan: Tensor, fresh: bool = False) -> None:
        (self.length, self.nq, self.width), self.n = a.shape, u.shape[1]
        self.a, self.u, self.w = a.contiguous(), u.contiguous(), w.float().contiguous()
        device = a.device
        tables = _tables(a.dtype, device)
        self.kmax = tables[0].shape[1]
        # A tile of hidden units is a power of two wide.
        self.dp = power_of_2(max(32, self.width))
        self.inner = self.kmax * 2 * self.dp
        a_rows, u_rows = self.length * self.nq, self.length * self.n
        # Each begins at a multiple of 16 bytes, as a launch expects.
        terms, _, self.scales, self.series = plan.split((1, 3, 4, 2 * self.kmax))
        self.terms: Tensor = terms.view(torch.int32)
        # For the prologue of a backward: zeros, once the features are there.
        self.tops = (torch.zeros if fresh else torch.empty)(2, self.width, dtype=torch.int32, device=device)
        if fresh:
            grid = (cdiv(a_rows, 128) + cdiv(u_rows, 128),)
            range_kernel[grid](self.a, self.u, self.tops, a_rows, u_rows, self.width, BR=128, BD=self.dp)
            plan_kernel[(1,)](
                self.tops, self.w, *tables, self.terms, self.series, self.scales, self.width, self.w.shape[0],
                F=tables[0].shape[0], K2=2 * self.kmax, BD=self.dp, BK=power_of_2(2 * self.kmax),
            )  # fmt: skip
        self.phi = torch.empty(self.length, self.nq, self.inner, dtype=torch.float16, device=device)
        self.psi = torch.empty(self.length, self.n, self.inner, dtype=torch.float16, device=device)
        self.bias = torch.empty(self.length, self.n, device=device)
        grid = (cdiv(a_rows, 16) + cdiv(u_rows, 16),)
        features_kernel[grid](
            self.a, self.u, self.w, self.phi, self.psi, self.bias, self.terms, self.series, self.scales, self.tops,
            self.w_stride(), a_rows, u_rows, self.nq, self.n, self.width,
            KMAX=self.kmax, FAST=_on_device(a), BR=16, DP=self.dp, num_warps=4,
        )  # fmt: skip

    def descriptors(self, tile: dict[str, int], own_keys: bool = False) -> tuple[TensorDescriptor, TensorDescriptor]:
        """How the copy engine reads tiles of the features: of phi for the rows of a tile and psi for its columns, or the reverse."""
        sides = (self.psi, self.phi) if own_keys else (self.phi, self.psi)
        return tuple(
            TensorDescriptor(x, [x.shape[0] * x.shape[1], self.inner], [self.inner, 1], [tile[rows], tile["BK"]])
            for x, rows in zip(sides, ("BM", "BN"), strict=True)
        )

    def w_stride(self) -> int:
        return self.w.stride(0) if self.w.shape[0] > 1 else 0

    def forward(self, v: Tensor, given: Conditions, out: Tensor, lse: Tensor) -> None:
        """Write out (L, Nq, d_v) and lse (L, Nq), if the range allows."""
        mask, sml, smm, smn = mask_arguments(given.mask, self.bias)
        dv = v.shape[-1]
        tile = tile_of(v, FORWARD_TILE, given)
        forward_kernel[(cdiv(self.nq, tile["BM"]), self.length)](
            *self.descriptors(tile), self.bias, v, mask, out, lse, self.terms, self.scales,
            *v.stride(), sml, smm, smn, *out.stride(), self.nq, self.n, dv, *self._drops(given),
            **_flags(given), DP=self.dp, BV=max(16, power_of_2(dv)), **tile,
        )  # fmt: skip

    def _drops(self, given: Conditions) -> tuple[Tensor, float, int]:
        """Seed, dropout, first query."""
        align = given.align
        return self.bias if align.seed is None else align.seed, align.dropout, align.first_query

    def backward(
        self, v: Tensor, given: Conditions, lse: Tensor, do: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of a, u, w (L or 1, D) and v, when the prologue has been. Where `terms` is 0 the first three are zero, the last meaningless."""
        length, nq, n, dv = self.length, self.nq, self.n, v.shape[-1]
        device = v.device
        mask, sml, smm, smn = mask_arguments(given.mask, self.bias)
        rows = max(1, min(nq, PANEL_ELEMENTS // max(1, length * n)))
        rows = rows if rows == nq else max(128, rows // 128 * 128)
        tile = tile_of(v, PANEL_TILE, given)
        single = rows >= nq
        p = torch.empty(length, rows, n, dtype=v.dtype, device=device)
        g = torch.empty(length, rows, n, dtype=torch.float16, device=device)
        descriptors = self.descriptors(tile)
        dphi = None if single else torch.empty_like(self.phi)
        dpsi: Tensor | None = None
        dvalue: Tensor | None = None
        dbias: Tensor | None = None
        for first in range(0, nq, rows):
            count = min(rows, nq - first)
            grid = (cdiv(count, tile["BM"]), cdiv(n, tile["BN"]), length)
            panel_kernel[grid](
                *descriptors, self.bias, v, do, mask, lse, delta, p, g, self.terms, self.scales, self.tops, first,
                *v.stride(), *do.stride(), sml, smm, smn, nq, n, dv, rows, *self._drops(given),
                **_flags(given), DP=self.dp, BV=max(16, power_of_2(dv)), **tile,
            )  # fmt: skip
            part_p, part_g, part_phi, part_do = p, g, self.phi, do
            if not single:
                part_p, part_g = p[:, :count], g[:, :count]
                part_phi, part_do = self.phi[:, first : first + count], do[:, first : first + count]
            part_dphi = torch.bmm(part_g, self.psi, out=None if dphi is None else dphi[:, first : first + count])
            part_psi = torch.bmm(part_g.mT, part_phi)
            part_v = torch.bmm(part_p.mT, part_do)
            part_bias = part_g.sum(1, dtype=torch.float32)
            if single:
                dpsi, dvalue, dbias = part_psi, part_v, part_bias
            elif dpsi is None or dvalue is None or dbias is None:
                dpsi, dvalue, dbias = part_psi.float(), part_v.float(), part_bias
            else:
                dpsi, dvalue, dbias = dpsi.add_(part_psi), dvalue.add_(part_v), dbias.add_(part_bias)
        assert dpsi is not None
        assert dvalue is not None
        assert dbias is not None
        return (*self._from_features(part_dphi if dphi is None else dphi, dpsi, dbias), dvalue)

    def _from_features(self, dphi: Tensor, dpsi: Tensor, dbias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of a, u and w from those of the features."""
        own = self.w.shape[0] > 1
        # A partial sum of w must not span two leading indices when w differs between them.
        block = 1 if own and (self.nq % 16 or self.n % 16) else 16
        a_rows, u_rows = self.length * self.nq, self.length * self.n
        split, programs = cdiv(a_rows, block), cdiv(a_rows, block) + cdiv(u_rows, block)
        da, du = (torch.empty(x.shape, device=x.device) for x in (self.a, self.u))
        dw = torch.empty(programs, self.width, device=self.a.device)
        features_grad_kernel[(programs,)](
            self.a, self.u, self.w, dphi, dpsi, dbias, da, du, dw, self.terms, self.series, self.scales, self.tops,
            self.w_stride(), a_rows, u_rows, self.nq, self.n, self.width,
            KMAX=self.kmax, FAST=_on_device(self.a), BR=block, DP=self.dp, num_warps=4,
        )  # fmt: skip
        if not own:
            return da, du, dw.sum(0, keepdim=True)
        from_a, from_u = (part.view(self.length, -1, self.width).sum(1) for part in (dw[:split], dw[split:]))
        return da, du, from_a + from_u


def prologue(do: Tensor, out: Tensor, v: Tensor, tops: Tensor) -> Tensor:
    """The delta (L, Nq); into zeros the largest squared norms of do and v, as bits of floats."""
    (length, nq, dv), n = out.shape, v.shape[1]
    delta = torch.empty(length, nq, device=v.device)
    q_blocks = cdiv(nq, 64)
    prologue_kernel[(q_blocks + cdiv(n, 64), length)](
        do, out, v, delta, tops, *do.stride(), *out.stride(), *v.stride(), nq, n, dv, q_blocks,
        BR=64, BV=max(16, power_of_2(dv)), num_warps=4,
    )  # fmt: skip
    return delta


def _flags(given: Conditions) -> dict[str, bool]:
    return {"CAUSAL": given.causal, "HAS_MASK": given.mask is not None, "DROP": given.align.dropout > 0.0}


def tile_of(x: Tensor, tile: dict[str, int], given: Conditions) -> dict[str, int]:
    """The tile on the device, half as wide where random numbers need registers too; a small one under the interpreter."""
    if _on_device(x):
        return {**tile, "BN": 128} if given.align.dropout > 0.0 else tile
    return {"BM": 32, "BN": 32, "BK": 32, "num_warps": 4, "num_stages": 1}


def _on_device(x: Tensor) -> bool:
    return x.device.type == "cuda"
