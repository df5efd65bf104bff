"""Scores that are similarities: cosine and negative squared distance."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.general.scores.base import BilinearForm, Score
from regard.ops.squares import squares, unit


@register(
    name="cosine",
    zh="余弦相似度评分",
    path="general/scoring",
    equation="e_ij = β q_i · k_j / (‖q_i‖ ‖k_j‖)",
    paper="Graves, Wayne & Danihelka, Neural Turing Machines, 2014",
    year=2014,
    time="N² d",
    memory="linear (fused)",
    choose="content lookup where the length of a vector must not count",
    avoid="sharp attention with a small β: scores are bounded by β",
)
class Cosine(Score):
    r"""Cosine similarity with a key strength (Graves et al. 2014, https://arxiv.org/abs/1410.5401).

    $$e_{ij} = \beta\, \frac{q_i \cdot k_j}{\max(\|q_i\|, \epsilon)\, \max(\|k_j\|, \epsilon)}, \qquad \beta > 0$$

    Args:
        beta: key strength.
        learnable: train it, through its logarithm so that it stays positive.

    Example:
        >>> Cosine()(torch.tensor([[2.0, 0.0]]), torch.tensor([[5.0, 0.0]])).item()
        1.0
    """

    epsilon = 1e-8

    def __init__(self, beta: float = 1.0, learnable: bool = False) -> None:
        super().__init__()
        if not beta > 0:
            raise ValueError(refusal("beta", beta, "a number > 0"))
        self.beta = float(beta)
        self.log_beta = nn.Parameter(torch.tensor([self.beta]).log()) if learnable else None

    def reduce(self, query: Tensor | None, key: Tensor) -> BilinearForm:
        assert query is not None
        query, key = unit(query, self.epsilon), unit(key, self.epsilon)
        if self.log_beta is None:
            return BilinearForm(query, key, scale=self.beta)
        return BilinearForm(query * self.log_beta.exp().to(query.dtype), key)

    def extra_repr(self) -> str:
        return f"beta={self.beta}, learnable={self.log_beta is not None}"


@register(
    name="negative-l2",
    zh="负平方距离评分",
    path="general/scoring",
    equation="e_ij = −‖q_i − k_j‖² / τ",
    paper="Brauwers & Frasincar, A General Survey on Attention Mechanisms in Deep Learning, TKDE 2023 (similarity score)",
    year=2023,
    time="N² d",
    memory="linear (fused)",
    choose="nearness in space is what makes a key relevant (a kernel smoother)",
    avoid="wide unnormalised features: distances concentrate",
)
class NegativeL2(Score):
    r"""Negative squared distance (a similarity score of Brauwers & Frasincar 2023, https://arxiv.org/abs/2203.14263).

    $$e_{ij} = -\frac{\|q_i - k_j\|^2}{\tau} = \frac{2\, q_i \cdot k_j - \|k_j\|^2 - \|q_i\|^2}{\tau}$$

    so it is a dot product with a term of each key; the term of each query matters to the scores, not to the weights.

    Args:
        tau: temperature of the distance.

    Example:
        >>> NegativeL2()(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 3.0]])).item()
        -4.0
    """

    def __init__(self, tau: float = 1.0) -> None:
        super().__init__()
        if not tau > 0:
            raise ValueError(refusal("tau", tau, "a number > 0"))
        self.tau = float(tau)

    def reduce(self, query: Tensor | None, key: Tensor) -> BilinearForm:
        assert query is not None
        return BilinearForm(
            query,
            key,
            scale=2.0 / self.tau,
            query_bias=squares(query, over=-self.tau),
            key_bias=squares(key, over=-self.tau),
        )

    def extra_repr(self) -> str:
        return f"tau={self.tau}"
