"""Local alignment: soft attention in a window around a position that is given by the step or predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard._errors import refusal
from regard.catalog import register
from regard.general.alignments.base import Alignment, readable, softmax
from regard.general.bound import Bound, between
from regard.general.scores.base import matrix, vector, width
from regard.ops.call import Call, Tile
from regard.ops.fill import where
from regard.ops.folds import BestFold, FallbackFold, Fold, SoftFold
from regard.ops.forms import wide
from regard.ops.rule import Rule

_LUONG = "Luong, Pham & Manning, Effective Approaches to Attention-based Neural Machine Translation, EMNLP 2015"


@register(
    name="local-monotonic",
    zh="局部对齐（单调）",
    path="general/alignment",
    equation="a_j = softmax_{|j−p|≤D}(e)_j [· exp(−(j−p)²/2σ²)],  p_t = t",
    paper=_LUONG,
    year=2015,
    time="N D",
    memory="linear",
    choose="source and target run at the same pace: speech frames, tagging, copying",
    avoid="reordering, or lengths that differ a lot",
    preset={"position": "monotonic"},
)
@register(
    name="local-predictive",
    zh="局部对齐（预测）",
    path="general/alignment",
    equation="a_j = softmax_{|j−p|≤D}(e)_j [· exp(−(j−p)²/2σ²)],  p = S σ(w_p · tanh(W_p q))",
    paper=_LUONG,
    year=2015,
    time="N D + N d_p d_q",
    memory="linear",
    choose="long sequences where what matters lies together, at a place that the query tells",
    avoid="the relevant keys are scattered, or there is no query",
    preset={"position": "predictive"},
    example="""
    >>> x = torch.randn(2, 6, 4)
    >>> Attention("dot", "local-predictive", window=2, query_dim=4)(x, x).shape
    torch.Size([2, 6, 4])
    """,
)
class Local(Alignment):
    r"""Attend a window (Luong et al. 2015, https://arxiv.org/abs/1508.04025).

    $$a_{ij} = \frac{\exp e_{ij}}{\sum_{l \in \Omega_i} \exp e_{il}} \cdot \exp\!\Big(\!-\frac{(j - p_i)^2}{2\sigma^2}\Big)
      \quad (j \in \Omega_i), \qquad a_{ij} = 0 \text{ elsewhere}$$

    $$\Omega_i = \{\, j \text{ allowed} : \lceil p_i - D \rceil \le j \le \lfloor p_i + D \rfloor \,\}, \qquad \sigma = D/2$$

    `monotonic` takes $p_i = i$ (local-m); `predictive` takes $p_i = S_i\, \mathrm{sigmoid}(w_p \cdot \tanh(W_p q_i))$ with the
    length $S_i$ of what the query may see, up to the last key that it may attend (local-p): the true length of a padded sequence; under a
    causal mask that of the prefix, so that decoding step by step predicts the same. It learns $W_p \in \mathbb{R}^{d_p \times d_q}$ and
    $w_p \in \mathbb{R}^{d_p}$ through the Gaussian alone. Positions count from 0. Where the window holds nothing, it is the one allowed
    key nearest to $p$. As in the paper, weights are not renormalised after the Gaussian (they sum to at most one); `renormalize`
    does, which is the same as adding $-(j-p)^2/2\sigma^2$ to the scores. The paper's local-m has no Gaussian.

    Args:
        window: $D \ge 0$, the half-width.
        position: `"monotonic"` or `"predictive"`.
        gaussian: favour keys near $p$; there is none for a window of 0.
        renormalize: let the weights sum to one.
        query_dim: width of queries, for predictive positions.
        position_dim: $d_p$; `query_dim` when not given.

    Example:
        >>> from regard import Attention, Dot
        >>> x = torch.randn(2, 6, 4)
        >>> Attention(Dot(), Local(2))(x, x).shape
        torch.Size([2, 6, 4])
    """

    is_rowwise = True
    numbers = ("window",)
    splits = True
    of_queries = ("position",)

    def __init__(
        self,
        window: float,
        position: str = "monotonic",
        gaussian: bool = True,
        renormalize: bool = False,
        query_dim: int | None = None,
        position_dim: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(window, bool) or not isinstance(window, int | float) or not 0 <= window < math.inf:
            raise ValueError(refusal("window", repr(window), "a finite number >= 0"))
        if position not in ("monotonic", "predictive"):
            raise ValueError(refusal("position", repr(position), "'monotonic' or 'predictive'"))
        # No window is longer than an index can be.
        self.window, self.position = min(window, 1 << 53), position
        self.gaussian, self.renormalize = gaussian and window > 0, renormalize
        if position == "predictive":
            if query_dim is None:
                fix = "Fix: pass query_dim=…, the width of the queries."
                raise ValueError(
                    refusal("query_dim", None, "a width, since the position is predicted from the query", fix)
                )
            query_dim = width("query_dim", query_dim)
            position_dim = query_dim if position_dim is None else width("position_dim", position_dim)
            self.W_p, self.w_p = matrix(position_dim, query_dim), vector(position_dim)

    def prepare(self, call: Call) -> Mapping[str, Any]:
        # Whether positions count from the first of all queries, not from that of each sequence.
        by_place = not isinstance(call.mask, Bound) or call.mask.origins(call.device) is None
        return {"position": self.positions(call), "by_place": by_place}

    def positions(self, call: Call) -> Tensor:
        """The real positions p, (..., Nq)."""
        origins = call.mask.origins(call.device) if isinstance(call.mask, Bound) else None
        if self.position == "monotonic":
            dtype = torch.promote_types(call.value.dtype, torch.float32)
            place = torch.arange(call.start, call.start + call.nq, device=call.device, dtype=dtype)
            return place if origins is None else place - origins[0] + origins[1]
        if call.query is None:
            fix = "Fix: give a query, or use position='monotonic'."
            raise ValueError(refusal("query", None, "a query, since the position is predicted from it", fix))
        if call.query.shape[-1] != self.W_p.shape[-1]:
            got = f"width {call.query.shape[-1]}"
            raise ValueError(refusal("query", got, f"query_dim={self.W_p.shape[-1]} of the local alignment"))
        place = torch.sigmoid(wide(torch.tanh(call.query @ self.W_p.mT) @ self.w_p))
        length = self.length(call)
        if origins is None:
            return place * length.to(place.dtype)
        first = torch.minimum(origins[1], length)
        return first + place * (length - first).to(place.dtype)

    def span(self, call: Call, i: range) -> range | None:
        """The keys that windows of some queries hold, where none can be empty and they are known without looking; None elsewhere."""
        n, by_place = call.all_keys, self.position == "monotonic" and call.prepared.get("by_place", False)
        if not by_place or call.bias is not None or not i or not n:
            return None
        causal = getattr(call.mask, "is_plain_causal", False) or getattr(call.mask, "is_causal_part", False)
        # A query that may read its own position has a window with something in it.
        if call.mask is not None and not (causal and call.start == call.first_query):
            return None
        first, last = (max(0, min(call.start + k, n - 1)) for k in (i[0], i[-1]))
        return between(first - self.window, last + self.window + 1, n)

    @staticmethod
    def length(call: Call) -> Tensor:
        """Length S_i of what each query may see, (..., Nq) or the same for all: one more than the last key that it may attend."""
        if call.mask is None:
            return torch.full((1,), float(call.all_keys), device=call.device)
        assert isinstance(call.mask, Bound)
        return call.mask.ends(call.device).float()

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        if scores.shape[-1] == 0:
            return scores
        window = self.window_of(mask, tile, scores)
        scores = self._lost(scores, tile)
        if not self.gaussian:
            return softmax(scores, window)
        bump = self.log_gaussian(tile).to(scores.dtype)
        if self.renormalize:
            return softmax(scores + bump, window)
        return softmax(scores, window) * bump.exp()

    def window_of(self, mask: Tensor | None, tile: Tile, scores: Tensor) -> Tensor:
        """The set of each row, falling back to the nearest allowed key where it would be empty."""
        p = tile.per_row(tile.call.prepared["position"]).detach()
        j = tile.positions()[1]
        inside = self.inside(p, j)
        allowed = readable(scores, mask)
        window = inside & allowed
        # Of a position that is no number any key will do: it is read as NaN.
        distance = where(allowed, (j - p).abs().nan_to_num(nan=0.0, posinf=math.inf), math.inf)
        # The first of equals: the lower position.
        nearest = (distance == distance.amin(-1, keepdim=True)).to(torch.uint8).argmax(-1, keepdim=True)
        fallback = (torch.arange(scores.shape[-1], device=scores.device) == nearest) & allowed
        return torch.where(window.any(-1, keepdim=True), window, fallback)

    def _lost(self, scores: Tensor, tile: Tile) -> Tensor:
        """NaN for a query whose predicted position is none."""
        if self.position == "monotonic":
            return scores
        return where(~tile.per_row(tile.call.prepared["position"]).isnan(), scores, math.nan)

    def inside(self, p: Tensor, j: Tensor) -> Tensor:
        """Whether position j lies in the window of p, the mask aside."""
        return (j >= torch.ceil(p - self.window)) & (j <= torch.floor(p + self.window))

    def log_gaussian(self, tile: Tile) -> Tensor:
        """The exponent of the Gaussian, through which alone p learns."""
        p = tile.per_row(tile.call.prepared["position"])
        sigma = self.window / 2
        return -0.5 * ((tile.positions()[1] - p) / sigma) ** 2

    def rule(self, call: Call) -> Rule:
        kind = "" if not self.gaussian else "added" if self.renormalize else "scaled"
        ordered = self.position == "monotonic"
        return Rule(position=call.prepared["position"], window=self.window, ordered=ordered, gaussian=kind)

    def fold(self, tile: Tile) -> Fold:
        def position(part: Tile) -> Tensor:
            return part.per_row(part.call.prepared["position"]).detach()

        def in_window(scores: Tensor, part: Tile) -> Tensor:
            lost = position(part).isnan() & readable(scores, None)
            if self.gaussian and self.renormalize:
                scores = scores + self.log_gaussian(part).to(scores.dtype)
            near = where(self.inside(position(part), part.positions()[1]), scores, -math.inf)
            return where(~lost, near, math.nan)

        def nearness(scores: Tensor, part: Tile) -> Tensor:
            near = -(part.positions()[1] - position(part)).abs().to(scores.dtype)
            return where(readable(scores, None), near, -math.inf)

        def bump(part: Tile) -> Tensor:
            return self.log_gaussian(part).exp()

        scaled = self.gaussian and not self.renormalize
        window = SoftFold(change=in_window, gain=bump if scaled else None)
        # The nearest key is read with a softmax weight of one, then scaled like any other.
        return FallbackFold(window, BestFold(nearness, bump if scaled else None))

    def extra_repr(self) -> str:
        return f"window={self.window}, position={self.position!r}, gaussian={self.gaussian}, renormalize={self.renormalize}"
