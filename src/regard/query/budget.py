"""A budget of keys: at most k of them are read, or exactly k."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from regard.catalog import register
from regard.general.alignments.base import readable
from regard.general.scores.base import width
from regard.ops.fill import where
from regard.query.scans import followed, log_convolution, log_sum_exp, scan, shifted
from regard.query.structured import Structured, drawn, selection


@register(
    name="budget",
    zh="预算约束结构化注意力（至多 k 个）",
    path="general/alignment",
    equation="a_j = p(z_j = 1),  p(z) ∝ exp(Σ_j e_j z_j) [Σ_j z_j ≤ k]",
    paper="Kim, Denton, Hoang & Rush, Structured Attention Networks, ICLR 2017",
    year=2017,
    time="N² k² (a scan of depth log N)",
    memory="linear",
    choose="a known, small number of keys is to be read, or none where none fits, and smoothly so",
    avoid="exact zeros are wanted (entmax), or k is large: the cost grows with its square",
)
class Budget(Structured):
    r"""Select at most $k$ keys: marginals under a constraint (after Kim et al. 2017, https://arxiv.org/abs/1702.00887).

    $$p(z) \propto \exp\Big(\sum_j e_j z_j\Big)\,\Big[\sum_j z_j \le k\Big], \quad z \in \{0, 1\}^N, \qquad a_j = p(z_j = 1)$$

    or $\sum_j z_j = k$ with `exact`. The normaliser is a sum of coefficients of $\prod_j (1 + e^{e_j} x)$, and $p(z_j = 1)$ needs the same
    product without $j$: prefixes and suffixes of polynomials cut off after $x^k$, in log space, by an associative scan of depth $\log N$.
    Exactly one is softmax; at most one is softmax beside a key of score 0 that holds nothing; as many as there are keys, independent
    sigmoids. Where a row may attend fewer than $k$, exactly $k$ means all of them.

    A row sums to the expected number of keys that are read. `distribution(call)` gives samples, entropy and log-probabilities.

    Args:
        k: how many.
        exact: exactly $k$ instead of at most.
        normalize: divide by the expected number, so that a row sums to one.

    Example:
        >>> from regard import Attention, Dot
        >>> attend = Attention(Dot(), Budget(2, exact=True))
        >>> attend(torch.randn(2, 3, 4), torch.randn(2, 7, 4)).shape
        torch.Size([2, 3, 4])
    """

    def __init__(self, k: int = 1, exact: bool = False, normalize: bool = False) -> None:
        super().__init__(normalize)
        self.k, self.exact = width("k", k), bool(exact)

    def structure(self, scores: Tensor, mask: Tensor | None) -> Subset:
        return Subset(scores, mask, self.k, self.exact)

    def extra_repr(self) -> str:
        return f"k={self.k}, exact={self.exact}, normalize={self.normalize}"


class Subset:
    """Distributions over subsets of at most, or exactly, k keys of rows (..., N); keys come first inside."""

    def __init__(self, scores: Tensor, mask: Tensor | None, k: int, exact: bool) -> None:
        self.allowed = readable(scores, mask)
        self.scores = where(self.allowed, scores, 0.0)
        # No more than there are keys can be read; the polynomials need no terms beyond.
        self.k, self.exact = min(k, scores.shape[-1]), exact
        self._count = self.allowed.sum(-1).clamp(max=self.k)
        self._one = self._polynomial(torch.full_like(self._count, -math.inf, dtype=scores.dtype), 0)
        # Terms stand before rows, which are many: sums over them are then sums of long vectors.
        self._terms = self._polynomial(where(self.allowed, scores, -math.inf).movedim(-1, 0), 1)
        self._prefixes = scan(self._terms, log_convolution)

    def _polynomial(self, log_coefficient: Tensor, axis: int) -> Tensor:
        """The logarithms of 1 + c x, its k + 1 terms on a new axis."""
        terms = log_coefficient.unsqueeze(axis)
        none = torch.full_like(terms, -math.inf).expand(*terms.shape[:axis], self.k - 1, *terms.shape[axis + 1 :])
        return torch.cat([torch.zeros_like(terms), terms, none], axis)

    def _total(self, terms: Tensor, count: Tensor, axis: int) -> Tensor:
        """The coefficients that the constraint lets in, summed: those up to the count, or that of the count."""
        if self.exact:
            return terms.gather(axis, count.expand(*terms.shape[:axis], 1, *count.shape)).squeeze(axis)
        low = torch.arange(self.k + 1, device=count.device).reshape(-1, *(1,) * count.dim()) <= count
        return log_sum_exp(where(low, terms, -math.inf), axis)

    def log_odds(self) -> Tensor:
        """Of each key to be selected, (..., N); infinite where it must be."""
        after = shifted(scan(self._terms, log_convolution, reverse=True), -1, self._one)
        others = log_convolution(shifted(self._prefixes, 1, self._one), after)
        bound = self._count if self.exact else torch.full_like(self._count, self.k)
        taken, left = self._total(others, (bound - 1).clamp(min=0), 1), self._total(others, bound, 1)
        return where(self.allowed, self.scores + (taken - left).movedim(0, -1), 0.0)

    def marginals(self) -> Tensor:
        """Probability of each key to be selected, (..., N)."""
        return where(self.allowed, self.log_odds().sigmoid(), 0.0)

    def log_partition(self) -> Tensor:
        """The logarithm of the normaliser, (...)."""
        return self._total(self._prefixes[-1], self._count, 0)

    def entropy(self) -> Tensor:
        """Entropy of the selection, (...)."""
        return self.log_partition() - (self.marginals() * self.scores).sum(-1)

    def sample(self, generator: Generator | None = None) -> Tensor:
        """A selection (..., N): how many, then from the last key to the first which, as maps of what is left to take."""
        with torch.no_grad():
            before = shifted(self._prefixes, 1, self._one).movedim(1, -1)
            less = torch.cat([torch.full_like(before[..., :1], -math.inf), before[..., :-1]], -1)
            # Infinite odds are certain; where both are impossible no path leads.
            odds = self.scores.movedim(-1, 0).unsqueeze(-1) + (less - before)
            take = drawn(odds, generator) & self.allowed.movedim(-1, 0).unsqueeze(-1)
            left = torch.arange(self.k + 1, device=take.device)
            maps = left - take.long()
            state = followed(maps, self._how_many(generator))
            return take.gather(-1, state.unsqueeze(-1)).squeeze(-1).movedim(0, -1)

    def _how_many(self, generator: Generator | None) -> Tensor:
        if self.exact:
            return self._count
        chances = self._prefixes[-1].movedim(0, -1).double().softmax(-1)
        numbers = torch.rand(chances.shape[:-1], generator=generator, dtype=torch.float64, device=chances.device)
        return (numbers.unsqueeze(-1) > chances.cumsum(-1)[..., :-1]).sum(-1)

    def log_prob(self, selected: Tensor) -> Tensor:
        """Of a selection (..., N); minus infinity where the constraint forbids it."""
        selected = selection(selected, self.allowed)
        size = (selected & self.allowed).sum(-1)
        fits = size == self._count if self.exact else size <= self._count
        found = (self.scores * selected).sum(-1) - self.log_partition()
        return where(fits, found, -math.inf)
