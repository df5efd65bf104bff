r"""The additive form of a logistic activation, one hidden unit after another: what a CPU does fastest.

With $\mathrm{act}(z) = \alpha + \beta r$, $r = 1/(1 + e^{\rho z})$, the exponential splits between query and key, and dividing
by the key's part leaves one sum and one division for a pair:

$$r_{ijd} = \frac{\kappa_{jd}}{\kappa_{jd} + \lambda_{id}}, \qquad \lambda_{id} = e^{\rho a_{id}}, \quad \kappa_{jd} = e^{-\rho u_{jd}}$$

$$E_{ij} = \alpha \sum_d w_d + \beta \sum_d w_d\, r_{ijd}$$

Backward, from $G = dE$, with $m = G r$ and $t = m (1 - r)$ of one unit at a time:

$$da_{id} = -\beta\rho\, w_d \sum_j t_{ijd} \qquad du_{jd} = -\beta\rho\, w_d \sum_i t_{ijd} \qquad
  dw_d = \alpha \sum_{ij} G_{ij} + \beta \sum_{ij} m_{ijd}$$

A unit's tile is as large as the scores themselves and stays in the cache from one pass to the next. All of it holds while
both factors are normal numbers, which the caller makes sure of.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.ops.activations import Logistic
from regard.ops.workspace import Workspace

Box = tuple[slice, slice, slice]

# Pairs of one tile: fewer pay for the launches of two small operations a unit, more leave the cache.
FEWEST_PAIRS = 1 << 15
TILE_PAIRS = 1 << 20
# Units summed before the sum is added to the others: one long chain of additions would round three times as much.
GROUP = 16


def boxes(leads: int, queries: int, keys: int, pairs: int) -> Iterator[Box]:
    """Boxes (leading, queries, keys) of at most so many pairs, several leading entries at once where they are small."""
    if 0 in (leads, queries, keys):
        return
    columns = min(keys, pairs)
    rows = min(queries, max(1, pairs // columns))
    entries = max(1, pairs // (columns * rows)) if (columns, rows) == (keys, queries) else 1
    for b in range(0, leads, entries):
        for i in range(0, queries, rows):
            for j in range(0, keys, columns):
                yield slice(b, b + entries), slice(i, i + rows), slice(j, j + columns)


class _Units:
    """The factors of all units, units first, and the space in which a tile is computed."""

    def __init__(self, a: Tensor, u: Tensor, rate: float) -> None:
        self.query = torch.exp(a.movedim(-1, 0) * rate).contiguous()  # (D, L, Nq)
        self.key = torch.exp(u.movedim(-1, 0) * -rate).contiguous()  # (D, L, N)
        self.shape = (a.shape[0], a.shape[1], u.shape[1])
        self.space = Workspace(a)

    def boxes(self) -> Iterator[Box]:
        return boxes(*self.shape, TILE_PAIRS)

    def denominator(self, d: int, box: Box, out: Tensor) -> Tensor:
        b, i, j = box
        return torch.add(self.key[d, b, None, j], self.query[d, b, i, None], out=out)


def scores(a: Tensor, u: Tensor, weight: Tensor, act: Logistic) -> Tensor:
    """Scores (L, Nq, N) of a (L, Nq, D), u (L, N, D), weight (L, D)."""
    units = _Units(a, u, act.rate)
    result = a.new_empty(units.shape)
    numerator = units.key * (weight.mT[..., None] * act.gain)
    for box in units.boxes():
        b, i, j = box
        tile = result[b, i, j]
        divisor, partial = units.space.shaped("divisor", tile.shape), units.space.shaped("partial", tile.shape)
        for first in range(0, len(numerator), GROUP):
            last = min(first + GROUP, len(numerator))
            sum_ = tile if first == 0 else partial
            start = weight[b, first:last].sum(-1)[:, None, None] * act.shift
            for d in range(first, last):
                units.denominator(d, box, divisor)
                torch.addcdiv(start if d == first else sum_, numerator[d, b, None, j], divisor, out=sum_)
            if first > 0:
                tile += partial
    return result


def backward(grad: Tensor, a: Tensor, u: Tensor, weight: Tensor, act: Logistic) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (L, Nq, D), (L, N, D), (L, D) from the gradient (L, Nq, N) of the scores."""
    units = _Units(a, u, act.rate)
    da, du = torch.zeros_like(units.query), torch.zeros_like(units.key)
    dweight = torch.zeros_like(weight.mT)  # (D, L)
    for box in units.boxes():
        b, i, j = box
        g = grad[b, i, j].contiguous()
        r, t = units.space.shaped("r", g.shape), units.space.shaped("t", g.shape)
        for d in range(len(da)):
            torch.div(units.key[d, b, None, j], units.denominator(d, box, r), out=r)
            torch.mul(g, r, out=t)
            dweight[d, b] += t.sum((-2, -1))
            t.addcmul_(t, r, value=-1)
            da[d, b, i] += t.sum(-1)
            du[d, b, j] += t.sum(-2)
    slope = weight.mT[..., None] * (-act.gain * act.rate)
    total = grad.sum((-2, -1)) * act.shift
    return (da * slope).movedim(0, -1), (du * slope).movedim(0, -1), (dweight * act.gain + total).mT
