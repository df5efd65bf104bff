"""Metrics of rankings: of the candidates of a question, and of one item among all.

Where a right and a wrong candidate have the same score, the wrong one is ranked first: a model that gives everything the same score is
not rewarded for the order in which candidates were listed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from regard._errors import refusal
from regard.evaluate.outer.inputs import numbers, same_shape, several, whole_number, whole_numbers
from regard.evaluate.outer.result import Score, signed

Numbers: TypeAlias = Float[Tensor, " n"] | Sequence[float]
Labels: TypeAlias = Int[Tensor, " n"] | Sequence[int]
Groups: TypeAlias = Int[Tensor, " n"] | Sequence[Hashable]


def mean_average_precision(predicted: Numbers, truth: Labels, *, groups: Groups) -> Score:
    r"""MAP, the mean over questions of the average precision of their candidates.

    $$\mathrm{AP} = \frac{1}{R} \sum_{r\ \text{right}} \frac{\text{right ones down to } r}{\mathrm{rank}(r)}$$

    Questions without a right candidate are left out, and counted in `details`.

    Args:
        predicted: the score of each candidate.
        truth: 1 for a right candidate, 0 for a wrong one.
        groups: the question that each candidate belongs to, by its number or name, in any order.

    Example:
        >>> score = mean_average_precision([0.9, 0.8, 0.7, 0.3, 0.6], [1, 0, 1, 1, 0], groups=[0, 0, 0, 1, 1])
        >>> round(float(score), 4)  # of (1 + 2/3) / 2 and 1/2
        0.6667
    """
    found = _answers(predicted, truth, groups)
    each = [sum((k + 1) / rank for k, rank in enumerate(ranks)) / len(ranks) for ranks in found if ranks]
    return _over_questions("map", each, len(found))


def mean_reciprocal_rank(predicted: Numbers, truth: Labels, *, groups: Groups) -> Score:
    r"""MRR, the mean over questions of $1 / \mathrm{rank}$ of the first right candidate. Arguments as of `mean_average_precision`.

    Example:
        >>> float(mean_reciprocal_rank([0.9, 0.8, 0.3, 0.6], [1, 0, 1, 0], groups=["Q7", "Q7", "Q4", "Q4"]))
        0.75
    """
    found = _answers(predicted, truth, groups)
    return _over_questions("mrr", [1 / ranks[0] for ranks in found if ranks], len(found))


def _answers(predicted: Any, truth: Any, groups: Any) -> list[list[int]]:
    """For each question, the ranks of its right candidates, from 1."""
    scores, right = numbers("predicted", predicted), whole_numbers("truth", truth)
    same_shape(scores, right)
    questions = several("groups", groups.tolist() if isinstance(groups, Tensor | np.ndarray) else groups, "candidate")
    # Each tensor is a thing of its own, whatever number it holds.
    questions = [asked.item() if isinstance(asked, Tensor) and asked.ndim == 0 else asked for asked in questions]
    if scores.ndim != 1 or len(questions) != len(scores):
        got = f"{len(questions)} questions for scores of shape {tuple(scores.shape)}"
        raise ValueError(refusal("groups", got, "one score and one question a candidate"))
    for k, asked in enumerate(questions):
        if not isinstance(asked, Hashable):
            raise TypeError(refusal(f"groups[{k}]", f"a {type(asked).__name__}", "the number or name of a question"))
        if asked != asked:
            raise ValueError(refusal(f"groups[{k}]", "NaN, which equals no other", "the number or name of a question"))
    if bool(((right != 0) & (right != 1)).any()):
        raise ValueError(refusal("truth", sorted(set(right.tolist()))[:5], "1 for right, 0 for wrong"))
    listed: dict[Hashable, list[tuple[float, int]]] = {}
    for score, label, asked in zip(scores.tolist(), right.tolist(), questions, strict=True):
        listed.setdefault(asked, []).append((-score, label))
    # Of equal scores the wrong one sorts first.
    return [[k for k, (_, label) in enumerate(sorted(pairs), 1) if label] for pairs in listed.values()]


def _over_questions(name: str, each: list[float], questions: int) -> Score:
    if not each:
        raise ValueError(refusal("truth", "no right candidate for any question", "at least one"))
    details = {"questions": float(len(each)), "left_out": float(questions - len(each))}
    signature = signed(ties="pessimistic", unanswerable="left out", level="mean of questions")
    return Score(name, sum(each) / len(each), signature, details=details)


@dataclass(frozen=True)
class RankCounts:
    """What hit rate and NDCG at k are made of; counts of batches with the same k are added.

    Attributes:
        k: how far down a ranking counts.
        hits: how many right items came that far.
        gain: the sum of their discounted gains.
        total: how many rankings there are.
    """

    k: int
    hits: int = 0
    gain: float = 0.0
    total: int = 0

    @staticmethod
    def of(scores: Float[Tensor, "b items"], truth: Int[Tensor, " b"], *, k: int) -> RankCounts:
        """Of one batch: the scores of all items, and the number of the right one."""
        whole_number("k", k, 1)
        ranks = rank_of(scores, truth)
        inside = ranks[ranks <= k]
        return RankCounts(k, len(inside), float((1.0 + inside.double()).log2().reciprocal().sum()), len(ranks))

    def __add__(self, other: Any) -> RankCounts:
        if not isinstance(other, RankCounts):
            return NotImplemented
        if self.k != other.k:
            raise ValueError(refusal("k", other.k, f"that of the other counts, {self.k}"))
        return RankCounts(self.k, self.hits + other.hits, self.gain + other.gain, self.total + other.total)

    @property
    def hit_rate(self) -> float:
        return self._mean(self.hits)

    @property
    def ndcg(self) -> float:
        return self._mean(self.gain)

    def _mean(self, total: float) -> float:
        if not self.total:
            raise ValueError(refusal("predicted", "nothing", "at least one ranking: a metric of nothing has no value"))
        return total / self.total

    def score(self, name: str) -> Score:
        """`hit_rate` or `ndcg`, as the metric gives it."""
        signature = signed(k=self.k, ties="pessimistic", ranked="all items", relevant="one")
        details = {"hits": float(self.hits), "rankings": float(self.total)}
        return Score(name, getattr(self, name), signature, details=details)


def rank_of(scores: Float[Tensor, "b items"], truth: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
    """The rank of the right item among all, from 1: as many as score no less than it.

    Example:
        >>> import torch
        >>> rank_of(torch.tensor([[0.1, 0.7, 0.7, 0.2]]), torch.tensor([1])).tolist()  # another has 0.7 too
        [2]
    """
    scores, truth = numbers("predicted", scores), whole_numbers("truth", truth)
    if scores.ndim != 2 or truth.shape != scores.shape[:1]:
        got = f"shapes {tuple(scores.shape)} and {tuple(truth.shape)}"
        raise ValueError(refusal("predicted", got, "scores (n, items) and one item a row, (n,)"))
    wrong = truth[(truth < 0) | (truth >= scores.shape[1])]
    if len(wrong):
        raise ValueError(refusal("truth", int(wrong[0]), f"items from 0 to {scores.shape[1] - 1}"))
    return (scores >= scores.gather(1, truth[:, None])).sum(1)


def hit_rate(predicted: Float[Tensor, "b items"], truth: Int[Tensor, " b"], *, k: int) -> Score:
    """HR@k: how often the right item is among the first k of a ranking of all items.

    Args:
        predicted: (n, items), the scores of all items; minus infinity for those that may not be recommended.
        truth: (n,), the number of the right one.
        k: how many count.

    Example:
        >>> import torch
        >>> float(hit_rate(torch.tensor([[0.1, 0.9, 0.5], [0.6, 0.5, 0.4]]), torch.tensor([2, 2]), k=2))
        0.5
    """
    return RankCounts.of(predicted, truth, k=k).score("hit_rate")


def ndcg(predicted: Float[Tensor, "b items"], truth: Int[Tensor, " b"], *, k: int) -> Score:
    r"""NDCG@k with one right item: the mean of $1 / \log_2(1 + \mathrm{rank})$ where it is among the first k, else 0.

    Arguments as of `hit_rate`.

    Example:
        >>> import torch
        >>> round(float(ndcg(torch.tensor([[0.1, 0.9, 0.5], [0.6, 0.5, 0.4]]), torch.tensor([2, 2]), k=2)), 4)
        0.3155
    """
    return RankCounts.of(predicted, truth, k=k).score("ndcg")
