"""Scores with a hidden layer: additive, query-free, and DiSAN's two."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.catalog import register
from regard.general.scores.base import AdditiveForm, Heads, Score, affine, head_axes, matrix, vector, width, zeros
from regard.ops.activations import activation as resolve


@register(
    name="additive",
    zh="加性评分",
    path="general/scoring",
    equation="e_ij = w · act(W1 q_i + W2 k_j + b)",
    paper="Bahdanau, Cho & Bengio, Neural Machine Translation by Jointly Learning to Align and Translate, ICLR 2015",
    year=2015,
    time="N² d_w activations + N d_w (d_q + d_k)",
    memory="linear (blockwise); N² d_w dense",
    choose="query and key differ in width and meaning, or the match is not a product; small hidden widths",
    avoid="where a bilinear score does as well: each pair costs d_w activations",
)
class Additive(Score):
    r"""Additive score, also called concat (Bahdanau et al. 2015, https://arxiv.org/abs/1409.0473).

    $$e_{ij} = w \cdot \mathrm{act}(W_1 q_i + W_2 k_j + b) \qquad
      e_{ijf} = \big(W_d^\top\, \mathrm{act}(W_1 q_i + W_2 k_j + b)\big)_f$$

    With $W_1 \in \mathbb{R}^{d_w \times d_q}$, $W_2 \in \mathbb{R}^{d_w \times d_k}$, $b, w \in \mathbb{R}^{d_w}$; `features` makes it
    multi-dimensional with $W_d \in \mathbb{R}^{d_w \times d_v}$ (Shen et al. 2018, https://arxiv.org/abs/1709.04696). The paper has no $b$;
    it is zero at the start. The concatenated form $w \cdot \tanh(W [q; k])$ is the same with $W = [W_1 | W_2]$.

    Args:
        query_dim: width of queries.
        key_dim: width of keys.
        hidden_dim: $d_w$.
        activation: a name or a callable. `"leaky_relu"` has the slope 0.2 of graph attention below zero; `"leaky_relu:0.01"` is torch's.
        features: width of the value, for a multi-dimensional score.
        heads: leading axes of the parameters, aligned with the last leading axes of the inputs.

    Example:
        >>> Additive(query_dim=3, key_dim=5, hidden_dim=4)(torch.randn(2, 7, 3), torch.randn(2, 11, 5)).shape
        torch.Size([2, 7, 11])
        >>> Additive(3, 5, 4, features=6)(torch.randn(2, 7, 3), torch.randn(2, 11, 5)).shape
        torch.Size([2, 7, 11, 6])
    """

    is_activated = True

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        hidden_dim: int,
        activation: str | Callable[[Tensor], Tensor] = "tanh",
        features: int | None = None,
        heads: Heads = (),
    ) -> None:
        super().__init__()
        self.query_dim, self.key_dim = width("query_dim", query_dim), width("key_dim", key_dim)
        self.hidden_dim = width("hidden_dim", hidden_dim)
        self.features = features if features is None else width("features", features)
        lead = self.head_shape = head_axes(heads)
        self.W1 = matrix(*lead, hidden_dim, query_dim)
        self.W2 = matrix(*lead, hidden_dim, key_dim)
        self.b = zeros(*lead, hidden_dim)
        if features is None:
            self.w = vector(*lead, hidden_dim)
        else:
            self.W_d = matrix(*lead, hidden_dim, features)
        self.activation = resolve(activation)
        # A module among the callables keeps its own parameters: it must be found by .parameters().
        self.activation_module = activation if isinstance(activation, nn.Module) else None

    def reduce(self, query: Tensor | None, key: Tensor) -> AdditiveForm:
        assert query is not None
        multi = self.features is not None
        return AdditiveForm(
            a=affine(query, self.W1, self.b),
            u=key @ self.W2.mT,
            weight=self.W_d if multi else self.w,
            activation=self.activation,
            multi=multi,
        )

    def extra_repr(self) -> str:
        return (
            f"query_dim={self.query_dim}, key_dim={self.key_dim}, hidden_dim={self.hidden_dim}, "
            f"activation={self.activation.spec!r}, features={self.features}"
        )


@register(
    name="query-free",
    zh="无查询评分（自注意评分）",
    path="general/scoring",
    equation="e_j = w · act(W k_j + b)",
    paper="Lin et al., A Structured Self-Attentive Sentence Embedding, ICLR 2017",
    year=2017,
    time="N d_w d_k",
    memory="linear",
    choose="pooling: what is worth reading does not depend on who asks (saliency)",
    avoid="different queries should read different things",
)
class QueryFree(Score):
    r"""Score of a key by itself (Lin et al. 2017, https://arxiv.org/abs/1703.03130; Yang et al. 2016).

    $$e_j = w \cdot \mathrm{act}(W k_j + b) \qquad e_{jf} = \big(W_d^\top\, \mathrm{act}(W k_j + b)\big)_f$$

    Used without a query; a query given nevertheless only says how many times to answer.

    Args:
        key_dim: width of keys.
        hidden_dim: width of the hidden layer.
        activation: a name or a callable.
        features: width of the value, for a multi-dimensional score.
        heads: leading axes of the parameters, aligned with the last leading axes of the inputs.

    Example:
        >>> QueryFree(key_dim=5, hidden_dim=4)(None, torch.randn(2, 11, 5)).shape
        torch.Size([2, 1, 11])
    """

    needs_query = False
    is_activated = True

    def __init__(
        self,
        key_dim: int,
        hidden_dim: int,
        activation: str | Callable[[Tensor], Tensor] = "tanh",
        features: int | None = None,
        heads: Heads = (),
    ) -> None:
        super().__init__()
        self.key_dim, self.hidden_dim = width("key_dim", key_dim), width("hidden_dim", hidden_dim)
        self.features = features if features is None else width("features", features)
        lead = self.head_shape = head_axes(heads)
        self.W, self.b = matrix(*lead, hidden_dim, key_dim), zeros(*lead, hidden_dim)
        if features is None:
            self.w = vector(*lead, hidden_dim)
        else:
            self.W_d = matrix(*lead, hidden_dim, features)
        self.activation = resolve(activation)
        # A module among the callables keeps its own parameters: it must be found by .parameters().
        self.activation_module = activation if isinstance(activation, nn.Module) else None

    def reduce(self, query: Tensor | None, key: Tensor) -> AdditiveForm:
        multi = self.features is not None
        u = key @ self.W.mT
        # The bias plays the query.
        a = self.b.unsqueeze(-2).to(u.dtype)
        if query is not None:
            lead = torch.broadcast_shapes(query.shape[:-2], a.shape[:-2])
            a = a.expand(*lead, query.shape[-2], a.shape[-1])
        return AdditiveForm(a, u, self.W_d if multi else self.w, self.activation, multi)

    def extra_repr(self) -> str:
        return (
            f"key_dim={self.key_dim}, hidden_dim={self.hidden_dim}, activation={self.activation.spec!r}, "
            f"features={self.features}"
        )


@register(
    name="token-to-token",
    zh="词对词多维评分（DiSAN）",
    path="general/scoring",
    equation="e_ijf = c tanh((W1 q_i + W2 k_j + b)_f / c)",
    paper="Shen et al., DiSAN: Directional Self-Attention Network for RNN/CNN-Free Language Understanding, AAAI 2018",
    year=2018,
    time="N² d_v activations",
    memory="linear (blockwise); N² d_v dense",
    choose="multi-dimensional self-attention without the cost of an output matrix",
    avoid="the value is not as wide as the scores",
)
class TokenToToken(Score):
    r"""DiSAN's multi-dimensional score of token pairs (Shen et al. 2018, https://arxiv.org/abs/1709.04696).

    $$e_{ijf} = c \tanh\big((W_1 q_i + W_2 k_j + b)_f / c\big)$$

    The hidden units are the features: there is no output matrix, so the value must be `features` wide. Usually under a
    `Directional` mask, which excludes the token itself.

    Args:
        dim: width of queries and keys.
        features: width of the value; `dim` when not given.
        c: bound of the scores.

    Example:
        >>> TokenToToken(6)(torch.randn(2, 5, 6), torch.randn(2, 5, 6)).shape
        torch.Size([2, 5, 5, 6])
    """

    def __init__(self, dim: int, features: int | None = None, c: float = 5.0) -> None:
        super().__init__()
        self.query_dim = self.key_dim = width("dim", dim)
        self.features = width("features", dim if features is None else features)
        self.W1, self.W2 = matrix(self.features, dim), matrix(self.features, dim)
        self.b = zeros(self.features)
        self.activation = resolve(f"tanh:{float(c)}")

    def reduce(self, query: Tensor | None, key: Tensor) -> AdditiveForm:
        assert query is not None
        return AdditiveForm(affine(query, self.W1, self.b), key @ self.W2.mT, None, self.activation, multi=True)


@register(
    name="source-to-token",
    zh="源对词多维评分（DiSAN）",
    path="general/scoring",
    equation="e_jf = (W_dᵀ elu(W k_j + b))_f",
    paper="Shen et al., DiSAN: Directional Self-Attention Network for RNN/CNN-Free Language Understanding, AAAI 2018",
    year=2018,
    time="N d_w (d_k + d_v)",
    memory="linear",
    choose="pooling a sequence into one vector, feature by feature",
    avoid="different queries should read different things",
)
class SourceToToken(QueryFree):
    r"""DiSAN's multi-dimensional score of a token by itself (Shen et al. 2018, https://arxiv.org/abs/1709.04696).

    $$e_{jf} = \big(W_d^\top\, \mathrm{elu}(W k_j + b)\big)_f$$

    The paper's output bias is a constant of each feature and cancels in every alignment here.

    Args:
        dim: width of keys.
        hidden_dim: width of the hidden layer; `dim` when not given.
        features: width of the value; `dim` when not given.

    Example:
        >>> SourceToToken(6)(None, torch.randn(2, 5, 6)).shape
        torch.Size([2, 1, 5, 6])
    """

    def __init__(self, dim: int, hidden_dim: int | None = None, features: int | None = None) -> None:
        super().__init__(
            width("dim", dim),
            dim if hidden_dim is None else hidden_dim,
            activation="elu",
            features=dim if features is None else features,
        )
