"""Scores that are one dot product a pair: dot, scaled, general, low-rank, biased and activated general."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

from regard.catalog import register
from regard.general.scores.base import BilinearForm, Heads, Score, affine, head_axes, matrix, width, zeros
from regard.ops.activations import Activation
from regard.ops.activations import activation as resolve


@register(
    name="dot",
    zh="点积评分",
    path="general/scoring",
    equation="e_ij = q_i · k_j",
    paper="Luong, Pham & Manning, Effective Approaches to Attention-based Neural Machine Translation, EMNLP 2015",
    year=2015,
    time="N² d",
    memory="linear (fused)",
    choose="queries and keys live in one space and are already trained to be compared; the cheapest score",
    avoid="wide keys without normalisation (scores grow with the width), or different widths",
)
class Dot(Score):
    r"""Multiplicative score (Luong et al. 2015, https://arxiv.org/abs/1508.04025).

    $$e_{ij} = q_i \cdot k_j$$

    Needs queries as wide as keys; has no parameters.

    Example:
        >>> import torch
        >>> Dot()(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])).item()
        11.0
    """

    def scale(self, d: int) -> float:
        """What the dot product of d-wide vectors is multiplied by."""
        return 1.0

    def reduce(self, query: Tensor | None, key: Tensor) -> BilinearForm:
        assert query is not None
        return BilinearForm(query, key, scale=self.scale(key.shape[-1]))


@register(
    name="scaled-dot",
    zh="缩放点积评分",
    path="general/scoring",
    equation="e_ij = q_i · k_j / √d_k",
    paper="Vaswani et al., Attention Is All You Need, NeurIPS 2017",
    year=2017,
    time="N² d",
    memory="linear (fused)",
    choose="the default where speed counts: keeps the variance of scores at one whatever the width",
    avoid="different widths of query and key",
)
class ScaledDot(Dot):
    r"""Scaled multiplicative score (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

    $$e_{ij} = \frac{q_i \cdot k_j}{\sqrt{d_k}}$$

    $d_k$ is the width of the keys that are compared, the head's and not the model's.

    Example:
        >>> import torch
        >>> ScaledDot()(torch.ones(1, 4), torch.ones(1, 4)).item()
        2.0
    """

    def scale(self, d: int) -> float:
        return 1.0 / math.sqrt(d) if d else 1.0


@register(
    name="general",
    zh="通用评分（双线性）",
    path="general/scoring",
    equation="e_ij = k_jᵀ W q_i",
    paper="Luong, Pham & Manning, Effective Approaches to Attention-based Neural Machine Translation, EMNLP 2015",
    year=2015,
    time="N² d_k + N d_k d_q",
    memory="linear (fused)",
    choose="query and key differ in width or in meaning, and speed counts",
    avoid="very wide inputs with little data: W has d_k d_q parameters (see low-rank-general)",
)
class General(Score):
    r"""Bilinear score (Luong et al. 2015, https://arxiv.org/abs/1508.04025).

    $$e_{ij} = k_j^\top W q_i, \qquad W \in \mathbb{R}^{d_k \times d_q}$$

    With `features`, one $W_f$ for each feature of the value: $e_{ijf} = k_j^\top W_f q_i$.

    Args:
        query_dim: width of queries.
        key_dim: width of keys.
        features: width of the value, for a multi-dimensional score.
        heads: leading axes of the parameters, aligned with the last leading axes of the inputs.

    Example:
        >>> import torch
        >>> General(query_dim=3, key_dim=5)(torch.randn(2, 7, 3), torch.randn(2, 11, 5)).shape
        torch.Size([2, 7, 11])
    """

    def __init__(self, query_dim: int, key_dim: int, features: int | None = None, heads: Heads = ()) -> None:
        super().__init__()
        self.query_dim, self.key_dim = width("query_dim", query_dim), width("key_dim", key_dim)
        self.features = features if features is None else width("features", features)
        self.head_shape = head_axes(heads)
        self.axes = (*self.head_shape, *(() if features is None else (features,)))
        self.W = matrix(*self.axes, key_dim, query_dim)

    def reduce(self, query: Tensor | None, key: Tensor) -> BilinearForm:
        return self.form(query, key)

    def form(
        self, query: Tensor | None, key: Tensor, activation: Activation | None = None, offset: Tensor | None = None
    ) -> BilinearForm:
        """The bilinear form of the projected query, under an activation if there is one."""
        assert query is not None
        multi = self.features is not None
        if multi:
            query, key = query.unsqueeze(-3), key.unsqueeze(-3)
        return BilinearForm(self.project(query), key, activation=activation, offset=offset, multi=multi)

    def project(self, query: Tensor) -> Tensor:
        """The query as seen by the keys, W q."""
        return query @ self.W.mT

    def extra_repr(self) -> str:
        return f"query_dim={self.query_dim}, key_dim={self.key_dim}, features={self.features}"


@register(
    name="low-rank-general",
    zh="低秩双线性评分",
    path="general/scoring",
    equation="e_ij = (U k_j) · (V q_i)",
    paper="Qiu, Neural Networks and Deep Learning (神经网络与深度学习), chapter 8",
    year=2020,
    time="N² r + N r (d_k + d_q)",
    memory="linear (fused)",
    choose="a bilinear score of wide inputs with few parameters; the same as one projected Transformer head",
    avoid="a rank so small that it cannot tell the keys apart",
)
class LowRankGeneral(Score):
    r"""Factorised bilinear score (Qiu, Neural Networks and Deep Learning, chapter 8, https://nndl.github.io).

    $$e_{ij} = k_j^\top U^\top V q_i = (U k_j) \cdot (V q_i), \qquad U \in \mathbb{R}^{r \times d_k},\; V \in \mathbb{R}^{r \times d_q}$$

    Args:
        query_dim: width of queries.
        key_dim: width of keys.
        rank: r, the width in which they are compared.
        features: width of the value, for a multi-dimensional score.
        heads: leading axes of the parameters, aligned with the last leading axes of the inputs.

    Example:
        >>> import torch
        >>> LowRankGeneral(query_dim=3, key_dim=5, rank=2)(torch.randn(7, 3), torch.randn(11, 5)).shape
        torch.Size([7, 11])
    """

    def __init__(self, query_dim: int, key_dim: int, rank: int, features: int | None = None, heads: Heads = ()) -> None:
        super().__init__()
        self.query_dim, self.key_dim = width("query_dim", query_dim), width("key_dim", key_dim)
        self.features = features if features is None else width("features", features)
        self.rank = width("rank", rank)
        self.head_shape = head_axes(heads)
        axes = (*self.head_shape, *(() if features is None else (features,)))
        self.U, self.V = matrix(*axes, rank, key_dim), matrix(*axes, rank, query_dim)

    def reduce(self, query: Tensor | None, key: Tensor) -> BilinearForm:
        assert query is not None
        if self.features is not None:
            query, key = query.unsqueeze(-3), key.unsqueeze(-3)
        return BilinearForm(query @ self.V.mT, key @ self.U.mT, multi=self.features is not None)

    def extra_repr(self) -> str:
        return f"query_dim={self.query_dim}, key_dim={self.key_dim}, rank={self.rank}, features={self.features}"


@register(
    name="biased-general",
    zh="带偏置通用评分",
    path="general/scoring",
    equation="e_ij = k_jᵀ (W q_i + b)",
    paper="Sordoni, Bachman, Trischler & Bengio, Iterative Alternating Neural Attention for Machine Reading, 2016",
    year=2016,
    time="N² d_k + N d_k d_q",
    memory="linear (fused)",
    choose="some keys matter whatever the query: b · k_j is a learned saliency",
    avoid="where only the match with the query should count",
)
class BiasedGeneral(General):
    r"""Bilinear score with a bias (Sordoni et al. 2016, https://arxiv.org/abs/1606.02245).

    $$e_{ij} = k_j^\top (W q_i + b) = \underbrace{k_j^\top W q_i}_{\text{focus}} + \underbrace{k_j \cdot b}_{\text{saliency}},
      \qquad b \in \mathbb{R}^{d_k}$$

    Args:
        query_dim: width of queries.
        key_dim: width of keys.
        features: width of the value, for a multi-dimensional score.
        heads: leading axes of the parameters, aligned with the last leading axes of the inputs.

    Example:
        >>> import torch
        >>> BiasedGeneral(query_dim=3, key_dim=5)(torch.randn(7, 3), torch.randn(11, 5)).shape
        torch.Size([7, 11])
    """

    def __init__(self, query_dim: int, key_dim: int, features: int | None = None, heads: Heads = ()) -> None:
        super().__init__(query_dim, key_dim, features, heads)
        self.b = zeros(*self.axes, key_dim)

    def project(self, query: Tensor) -> Tensor:
        return affine(query, self.W, self.b)


@register(
    name="activated-general",
    zh="激活通用评分",
    path="general/scoring",
    equation="e_ij = act(k_jᵀ W q_i + b)",
    paper="Ma, Li, Zhang & Wang, Interactive Attention Networks for Aspect-Level Sentiment Classification, IJCAI 2017",
    year=2017,
    time="N² d_k + N d_k d_q",
    memory="linear (blockwise; fused on CUDA)",
    choose="short inputs where no single key should win outright: tanh bounds the scores",
    avoid="long inputs: with tanh no weight exceeds e²/(e² + N − 1), so attention cannot become sharp",
)
class ActivatedGeneral(General):
    r"""Bilinear score under an activation (Ma et al. 2017, https://arxiv.org/abs/1709.00893).

    $$e_{ij} = \mathrm{act}(k_j^\top W q_i + b), \qquad b \in \mathbb{R}$$

    With tanh the scores lie in $[-1, 1]$, so that of $N$ keys none weighs more than $e^2/(e^2 + N - 1)$ under softmax; a
    learnable temperature (`Soft(learnable=True)`) lifts that bound.

    Args:
        query_dim: width of queries.
        key_dim: width of keys.
        activation: a name or a callable. `"leaky_relu"` has the slope 0.2 of graph attention below zero; `"leaky_relu:0.01"` is torch's.
        features: width of the value, for a multi-dimensional score.
        heads: leading axes of the parameters, aligned with the last leading axes of the inputs.

    Example:
        >>> import torch
        >>> e = ActivatedGeneral(query_dim=3, key_dim=5)(torch.randn(7, 3), torch.randn(11, 5))
        >>> bool((e.abs() <= 1).all())
        True
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        activation: str | Callable[[Tensor], Tensor] = "tanh",
        features: int | None = None,
        heads: Heads = (),
    ) -> None:
        super().__init__(query_dim, key_dim, features, heads)
        self.b = zeros(*(self.axes or (1,)))
        self.activation = resolve(activation)
        self.is_activated = not self.activation.is_identity
        # A module among the callables keeps its own parameters: it must be found by .parameters().
        self.activation_module = activation if isinstance(activation, nn.Module) else None

    def reduce(self, query: Tensor | None, key: Tensor) -> BilinearForm:
        offset = self.b[..., None, None] if self.axes else self.b[0]
        return self.form(query, key, self.activation, offset)
