"""Reinforced alignment: a policy selects a subset of the keys, attention is soft on the subset."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._errors import refusal
from regard.catalog import register
from regard.general.alignments.base import Alignment, softmax
from regard.general.scores.base import matrix, vector, width, zeros
from regard.ops.call import Call, Tile
from regard.ops.folds import FallbackFold, Fold, SoftFold
from regard.ops.forms import wide
from regard.ops.random import SELECT, uniform


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
    $\log p(z) = \sum_j z_j \log \pi_j + (1 - z_j) \log(1 - \pi_j)$ over the keys that may be attended. Where the subset holds nothing that a row may attend, the row is the mean of what it
    may. In evaluation $z_j = [\pi_j > 1/2]$, or a sample.

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

    def __init__(
        self, key_dim: int, hidden_dim: int | None = None, context: bool = False, evaluation: str = "threshold"
    ) -> None:
        super().__init__()
        key_dim = width("key_dim", key_dim)
        hidden_dim = key_dim if hidden_dim is None else width("hidden_dim", hidden_dim)
        if evaluation not in ("threshold", "sample"):
            raise ValueError(refusal("evaluation", repr(evaluation), "'threshold' or 'sample'"))
        self.context, self.evaluation, self.selecting = context, evaluation, True
        self.W, self.b = matrix(hidden_dim, 3 * key_dim if context else key_dim), zeros(hidden_dim)
        self.w, self.c = vector(hidden_dim), zeros(1)

    def needs_seed(self, training: bool) -> bool:
        return self.selecting and (training or self.evaluation == "sample")

    def prepare(self, call: Call) -> Mapping[str, Any]:
        valid = None if call.mask is None else call.mask.keys(call.device)
        logits = self.logits(call.key, valid)
        if not self.selecting:
            selected = torch.ones_like(logits, dtype=torch.bool)
        elif self.needs_seed(call.training):
            assert call.seed is not None
            lead = tuple(logits.shape[:-1])
            drawn = uniform(call.seed, lead, None, range(1), range(call.n), SELECT).squeeze(-2)
            selected = drawn < logits.sigmoid()
        else:
            selected = logits > 0
        log_prob = torch.where(selected, F.logsigmoid(logits), F.logsigmoid(-logits))
        if valid is not None:
            log_prob = torch.where(valid, log_prob, 0.0)
        return {"selected": selected, "log_prob": log_prob.sum(-1), "logits": logits, "valid": valid}

    def logits(self, key: Tensor, valid: Tensor | None) -> Tensor:
        """Log-odds of selecting each key, (..., N)."""
        if key.shape[-1] * (3 if self.context else 1) != self.W.shape[-1]:
            expected = self.W.shape[-1] // (3 if self.context else 1)
            raise ValueError(
                refusal("key", f"width {key.shape[-1]}", f"key_dim={expected} of the reinforced alignment")
            )
        if self.context:
            count = key.shape[-2] if valid is None else valid.sum(-1)[..., None, None]
            # Keys that nobody may attend are zero already, so the sum is over the valid ones.
            mean = key.sum(-2, keepdim=True) / torch.as_tensor(count, device=key.device).clamp(min=1)
            mean = mean.to(key.dtype).expand_as(key)
            key = torch.cat([key, mean, key * mean], -1)
        return wide(F.elu(key @ self.W.mT + self.b) @ self.w + self.c)

    def weights(self, scores: Tensor, mask: Tensor | None, tile: Tile) -> Tensor:
        selected = tile.per_key(tile.call.prepared["selected"])
        subset = selected if mask is None else mask & selected
        empty = ~subset.any(-1, keepdim=True)
        everything = torch.ones_like(subset) if mask is None else mask
        return softmax(torch.where(empty, 0.0, scores), torch.where(empty, everything, subset))

    def log_prob(self, call: Call) -> Tensor:
        log_prob: Tensor = call.prepared["log_prob"]
        return log_prob

    def policy_entropy(self, call: Call) -> Tensor:
        logits, valid = call.prepared["logits"], call.prepared["valid"]
        entropy = F.softplus(-logits) + (1 - logits.sigmoid()) * logits
        return (entropy if valid is None else torch.where(valid, entropy, 0.0)).sum(-1)

    def fold(self, tile: Tile) -> Fold:
        def in_subset(scores: Tensor, part: Tile) -> Tensor:
            return torch.where(part.per_key(part.call.prepared["selected"]), scores, -math.inf)

        def equal(scores: Tensor, part: Tile) -> Tensor:
            return torch.zeros_like(scores)

        return FallbackFold(SoftFold(change=in_subset), SoftFold(change=equal))

    def extra_repr(self) -> str:
        return f"context={self.context}, evaluation={self.evaluation!r}"
