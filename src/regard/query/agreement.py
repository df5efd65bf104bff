"""Heads that agree: multi-head attention whose heads are joined by routing instead of a linear map."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.parts import Aligns, Scores
from regard.general.scores.base import width
from regard.query.multi_head import MultiHeadAttention
from regard.query.parts import widths
from regard.query.routing import DynamicRouting


@register(
    name="routing-by-agreement",
    zh="多头协议路由聚合",
    path="query/emerging",
    equation="C = [v_1; …; v_J],  v = route(û),  û_{j|h} = C_h W_hj",
    paper="Li, Yang, Dou, Wang, Lyu & Tu, Information Aggregation for Multi-Head Attention with Routing-by-Agreement, NAACL 2019",
    year=2019,
    time="that of multi-head attention, and N R H d_v d",
    memory="that of multi-head attention, and N H d",
    choose="heads should be weighed against each other by what they say, anew at every position",
    avoid="a linear map of the heads is enough, as mostly: it is cheaper, and does not iterate",
)
class AgreementAttention(MultiHeadAttention):
    r"""Join heads by dynamic routing (Li et al. 2019, https://arxiv.org/abs/1904.03100).

    $$\hat u_{j|h} = C_h W_{hj}, \qquad c_{hj} = \mathrm{softmax}_j(b_{hj}), \quad
      v_j = \mathrm{squash}\Big(\sum_h c_{hj}\, \hat u_{j|h}\Big), \quad b_{hj} \leftarrow b_{hj} + \hat u_{j|h} \cdot v_j$$

    at every position, with $C_h$ the context of head $h$; the result is $[v_1; \dots; v_J]$, in place of
    $[C_1; \dots; C_H]\, W_O^\top$. Heads that agree on an output are heard, others are not. Under a trace the heads are at `attention`, and
    how each distributes itself over the outputs at `agreement.routing`, (..., Nq, H, J), once an iteration.

    Args:
        dim: width of query, key and value, or of each of the three; the result is as wide as the query.
        heads: $H$.
        capsules: $J$, a divisor of the width of the query; $H$ when not given.
        iterations: of the routing.
        head_dim: as in `MultiHeadAttention`.
        score: likewise.
        align: likewise.
        **options: likewise, and its `key_heads` and `bias`.

    Example:
        >>> import torch
        >>> attend = AgreementAttention(6, heads=3)
        >>> attend(torch.randn(2, 5, 6), torch.randn(2, 7, 6)).shape
        torch.Size([2, 5, 6])
    """

    def __init__(
        self,
        dim: int | tuple[int, int, int],
        heads: int,
        *,
        capsules: int | None = None,
        iterations: int = 3,
        head_dim: int | tuple[int, int] | None = None,
        score: Scores = "scaled-dot",
        align: Aligns = None,
        **options: Any,
    ) -> None:
        super().__init__(dim, heads, head_dim=head_dim, score=score, align=align, **options)
        query_dim = widths("dim", dim, 3)[0]
        capsules = width("capsules", heads if capsules is None else capsules)
        if query_dim % capsules:
            raise ValueError(refusal("capsules", capsules, f"a divisor of the width {query_dim}"))
        widths_of_route = self.W_V.shape[-2], query_dim // capsules
        self.agreement = DynamicRouting(widths_of_route, capsules, inputs=heads, iterations=iterations)
        # The linear map that joins heads otherwise has nothing to do.
        self.W_O = self.b_O = None  # type: ignore[assignment]

    def join(self, context: Tensor) -> Tensor:
        """Contexts of all heads (..., H, Nq, d_v), routed at each position: (..., Nq, d_q)."""
        routed: Tensor = self.agreement(context.transpose(-3, -2))
        return routed.flatten(-2)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, **options: Any) -> AgreementAttention:
        """Refused: torch joins heads by a linear map."""
        fix = "Fix: MultiHeadAttention.from_torch(module)."
        raise TypeError(refusal("module", type(module).__name__, "nothing: torch has no heads that are routed", fix))
