"""Energy-based query selection: of several questions, the one that the keys answer best."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.parts import AlignLike, attentions, masked_input
from regard.general.alignments import Soft
from regard.general.attention import Attention
from regard.general.bound import Sizes
from regard.general.masks import Keys, Mask
from regard.general.scores.base import width
from regard.ops.fill import kept_rows, where
from regard.ops.forms import wide
from regard.query.parts import Filled, uncast
from regard.query.scans import log_sum_exp


def hopfield_energy(
    query: Float[Tensor, "*b m d"],
    key: Float[Tensor, "*b n d"],
    beta: float = 1.0,
    mask: Bool[Tensor, "*_ n"] | None = None,
) -> Float[Tensor, "*b m"]:
    r"""The energy of queries among keys (Ramsauer et al. 2021, https://arxiv.org/abs/2008.02217).

    $$E(q) = -\frac{1}{\beta} \log \sum_j e^{\beta\, q \cdot k_j} + \frac{1}{2} \lVert q \rVert^2$$

    Low where a query lies at a key, or between keys that lie together. Its gradient is the query minus what attention reads there,
    $\nabla E(q) = q - \sum_j \mathrm{softmax}(\beta q \cdot k)_j\, k_j$.

    Args:
        query: (..., M, d).
        key: (..., N, d).
        beta: $\beta > 0$.
        mask: True for real keys, (..., N); infinite energy where there are none.

    Example:
        >>> hopfield_energy(torch.zeros(1, 2), torch.ones(1, 2))
        tensor([0.])
    """
    if not 0 < beta < math.inf:
        raise ValueError(refusal("beta", beta, "a finite number > 0"))
    key, mask = masked_input(key, mask, "key")
    with uncast(key.device):
        query, key = wide(query), wide(key)
        scores = beta * (query @ key.mT)
        scores = scores if mask is None else where(mask.unsqueeze(-2), scores, -math.inf)
        return query.square().sum(-1) / 2 - log_sum_exp(scores, -1) / beta


@register(
    name="energy-based-query-selection",
    zh="基于能量的查询选择",
    path="query/emerging",
    equation="c = Σ_m p_m attend(q_m),  p = softmax(−E(q)/T),  E(q) = −(1/β) log Σ_j exp(β q·k_j) + ½‖q‖²",
    paper="after Ramsauer et al., Hopfield Networks is All You Need, ICLR 2021",
    year=2021,
    time="M N d (S + 2)",
    memory="M N",
    choose="several questions are possible and the keys should decide which: hypotheses, noisy or competing queries",
    avoid="the right question is known, or every question should be answered (multi-head)",
)
class EnergySelection(nn.Module):
    r"""Let the keys choose among queries (after Ramsauer et al. 2021, https://arxiv.org/abs/2008.02217).

    $$E(q) = -\frac{1}{\beta} \log \sum_j e^{\beta\, q \cdot k_j} + \frac{1}{2} \lVert q \rVert^2, \qquad
      p = \mathrm{align}(-E(q_1), \dots, -E(q_M)), \qquad c = \sum_m p_m \sum_j \mathrm{softmax}(\beta\, q_m \cdot k)_j\, v_j$$

    with a softmax of temperature $T$ as the alignment, or another one: `Hard` reads with one query alone. Before that a query may walk
    downhill, $q \leftarrow q - \eta \nabla E(q) = (1 - \eta)\, q + \eta \sum_j \mathrm{softmax}(\beta q \cdot k)_j\, k_j$: with
    $\eta = 1$ a step is attention with the keys as values. The energy never rises.

    Under a trace, steps are calls of `refine`, what the queries read is at `attention`, (..., M, N), and the choice at `select`, (..., M),
    its scores the negative energies.

    Args:
        dim: width of queries and keys.
        beta: $\beta$; $1 / \sqrt{d}$ when not given.
        temperature: $T$, of the choice.
        steps: of refinement.
        rate: $\eta$.
        align: of the choice, in place of the softmax: a name, a class or a ready-made alignment.
        **options: arguments of an alignment given by name.

    Example:
        >>> choose = EnergySelection(5, beta=2.0, steps=1)
        >>> choose(torch.randn(2, 3, 5), torch.randn(2, 11, 5), torch.randn(2, 11, 7)).shape
        torch.Size([2, 7])
    """

    def __init__(
        self,
        dim: int,
        *,
        beta: float | None = None,
        temperature: float = 1.0,
        steps: int = 0,
        rate: float = 1.0,
        align: AlignLike = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.beta = 1 / math.sqrt(width("dim", dim)) if beta is None else float(beta)
        if not 0 < self.beta < math.inf:
            raise ValueError(refusal("beta", beta, "a finite number > 0"))
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(refusal("steps", repr(steps), "a whole number >= 0"))
        if not 0 < rate <= 1:
            raise ValueError(refusal("rate", rate, "a number above 0, up to 1"))
        if align is not None and temperature != 1.0:
            raise ValueError(refusal("temperature", temperature, "1 beside an alignment that is given"))
        self.dim, self.steps, self.rate = dim, steps, float(rate)
        self.refine = Attention("dot", Soft(1 / self.beta)) if steps else None
        self.attention = Attention("dot", Soft(1 / self.beta))
        choice = Soft(temperature) if align is None else align
        self.select = attentions({"select": (1, 1)}, "dot", choice, options)["select"]

    def forward(
        self,
        query: Float[Tensor, "*b m d"],
        key: Float[Tensor, "*b n d"],
        value: Float[Tensor, "*b n dv"] | None = None,
        mask: Bool[Tensor, "*_ n"] | None = None,
        *,
        query_mask: Bool[Tensor, "*_ m"] | None = None,
    ) -> Float[Tensor, "*b dv"]:
        """What the chosen query reads.

        Args:
            query: candidates (..., M, d).
            key: (..., N, d).
            value: (..., N, d_v); the key when not given.
            mask: True for real keys, (..., N).
            query_mask: True for real candidates, (..., M).
        """
        value = key if value is None else value
        key, mask = masked_input(key, mask, "key", self.dim)
        value, _ = masked_input(value, mask, "value")
        query, query_mask = masked_input(query, query_mask, "query", self.dim)
        if query.dim() != key.dim():
            got = f"shape {tuple(query.shape)} beside a key of shape {tuple(key.shape)}"
            raise ValueError(refusal("query", got, "as many axes as the key: candidates (..., M, d)"))
        tokens: Mask | None = None
        if mask is not None:
            # Nothing to choose by, where there are no keys.
            alive = mask.any(-1, keepdim=True).expand(query.shape[:-1])
            query_mask = alive if query_mask is None else query_mask & alive
            tokens = Filled(Keys(mask).bind(Sizes(tuple(query.shape[:-2]), query.shape[-2], key.shape[-2])))
        query = kept_rows(query, query_mask)
        for _ in range(self.steps):
            assert self.refine is not None
            query = query + self.rate * (self.refine(query, key, mask=tokens) - query)
        contexts = self.attention(query, key, value, mask=tokens)
        energy = hopfield_energy(query, key, self.beta, mask)
        # Without keys the energy is infinite: nothing is chosen there, and a bias must be a number.
        energy = energy if query_mask is None else where(query_mask, energy, 0.0)
        # The energies are the scores: queries and keys of the choice are empty.
        none = contexts.new_zeros(1), torch.zeros_like(contexts[..., :1])
        chosen: Tensor = self.select(*none, contexts, mask=query_mask, bias=-energy)
        return chosen

    def extra_repr(self) -> str:
        return f"dim={self.dim}, beta={self.beta:.4g}, steps={self.steps}, rate={self.rate}"
