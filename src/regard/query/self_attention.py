"""Self-attention: every token asks, and every token answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.catalog import register
from regard.feature.parts import AlignLike, ScoreLike, attentions, masked_input
from regard.general.bound import Sizes
from regard.general.masks import Mask
from regard.general.scores.base import matrix, width
from regard.ops.fill import kept_rows, where
from regard.query.parts import Filled, Others, of_tokens, one_of, operand

_UPDATES = ("replace", "residual")


@register(
    name="self-attention",
    zh="自注意力",
    path="query/type",
    equation="q_i = W_Q f_i,  k_j = W_K f_j,  v_j = W_V f_j,  f'_i = Σ_j align(score(q_i, k_j)) v_j",
    paper="Vaswani et al., Attention Is All You Need, NeurIPS 2017",
    year=2017,
    time="N² d + N d²",
    memory="linear (fused, blockwise)",
    choose="tokens must be understood together, at any distance, in one parallel step",
    avoid="very long inputs whose dependencies are local (convolution, a window), or order matters and no position is given",
)
@register(
    name="feature-update",
    zh="特征更新（归一化残差）",
    path="query/type",
    preset={"update": "residual"},
    equation="f'_i = Norm(f_i + c_i)  or  f'_i = c_i",
    paper="Vaswani et al., Attention Is All You Need, NeurIPS 2017",
    year=2017,
    time="that of self-attention",
    memory="linear",
    choose="layers are stacked: the sum keeps the token, and its gradient, through many of them",
    avoid="a single layer whose result should be what was read and nothing else (replace)",
    example="""
    >>> import torch
    >>> stack = nn.Sequential(SelfAttention(6, update="residual"), SelfAttention(6, update="residual"))
    >>> stack(torch.randn(2, 5, 6)).shape
    torch.Size([2, 5, 6])
    """,
)
class SelfAttention(nn.Module):
    r"""Tokens read each other (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; Cheng et al. 2016, https://arxiv.org/abs/1601.06733).

    $$q_i = W_Q f_i, \quad k_j = W_K f_j, \quad v_j = W_V f_j, \qquad c_i = \sum_j \mathrm{align}\big(\mathrm{score}(q_i, k_j)\big) v_j,
      \qquad f_i' = c_i \;\;\text{or}\;\; f_i' = \mathrm{LayerNorm}(f_i + c_i)$$

    The matrices are learned and fixed; only the weights depend on the input, so that any length will do. The softmax is over the
    keys $j$, for each query $i$. Without a mask of pairs the order of the tokens does not matter: permuted tokens give permuted
    results. Padding is neither read nor written.

    Args:
        dim: $d_f$, width of the tokens.
        key_dim: $d_k$, rows of $W_Q$ and $W_K$; `dim` when not given.
        value_dim: $d_v$, rows of $W_V$ and width of the result; `dim` when not given.
        score: a name, a class, a function of the widths of query and key, or a ready-made score or attention.
        align: likewise; softmax when not given.
        update: `"replace"` for $c_i$, or `"residual"` for the normalised sum, in which a map $W_O$ brings $c_i$ to the width of the
            tokens where it has another.
        pairs: which tokens a token may look at, such as `Causal()`, `Directional("forward")`, `Window(3)` or `Others()`.
        project: False for tokens that are their own queries, keys and values.
        **options: arguments of a score and alignment given by name; `features=True` for one weight for each feature;
            `dropout`, `impl`.

    Example:
        >>> import torch
        >>> SelfAttention(6)(torch.randn(2, 5, 6)).shape
        torch.Size([2, 5, 6])
        >>> SelfAttention(6, score="additive", update="residual", pairs=Others())(torch.randn(2, 5, 6)).shape
        torch.Size([2, 5, 6])
    """

    def __init__(
        self,
        dim: int,
        key_dim: int | None = None,
        value_dim: int | None = None,
        *,
        score: ScoreLike = "scaled-dot",
        align: AlignLike = None,
        update: str = "replace",
        pairs: Mask | None = None,
        project: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        dim = width("dim", dim)
        key_dim = width("key_dim", dim if key_dim is None or not project else key_dim)
        value_dim = width("value_dim", dim if value_dim is None or not project else value_dim)
        self.update, self.pairs = one_of("update", update, _UPDATES), pairs
        of_tokens(None, pairs)  # refuses what is no mask
        self.W_Q = matrix(key_dim, dim) if project else None
        self.W_K = matrix(key_dim, dim) if project else None
        self.W_V = matrix(value_dim, dim) if project else None
        if options.get("features") is True:
            options["features"] = value_dim
        self.attention = attentions({"attention": (key_dim, key_dim)}, score, align, options)["attention"]
        residual = self.update == "residual"
        self.W_O = matrix(dim, value_dim) if residual and value_dim != dim else None
        self.norm = nn.LayerNorm(dim) if residual else None

    def forward(
        self,
        tokens: Float[Tensor, "*b n d"],
        mask: Bool[Tensor, "*_ n"] | None = None,
        *,
        pairs: Mask | Tensor | None = None,
        bias: Tensor | Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Float[Tensor, "*b n dv"]:
        """Update the tokens.

        Args:
            tokens: (..., N, d_f).
            mask: True for real tokens, (..., N).
            pairs: which token may look at which, beside what the constructor said: a mask object, or booleans that broadcast
                to (..., N, N).
            bias: added to the scores, as in `Attention`.
        """
        tokens, mask = masked_input(tokens, mask, "tokens")
        if self.W_Q is not None:
            operand("tokens", tokens, self.W_Q)
        allowed = of_tokens(mask, self.pairs)
        if pairs is not None:
            allowed = of_tokens(None, pairs) if allowed is None else allowed & pairs
        asking = answering = tokens
        seen = None
        if allowed is not None:
            n = tokens.shape[-2]
            bound = allowed.bind(Sizes(tuple(tokens.shape[:-2]), n, n))
            if self.pairs is not None or pairs is not None:
                asking, answering = (
                    kept_rows(tokens, bound.rows(tokens.device)),
                    kept_rows(tokens, bound.keys(tokens.device)),
                )
            seen = Filled(bound)
        query, key, value = _mapped(asking, self.W_Q), _mapped(answering, self.W_K), _mapped(answering, self.W_V)
        read: Tensor = self.attention(query, key, value, mask=seen, bias=bias)
        if self.norm is not None:
            read = self.norm(tokens + _mapped(read, self.W_O))
        return read if mask is None else where(mask.unsqueeze(-1), read, 0.0)

    def extra_repr(self) -> str:
        return f"update={self.update!r}, pairs={self.pairs!r}"


def _mapped(x: Tensor, W: Tensor | None) -> Tensor:
    return x if W is None else x @ W.mT


__all__ = ["Others", "SelfAttention"]
