"""Perplexity: from log-probabilities, weighted by tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from regard._errors import refusal
from regard.evaluate.outer.inputs import logits_of, whole_number, whole_numbers
from regard.evaluate.outer.result import Score, signed


@dataclass(frozen=True)
class PerplexityCounts:
    """What a perplexity is made of; counts of batches are added, and are then weighted by their tokens.

    Attributes:
        nats: minus the log-probability of all tokens together.
        tokens: how many.

    Example:
        >>> short, long = PerplexityCounts(nats=0.0, tokens=1), PerplexityCounts(nats=3 * math.log(4), tokens=3)
        >>> round((short + long).perplexity, 3)  # the mean of 1 and 4 is another number
        2.828
    """

    nats: float = 0.0
    tokens: int = 0

    @staticmethod
    def of(logits: Float[Tensor, "*b v"], truth: Int[Tensor, "*b"], *, ignore: int | None = -1) -> PerplexityCounts:
        """Of one batch.

        Args:
            logits: (..., V), logits or log-probabilities: softmax makes nothing of the difference.
            truth: (...), the tokens that came.
            ignore: what stands in `truth` where nothing is to be told, such as padding; None where every entry is a token.
        """
        logits, truth = logits_of("predicted", logits), whole_numbers("truth", truth)
        if ignore is not None:
            whole_number("ignore", ignore)
        if not logits.ndim or logits.shape[:-1] != truth.shape:
            raise ValueError(
                refusal("predicted", f"shape {tuple(logits.shape)}", f"logits of shape {(*truth.shape, 'V')}")
            )
        told = torch.ones_like(truth, dtype=torch.bool) if ignore is None else truth != ignore
        wrong = told & ((truth < 0) | (truth >= logits.shape[-1]))
        if bool(wrong.any()):
            fix = f"Fix: say with ignore={int(truth[wrong][0])} that it is padding, if it is."
            expected = f"tokens from 0 to {logits.shape[-1] - 1}, or ignore ({ignore})"
            raise ValueError(refusal("truth", int(truth[wrong][0]), expected, fix))
        rows = logits[told]
        rows = rows if rows.element_size() >= 4 else rows.float()
        lost = F.cross_entropy(rows, truth[told], reduction="none").double().sum()
        if bool(lost.isnan()):
            raise ValueError(refusal("predicted", "NaN, or nothing but infinities, for a token", "logits"))
        return PerplexityCounts(float(lost), int(told.sum()))

    def __add__(self, other: Any) -> PerplexityCounts:
        if not isinstance(other, PerplexityCounts):
            return NotImplemented
        return PerplexityCounts(self.nats + other.nats, self.tokens + other.tokens)

    @property
    def perplexity(self) -> float:
        """The exponential of the mean over tokens; infinite where it is beyond what a float holds."""
        return self.per(self.tokens)

    def per(self, units: int) -> float:
        """Per something else than tokens, such as the words that they spell: only so are vocabularies comparable."""
        if units < 1:
            raise ValueError(refusal("units", units, "at least one token: the perplexity of nothing has no value"))
        mean = self.nats / units
        # exp(710) is more than the largest float.
        return math.exp(mean) if mean < 709.0 else math.inf

    def score(self, ignore: int | None = -1) -> Score:
        """As the metric gives it."""
        bits = self.nats / math.log(2)
        details = {"nats": self.nats, "tokens": float(self.tokens), "bits_per_token": bits / max(self.tokens, 1)}
        signature = signed(per="token", mean="over tokens", ignore=ignore)
        return Score("perplexity", self.perplexity, signature, higher=False, details=details)


def perplexity(predicted: Float[Tensor, "*b v"], truth: Int[Tensor, "*b"], *, ignore: int | None = -1) -> Score:
    r"""Perplexity, the exponential of the mean surprise.

    $$\mathrm{PPL} = \exp\Big(-\frac{1}{T} \sum_{t=1}^{T} \log p(y_t)\Big)$$

    over all tokens $T$ together, which is not the mean of the perplexities of batches: add `PerplexityCounts` instead. Probabilities
    are never formed, so that none underflows. Per token: of other tokens, words or pieces of words, it is another number.

    Args:
        predicted: (..., V), logits or log-probabilities.
        truth: (...), the tokens that came.
        ignore: what stands in `truth` for padding; None where every entry is a token.

    Example:
        >>> round(float(perplexity(torch.zeros(2, 3, 5), torch.tensor([[0, 1, 4], [2, -1, -1]]))), 6)
        5.0
    """
    return PerplexityCounts.of(predicted, truth, ignore=ignore).score(ignore)
