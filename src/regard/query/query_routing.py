"""Dynamic query routing: every token chooses which of several experts ask for it."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.parts import AlignLike, ScoreLike, attentions
from regard.general.alignments.base import Alignment, masked, readable, softmax
from regard.general.attention import Attention
from regard.general.bound import Bound, Sizes
from regard.general.masks import Mask, as_mask
from regard.general.scores.base import matrix, width
from regard.ops.call import Call, Tile
from regard.ops.fill import kept_rows
from regard.ops.random import SAMPLE
from regard.query.parts import Filled, one_of, operand, uncast, widths

_MIXES = ("query", "context")


class TopK(Alignment):
    r"""Softmax over the $k$ largest scores of each row (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538).

    $$a_j = \mathrm{softmax}_{j \in \mathrm{top}_k(e + \sigma n)}(e + \sigma n), \qquad n_j \sim \mathcal{N}(0, 1)$$

    which are the $k$ largest weights of a softmax, renormalised. Which they are has no gradient. The noise is there while training alone;
    its size, learned in the paper, is given here.

    Args:
        k: how many.
        noise: $\sigma$.
    """

    is_random = True

    def __init__(self, k: int, noise: float = 0.0) -> None:
        super().__init__()
        if not 0 <= noise < math.inf:
            raise ValueError(refusal("noise", noise, "a finite number >= 0"))
        self.k, self.noise = width("k", k), float(noise)

    def needs_seed(self, training: bool) -> bool:
        return training and self.noise > 0

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        if self.needs_seed(tile.call.training):
            normal = torch.special.ndtri(tile.uniform(SAMPLE))
            scores = scores + self.noise * normal.to(scores.dtype)
        if scores.shape[-1] == 0:
            return scores
        largest = masked(scores, mask).topk(min(self.k, scores.shape[-1]), -1).indices
        place = torch.arange(scores.shape[-1], device=scores.device)
        chosen = (largest.unsqueeze(-1) == place).any(-2)
        return softmax(scores, readable(scores, mask) & chosen)

    def extra_repr(self) -> str:
        return f"k={self.k}, noise={self.noise}"


@register(
    name="dynamic-query-routing",
    zh="动态查询路由",
    path="query/emerging",
    equation="q_i = Σ_{m ∈ top k} g_im W_Q^m x_i,  g_i = softmax(W_r x_i)",
    paper="after Shazeer et al., Outrageously Large Neural Networks: the Sparsely-Gated Mixture-of-Experts Layer, ICLR 2017",
    year=2017,
    time="N² d + N M d d_x (queries mixed); M times the attention (contexts mixed)",
    memory="that of the attention; M times (contexts mixed)",
    choose="tokens are of several kinds, and each kind looks for something else",
    avoid="one map of queries serves all tokens: gates and experts must then be trained for nothing",
)
class QueryRouting(nn.Module):
    r"""Ask by experts, chosen token by token (after Shazeer et al. 2017, https://arxiv.org/abs/1701.06538).

    $$g_i = \mathrm{softmax}(W_r x_i), \qquad \tilde g_i = \text{the } k \text{ largest, renormalised}, \qquad q_{im} = W_Q^m x_i$$

    $$\text{query mixing: } c_i = \mathrm{attend}\Big(\sum_m \tilde g_{im}\, q_{im}\Big), \qquad
      \text{context mixing: } c_i = \sum_m \tilde g_{im}\, \mathrm{attend}(q_{im})$$

    With bilinear scores, mixing queries mixes scores; mixing contexts lets every expert look at a place of its own. The gates are an
    attention too, of tokens on experts: under a trace they are at `router`, (..., Nq, M), and `load_balance(trace["router"].call)` is the
    loss that keeps all experts in use. What the experts look at is at `attention`, (..., M, Nq, N) where contexts are mixed. A single gate,
    renormalised, is one: with $k = 1$ the router learns by that loss alone.

    Args:
        dim: width of tokens, keys and values, or of each of the three.
        experts: $M$; their queries are as wide as the keys.
        top_k: $k$; all of them when not given.
        mix: `"query"` or `"context"`.
        noise: standard deviation of noise on the gates' scores while training, so that every expert is tried.
        score: a name, a class, a function of the widths of query and key, or a ready-made score or attention.
        align: likewise; softmax when not given.
        **options: arguments of a score and alignment given by name; `dropout`, `impl`.

    Example:
        >>> attend = QueryRouting((3, 5, 7), experts=4, top_k=2)
        >>> attend(torch.randn(2, 11, 3), torch.randn(2, 13, 5), torch.randn(2, 13, 7)).shape
        torch.Size([2, 11, 7])
    """

    def __init__(
        self,
        dim: int | tuple[int, int, int],
        experts: int,
        *,
        top_k: int | None = None,
        mix: str = "query",
        noise: float = 0.0,
        score: ScoreLike = "scaled-dot",
        align: AlignLike = None,
        **options: Any,
    ) -> None:
        super().__init__()
        token_dim, key_dim, value_dim = widths("dim", dim, 3)
        experts = width("experts", experts)
        top_k = experts if top_k is None else width("top_k", top_k)
        if top_k > experts:
            raise ValueError(refusal("top_k", top_k, f"at most experts={experts}"))
        self.mix = one_of("mix", mix, _MIXES)
        if options.get("features") is True:
            options["features"] = value_dim
        self.W_r, self.W_Q = matrix(experts, token_dim), matrix(experts, key_dim, token_dim)
        self.router = Attention("dot", TopK(top_k, noise))
        self.attention = attentions({"attention": (key_dim, key_dim)}, score, align, options)["attention"]

    def forward(
        self,
        query: Float[Tensor, "*q dx"],
        key: Float[Tensor, "*b n dk"],
        value: Float[Tensor, "*_ n dv"] | None = None,
        *,
        mask: Tensor | Mask | None = None,
    ) -> Float[Tensor, "*q dv"]:
        """Read the values.

        Args:
            query: tokens (..., Nq, d_x), or (..., d_x) for a single one.
            key: (..., N, d_k).
            value: (..., N, d_v); the key when not given.
            mask: True where a token may attend a key, as in `Attention`.
        """
        value = key if value is None else value
        operand("query", query, self.W_r)
        operand("key", key, self.W_Q, self.W_Q.shape[-2])
        if not isinstance(value, Tensor) or value.dim() < 2:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(refusal("value", got, "a row for each key: (..., N, d_v)"))
        if key.dim() < 2 or query.dim() not in (key.dim(), key.dim() - 1):
            got = f"shape {tuple(query.shape)} beside a key of shape {tuple(key.shape)}"
            raise ValueError(refusal("query", got, "as many axes as the key, or one fewer"))
        single = query.dim() == key.dim() - 1
        if single:
            query = query.unsqueeze(-2)
            mask = mask.unsqueeze(-2) if isinstance(mask, Tensor) and mask.dim() else mask
        bound, rows = None, None
        if mask is not None:
            lead = tuple(torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2]))
            bound = as_mask(mask).bind(Sizes(lead, query.shape[-2], key.shape[-2]))
            rows, keys = bound.rows(key.device), bound.keys(key.device)
            query, key, value = kept_rows(query, rows), kept_rows(key, keys), kept_rows(value, keys)
        gates = self._gates(query, rows)
        asked = torch.einsum("...ix,mkx->...mik", query, self.W_Q.to(query.dtype))
        context = self._mixed(asked, gates, key, value, bound)
        return context.squeeze(-2) if single else context

    def _gates(self, query: Tensor, rows: Tensor | None) -> Tensor:
        """Weights of the experts (..., Nq, M): what reading the unit vectors gives."""
        experts = self.W_r.to(query.dtype).expand(*query.shape[:-2], *self.W_r.shape)
        unit = torch.eye(len(self.W_r), dtype=query.dtype, device=query.device)
        allowed = None if rows is None else rows.unsqueeze(-1).expand(*query.shape[:-1], len(self.W_r))
        gates: Tensor = self.router(query, experts, unit, mask=allowed)
        return gates

    def _mixed(self, asked: Tensor, gates: Tensor, key: Tensor, value: Tensor, bound: Bound | None) -> Tensor:
        """From the queries (..., M, Nq, d_k) of the experts."""
        if self.mix == "query":
            query = torch.einsum("...im,...mik->...ik", gates, asked)
            read: Tensor = self.attention(query, key, value, mask=None if bound is None else Filled(bound))
            return read
        mask = None if bound is None else Filled(bound, heads=True)
        contexts = self.attention(asked, key.unsqueeze(-3), value.unsqueeze(-3), mask=mask)
        return torch.einsum("...im,...mid->...id", gates, contexts)

    def extra_repr(self) -> str:
        return f"mix={self.mix!r}"


def load_balance(call: Call) -> Tensor:
    r"""The loss that evens out the use of experts (Fedus et al. 2022, https://arxiv.org/abs/2101.03961).

    $$L = M \sum_m f_m P_m$$

    with $f_m$ the share of what was routed that went to expert $m$, a constant, and $P_m$ its mean gate before the $k$ largest were taken.
    It is 1 for gates that are all equal, and at most $M$.

    Args:
        call: of a router, such as `trace["router"].call`.

    Example:
        >>> import regard as rg
        >>> attend, x = rg.QueryRouting(3, experts=4, top_k=1), torch.randn(2, 5, 3)
        >>> with rg.record(attend) as trace:
        ...     context = attend(x, x)
        >>> loss = load_balance(trace["router"].call)
        >>> bool((loss > 0) & (loss <= 4))
        True
    """
    if not isinstance(call, Call):
        raise TypeError(refusal("call", type(call).__name__, "the call of a router", 'Fix: trace["router"].call.'))
    with uncast(call.device):
        gates = softmax(call.scores(), call.tile().mask()).flatten(0, -2)
        routed = (call.weights() > 0).to(gates.dtype).flatten(0, -2)
    real = (gates.sum(-1) > 0).sum().clamp(min=1)
    share = (routed / routed.sum(-1, keepdim=True).clamp(min=1)).sum(0) / real
    return call.n * (share * gates.sum(0) / real).sum()
