"""Reinforced alignment: a policy selects a subset of the keys, attention is soft on the subset."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard._errors import refusal
from regard.catalog import register
from regard.general.alignments.base import Alignment, readable, refuse_packed, softmax
from regard.general.scores.base import matrix, vector, width, zeros
from regard.ops.call import Call, Tile
from regard.ops.fill import where
from regard.ops.folds import FallbackFold, Fold, SoftFold
from regard.ops.forms import wide
from regard.ops.random import SELECT, uniform


class Selector(nn.Module):
    r"""The policy: log-odds of taking each token, $w \cdot \mathrm{elu}(W f_j + b) + c$, all in parallel."""

    def __init__(self, dim: int, hidden_dim: int | None = None, context: bool = False) -> None:
        super().__init__()
        self.dim = width("key_dim", dim)
        hidden_dim = dim if hidden_dim is None else width("hidden_dim", hidden_dim)
        self.context = context
        self.W, self.b = matrix(hidden_dim, 3 * dim if context else dim), zeros(hidden_dim)
        self.w, self.c = vector(hidden_dim), zeros(1)

    def forward(
        self, tokens: Float[Tensor, "*lead n d"], valid: Bool[Tensor, "*v n"] | None
    ) -> Float[Tensor, "*lead n"]:
        """Log-odds (..., N); tokens that are not valid must be zero."""
        if tokens.shape[-1] != self.dim:
            got = f"width {tokens.shape[-1]}"
            raise ValueError(refusal("key", got, f"key_dim={self.dim} of the reinforced alignment"))
        if self.context:
            count = tokens.new_tensor(tokens.shape[-2]) if valid is None else valid.sum(-1)[..., None, None]
            mean = (tokens.sum(-2, keepdim=True) / count.clamp(min=1)).to(tokens.dtype).expand_as(tokens)
            tokens = torch.cat([tokens, mean, tokens * mean], -1)
        return wide(F.elu(tokens @ self.W.mT + self.b) @ self.w + self.c)


def log_probability(logits: Tensor, selected: Tensor, valid: Tensor | None) -> Tensor:
    """Of a selection, summed over the valid tokens."""
    each = torch.where(selected, F.logsigmoid(logits), F.logsigmoid(-logits))
    return (each if valid is None else where(valid, each, 0.0)).sum(-1)


def bernoulli_entropy(logits: Tensor, valid: Tensor | None) -> Tensor:
    """Of the selection, summed over the valid tokens."""
    each = F.softplus(-logits) + (1 - logits.sigmoid()) * logits
    return (each if valid is None else where(valid, each, 0.0)).sum(-1)


@register(
    name="reinforced",
    zh="强化对齐",
    path="general/alignment",
    equation="z_j ~ Bernoulli(π(k_j)),  a = softmax(e + log z)",
    paper="Shen et al., Reinforced Self-Attention Network: a Hybrid of Hard and Soft Attention, IJCAI 2018",
    year=2018,
    time="N² + N d_h d_k",
    memory="linear",
    choose="a varying, small number of keys matters, and what is skipped should cost nothing downstream",
    avoid="little data or no clear reward: the policy learns by REINFORCE",
)
class Reinforced(Alignment):
    r"""Soft attention on a sampled subset (Shen et al. 2018, https://arxiv.org/abs/1801.10296).

    $$\pi_j = \mathrm{sigmoid}(w \cdot \mathrm{elu}(W f_j + b) + c), \qquad z_j \sim \mathrm{Bernoulli}(\pi_j), \qquad
      a_i = \mathrm{softmax}(e_i + \log z)$$

    with $f_j = k_j$, or $[k_j; \bar k; k_j \odot \bar k]$ when `context` is set. Every token is decided in parallel. The choice
    has no gradient: `regard.reinforce(trace, reward)` gives the policy its loss, with
    $\log p(z) = \sum_j z_j \log \pi_j + (1 - z_j) \log(1 - \pi_j)$ over the keys that may be attended. Where the subset holds
    nothing that a row may attend, the row is the mean of what it may. In evaluation $z_j = [\pi_j > 1/2]$, or a sample.

    Set `selecting = False` to start training with everything selected, as the authors do.

    Args:
        key_dim: width of keys.
        hidden_dim: width of the policy's hidden layer; `key_dim` when not given.
        context: let the policy see the mean of the keys.
        evaluation: `"threshold"`, or `"sample"`.

    Example:
        >>> from regard import Attention, Dot
        >>> x = torch.randn(2, 6, 4)
        >>> Attention(Dot(), Reinforced(key_dim=4))(x, x).shape
        torch.Size([2, 6, 4])
    """

    is_random = True
    is_rowwise = True
    of_keys = ("selected",)

    def __init__(
        self, key_dim: int, hidden_dim: int | None = None, context: bool = False, evaluation: str = "threshold"
    ) -> None:
        super().__init__()
        if evaluation not in ("threshold", "sample"):
            raise ValueError(refusal("evaluation", repr(evaluation), "'threshold' or 'sample'"))
        self.policy = Selector(key_dim, hidden_dim, context)
        self.evaluation, self.selecting = evaluation, True

    def needs_seed(self, training: bool) -> bool:
        return self.selecting and (training or self.evaluation == "sample")

    @property
    def learns_by_reward(self) -> bool:
        return True

    @property
    def splits(self) -> bool:
        # The mean of the keys is one of all.
        return not self.policy.context

    def prepare(self, call: Call) -> Mapping[str, Any]:
        if self.policy.context:
            refuse_packed(call, "the policy sees the mean of the keys")
        valid = None if call.mask is None else call.mask.keys(call.device)
        logits = self.policy(call.key, valid)
        selected = self.select(logits, call, 0)
        return {
            "selected": selected,
            "valid": valid,
            "log_prob": log_probability(logits, selected, valid),
            "entropy": bernoulli_entropy(logits, valid),
        }

    def select(self, logits: Tensor, call: Call, stream: int) -> Tensor:
        """Which tokens are taken, (..., N); each stream draws its own numbers."""
        if not self.selecting:
            return torch.ones_like(logits, dtype=torch.bool)
        if not self.needs_seed(call.training):
            return logits > 0
        assert call.seed is not None
        lead, n = tuple(logits.shape[:-1]), logits.shape[-1]
        places = range(call.first_key, call.first_key + n)
        drawn = uniform(call.seed, lead, None, range(stream, stream + 1), places, SELECT).squeeze(-2)
        return drawn < logits.sigmoid()

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        everything = readable(scores, mask)
        subset = everything & tile.per_key(tile.call.prepared["selected"])
        empty = ~subset.any(-1, keepdim=True)
        return softmax(where(~empty, scores, 0.0), torch.where(empty, everything, subset))

    def log_prob(self, call: Call) -> Tensor:
        log_prob: Tensor = call.prepared["log_prob"]
        return log_prob

    def policy_entropy(self, call: Call) -> Tensor:
        entropy: Tensor = call.prepared["entropy"]
        return entropy

    def fold(self, tile: Tile) -> Fold:
        def in_subset(scores: Tensor, part: Tile) -> Tensor:
            return where(part.per_key(part.call.prepared["selected"]), scores, -math.inf)

        def equal(scores: Tensor, part: Tile) -> Tensor:
            return torch.where(readable(scores, None), 0.0, -math.inf).to(scores.dtype)

        return FallbackFold(SoftFold(change=in_subset), SoftFold(change=equal))

    def extra_repr(self) -> str:
        return f"evaluation={self.evaluation!r}"


class ReinforcedPairs(Reinforced):
    r"""Two independent selections, of the tokens that attend (heads) and of those that are attended (dependents).

    $$M_{ij} = [z^h_i = z^d_j = 1]$$

    A query that is not selected reads the mean of all tokens that somebody may attend. Used by `ReinforcedSelfAttention` (Shen et al. 2018,
    https://arxiv.org/abs/1801.10296).

    Args:
        key_dim: width of the tokens, which are both queries and keys.
        hidden_dim: width of the policies' hidden layers; `key_dim` when not given.
        context: let the policies see the mean of the tokens.
        evaluation: `"threshold"`, or `"sample"`.

    Example:
        >>> from regard import Attention, Dot
        >>> x = torch.randn(2, 6, 4)
        >>> Attention(Dot(), ReinforcedPairs(key_dim=4))(x, x).shape
        torch.Size([2, 6, 4])
    """

    def __init__(
        self, key_dim: int, hidden_dim: int | None = None, context: bool = False, evaluation: str = "threshold"
    ) -> None:
        super().__init__(key_dim, hidden_dim, context, evaluation)
        self.head_policy = Selector(key_dim, hidden_dim, context)

    is_rowwise = False  # a query that is not selected reads the mean of all
    splits = False

    def prepare(self, call: Call) -> Mapping[str, Any]:
        if call.query is None:
            raise ValueError(refusal("query", None, "a query, since the queries are selected too"))
        refuse_packed(call, "a query that is not selected reads the mean of all")
        dependents = super().prepare(call)
        alive = None if call.mask is None else call.mask.rows(call.device)
        logits = self.head_policy(call.query, alive)
        attends = self.select(logits, call, 1)
        return {
            **dependents,
            # A row with nothing to attend to reads nothing, selected or not: its choice has no probability to learn by.
            "attends": attends if alive is None else attends | ~alive,
            "log_prob": dependents["log_prob"] + log_probability(logits, attends, alive),
            "entropy": dependents["entropy"] + bernoulli_entropy(logits, alive),
        }

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        attends = tile.per_row(tile.call.prepared["attends"])
        valid = tile.call.prepared["valid"]
        mean = softmax(torch.zeros_like(scores), None if valid is None else tile.per_key(valid))
        return torch.where(attends, super().weights(scores, mask, tile), mean)

    def fold(self, tile: Tile) -> None:  # type: ignore[override]
        return None
