"""Attention-over-attention: how much each question word counts decides how its attention on the document is weighted."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.feature.affinity import Sides
from regard.feature.parts import ScoreLike, attentions, masked_inputs, pair_of_widths
from regard.general.alignments.base import softmax
from regard.ops import hooks
from regard.ops.blockwise import over_rows
from regard.ops.call import Call
from regard.ops.dispatch import choose, rows_of_panel
from regard.ops.fill import where
from regard.ops.heap import return_freed_memory
from regard.query.parts import in_range, uncast


@register(
    name="attention-over-attention",
    zh="注意力之上的注意力（注意力堆叠）",
    path="query/type",
    equation="α = softmax_i(M),  β = softmax_j(M),  s_i = Σ_j α_ij (1/N_d) Σ_t β_tj",
    paper="Cui et al., Attention-over-Attention Neural Networks for Reading Comprehension, ACL 2017",
    year=2017,
    time="2 N_d N_q d",
    memory="linear",
    choose="the answer is a word of the document, and not every word of the question matters",
    avoid="the answer is no word of the document, or there is one query vector (then it is plain attention)",
)
class AttentionOverAttention(nn.Module):
    r"""An attention over the attentions of question words (Cui et al. 2017, https://arxiv.org/abs/1607.04423).

    $$M_{ij} = \mathrm{score}(d_i, q_j), \qquad \alpha_{ij} = \mathrm{softmax}_i(M_{ij}), \quad \beta_{ij} = \mathrm{softmax}_j(M_{ij}),
      \quad \bar\beta_j = \frac{1}{N_d} \sum_i \beta_{ij}, \qquad s_i = \sum_j \alpha_{ij} \bar\beta_j$$

    Each question word $j$ has a distribution $\alpha_{\cdot j}$ over the document; the document has, word by word, a distribution over
    the question, whose mean $\bar\beta$ says how much each of the former counts. It is a second attention over the first one's
    distributions, not a query of several layers. $s$ sums to one by itself; there is no third softmax. `sum_attention` adds it up by
    token: $P(w) = \sum_{i: d_i = w} s_i$.

    $M$ is streamed: every panel is computed twice, once for $\bar\beta$ and the sums of the columns, once for $s$, and again in the
    backward; nothing of size $N_d N_q$ is kept. Under a trace, `attention` has $M$ as its scores and $\beta$ as its weights. Padding
    is in no softmax and not in the mean.

    Args:
        dim: width of document and question, or of each.
        score: documents are its queries: a name, a class, a function of the two widths, or a ready-made score.
        **options: arguments of a score given by name; `impl`.

    Example:
        >>> attend = AttentionOverAttention(5)
        >>> s = attend(torch.randn(2, 11, 5), torch.randn(2, 3, 5))
        >>> s.shape, torch.allclose(s.sum(-1), torch.ones(2))
        (torch.Size([2, 11]), True)
    """

    def __init__(self, dim: int | tuple[int, int], *, score: ScoreLike = "dot", **options: Any) -> None:
        super().__init__()
        if "dropout" in options:
            raise TypeError(refusal("dropout", options["dropout"], "nothing: both softmaxes are part of the mechanism"))
        self.widths = pair_of_widths(dim)
        self.attention = attentions({"attention": self.widths}, score, None, options)["attention"]
        if self.attention.score.features is not None:
            raise ValueError(refusal("score", "a multi-dimensional score", "one number for each pair"))

    def forward(
        self,
        document: Float[Tensor, "*b nd dd"],
        question: Float[Tensor, "*b nq dq"],
        masks: tuple[Bool[Tensor, "*_ nd"] | None, Bool[Tensor, "*_ nq"] | None] | None = None,
    ) -> Float[Tensor, "*b nd"]:
        """How much each document word is the answer, (..., N_d); `masks` are True for real words."""
        given = {"document": document, "question": question}
        (document, question), (real, asked) = masked_inputs(given, masks, self.widths)
        sides = None if real is None and asked is None else Sides(real, asked)
        call = hooks.changed(self.attention, self.attention.call(document, question, mask=sides))
        count = document.shape[-2] if real is None else real.sum(-1, keepdim=True).clamp(min=1)
        with uncast(call.device):
            s = _read(call, self.attention.impl, count)
        hooks.seen(self.attention, call)
        return s.to(call.value.dtype)

    def probabilities(
        self,
        document: Float[Tensor, "*b nd dd"],
        question: Float[Tensor, "*b nq dq"],
        tokens: Int[Tensor, "*b nd"],
        vocabulary: int,
        masks: tuple[Bool[Tensor, "*_ nd"] | None, Bool[Tensor, "*_ nq"] | None] | None = None,
    ) -> Float[Tensor, "*b v"]:
        """The probability of every token to be the answer, (..., V): zero for those that the document does not hold."""
        return sum_attention(self(document, question, masks), tokens, vocabulary)


def sum_attention(
    weights: Float[Tensor, "*b n"], tokens: Int[Tensor, "*b n"], vocabulary: int
) -> Float[Tensor, "*b v"]:
    r"""Add up weights by token: $P(w) = \sum_{i: t_i = w} s_i$ (Kadlec et al. 2016, https://arxiv.org/abs/1603.01547).

    Example:
        >>> sum_attention(torch.tensor([0.5, 0.25, 0.25]), torch.tensor([2, 0, 2]), 4)
        tensor([0.2500, 0.0000, 0.7500, 0.0000])
    """
    if tokens.dtype.is_floating_point or tokens.shape != weights.shape:
        got = f"a tensor of {tokens.dtype}, shape {tuple(tokens.shape)}"
        raise ValueError(refusal("tokens", got, f"integers, one for each weight: {tuple(weights.shape)}"))
    in_range("tokens", tokens, 0, vocabulary, "tokens of a vocabulary of {high}")
    return weights.new_zeros(*weights.shape[:-1], vocabulary).scatter_add(-1, tokens, weights)


def _read(call: Call, impl: str, count: int | Tensor) -> Tensor:
    """The weights s (..., N_d)."""
    found = choose(call, impl)
    if found.path == "fused" and found.reason == "asked for":
        raise NotImplementedError(
            "impl='fused' is not available here: a matrix is normalised along both sides. "
            "Fix: use impl='auto', 'blockwise' or 'dense'."
        )
    tiled, rows = found.path != "dense", rows_of_panel(call) if found.path != "dense" else max(call.nq, 1)
    shape = (*call.lead, call.nq)
    if 0 in (call.nq, call.n):
        return call.scores().sum(-1).expand(shape)
    if rows >= call.nq:
        scores, allowed = _scores(call, range(call.nq), tiled)
        beta = call.align.weights(scores, allowed, call.tile())
        alpha = softmax(scores.mT, None if allowed is None else allowed.mT).mT
        return (alpha @ (beta.sum(-2) / count).unsqueeze(-1)).squeeze(-1).expand(shape)

    def tidy() -> None:
        if call.device.type == "cpu" and not torch.compiler.is_compiling():
            return_freed_memory()

    def sums(i: range) -> tuple[Tensor, Tensor]:
        """What a panel adds to the mean of β, and the log-sum-exp of its part of every column."""
        tidy()
        scores, allowed = _scores(call, i, tiled)
        beta = call.align.weights(scores, allowed, call.tile(i)).sum(-2)
        return beta, _log_sum_exp(scores, allowed)

    parts = over_rows(call, sums, rows)
    mean = torch.stack([beta for beta, _ in parts]).sum(0) / count
    total = torch.stack([part for _, part in parts], -2)
    # A column in which nothing is allowed has no sum; what is read by it is masked.
    some = (total > -math.inf).any(-2, keepdim=True)
    total = where(some, where(some, total, 0.0).logsumexp(-2, keepdim=True), 0.0)

    def read(i: range) -> Tensor:
        tidy()
        scores, allowed = _scores(call, i, tiled)
        scores = scores - total
        alpha = scores.exp() if allowed is None else where(allowed, where(allowed, scores, 0.0).exp(), 0.0)
        return (alpha @ mean.unsqueeze(-1)).squeeze(-1).expand(*call.lead, len(i))

    return torch.cat(over_rows(call, read, rows), -1)


def _scores(call: Call, i: range, tiled: bool) -> tuple[Tensor, Tensor | None]:
    scores = call.scores(i, tiled=tiled)
    allowed = call.tile(i).mask()
    return scores.expand(*call.lead, len(i), call.n), None if allowed is None else allowed.expand(
        *call.lead, len(i), call.n
    )


def _log_sum_exp(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Over the rows of a panel, (..., N); minus infinity, with zero gradients, where nothing is allowed."""
    if allowed is None:
        return scores.logsumexp(-2)
    some = allowed.any(-2, keepdim=True)
    inside = where(some, where(allowed, scores, -math.inf), 0.0)
    return where(some.squeeze(-2), inside.logsumexp(-2), -math.inf)
