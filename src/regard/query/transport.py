"""Optimal transport: weights under which every key is read as much as it should be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard._errors import refusal
from regard.catalog import register
from regard.general.alignments.base import Alignment, readable
from regard.general.bound import Sizes
from regard.general.masks import as_mask
from regard.general.scores.base import width
from regard.ops.call import Call, Tile
from regard.ops.fill import where
from regard.ops.forms import wide
from regard.query.parts import uncast
from regard.query.scans import log_sum_exp


def log_plan(scores: Tensor, allowed: Tensor, epsilon: float, iterations: int) -> Tensor:
    """The logarithm of the transport plan (..., n, m) with these scores as negative costs; minus infinity where nothing may go."""
    log = where(allowed, scores / epsilon, -math.inf)
    # Each row that may send holds the same mass, and so does each column that may receive.
    rows, columns = (_log_shares(allowed.any(axis)).to(log.dtype) for axis in (-1, -2))
    f, g = torch.zeros_like(rows), torch.zeros_like(columns)
    for step in range(iterations):
        if step > 0:
            f = _fitted(rows, log_sum_exp(log + g.unsqueeze(-2), -1))
        g = _fitted(columns, log_sum_exp(log + f.unsqueeze(-1), -2))
    # Rows once more, but as a softmax: large potentials would leave no digits for a sum of one.
    some = allowed.any(-1, keepdim=True)
    shares = where(some, log + g.unsqueeze(-2), 0.0).log_softmax(-1) + rows.unsqueeze(-1)
    return where(allowed, shares, -math.inf)


def _log_shares(used: Tensor) -> Tensor:
    """Equal shares of one, zero for those that take no part."""
    return -used.sum(-1, keepdim=True).clamp(min=1).double().log().expand(used.shape)


def _fitted(shares: Tensor, total: Tensor) -> Tensor:
    """The potential that brings a total to its share."""
    some = total > -math.inf
    return where(some, shares - where(some, total, 0.0), 0.0)


def sinkhorn(
    cost: Float[Tensor, "*b n m"],
    epsilon: float = 0.1,
    iterations: int = 50,
    mask: Bool[Tensor, "*_ n m"] | None = None,
) -> Float[Tensor, "*b n m"]:
    r"""The entropic transport plan (Cuturi 2013, https://arxiv.org/abs/1306.0895).

    $$T = \arg\min_{T \ge 0} \sum_{ij} T_{ij} C_{ij} - \epsilon H(T), \qquad
      \sum_j T_{ij} = \tfrac{1}{n}, \quad \sum_i T_{ij} = \tfrac{1}{m}$$

    by Sinkhorn's iterations in log space, columns first, so that the sums of rows are exact and those of columns as good as the
    iterations are many. The cost of the plan is `(plan * cost).sum((-2, -1))`.

    Args:
        cost: (..., n, m).
        epsilon: $\epsilon > 0$; towards 0 the plan is a matching.
        iterations: of rows and columns each.
        mask: True for pairs that may be matched; rows and columns without any take no part.

    Example:
        >>> sinkhorn(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), epsilon=0.01).round(decimals=4)
        tensor([[0.0000, 0.5000],
                [0.5000, 0.0000]])
    """
    _check(epsilon, iterations)
    if not isinstance(cost, Tensor) or cost.dim() < 2:
        got = f"shape {tuple(cost.shape)}" if isinstance(cost, Tensor) else type(cost).__name__
        raise ValueError(refusal("cost", got, "a tensor (..., n, m)"))
    if mask is not None:
        *lead, n, m = cost.shape
        mask = as_mask(mask).bind(Sizes(tuple(lead), n, m)).tile(range(n), range(m), cost.device)
    scores = -wide(cost)
    return log_plan(scores, readable(scores, mask), epsilon, iterations).exp()


@register(
    name="sinkhorn",
    zh="最优传输对齐（Sinkhorn）",
    path="query/structured",
    part="align",
    equation="a_ij = n T_ij,  T = argmax_T Σ_ij T_ij e_ij + ε H(T),  Σ_j T_ij = 1/n,  Σ_i T_ij = 1/m",
    paper="Cuturi, Sinkhorn Distances: Lightspeed Computation of Optimal Transport, NeurIPS 2013; Sander et al., Sinkformers, AISTATS 2022",
    year=2013,
    time="N² per iteration",
    memory="N² per iteration",
    choose="two sets are to be matched: every key should be read by somebody, and nobody by all",
    avoid="keys that nobody needs should be left unread, or there is one query: then it reads all keys alike",
)
class Sinkhorn(Alignment):
    r"""Match queries with keys (Cuturi 2013, https://arxiv.org/abs/1306.0895; Sander et al. 2022, https://arxiv.org/abs/2110.11773).

    $$a_{ij} = n\, T_{ij}, \qquad T = \arg\max_{T \ge 0} \sum_{ij} T_{ij} e_{ij} + \epsilon H(T), \qquad
      \sum_j T_{ij} = \tfrac{1}{n}, \quad \sum_i T_{ij} = \tfrac{1}{m}$$

    for $n$ queries and $m$ keys. Rows sum to one, as under a softmax; columns, to $n / m$: every key is read alike. Towards
    $\epsilon = 0$, with as many queries as keys, the weights are a permutation. A query that may attend nothing, and a key that nobody
    may, take no part.

    Args:
        epsilon: $\epsilon > 0$.
        iterations: of rows and columns each.

    Example:
        >>> from regard import Attention, Dot
        >>> attend = Attention(Dot(), Sinkhorn(epsilon=0.5))
        >>> attend(torch.randn(2, 3, 4), torch.randn(2, 7, 4)).shape
        torch.Size([2, 3, 4])
    """

    def __init__(self, epsilon: float = 1.0, iterations: int = 20) -> None:
        super().__init__()
        _check(epsilon, iterations)
        self.epsilon, self.iterations = float(epsilon), iterations

    def prepare(self, call: Call) -> Mapping[str, Any]:
        # Columns are sums over all rows, and an execution may show a few at a time.
        with uncast(call.device):
            scores = call.scores()
            allowed = readable(scores, call.tile().mask())
            log = log_plan(where(allowed, scores, 0.0), allowed, self.epsilon, self.iterations)
            count = allowed.any(-1).sum(-1)[..., None, None].to(log.dtype)
            return {"weights": log.exp() * count}

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        whole: Tensor = tile.call.prepared["weights"]
        return whole[..., tile.i.start : tile.i.stop, :].to(scores.dtype)

    def extra_repr(self) -> str:
        return f"epsilon={self.epsilon}, iterations={self.iterations}"


def _check(epsilon: float, iterations: int) -> None:
    if not 0 < epsilon < math.inf:
        raise ValueError(refusal("epsilon", epsilon, "a finite number > 0"))
    width("iterations", iterations)
