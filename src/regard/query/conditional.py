"""Conditional query generation: what is known beside the input shapes the question."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.general.scores.base import matrix, vector, width, zeros
from regard.ops.fill import kept_rows
from regard.query.parts import check_asked, operand


@register(
    name="conditional-query-generation",
    zh="查询生成的条件控制",
    path="query/emerging",
    equation="q = (1 + γ(z)) ⊙ q₀ + β(z)",
    paper="after Perez, Strub, de Vries, Dumoulin & Courville, FiLM: Visual Reasoning with a General Conditioning Layer, AAAI 2018",
    year=2018,
    time="d_z d_q",
    memory="none",
    choose="a condition says which features of the question count, or shifts what is looked for: a task, a user, a style",
    avoid="the condition is the whole question: then it is the query itself (auxiliary-query)",
)
class FiLMQuery(nn.Module):
    r"""Scale and shift a query by a condition (after Perez et al. 2018, https://arxiv.org/abs/1709.07871).

    $$q = (1 + \gamma(z)) \odot q_0 + \beta(z), \qquad \gamma(z) = W_\gamma z + b_\gamma, \quad \beta(z) = W_\beta z + b_\beta$$

    Everything starts at zero: at first no condition changes the query. Under a dot product the shift is a bias on keys,
    $\beta(z) \cdot k_j$.

    Args:
        dim: $d_q$, width of the query.
        condition_dim: $d_z$.

    Example:
        >>> import regard as rg
        >>> shape = FiLMQuery(5, condition_dim=3)
        >>> query, condition, features = torch.randn(2, 5), torch.randn(2, 3), torch.randn(2, 7, 5)
        >>> rg.Attention("dot")(shape(query, condition), features).shape
        torch.Size([2, 5])
    """

    def __init__(self, dim: int, condition_dim: int) -> None:
        super().__init__()
        dim, condition_dim = width("dim", dim), width("condition_dim", condition_dim)
        self.W_gamma, self.b_gamma = zeros(dim, condition_dim), zeros(dim)
        self.W_beta, self.b_beta = zeros(dim, condition_dim), zeros(dim)

    def forward(
        self,
        query: Float[Tensor, "*q dq"],
        condition: Float[Tensor, "*b dz"],
        mask: Bool[Tensor, "*_"] | None = None,
    ) -> Float[Tensor, "*q dq"]:
        """Queries (..., d_q), or (..., Nq, d_q) that share a condition (..., d_z).

        Args:
            query: what would be asked without the condition.
            condition: what is known.
            mask: True where there is something to ask, (...); what is False is read as zero.
        """
        operand("query", query, self.W_gamma, self.W_gamma.shape[0])
        operand("condition", condition, self.W_gamma)
        query, condition = _shared(query, condition, mask)
        gamma = condition @ self.W_gamma.mT + self.b_gamma
        return (1 + gamma) * query + (condition @ self.W_beta.mT + self.b_beta)


@register(
    name="hyper-network-query",
    zh="超网络条件查询（低秩）",
    path="query/emerging",
    equation="q = (W₀ + U diag(s(z)) Vᵀ) x",
    paper="after Ha, Dai & Le, HyperNetworks, ICLR 2017",
    year=2017,
    time="d_q d_x + r (d_q + d_x + d_z)",
    memory="none",
    choose="the condition changes how features of the input are turned into a question, not only their size",
    avoid="few examples of each condition: scaling and shifting has fewer parameters",
)
class HyperQuery(nn.Module):
    r"""A query map that a condition writes, in low rank (after Ha, Dai & Le 2017, https://arxiv.org/abs/1609.09106).

    $$q = W_Q(z)\, x, \qquad W_Q(z) = W_0 + U\, \mathrm{diag}(s(z))\, V^\top, \quad s(z) = W_s z + b_s$$

    with $U \in \mathbb{R}^{d_q \times r}$ and $V \in \mathbb{R}^{d_x \times r}$. $s$ starts at zero: at first the map is $W_0$ whatever the
    condition. No map is ever written out.

    Args:
        dim: $d_x$, width of what is asked with.
        condition_dim: $d_z$.
        query_dim: $d_q$; `dim` when not given.
        rank: $r$.

    Example:
        >>> ask = HyperQuery(5, condition_dim=3, query_dim=7, rank=2)
        >>> ask(torch.randn(2, 11, 5), torch.randn(2, 3)).shape
        torch.Size([2, 11, 7])
    """

    def __init__(self, dim: int, condition_dim: int, query_dim: int | None = None, rank: int = 8) -> None:
        super().__init__()
        dim, condition_dim, rank = width("dim", dim), width("condition_dim", condition_dim), width("rank", rank)
        query_dim = width("query_dim", dim if query_dim is None else query_dim)
        self.W_0, self.U, self.V = matrix(query_dim, dim), matrix(query_dim, rank), matrix(dim, rank)
        self.W_s, self.b_s = zeros(rank, condition_dim), zeros(rank)

    def forward(
        self,
        x: Float[Tensor, "*q dx"],
        condition: Float[Tensor, "*b dz"],
        mask: Bool[Tensor, "*_"] | None = None,
    ) -> Float[Tensor, "*q dq"]:
        """Queries (..., d_q) of x (..., d_x), or (..., Nq, d_x) that share a condition (..., d_z).

        Args:
            x: what is asked with.
            condition: what is known.
            mask: True where there is something to ask, (...); what is False is read as zero.
        """
        operand("x", x, self.W_0)
        operand("condition", condition, self.W_s)
        x, condition = _shared(x, condition, mask)
        scale = condition @ self.W_s.mT + self.b_s
        return x @ self.W_0.mT + ((x @ self.V) * scale) @ self.U.mT


@register(
    name="latent-queries",
    zh="条件潜查询",
    path="query/emerging",
    equation="Q(z) = Q₀ + MLP(z)",
    paper="after Jaegle et al., Perceiver: General Perception with Iterative Attention, ICML 2021; Carion et al. (DETR), ECCV 2020",
    year=2021,
    time="d_z d_h + d_h M d_q",
    memory="none",
    choose="a fixed number of summaries is wanted of an input of any length, and a condition says of what",
    avoid="the input itself should ask (self-attention), or one question is enough",
)
class LatentQueries(nn.Module):
    r"""Learned queries that a condition moves (after Jaegle et al. 2021, https://arxiv.org/abs/2103.03206).

    $$Q(z) = Q_0 + \mathrm{MLP}(z), \qquad \mathrm{MLP}(z) = W_2 \tanh(W_1 z + b_1) + b_2$$

    $W_2$ and $b_2$ start at zero: at first these are learnable queries, whatever the condition, and for a condition that never changes they
    remain so.

    Args:
        dim: $d_q$.
        count: number of queries M.
        condition_dim: $d_z$.
        hidden_dim: of the MLP; `dim` when not given.

    Example:
        >>> import regard as rg
        >>> ask, features = LatentQueries(5, count=3, condition_dim=2), torch.randn(2, 7, 5)
        >>> rg.Attention("dot")(ask(torch.randn(2, 2)), features).shape
        torch.Size([2, 3, 5])
    """

    def __init__(self, dim: int, count: int, condition_dim: int, hidden_dim: int | None = None) -> None:
        super().__init__()
        dim, count, condition_dim = width("dim", dim), width("count", count), width("condition_dim", condition_dim)
        hidden_dim = width("hidden_dim", dim if hidden_dim is None else hidden_dim)
        self.Q_0 = vector(count, dim)
        self.W1, self.b1 = matrix(hidden_dim, condition_dim), zeros(hidden_dim)
        self.W2, self.b2 = zeros(count * dim, hidden_dim), zeros(count * dim)

    def forward(
        self, condition: Float[Tensor, "*b dz"], mask: Bool[Tensor, "*_"] | None = None
    ) -> Float[Tensor, "*b m dq"]:
        """Queries (..., M, d_q) of a condition (..., d_z); False in the mask (...) is one that is missing, read as zero."""
        operand("condition", condition, self.W1)
        check_asked(mask)
        hidden = torch.tanh(kept_rows(condition, mask) @ self.W1.mT + self.b1)
        moved: Tensor = (hidden @ self.W2.mT + self.b2).unflatten(-1, self.Q_0.shape)
        return self.Q_0 + moved


def _shared(query: Tensor, condition: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both without what is missing, the condition with the axes of the query."""
    if query.dim() not in (condition.dim(), condition.dim() + 1):
        got = f"shape {tuple(condition.shape)} beside queries of shape {tuple(query.shape)}"
        raise ValueError(
            refusal("condition", got, "as many axes as the queries, or one fewer for queries that share it")
        )
    check_asked(mask)
    shared = condition if query.dim() == condition.dim() else condition.unsqueeze(-2)
    if any(a != b and 1 not in (a, b) for a, b in zip(shared.shape[:-1], query.shape[:-1], strict=True)):
        got = f"shape {tuple(condition.shape)} beside queries of shape {tuple(query.shape)}"
        raise ValueError(refusal("condition", got, "the leading axes of the queries"))
    condition = kept_rows(condition, mask)
    if query.dim() == condition.dim():
        return kept_rows(query, mask), condition
    return kept_rows(query, None if mask is None else mask.unsqueeze(-1).expand(query.shape[:-1])), condition.unsqueeze(
        -2
    )
