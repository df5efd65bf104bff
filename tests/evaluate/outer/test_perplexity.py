"""Perplexity: of log-probabilities, weighted by tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.evaluate.outer import PerplexityCounts, perplexity


def by_hand(logits: torch.Tensor, truth: torch.Tensor, ignore: int) -> float:
    logs = [
        math.log(math.exp(row[t]) / sum(map(math.exp, row)))
        for row, t in zip(logits.flatten(0, -2).tolist(), truth.flatten().tolist(), strict=True)
        if t != ignore
    ]
    return math.exp(-sum(logs) / len(logs))


def test_it_is_the_formula_and_padding_never_matters() -> None:
    logits, truth = torch.randn(3, 5, 7, dtype=torch.float64), torch.randint(7, (3, 5))
    truth[1, 3:], truth[2, 1:] = -1, -1
    score = perplexity(logits, truth)
    assert float(score) == pytest.approx(by_hand(logits, truth, -1), rel=1e-12)
    assert score.details["tokens"] == 9.0
    assert score.details["bits_per_token"] == pytest.approx(math.log2(float(score)))
    logits[1, 3:] = torch.nan
    assert float(perplexity(logits, truth)) == pytest.approx(float(score), rel=1e-12)


def test_it_is_torchmetrics() -> None:
    text = pytest.importorskip("torchmetrics.functional.text")
    logits, truth = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    assert float(perplexity(logits, truth)) == pytest.approx(float(text.perplexity(logits, truth)), rel=1e-5)


def test_logits_and_log_probabilities_are_the_same() -> None:
    logits, truth = torch.randn(5, 7, dtype=torch.float64), torch.randint(7, (5,))
    assert float(perplexity(logits, truth)) == pytest.approx(
        float(perplexity(logits.log_softmax(-1), truth)), rel=1e-12
    )


def test_no_probability_underflows() -> None:
    logits = torch.tensor([[0.0, 300.0]])  # exp(-300) is no float32
    assert perplexity(logits, torch.tensor([0])).details["nats"] == pytest.approx(300.0)
    assert float(perplexity(logits, torch.tensor([0]))) == pytest.approx(math.exp(300.0), rel=1e-4)
    assert float(perplexity(torch.tensor([[0.0, 5000.0]]), torch.tensor([0]))) == math.inf
    assert float(perplexity(torch.tensor([[-math.inf, 0.0]]), torch.tensor([0]))) == math.inf
    assert float(perplexity(torch.tensor([[-math.inf, 0.0]]), torch.tensor([1]))) == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_more(dtype: torch.dtype) -> None:
    logits = torch.randn(4001, 5).to(dtype)
    truth = torch.randint(5, (4001,))
    assert float(perplexity(logits, truth)) == pytest.approx(float(perplexity(logits.double(), truth)), rel=1e-6)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 99))
def test_batches_are_weighted_by_their_tokens(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [
        (torch.randn(n, 5, dtype=torch.float64, generator=generator), torch.randint(5, (n,), generator=generator))
        for n in sizes
    ]
    added = sum((PerplexityCounts.of(*part) for part in parts), PerplexityCounts())
    logits, truth = (torch.cat(list(column)) for column in zip(*parts, strict=True))
    assert added.perplexity == pytest.approx(float(perplexity(logits, truth)), rel=1e-12)
    assert added.score().value == added.perplexity
    assert added.tokens == sum(sizes)
    assert added.perplexity >= 1.0


def test_per_something_else() -> None:
    counts = PerplexityCounts(nats=6 * math.log(2), tokens=6)
    assert counts.perplexity == pytest.approx(2.0)
    assert counts.per(2) == pytest.approx(8.0)


def test_what_is_refused() -> None:
    logits = torch.zeros(2, 3, 5)
    with pytest.raises(ValueError, match=r"predicted: got shape \(2, 3, 5\).*expected logits of shape \(2, 4, 'V'\)"):
        perplexity(logits, torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(TypeError, match="predicted: got dtype torch.int64, expected logits"):
        perplexity(logits.long(), torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(
        ValueError, match=r"truth: got -100, expected tokens from 0 to 4, or ignore \(-1\). Fix: say with ignore=-100"
    ):
        perplexity(logits, torch.full((2, 3), -100))
    with pytest.raises(ValueError, match=r"truth: got -1, expected tokens from 0 to 4, or ignore \(None\)"):
        perplexity(logits, torch.full((2, 3), -1), ignore=None)
    with pytest.raises(ValueError, match="truth: got 5, expected tokens from 0 to 4"):
        perplexity(logits, torch.full((2, 3), 5))
    with pytest.raises(ValueError, match="units: got 0, expected at least one token"):
        perplexity(logits, torch.full((2, 3), -1))
    for wrong in (torch.nan, torch.inf, -torch.inf):
        with pytest.raises(
            ValueError, match="predicted: got NaN, or nothing but infinities, for a token, expected logits"
        ):
            perplexity(torch.full((2, 3, 5), wrong), torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(TypeError, match="truth: got dtype torch.float32, expected classes"):
        perplexity(logits, torch.zeros(2, 3))
    with pytest.raises(TypeError):
        PerplexityCounts() + 1.0
