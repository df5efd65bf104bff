"""Multi-hop attention: what was read decides what is asked next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.parts import AlignLike, ScoreLike, attentions, masked_input, masked_mean
from regard.general.attention import Attention
from regard.general.bound import Bound, Sizes, broadcasts
from regard.general.masks import Keys, Mask
from regard.general.scores.base import matrix, width
from regard.ops.fill import kept_rows
from regard.query.parts import Filled, one_of, operand, widths

_STARTS = ("mean", "zeros")


class Transform(nn.Module):
    r"""How a query becomes the next one: $q^{(s+1)} = \mathrm{transform}(q^{(s)}, c^{(s)})$. This one leaves it as it is."""

    def __init__(self, query_dim: int, value_dim: int) -> None:
        super().__init__()

    def forward(
        self, query: Float[Tensor, "*b dq"], context: Float[Tensor, "*b dv"], side: Tensor | None, mask: Mask | None
    ) -> Float[Tensor, "*b dq"]:
        """The next query; `side` are the features of the query side (..., M, d_q), and `mask` which of them are real."""
        return query


class ResidualTransform(Transform):
    r"""Add what was read: $q + W c$ (https://arxiv.org/abs/1511.02274 has $W = I$)."""

    def __init__(self, query_dim: int, value_dim: int) -> None:
        super().__init__(query_dim, value_dim)
        self.W = matrix(query_dim, value_dim)

    def forward(self, query: Tensor, context: Tensor, side: Tensor | None, mask: Mask | None) -> Tensor:
        return query + context @ self.W.mT


class SumTransform(Transform):
    r"""Add what was read, as it is: $q + c$."""

    def __init__(self, query_dim: int, value_dim: int) -> None:
        super().__init__(query_dim, value_dim)
        if query_dim != value_dim:
            fix = "Fix: transform='residual', which has a matrix."
            raise ValueError(refusal("transform", "'sum'", f"equal widths, not {query_dim} and {value_dim}", fix))

    def forward(self, query: Tensor, context: Tensor, side: Tensor | None, mask: Mask | None) -> Tensor:
        return query + context


class GRUTransform(Transform):
    r"""A recurrent step: $q' = \mathrm{GRU}(c, q)$."""

    def __init__(self, query_dim: int, value_dim: int) -> None:
        super().__init__(query_dim, value_dim)
        self.cell = nn.GRUCell(value_dim, query_dim)

    def forward(self, query: Tensor, context: Tensor, side: Tensor | None, mask: Mask | None) -> Tensor:
        flat: Tensor = self.cell(context.reshape(-1, context.shape[-1]), query.reshape(-1, query.shape[-1]))
        return flat.view(query.shape)


class SideTransform(Transform):
    r"""Read the query side again: $q' = \sum_i \mathrm{align}(\mathrm{score}([q; c], f_i))\, f_i$."""

    def __init__(self, query_dim: int, value_dim: int) -> None:
        super().__init__(query_dim, value_dim)
        self.attention = Attention("additive", query_dim=query_dim + value_dim, key_dim=query_dim, hidden_dim=query_dim)

    def forward(self, query: Tensor, context: Tensor, side: Tensor | None, mask: Mask | None) -> Tensor:
        if side is None:
            raise ValueError(refusal("side", None, "the features of the query side, which this transform reads"))
        asked: Tensor = self.attention(torch.cat([query, context], -1), side, mask=mask)
        return asked


TRANSFORMS: dict[str, type[Transform]] = {
    "identity": Transform,
    "residual": ResidualTransform,
    "sum": SumTransform,
    "gru": GRUTransform,
    "attention": SideTransform,
}


@register(
    name="multi-hop",
    zh="多跳注意力",
    path="query/multiplicity",
    equation="q^{s+1} = transform(q^s, c^s),  c^{s+1} = Σ_j align(score([q^{s+1}; c^s], k_j)) v_j",
    paper="Tran & Niederée, Multihop Attention Networks for Question Answer Matching, SIGIR 2018",
    year=2018,
    time="S N d",
    memory="linear",
    choose="the answer is reached in steps: one fact says which fact to look for next",
    avoid="one look is enough: every hop waits for the one before",
)
@register(
    name="multi-hop-variants",
    zh="多跳变体（共享权重、查询侧注意力）",
    path="query/multiplicity",
    preset={"transform": "attention", "share": True},
    equation="q^{s+1} = Σ_i align(score([q^s; c^s], f_i)) f_i, the same parameters at every hop",
    paper="Tran & Niederée, Multihop Attention Networks for Question Answer Matching, SIGIR 2018",
    year=2018,
    time="S (N + M) d",
    memory="linear",
    choose="few parameters (shared), or a question of several parts, one for each hop (attention over the query side)",
    avoid="hops that must do different things (own weights)",
    example="""
    >>> attend = MultiHopAttention((3, 5, 7), hops=2, transform="attention", share=True)
    >>> question, key, value = torch.randn(2, 4, 3), torch.randn(2, 11, 5), torch.randn(2, 11, 7)
    >>> attend(question.mean(-2), key, value, side=question).shape
    torch.Size([2, 7])
    """,
)
class MultiHopAttention(nn.Module):
    r"""Ask, read, and ask again (Tran & Niederée 2018, https://doi.org/10.1145/3209978.3210009).

    $$q^{(s+1)} = \mathrm{transform}(q^{(s)}, c^{(s)}), \qquad e_j^{(s)} = \mathrm{score}([q^{(s+1)}; c^{(s)}], k_j), \qquad
      c^{(s+1)} = \sum_j \mathrm{align}(e^{(s)})_j\, v_j$$

    from $c^{(0)}$, the mean of the real values, or zero. The result is $c^{(S)}$; `contexts` gives all of them. With
    `transform="sum"`, `start="zeros"`, `see_context=False` and `share=False` these are stacked attention networks (Yang et al. 2016,
    https://arxiv.org/abs/1511.02274). A residual transform keeps gradients alive over many hops. The attentions are `hops.0`,
    `hops.1`, …, or `hops.0` called $S$ times where the weights are shared.

    Args:
        dim: width of query, key and value, or of each of the three.
        hops: $S$.
        transform: `"identity"`, `"residual"` ($q + W c$), `"sum"` ($q + c$), `"gru"`, `"attention"` (over the query side), or a function of
            the widths of query and value that makes a `Transform`.
        share: the same parameters at every hop, or own ones.
        see_context: whether the score sees $[q; c]$ or $q$ alone.
        start: $c^{(0)}$, `"mean"` or `"zeros"`.
        score: a name, a class, a function of the widths of query and key, or (shared) a ready-made score or attention.
        align: likewise; softmax when not given.
        **options: arguments of scores and alignments given by name, such as `hidden_dim`; `dropout`, `impl`.

    Example:
        >>> attend = MultiHopAttention((3, 5, 7), hops=2, transform="residual")
        >>> query, key, value = torch.randn(2, 3), torch.randn(2, 11, 5), torch.randn(2, 11, 7)
        >>> attend(query, key, value).shape, attend.contexts(query, key, value).shape
        (torch.Size([2, 7]), torch.Size([2, 2, 7]))
    """

    def __init__(
        self,
        dim: int | tuple[int, int, int],
        hops: int = 2,
        *,
        transform: str | Callable[[int, int], nn.Module] = "residual",
        share: bool = True,
        see_context: bool = True,
        start: str = "mean",
        score: ScoreLike = "additive",
        align: AlignLike = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.dims = query_dim, key_dim, value_dim = widths("dim", dim, 3)
        self.count, self.see_context, self.start = (
            width("hops", hops),
            bool(see_context),
            one_of("start", start, _STARTS),
        )
        if isinstance(transform, str):
            transform = TRANSFORMS[one_of("transform", transform, tuple(TRANSFORMS))]
        elif not callable(transform):
            raise TypeError(refusal("transform", type(transform).__name__, "a name, or a function that makes one"))
        if options.get("features") is True:
            options["features"] = value_dim
        asked = query_dim + value_dim if self.see_context else query_dim
        own = 1 if share else self.count
        self.hops = nn.ModuleList(
            attentions({f"hop {s}": (asked, key_dim) for s in range(own)}, score, align, options).values()
        )
        self.transforms = nn.ModuleList(transform(query_dim, value_dim) for _ in range(own))

    def forward(
        self,
        query: Float[Tensor, "*q dq"],
        key: Float[Tensor, "*b n dk"],
        value: Float[Tensor, "*_ n dv"] | None = None,
        mask: Bool[Tensor, "*_ n"] | None = None,
        *,
        side: Float[Tensor, "*_ m dq"] | None = None,
        side_mask: Bool[Tensor, "*_ m"] | None = None,
    ) -> Float[Tensor, "*q dv"]:
        """The context of the last hop.

        Args:
            query: (..., d_q), or (..., Nq, d_q) for several, each on its own way.
            key: (..., N, d_k).
            value: (..., N, d_v); the key when not given.
            mask: True for real keys, (..., N).
            side: features of the query side (..., M, d_q), for a transform that reads them.
            side_mask: True for real ones, (..., M).
        """
        return self.contexts(query, key, value, mask, side=side, side_mask=side_mask)[..., -1, :]

    def contexts(
        self,
        query: Float[Tensor, "*q dq"],
        key: Float[Tensor, "*b n dk"],
        value: Float[Tensor, "*_ n dv"] | None = None,
        mask: Bool[Tensor, "*_ n"] | None = None,
        *,
        side: Float[Tensor, "*_ m dq"] | None = None,
        side_mask: Bool[Tensor, "*_ m"] | None = None,
    ) -> Float[Tensor, "*q s dv"]:
        """The contexts of all hops, (..., S, d_v)."""
        value = key if value is None else value
        query_dim, key_dim, value_dim = self.dims
        key, mask = masked_input(key, mask, "key", key_dim)
        value, _ = masked_input(value, mask, "value", value_dim)
        weight = next(self.parameters(), key)
        for name, x, d in (("query", query, query_dim), ("key", key, key_dim), ("value", value, value_dim)):
            operand(name, x, weight, d)
        many = query.dim() == key.dim()
        if mask is not None:
            alive = mask.any(-1)
            query = kept_rows(query, alive.unsqueeze(-1).expand(query.shape[:-1]) if many else alive)
        tokens = None if mask is None else _filled(Keys(mask), query, key, many)
        of_side = None
        if side is not None:
            side, side_mask = masked_input(side, side_mask, "side")
            of_side = None if side_mask is None else _filled(Keys(side_mask), query, side, many)
        context = (
            masked_mean(value, mask) if self.start == "mean" else value.new_zeros(*value.shape[:-2], value.shape[-1])
        )
        context = context.unsqueeze(-2) if many else context
        if not broadcasts(tuple(context.shape[:-1]), tuple(query.shape[:-1])):
            got = f"shape {tuple(query.shape)} beside a key of shape {tuple(key.shape)}"
            raise ValueError(refusal("query", got, "the leading axes of the key"))
        context = context.expand(*query.shape[:-1], context.shape[-1])
        found = []
        for s in range(self.count):
            shared = 0 if len(self.hops) == 1 else s
            query = self.transforms[shared](query, context, side, of_side)
            asked = torch.cat([query, context.to(query.dtype)], -1) if self.see_context else query
            context = self.hops[shared](asked, key, value, mask=tokens)
            found.append(context)
        return torch.stack(found, -2)

    def extra_repr(self) -> str:
        return f"hops={self.count}, see_context={self.see_context}, start={self.start!r}"


def _filled(mask: Mask, query: Tensor, key: Tensor, many: bool) -> Mask:
    """The mask of keys whose padding is zero already."""
    lead = tuple(torch.broadcast_shapes(query.shape[: -2 if many else -1], key.shape[:-2]))
    bound: Bound = mask.bind(Sizes(lead, query.shape[-2] if many else 1, key.shape[-2]))
    return Filled(bound)
