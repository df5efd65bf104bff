"""Positions that are a bias of the scores: distances alone (ALiBi), or seen by the query (Shaw, Transformer-XL)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._errors import refusal
from regard.catalog import register
from regard.general.masks import Directional
from regard.general.scores.base import matrix, vector, width, zeros
from regard.ops.parallel.ranks import first_place
from regard.transformer.positions.base import RelativePosition, StreamedBias, angles, gathered, rows_of, wide_dtype


@register(
    name="alibi-position",
    zh="线性偏置位置编码（ALiBi）",
    path="query/position",
    equation="e_ij − m_h |i − j|,  m_h = 2^{−8h/H}",
    paper="Press, Smith & Lewis, Train Short, Test Long: Attention with Linear Biases, ICLR 2022",
    year=2022,
    time="H N²",
    memory="linear (blockwise); H N² fused",
    choose="inputs will be longer than those of training; any score, nothing to learn",
    avoid="what matters may stand far away: distance always counts against it",
)
class AlibiPosition(RelativePosition):
    r"""A penalty that grows with the distance, each head at its own rate (Press et al. 2022, https://arxiv.org/abs/2108.12409).

    $$e_{ij}' = e_{ij} - m_h\, |i - j|, \qquad m_h = 2^{-8h/H}, \quad h = 1, \dots, H$$

    A bias, so it goes with either form of score.

    Args:
        heads: $H$.

    Example:
        >>> AlibiPosition(2).slopes(torch.float32).tolist()
        [0.0625, 0.00390625]
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = width("heads", heads)

    def slopes(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """The rates of all heads."""
        return torch.exp2(-8 / self.heads * torch.arange(1, self.heads + 1, dtype=dtype, device=device))

    def bias(self, query: Tensor, key: Tensor) -> StreamedBias:
        slopes = self.slopes(wide_dtype(query.dtype), query.device)[:, None, None]
        return StreamedBias(lambda i, j: -slopes * (i - j).abs(), lead=(self.heads,))

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


@register(
    name="relative-position",
    zh="相对位置编码",
    path="query/position",
    equation="e_ij + q_i · r_{clip(j − i)} / √d",
    paper="Shaw, Uszkoreit & Vaswani, Self-Attention with Relative Position Representations, NAACL 2018",
    year=2018,
    time="N² + N k d",
    memory="linear (blockwise)",
    choose="what a query wants nearby is to be learned, place by place: short, exact relations",
    avoid="distances beyond the reach must be told apart (Transformer-XL, rotary), or speed counts (rotary)",
)
class ShawPosition(RelativePosition):
    r"""A learned vector for each distance, met by the query (Shaw et al. 2018, https://arxiv.org/abs/1803.02155).

    $$e_{ij}' = e_{ij} + \frac{q_i \cdot r_{\mathrm{clip}(j - i, -k, k)}}{\sqrt{d}}, \qquad r \in \mathbb{R}^{(2k+1) \times d}$$

    For the scaled dot product this is $q_i \cdot (k_j + r_{j-i}) / \sqrt{d}$, the paper's. Heads share the vectors. A second
    table, added to the values, is left out: the paper finds that this one may suffice.

    Args:
        head_dim: $d$, width of a head.
        reach: $k$; farther keys count as that far.

    Example:
        >>> import regard as rg
        >>> rg.TransformerAttention(6, 2, position=ShawPosition(3, reach=4))(torch.randn(2, 5, 6)).shape
        torch.Size([2, 5, 6])
    """

    def __init__(self, head_dim: int, reach: int = 16) -> None:
        super().__init__()
        self.reach = width("reach", reach)
        self.r = vector(2 * reach + 1, width("head_dim", head_dim))

    def bias(self, query: Tensor, key: Tensor) -> StreamedBias:
        _check_width(query, self.r.shape[-1])
        first, reach = first_place(query.shape[-2]) + key.shape[-2] - query.shape[-2], self.reach
        products = query @ self.r.to(query.dtype).mT / math.sqrt(query.shape[-1])

        def tile(i: Tensor, j: Tensor, products: Tensor) -> Tensor:
            return gathered(rows_of(products, i, first), (j - i).clamp(-reach, reach) + reach)

        return StreamedBias(tile, tuple(products.shape[:-2]), products.requires_grad, (products,))

    def extra_repr(self) -> str:
        return f"head_dim={self.r.shape[-1]}, reach={self.reach}"


@register(
    name="transformer-xl-position",
    zh="Transformer-XL 相对位置编码",
    path="query/position",
    equation="((q_i + u) · k_j + (q_i + v) · W_R R_{i−j}) / √d,  R sinusoidal",
    paper="Dai et al., Transformer-XL: Attentive Language Models beyond a Fixed-Length Context, ACL 2019",
    year=2019,
    time="N² d",
    memory="linear (blockwise)",
    choose="relative positions of any distance, as where keys are remembered from earlier segments",
    avoid="speed counts (rotary), or a short reach is enough (relative)",
)
class TransformerXLPosition(RelativePosition):
    r"""Sinusoids of the distance, met by the query and by two learned ones (Dai et al. 2019, https://arxiv.org/abs/1901.02860).

    $$e_{ij}' = \frac{(q_i + u) \cdot k_j + (q_i + v) \cdot r_{i-j}}{\sqrt{d}}, \qquad r_{\delta} = W_R R_{\delta}, \qquad
      R_\delta = [\sin(\delta\, \omega);\, \cos(\delta\, \omega)]$$

    $u$ and $v$ are what every query of a head wants of contents and of places; the second term is a bias of either form of score,
    the first is the score of $q + u$.

    Args:
        heads: $H$.
        head_dim: $d$, width of a head.
        dim: width of the sinusoids, an even number; $H d$ when not given.
        clamp: distances beyond it count as that far; no limit when None.

    Example:
        >>> import regard as rg
        >>> position = TransformerXLPosition(heads=2, head_dim=3)
        >>> rg.TransformerAttention(6, 2, position=position)(torch.randn(2, 5, 6)).shape
        torch.Size([2, 5, 6])
    """

    def __init__(self, heads: int, head_dim: int, dim: int | None = None, clamp: int | None = None) -> None:
        super().__init__()
        heads, head_dim = width("heads", heads), width("head_dim", head_dim)
        self.dim = width("dim", heads * head_dim if dim is None else dim)
        if self.dim % 2:
            raise ValueError(refusal("dim", self.dim, "an even number: half sines, half cosines"))
        self.clamp = None if clamp is None else width("clamp", clamp)
        self.u, self.v = zeros(heads, head_dim), zeros(heads, head_dim)
        self.W_R = matrix(heads, head_dim, self.dim)

    def query(self, query: Tensor) -> Tensor:
        return query + self.u.to(query.dtype)[:, None, :]

    def bias(self, query: Tensor, key: Tensor) -> StreamedBias:
        _check_width(query, self.v.shape[-1])
        first, d = first_place(query.shape[-2]) + key.shape[-2] - query.shape[-2], query.shape[-1]
        asking = (query + self.v.to(query.dtype)[:, None, :]) / math.sqrt(d)

        def tile(i: Tensor, j: Tensor, asking: Tensor, W_R: Tensor) -> Tensor:
            if 0 in (i.shape[0], j.shape[1]):
                return asking.new_zeros(*asking.shape[:-2], i.shape[0], j.shape[1])
            # Every distance of the tile once; a row then takes those of its own keys.
            nearest = i[:1, 0] - j[0, -1:]
            count = i.shape[0] + j.shape[1] - 1
            distances = self.of(nearest + torch.arange(count, device=i.device), asking.dtype, W_R)
            return gathered(rows_of(asking, i, first) @ distances.mT, i - j - nearest)

        learns = asking.requires_grad or self.W_R.requires_grad
        return StreamedBias(tile, tuple(asking.shape[:-2]), learns, (asking, self.W_R))

    def of(self, distance: Tensor, dtype: torch.dtype, W_R: Tensor | None = None) -> Tensor:
        """The vectors of these distances for every head, (H, n, d)."""
        W_R = self.W_R if W_R is None else W_R
        distance = distance if self.clamp is None else distance.clamp(-self.clamp, self.clamp)
        angle = angles(distance, self.dim, 10000.0, wide_dtype(dtype))
        R = torch.cat([angle.sin(), angle.cos()], -1).to(dtype)
        return R @ W_R.to(dtype).mT

    def extra_repr(self) -> str:
        return f"heads={self.u.shape[0]}, head_dim={self.u.shape[1]}, dim={self.dim}, clamp={self.clamp}"


@register(
    name="directional-position",
    zh="方向掩码位置信息",
    path="query/position",
    equation="e_ij = −∞ unless j < i  (forward; j > i backward)",
    paper="Shen et al., DiSAN: Directional Self-Attention Network for RNN/CNN-Free Language Understanding, AAAI 2018",
    year=2018,
    time="that of the score",
    memory="linear",
    choose="order should matter and nothing be added: who stands before whom is all that is told",
    avoid="distances matter, or a token must see both sides in one layer",
)
class DirectionalPosition(RelativePosition):
    r"""Only earlier keys, or only later ones (Shen et al. 2018, https://arxiv.org/abs/1709.04696).

    $$e_{ij}' = \begin{cases} e_{ij} & j < i \\ -\infty & \text{otherwise} \end{cases}$$

    for the direction `"forward"`, and $j > i$ for `"backward"`. The first token, or the last, has nothing to attend to and reads zero.

    Args:
        direction: `"forward"` or `"backward"`.

    Example:
        >>> DirectionalPosition("backward").pairs
        Directional('backward')
    """

    def __init__(self, direction: str = "forward") -> None:
        super().__init__()
        self._pairs = Directional(direction)

    @property
    def pairs(self) -> Directional:
        return self._pairs

    def extra_repr(self) -> str:
        return repr(self._pairs.direction)


def _check_width(query: Tensor, expected: int) -> None:
    if query.shape[-1] != expected:
        raise ValueError(refusal("position", f"queries {query.shape[-1]} wide", f"head_dim={expected}"))
