"""What asks: queries that are constant, learned, a state, an auxiliary variable, pooled, or what another module read."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.parts import masked_input, masked_mean
from regard.general.scores.base import matrix, vector, width, zeros
from regard.ops.fill import kept_rows, where
from regard.query.parts import check_asked, one_of, operand

_SURVEY = "Brauwers & Frasincar, A General Survey on Attention Mechanisms in Deep Learning, TKDE 2023"


class _Fixed(nn.Module):
    """A query that does not look at the input."""

    query: Tensor  # (d_q,) or (M, d_q)

    def forward(
        self, features: Float[Tensor, "*b n d"] | None = None, mask: Bool[Tensor, "*_ n"] | None = None
    ) -> Float[Tensor, "*q dq"]:
        """The query for these features: (d_q,), which every attention takes; or (..., M, d_q) where there are several."""
        if self.query.dim() == 1:
            return self.query
        if features is None:
            raise ValueError(
                refusal("features", None, f"the features, for whose batch there are {len(self.query)} queries")
            )
        return self.query.expand(*features.shape[:-2], *self.query.shape)


@register(
    name="constant-query",
    zh="恒定查询",
    path="query/type",
    equation="e_j = score(q, k_j),  q constant",
    paper="Lin et al., A Structured Self-Attentive Sentence Embedding, ICLR 2017",
    year=2017,
    time="N d",
    memory="linear",
    choose="the task is one question that is known beforehand, such as the mean of a class",
    avoid="the question is to be found by training (learnable-query), or differs between inputs",
)
class ConstantQuery(_Fixed):
    r"""A query that is given once and never changes (Lin et al. 2017, https://arxiv.org/abs/1703.03130).

    $$e_j = \mathrm{score}(q, k_j), \qquad q \;\text{constant}$$

    It is saved with the module, and has no gradient. The other reading of a constant query, none at all, is the score
    `QueryFree`: additive with $W_1 = 0$.

    Args:
        query: (d_q,), or (M, d_q) for several.

    Example:
        >>> import regard as rg
        >>> ask = ConstantQuery(torch.ones(5))
        >>> features = torch.randn(2, 7, 5)
        >>> rg.Attention("dot")(ask(features), features).shape
        torch.Size([2, 5])
    """

    def __init__(self, query: Float[Tensor, "*m dq"]) -> None:
        super().__init__()
        if not isinstance(query, Tensor) or query.dim() not in (1, 2):
            got = f"shape {tuple(query.shape)}" if isinstance(query, Tensor) else type(query).__name__
            raise ValueError(refusal("query", got, "a tensor (d_q,) or (M, d_q)"))
        self.register_buffer("query", query.detach().clone())


@register(
    name="learnable-query",
    zh="可学习查询",
    path="query/type",
    equation="e_j = score(q, k_j),  q learned",
    paper="Yang et al., Hierarchical Attention Networks for Document Classification, NAACL 2016",
    year=2016,
    time="N d",
    memory="linear",
    choose="there is no question beside the input: the model learns what to look for",
    avoid="what to look for depends on something that is known: use that as the query",
)
class LearnableQuery(_Fixed):
    r"""A query that is a parameter (Yang et al. 2016, https://aclanthology.org/N16-1174; Lin et al. 2017, https://arxiv.org/abs/1703.03130).

    $$e_j = \mathrm{score}(q, k_j), \qquad q \in \mathbb{R}^{d_q} \;\text{learned}$$

    Args:
        dim: $d_q$.
        count: number of queries M, asked side by side; None for a single one, without an axis.

    Example:
        >>> import regard as rg
        >>> ask = LearnableQuery(5, count=3)
        >>> features = torch.randn(2, 7, 5)
        >>> rg.Attention("dot")(ask(features), features).shape
        torch.Size([2, 3, 5])
    """

    def __init__(self, dim: int, count: int | None = None) -> None:
        super().__init__()
        dim = width("dim", dim)
        self.query = vector(dim) if count is None else vector(width("count", count), dim)


@register(
    name="basic-query",
    zh="基本查询",
    path="query/type",
    equation="q_t = s_{t−1}",
    paper="Bahdanau, Cho & Bengio, Neural Machine Translation by Jointly Learning to Align and Translate, ICLR 2015",
    year=2015,
    time="none",
    memory="none",
    choose="a decoder asks at every step with what it has said so far",
    avoid="there is no decoder",
)
class RNNStateQuery(nn.Module):
    r"""The state of a recurrent network as the query (Bahdanau et al. 2015, https://arxiv.org/abs/1409.0473).

    $$q_t = s_{t-1}, \qquad c_t = \sum_j \mathrm{align}(\mathrm{score}(q_t, k_j))\, v_j$$

    Takes states as torch's recurrent layers and cells give them: of several layers the last one asks, of two directions both.

    Args:
        bidirectional: whether the last two states are the directions of one layer.

    Example:
        >>> _, state = nn.LSTM(3, 5, num_layers=2, batch_first=True)(torch.randn(2, 7, 3))
        >>> RNNStateQuery()(state).shape
        torch.Size([2, 5])
    """

    def __init__(self, bidirectional: bool = False) -> None:
        super().__init__()
        self.bidirectional = bool(bidirectional)

    def forward(self, state: Tensor | tuple[Tensor, Tensor]) -> Float[Tensor, "*b dq"]:
        """The query (..., d_q) of a state (layers · directions, ..., d), or (..., d) of a cell; an LSTM's pair too.

        Args:
            state: h, or (h, c).
        """
        h = state[0] if isinstance(state, tuple) else state
        if h.dim() < 3:
            return h
        if not self.bidirectional:
            return h[-1]
        if len(h) % 2:
            raise ValueError(refusal("state", f"{len(h)} states", "two for each layer"))
        return torch.cat([h[-2], h[-1]], -1)


@register(
    name="auxiliary-query",
    zh="辅助变量查询",
    path="query/type",
    equation="q = W x + b,  x an auxiliary variable",
    paper=_SURVEY,
    year=2023,
    time="d_x d_q",
    memory="none",
    choose="something beside the features says what to look for: patient covariates, a user, an aspect",
    avoid="the variable does not bear on which features matter",
)
class AuxiliaryQuery(nn.Module):
    r"""An auxiliary variable as the query (Brauwers & Frasincar 2023, https://arxiv.org/abs/2203.14263).

    $$q = W x + b, \qquad W \in \mathbb{R}^{d_q \times d_x}$$

    Args:
        dim: $d_x$, width of the variable.
        query_dim: $d_q$; `dim` when not given.

    Example:
        >>> AuxiliaryQuery(3, 5)(torch.randn(2, 3)).shape
        torch.Size([2, 5])
    """

    def __init__(self, dim: int, query_dim: int | None = None) -> None:
        super().__init__()
        dim = width("dim", dim)
        query_dim = width("query_dim", dim if query_dim is None else query_dim)
        self.W, self.b = matrix(query_dim, dim), zeros(query_dim)

    def forward(
        self, variable: Float[Tensor, "*b dx"], mask: Bool[Tensor, "*_"] | None = None
    ) -> Float[Tensor, "*b dq"]:
        """The query (..., d_q) of a variable (..., d_x); False in the mask (...) is a variable that is missing, read as zero."""
        operand("variable", variable, self.W)
        check_asked(mask)
        return kept_rows(variable, mask) @ self.W.mT + self.b


@register(
    name="pooled-query",
    zh="池化查询（均值键查询）",
    path="query/type",
    equation="q = (1/n) Σ_{j real} f_j",
    paper="Ma, Li, Zhang & Wang, Interactive Attention Networks for Aspect-Level Sentiment Classification, IJCAI 2017",
    year=2017,
    time="N d",
    memory="none",
    choose="the gist of one input should ask about another, or about itself",
    avoid="single features must be matched: their mean has lost them",
)
class PooledQuery(nn.Module):
    r"""The pooled features as the query (Ma et al. 2017, https://arxiv.org/abs/1709.00893).

    $$q = \frac{1}{n} \sum_{j \;\text{real}} f_j \qquad\text{or}\qquad q_d = \max_{j \;\text{real}} f_{jd}$$

    The mean divides by the true length, not by the padded one. Nothing real gives zero.

    Args:
        pool: `"mean"` or `"max"`.

    Example:
        >>> mask = torch.tensor([[True, True, False]])
        >>> PooledQuery()(torch.tensor([[[1.0], [3.0], [9.0]]]), mask)
        tensor([[2.]])
    """

    def __init__(self, pool: str = "mean") -> None:
        super().__init__()
        self.pool = one_of("pool", pool, ("mean", "max"))

    def forward(
        self, features: Float[Tensor, "*b n d"], mask: Bool[Tensor, "*_ n"] | None = None
    ) -> Float[Tensor, "*b d"]:
        """Features (..., N, d) to a query (..., d); `mask` is True for real ones."""
        features, mask = masked_input(features, mask, "features")
        if self.pool == "mean":
            return masked_mean(features, mask)
        if features.shape[-2] == 0:
            return features.sum(-2)
        if mask is None:
            return features.amax(-2)
        lowest = where(mask.unsqueeze(-1), features, -torch.inf).amax(-2)
        return where(mask.any(-1, keepdim=True), lowest, 0.0)

    def extra_repr(self) -> str:
        return f"pool={self.pool!r}"


@register(
    name="specialised-query",
    zh="特殊查询",
    path="query/type",
    equation="q = c' = Σ_j align(score(q', k'_j)) v'_j",
    paper=_SURVEY,
    year=2023,
    time="that of the module that is asked first",
    memory="that of the module that is asked first",
    choose="what to look for in one input is itself read from another: a question about an image, a target in a sentence",
    avoid="a simple query is at hand and enough",
)
class ContextQuery(nn.Module):
    r"""What another module reads, as the query (Brauwers & Frasincar 2023, https://arxiv.org/abs/2203.14263).

    $$q = c' = \sum_j \mathrm{align}(\mathrm{score}(q', k'_j))\, v'_j$$

    Args:
        module: an attention, or any module that gives a context (..., d); its weights are at `attention` under a trace.

    Example:
        >>> import regard as rg
        >>> ask = ContextQuery(rg.Attention("query-free", key_dim=5, hidden_dim=3))
        >>> ask(None, torch.randn(2, 7, 5)).shape
        torch.Size([2, 5])
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(refusal("module", type(module).__name__, "a module that gives a context"))
        self.attention = module

    def forward(self, *inputs: Any, **named: Any) -> Float[Tensor, "*b dq"]:
        """The context of the module, called with these arguments."""
        context = self.attention(*inputs, **named)
        if not isinstance(context, Tensor):
            raise TypeError(refusal("module", f"one that gives {type(context).__name__}", "one that gives a context"))
        return context
