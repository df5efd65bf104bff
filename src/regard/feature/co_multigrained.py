"""Multi-grained co-attention: a coarse and a fine one side by side."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.co_alternating import AlternatingCoAttention
from regard.feature.co_interactive import InteractiveCoAttention
from regard.feature.co_parallel import ParallelCoAttention
from regard.general.attention import Attention


@register(
    name="multi-grained-co-attention",
    zh="多粒度协同注意力",
    path="feature/multiplicity",
    equation="out = [coarse(F₁, F₂); fine(F₁, F₂)]",
    paper="Fan, Feng & Zhao, Multi-grained Attention Network for Aspect-Level Sentiment Classification, EMNLP 2018",
    year=2018,
    time="that of both",
    memory="linear",
    choose="both the gist of an input and single matches between features matter",
    avoid="one of the two does as well by itself: this costs both",
)
class MultiGrainedCoAttention(nn.Module):
    r"""A coarse and a fine co-attention on the same inputs (Fan et al. 2018, https://aclanthology.org/D18-1380).

    $$o = [\mathrm{coarse}(F^{1}, F^{2});\; \mathrm{fine}(F^{1}, F^{2})]$$

    Four contexts: two by summaries of the other input, two by affinities of single features.

    Args:
        dim: width of the inputs, or of each.
        coarse: an alternating or interactive co-attention; interactive when not given.
        fine: a parallel co-attention; by maxima of the affinity when not given.

    Example:
        >>> attend = MultiGrainedCoAttention((6, 4))
        >>> attend(torch.randn(2, 5, 6), torch.randn(2, 3, 4)).shape
        torch.Size([2, 20])
    """

    def __init__(
        self, dim: int | tuple[int, int], *, coarse: nn.Module | None = None, fine: nn.Module | None = None
    ) -> None:
        super().__init__()
        for name, part in (("coarse", coarse), ("fine", fine)):
            if part is not None and (not isinstance(part, nn.Module) or isinstance(part, Attention)):
                raise TypeError(refusal(name, type(part).__name__, "a co-attention: a module of two inputs and masks"))
        if isinstance(coarse, ParallelCoAttention):
            expected = "an alternating or interactive co-attention"
            raise TypeError(refusal("coarse", "ParallelCoAttention", expected, "Fix: it compares features: fine=…"))
        if isinstance(fine, AlternatingCoAttention | InteractiveCoAttention):
            fix = "Fix: it reads by summaries: coarse=…"
            raise TypeError(refusal("fine", type(fine).__name__, "a parallel co-attention", fix))
        self.coarse = InteractiveCoAttention(dim) if coarse is None else coarse
        self.fine = ParallelCoAttention(dim, scoring="max") if fine is None else fine

    def forward(
        self,
        first: Float[Tensor, "*b n1 d1"],
        second: Float[Tensor, "*b n2 d2"],
        masks: tuple[Bool[Tensor, "*_ n1"] | None, Bool[Tensor, "*_ n2"] | None] | None = None,
    ) -> Float[Tensor, "*b d"]:
        """Read both inputs; `masks` are True for real tokens."""
        return torch.cat([self.coarse(first, second, masks), self.fine(first, second, masks)], -1)
