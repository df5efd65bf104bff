"""BLEU and chrF of a corpus, beside sacrebleu called by hand, and a BLEU written apart."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.evaluate.outer import bleu, chrf

sacrebleu = pytest.importorskip("sacrebleu")

PREDICTED = ["The cat is on the mat.", "There is a dog in the big garden, I think.", "It rains"]
FIRST = ["The cat sat on the mat.", "A dog is in the big garden, I think.", "It is raining"]
SECOND = ["There is a cat on the mat.", "There is a dog in the garden.", "It rains today"]


def by_hand(predicted: list[str], truth: list[str]) -> float:
    """Of words that blanks separate and one reference, without smoothing."""

    def grams(text: str, n: int) -> Counter[tuple[str, ...]]:
        words = text.split()
        return Counter(tuple(words[k : k + n]) for k in range(len(words) - n + 1))

    logs = 0.0
    for n in range(1, 5):
        pairs = [(grams(p, n), grams(t, n)) for p, t in zip(predicted, truth, strict=True)]
        logs += math.log(sum((p & t).total() for p, t in pairs) / sum(p.total() for p, _ in pairs)) / 4
    c, r = (sum(len(text.split()) for text in texts) for texts in (predicted, truth))
    return 100 * min(1.0, math.exp(1 - r / c)) * math.exp(logs)


def test_bleu_is_that_of_a_corpus() -> None:
    score = bleu(PREDICTED, FIRST, tokenize="none", smoothing="none")
    assert float(score) == pytest.approx(by_hand(PREDICTED, FIRST), rel=1e-12)
    sentences = [float(bleu([p], [t])) for p, t in zip(PREDICTED, FIRST, strict=True)]
    assert abs(float(score) - sum(sentences) / 3) > 1.0


@pytest.mark.parametrize(
    "options", [{}, {"lowercase": True}, {"tokenize": "char"}, {"smoothing": "floor"}, {"max_order": 2}]
)
def test_bleu_is_sacrebleus(options: dict[str, object]) -> None:
    theirs = {"smoothing": "smooth_method", "max_order": "max_ngram_order"}
    metric = sacrebleu.BLEU(**{theirs.get(key, key): value for key, value in options.items()})
    result = metric.corpus_score(PREDICTED, [FIRST, SECOND])
    score = bleu(PREDICTED, list(zip(FIRST, SECOND, strict=True)), **options)  # type: ignore[arg-type]
    assert float(score) == result.score
    assert str(metric.get_signature()) in score.signature
    assert score.details["brevity_penalty"] == result.bp
    assert [score.details[f"precision_{n}"] for n in range(1, 1 + len(result.precisions))] == result.precisions


@pytest.mark.parametrize("options", [{}, {"word_order": 2}, {"beta": 1}, {"char_order": 3}, {"lowercase": True}])
def test_chrf_is_sacrebleus(options: dict[str, int]) -> None:
    metric = sacrebleu.CHRF(**options)
    result = metric.corpus_score(PREDICTED, [FIRST, SECOND])
    score = chrf(PREDICTED, list(zip(FIRST, SECOND, strict=True)), **options)  # type: ignore[arg-type]
    assert float(score) == result.score
    assert str(metric.get_signature()) in score.signature


@pytest.mark.parametrize("metric", [bleu, chrf])
def test_references_may_be_of_any_number(metric: object) -> None:
    assert callable(metric)
    one = metric(PREDICTED, FIRST)
    assert metric(PREDICTED, [[text] for text in FIRST]) == one
    twice = metric(PREDICTED, [[text, text] for text in FIRST])
    assert (float(twice), "nrefs:2" in twice.signature) == (float(one), True)
    some = metric(PREDICTED, [FIRST[0], FIRST[1], [FIRST[2], SECOND[2]]])
    assert "nrefs:var" in some.signature
    both = metric(PREDICTED, list(zip(FIRST, SECOND, strict=True)))
    assert float(one) < float(some) <= float(both)


@given(st.lists(st.text("ab c", min_size=9).filter(lambda t: len(t.split()) > 3), min_size=1, max_size=4))
def test_the_same_texts_score_in_full(texts: list[str]) -> None:
    assert float(bleu(texts, texts)) == pytest.approx(100.0)
    assert float(chrf(texts, texts)) == pytest.approx(100.0)


def test_nothing_in_common_scores_nothing() -> None:
    assert float(bleu(["a b c d"], ["e f g h"])) == 0.0
    assert float(bleu([""], ["e f g h"])) == 0.0
    assert float(chrf(["abcd"], ["efgh"])) == 0.0


def test_short_predictions_are_penalised() -> None:
    score = bleu(["the cat sat on"], ["the cat sat on the mat now ."], tokenize="none")
    assert score.details["brevity_penalty"] == pytest.approx(math.exp(1 - 8 / 4))
    assert float(score) == pytest.approx(100 * math.exp(1 - 8 / 4))
    assert (score.details["predicted_length"], score.details["truth_length"]) == (4.0, 8.0)


def test_choices_are_in_the_signature() -> None:
    signatures = {
        bleu(PREDICTED, FIRST, **options).signature  # type: ignore[arg-type]
        for options in ({}, {"tokenize": "char"}, {"lowercase": True}, {"smoothing": "none"}, {"max_order": 3})
    }
    assert len(signatures) == 5
    assert all("level:corpus|scale:100" in signature and sacrebleu.__version__ in signature for signature in signatures)
    betas = {chrf(PREDICTED, FIRST, beta=beta).signature for beta in (1, 2)}
    assert len(betas) == 2


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="tokenize: got 'flores200', expected one of '13a', .*Fix: tokenise before"):
        bleu(["a"], ["a"], tokenize="flores200")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="smoothing: got 'laplace', expected one of 'exp'"):
        bleu(["a"], ["a"], smoothing="laplace")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_order: got 0, expected a whole number >= 1"):
        bleu(["a"], ["a"], max_order=0)
    with pytest.raises(ValueError, match="word_order: got -1, expected a whole number >= 0"):
        chrf(["a"], ["a"], word_order=-1)
    with pytest.raises(ValueError, match=r"truth\[1\]: got ' ', expected a reference with words in it. Fix: leave the"):
        bleu(["a", ""], ["a", " "])
    with pytest.raises(ValueError, match=r"truth\[0\]: got nothing, expected at least one entry"):
        chrf(["a"], [[]])
