"""Several attentions side by side: projected heads, and plain queries whose contexts are concatenated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.parts import Aligns, Scores, attentions
from regard.general.alignments import Alignment
from regard.general.attention import Attention
from regard.general.bound import Bound, Sizes
from regard.general.masks import Mask, Pairs, as_mask
from regard.general.scores import Score
from regard.general.scores.base import matrix, width, zeros
from regard.ops.fill import kept_rows
from regard.query.parts import Filled, operand, widths


@register(
    name="multi-head",
    zh="多头注意力",
    path="query/multiplicity",
    equation="C_h = align(score(Q W_Q^hᵀ, K W_K^hᵀ)) V W_V^hᵀ,  C = [C_1; …; C_H] W_Oᵀ",
    paper="Vaswani et al., Attention Is All You Need, NeurIPS 2017",
    year=2017,
    time="N² H d + N H d d_f",
    memory="linear (fused, blockwise)",
    choose="several relations must be read at once, each in a space of its own",
    avoid="one relation matters and a single set of weights should show it",
)
class MultiHeadAttention(nn.Module):
    r"""Attentions in parallel, each on projections of its own (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

    $$C_h = \mathrm{align}\big(\mathrm{score}(Q W_Q^{h\top}, K W_K^{h\top})\big)\, V W_V^{h\top}, \qquad
      C = [C_1; \dots; C_H]\, W_O^\top$$

    No parameter is shared between heads, unless `key_heads` says that groups of them share keys and values (Ainslie et al. 2023,
    https://arxiv.org/abs/2305.13245). Each head has a softmax of its own. Under a trace the weights of all heads are at `attention`,
    (..., H, Nq, N); where heads differ in score or alignment they are at `heads.0`, `heads.1`, … A query that may attend
    nothing gives zero, whatever the biases.

    Args:
        dim: width of query, key and value, or of each of the three; the result is as wide as the query.
        heads: $H$.
        head_dim: $d_k$ and $d_v$ of a head, or one number for both; the width of the query over $H$ when not given.
        key_heads: number of heads of keys and values, a divisor of $H$; $H$ when not given, 1 for multi-query attention.
        score: of all heads, or a list with one for each: names, classes, functions of the widths of query and key, or ready-made
            scores (for all heads at once, with `heads=H`) or attentions.
        align: of all heads, or a list with one for each; softmax when not given.
        bias: add $b_Q$, $b_K$, $b_V$ and $b_O$ to the projections.
        **options: arguments of scores and alignments given by name; `features=True` for one weight for each feature; `dropout`,
            `impl`.

    Example:
        >>> attend = MultiHeadAttention(6, heads=3)
        >>> attend(torch.randn(2, 5, 6), torch.randn(2, 7, 6)).shape
        torch.Size([2, 5, 6])
        >>> MultiHeadAttention(6, heads=2, score=["additive", "scaled-dot"])(torch.randn(2, 5, 6)).shape  # of itself
        torch.Size([2, 5, 6])
    """

    def __init__(
        self,
        dim: int | tuple[int, int, int],
        heads: int,
        *,
        head_dim: int | tuple[int, int] | None = None,
        key_heads: int | None = None,
        score: Scores = "scaled-dot",
        align: Aligns = None,
        bias: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        query_dim, key_dim, value_dim = widths("dim", dim, 3)
        self.n_heads = H = width("heads", heads)
        if head_dim is None and query_dim % H:
            fix = "Fix: pass head_dim=…, the width of a head."
            raise ValueError(refusal("heads", H, f"a divisor of the width {query_dim}", fix))
        d_k, d_v = widths("head_dim", query_dim // H if head_dim is None else head_dim, 2)
        self.key_heads = G = width("key_heads", H if key_heads is None else key_heads)
        if H % G:
            raise ValueError(refusal("key_heads", G, f"a divisor of heads={H}"))
        self.W_Q, self.W_K, self.W_V = matrix(H, d_k, query_dim), matrix(G, d_k, key_dim), matrix(G, d_v, value_dim)
        self.W_O = matrix(query_dim, H * d_v)
        self.b_Q = zeros(H, d_k) if bias else None
        self.b_K = zeros(G, d_k) if bias else None
        self.b_V = zeros(G, d_v) if bias else None
        self.b_O = zeros(query_dim) if bias else None
        if options.get("features") is True:
            options["features"] = d_v
        self.attention: Attention | None = None
        self.heads: nn.ModuleList | None = None
        if isinstance(score, list | tuple) or isinstance(align, list | tuple):
            built = attentions({f"head {h}": (d_k, d_k) for h in range(H)}, score, align, options)
            self.heads = nn.ModuleList(built.values())
        else:
            self.attention = attentions({"heads": (d_k, d_k)}, score, align, options, heads=H)["heads"]

    def forward(
        self,
        query: Float[Tensor, "*q dq"],
        key: Float[Tensor, "*b n dk"] | None = None,
        value: Float[Tensor, "*_ n dv"] | None = None,
        *,
        mask: Tensor | Mask | None = None,
        bias: Tensor | Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Float[Tensor, "*q dq"]:
        """Read the values by every head.

        Args:
            query: (..., Nq, d_q), or (..., d_q) for a single query beside a key of one axis more.
            key: (..., N, d_k); the query when not given.
            value: (..., N, d_v); the key when not given.
            mask: True where a query may attend a key: booleans that broadcast to (..., Nq, N), the same for every head, or
                with one axis more, to (..., H, Nq, N); for a single query without the axis Nq; or a mask object.
            bias: added to the scores: as the mask, or a function of indices i and j.
        """
        key = query if key is None else key
        value = key if value is None else value
        for name, x, W in (("query", query, self.W_Q), ("key", key, self.W_K), ("value", value, self.W_V)):
            operand(name, x, W)
        if key.dim() < 2 or query.dim() not in (key.dim(), key.dim() - 1):
            got = f"shape {tuple(query.shape)} beside a key of shape {tuple(key.shape)}"
            raise ValueError(refusal("query", got, "as many axes as the key, or one fewer"))
        single = query.dim() == key.dim() - 1
        query = query.unsqueeze(-2) if single else query
        bound, per_head, rows = None, False, None
        if mask is not None:
            if single and isinstance(mask, Tensor) and mask.dim() >= 1:
                mask = mask.unsqueeze(-2)
            bound, per_head = self._bind(mask, query, key, value)
            rows, keys = bound.rows(key.device), bound.keys(key.device)
            if per_head:
                rows, keys = (None if x is None or x.dim() < 2 else x.any(-2) for x in (rows, keys))
            query, key, value = kept_rows(query, rows), kept_rows(key, keys), kept_rows(value, keys)
        q, k, v = self.project(query, key, value)
        context = self._attend(q, k, v, bound, per_head, over_heads(bias, key.dim(), single))
        result = kept_rows(self.join(context), rows)
        return result.squeeze(-2) if single else result

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all heads, (..., H, N, d_h); by one product where all three are one input."""
        # For a few tokens, as in decoding, putting the matrices together would cost more than it saves.
        one = query is key and key is value and query.numel() >= self.W_Q.numel()
        if not one or self.W_K.shape != self.W_V.shape:
            q, k = split_heads(query, self.W_Q, self.b_Q), split_heads(key, self.W_K, self.b_K)
            return q, k, split_heads(value, self.W_V, self.b_V)
        b = None
        if self.b_Q is not None and self.b_K is not None and self.b_V is not None:
            b = torch.cat([self.b_Q, self.b_K, self.b_V])
        together = split_heads(query, torch.cat([self.W_Q, self.W_K, self.W_V]), b)
        # Parted where they lie side by side in memory, so that their gradients are put together there too.
        q, k, v = together.transpose(-2, -3).split([self.n_heads, self.key_heads, self.key_heads], -2)
        return q.transpose(-2, -3), k.transpose(-2, -3), v.transpose(-2, -3)

    def join(self, context: Tensor) -> Tensor:
        """Contexts of all heads (..., H, Nq, d_v), side by side and mapped: (..., Nq, d_q)."""
        return F.linear(context.transpose(-3, -2).flatten(-2), self.W_O, self.b_O)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, bound: Bound | None, per_head: bool, bias: Any, start: int = 0
    ) -> Tensor:
        """Contexts of all heads, (..., H, Nq, d_v)."""
        group = self.n_heads // self.key_heads
        # Rows that may attend nothing in any head are zeroed behind the last map, which adds its bias to them.
        mask = None if bound is None else Filled(bound, heads=not per_head, cleared=not per_head)
        if self.attention is not None:
            if group > 1:
                k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
            together: Tensor = self.attention(q, k, v, mask=mask, bias=bias, start=start)
            return together
        assert self.heads is not None
        contexts = []
        for h, attend in enumerate(self.heads):
            # One head is a call of its own, with an axis of length one in the place of the heads.
            own, shared = slice(h, h + 1), slice(h // group, h // group + 1)
            if bound is not None and per_head:
                mask = Filled(_of_head(bound, h, q.device))
            parts = q[..., own, :, :], k[..., shared, :, :], v[..., shared, :, :]
            contexts.append(attend(*parts, mask=mask, bias=_bias_of_head(bias, h), start=start))
        return torch.cat(contexts, -3)

    def _bind(
        self, mask: Tensor | Mask, query: Tensor, key: Tensor, value: Tensor, past: int = 0
    ) -> tuple[Bound, bool]:
        """The mask for these inputs and so many earlier keys, and whether it knows heads."""
        mask = as_mask(mask)
        lead = tuple(torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2]))
        per_head = isinstance(mask, Pairs) and mask.allowed.dim() == len(lead) + 3
        sizes = Sizes((*lead, self.n_heads) if per_head else lead, query.shape[-2], past + key.shape[-2])
        return mask.bind(sizes), per_head

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **options: Any) -> MultiHeadAttention:
        """The same function as a module of torch, with copies of its weights.

        Axes are (..., N, d) whatever its `batch_first` says, and True in a mask means *may attend*, where torch's masks
        of booleans mean *ignore*.

        Args:
            module: without `add_bias_kv` and `add_zero_attn`.
            **options: such as `impl`; the dropout is the module's.
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise TypeError(refusal("module", type(module).__name__, "an nn.MultiheadAttention"))
        if module.bias_k is not None or module.add_zero_attn:
            fix = "Fix: regard.adopt(model) keeps the module and its extra keys."
            raise ValueError(refusal("module", "one with keys of its own", "one without bias_k and zero_attn", fix))
        E, H = module.embed_dim, module.num_heads
        kdim, vdim = module.kdim or E, module.vdim or E
        biased = module.in_proj_bias is not None
        ours = cls((E, kdim, vdim), H, bias=biased, dropout=module.dropout, **options)
        if module._qkv_same_embed_dim:
            matrices = module.in_proj_weight.chunk(3)
        else:
            matrices = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        state = {f"W_{name}": W.reshape(H, E // H, -1) for name, W in zip("QKV", matrices, strict=True)}
        state["W_O"] = module.out_proj.weight
        if biased:
            of_inputs = module.in_proj_bias.chunk(3)
            state |= {f"b_{name}": b.reshape(H, E // H) for name, b in zip("QKV", of_inputs, strict=True)}
            state["b_O"] = module.out_proj.bias
        ours = ours.to(module.out_proj.weight.device, module.out_proj.weight.dtype)
        ours.load_state_dict({name: x.detach() for name, x in state.items()}, strict=True)
        return ours.train(module.training)

    def extra_repr(self) -> str:
        return f"heads={self.n_heads}, key_heads={self.key_heads}"


def _of_head(bound: Bound, h: int, device: torch.device) -> Bound:
    """One head of a mask of all, (..., H, Nq, N)."""
    sizes = bound.sizes
    allowed = bound.tile(range(sizes.nq), range(sizes.n), device)
    allowed = allowed if allowed.shape[-3] == 1 else allowed[..., h : h + 1, :, :]
    return Pairs(allowed).bind(Sizes((*sizes.lead[:-1], 1), sizes.nq, sizes.n))


def _bias_of_head(bias: Any, h: int) -> Any:
    """One head of a bias of all, given as a tensor or as a function of indices; or the one that all share."""
    if isinstance(bias, Tensor):
        return bias[..., h : h + 1, :, :] if bias.dim() > 2 and bias.shape[-3] > 1 else bias
    return None if bias is None else lambda i, j: _bias_of_head(bias(i, j), h)


def split_heads(x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    """Project by all heads with one product: (..., N, d) to (..., H, N, d_h)."""
    projected: Tensor = F.linear(x, W.flatten(0, 1), None if b is None else b.flatten())
    heads: Tensor = projected.unflatten(-1, W.shape[:2]).transpose(-2, -3)
    return heads


def over_heads(bias: Any, axes: int, single: bool) -> Any:
    """A bias without heads, with an axis for them; Nq is there for a single query too."""
    if not isinstance(bias, Tensor):
        return bias
    bias = bias.unsqueeze(-2) if single and bias.dim() else bias
    return bias.unsqueeze(-3) if 2 < bias.dim() <= axes else bias


@register(
    name="multi-query-concat",
    zh="多头注意力（多查询拼接）",
    path="query/reading",
    equation="c = [att((K, V), q_1); …; att((K, V), q_M)]",
    paper="Qiu, Neural Networks and Deep Learning (神经网络与深度学习), chapter 8",
    year=2020,
    time="M N d",
    memory="linear",
    choose="a fixed number of questions about one input, such as learned ones, whose answers a following layer takes together",
    avoid="the questions should look at different spaces of the input: projected heads (multi-head)",
)
class MultiQueryConcat(nn.Module):
    r"""Several plain queries on the same keys and values, their contexts side by side (Qiu, chapter 8, https://nndl.github.io).

    $$c = [\mathrm{att}((K, V), q_1);\; \dots;\; \mathrm{att}((K, V), q_M)], \qquad
      \mathrm{att}((K, V), q) = \sum_j \mathrm{align}(\mathrm{score}(q, k_j))\, v_j$$

    The book calls this multi-head; it has no projections, and the queries share the score. `MultiHeadAttention` is the one of
    the Transformer.

    Args:
        score: a score, a name with the widths beside it, or a ready-made attention.
        align: an alignment or a name; softmax when not given.
        **options: as in `Attention`.

    Example:
        >>> MultiQueryConcat("dot")(torch.randn(2, 3, 5), torch.randn(2, 7, 5)).shape
        torch.Size([2, 15])
    """

    def __init__(
        self, score: Score | Attention | str = "scaled-dot", align: Alignment | str | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.attention = score if isinstance(score, Attention) else Attention(score, align, **options)

    def forward(
        self,
        query: Float[Tensor, "*b m dq"],
        key: Float[Tensor, "*_ n dk"],
        value: Float[Tensor, "*_ n dv"] | None = None,
        *,
        mask: Tensor | Mask | None = None,
    ) -> Float[Tensor, "*b c"]:
        """Ask all queries (..., M, d_q); the mask is that of `Attention`."""
        if query.dim() != key.dim():
            raise ValueError(refusal("query", f"{query.dim()} axes", f"as many as the key, {key.dim()}: (..., M, d_q)"))
        contexts: Tensor = self.attention(query, key, value, mask=mask)
        return contexts.flatten(-2)
