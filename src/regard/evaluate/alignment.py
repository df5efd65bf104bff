r"""Alignment error rate (Och & Ney 2003, https://aclanthology.org/J03-1002).

With sure links $S$, possible links $P \supseteq S$ and found links $A$:

$$\mathrm{AER} = 1 - \frac{|A \cap S| + |A \cap P|}{|A| + |S|}, \qquad
  \mathrm{precision} = \frac{|A \cap P|}{|A|}, \qquad \mathrm{recall} = \frac{|A \cap S|}{|S|}$$

Of a corpus: the counts of all sentences are added first. The mean of the sentences' rates is another number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from regard._errors import refusal
from regard.model.batch import SURE


@dataclass(frozen=True)
class AlignmentCounts:
    """What an error rate is made of; counts of parts of a corpus are added.

    Example:
        >>> counts = AlignmentCounts.of_links(found={(0, 0), (1, 2)}, sure={(0, 0)}, possible={(1, 1)})
        >>> counts.error_rate, counts.precision, counts.recall
        (0.33333333333333337, 0.5, 1.0)
    """

    found: int = 0
    sure: int = 0
    found_sure: int = 0
    found_possible: int = 0

    @staticmethod
    def of_links(
        found: Iterable[tuple[int, int]], sure: Iterable[tuple[int, int]], possible: Iterable[tuple[int, int]] = ()
    ) -> AlignmentCounts:
        """Of links (output, input) of one sentence; what is sure is possible, whether it is listed there or not."""
        a, s = set(found), set(sure)
        p = s | set(possible)
        return AlignmentCounts(len(a), len(s), len(a & s), len(a & p))

    @staticmethod
    def of_weights(weights: Float[Tensor, "*b m n"], gold: Int[Tensor, "*b m n"]) -> AlignmentCounts:
        """Of attention: each output is linked to the input that it looks at most; outputs without any gold link are left out.

        Args:
            weights: (..., M, N), zero at padding.
            gold: 2 sure, 1 possible, 0 none.
        """
        if weights.shape != gold.shape:
            raise ValueError(
                refusal("gold", f"shape {tuple(gold.shape)}", f"that of the weights, {tuple(weights.shape)}")
            )
        if bool(weights.isnan().any()):
            raise ValueError(refusal("weights", "NaN", "numbers: it is neither more nor less than anything"))
        judged = (gold > 0).any(-1)
        best = gold.gather(-1, weights.argmax(-1, keepdim=True)).squeeze(-1)
        numbers = [judged.sum(), (gold == SURE).sum(), ((best == SURE) & judged).sum(), ((best > 0) & judged).sum()]
        return AlignmentCounts(*(int(x) for x in numbers))

    def __add__(self, other: Any) -> AlignmentCounts:
        if not isinstance(other, AlignmentCounts):
            return NotImplemented
        return AlignmentCounts(
            self.found + other.found,
            self.sure + other.sure,
            self.found_sure + other.found_sure,
            self.found_possible + other.found_possible,
        )

    @property
    def error_rate(self) -> float:
        """AER; zero where nothing is sure and nothing was found."""
        total = self.found + self.sure
        return 1.0 - (self.found_sure + self.found_possible) / total if total else 0.0

    @property
    def precision(self) -> float:
        return self.found_possible / self.found if self.found else 1.0

    @property
    def recall(self) -> float:
        return self.found_sure / self.sure if self.sure else 1.0
