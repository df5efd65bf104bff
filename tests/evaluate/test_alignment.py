"""Alignment error rate: the definition, of a corpus, beside a library's rate of one sentence."""

from __future__ import annotations

import random

import pytest
import torch

from regard.evaluate.alignment import AlignmentCounts
from regard.model.batch import POSSIBLE, SURE


def drawn(rng: random.Random, share: float) -> set[tuple[int, int]]:
    return {(i, j) for i in range(5) for j in range(7) if rng.random() < share}


@pytest.mark.parametrize("seed", range(5))
def test_a_sentence_has_the_rate_of_the_library(seed: int) -> None:
    nltk = pytest.importorskip("nltk.translate.metrics")
    rng = random.Random(seed)
    found, sure, extra = drawn(rng, 0.3), drawn(rng, 0.2) | {(0, 0)}, drawn(rng, 0.2)
    counts = AlignmentCounts.of_links(found, sure, extra)
    assert counts.error_rate == pytest.approx(nltk.alignment_error_rate(sure, found, sure | extra))


def test_a_corpus_adds_counts_not_rates() -> None:
    short = AlignmentCounts.of_links({(0, 0)}, {(0, 0)})
    long = AlignmentCounts.of_links({(k, 0) for k in range(9)}, {(k, 1) for k in range(9)})
    assert (short.error_rate, long.error_rate) == (0.0, 1.0)
    assert (short + long).error_rate == pytest.approx(0.9)
    assert sum([short, long], AlignmentCounts()).error_rate == pytest.approx(0.9)


def test_what_is_sure_is_possible() -> None:
    assert AlignmentCounts.of_links({(0, 0)}, {(0, 0)}, set()).precision == 1.0


def test_nothing_to_find() -> None:
    nothing = AlignmentCounts.of_links(set(), set())
    assert (nothing.error_rate, nothing.precision, nothing.recall) == (0.0, 1.0, 1.0)


def test_attention_links_each_judged_output_to_what_it_looks_at_most() -> None:
    gold = torch.tensor([[SURE, POSSIBLE, 0], [0, 0, 0], [POSSIBLE, POSSIBLE, 0], [0, SURE, 0]])
    weights = torch.tensor([[0.1, 0.8, 0.1], [0.9, 0.1, 0.0], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]])
    counts = AlignmentCounts.of_weights(weights, gold)
    links = AlignmentCounts.of_links({(0, 1), (2, 2), (3, 1)}, {(0, 0), (3, 1)}, {(0, 1), (2, 0), (2, 1)})
    assert counts == links
    batched = AlignmentCounts.of_weights(torch.stack([weights, weights]), torch.stack([gold, gold]))
    assert batched == links + links


def test_weights_must_be_numbers() -> None:
    with pytest.raises(ValueError, match="weights: got NaN, expected numbers"):
        AlignmentCounts.of_weights(torch.full((2, 3), torch.nan), torch.ones(2, 3, dtype=torch.int8))


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"gold: got shape \(2, 3\), expected that of the weights"):
        AlignmentCounts.of_weights(torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.int8))
