"""METEOR: the formula by hand, nltk's function, and which resources it had."""

from __future__ import annotations

from typing import Any

import pytest

from regard.evaluate.outer import meteor

nltk = pytest.importorskip("nltk")


class Nothing:
    def synsets(self, word: str) -> list[Any]:
        return []


def formula(matches: int, chunks: int, predicted: int, truth: int) -> float:
    p, r = matches / predicted, matches / truth
    return (1 - 0.5 * (chunks / matches) ** 3) * 10 * p * r / (r + 9 * p)


@pytest.mark.parametrize(
    ("predicted", "truth", "expected"),
    [
        ("the cat sat on the mat", "the cat sat on the mat", formula(6, 1, 6, 6)),
        ("on mats sat cat", "cat sat on mat", formula(4, 3, 4, 4)),
        ("on the mat sat the cat", "the cat sat on the mat", formula(6, 6, 6, 6)),  # the last "the" with the last
        ("a cat", "the cat sat", formula(1, 1, 2, 3)),
        ("The Cats", "the cat", formula(2, 1, 2, 2)),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
    ],
)
def test_it_is_the_formula_of_2007(predicted: str, truth: str, expected: float) -> None:
    assert float(meteor([predicted], [truth])) == pytest.approx(expected, rel=1e-12)


def test_it_is_nltks_and_the_mean_over_sentences() -> None:
    from nltk.translate.meteor_score import single_meteor_score

    predicted = ["it is a guide to action which ensures that the army obeys", "he read the books"]
    truth = ["it is a guide to action that ensures that the army will heed", "he reads a book"]
    each = [single_meteor_score(t.split(), p.split(), wordnet=Nothing()) for p, t in zip(predicted, truth, strict=True)]
    assert float(meteor(predicted, truth)) == pytest.approx(sum(each) / 2, rel=1e-12)


def test_the_best_reference_counts() -> None:
    text, near, far = "the cat sat", "the cat sat down", "a dog"
    assert float(meteor([text], [[far, near]])) == float(meteor([text], [near])) > float(meteor([text], [far]))


def test_its_resources_are_named() -> None:
    signature = meteor(["a cat"], ["a cat"]).signature
    assert "resources:exact+stem|wordnet:none" in signature
    assert f"nltk:{nltk.__version__}|formula:2007|alpha:0.9|beta:3.0|gamma:0.5" in signature
    assert "mean of sentences" in signature


class Synonyms:
    """A WordNet of one pair."""

    class Lemma:
        def __init__(self, name: str) -> None:
            self._name = name

        def name(self) -> str:
            return self._name

        def lemmas(self) -> list[Synonyms.Lemma]:
            return [self]

    def ensure_loaded(self) -> None:
        pass

    def get_version(self) -> str:
        return "of one pair"

    def synsets(self, word: str) -> list[Lemma]:
        return [self.Lemma("dog")] if word == "cat" else []


def test_an_installed_wordnet_finds_synonyms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nltk.corpus.wordnet", Synonyms())
    score = meteor(["a cat"], ["a dog"], resources="exact+stem+wordnet")
    assert float(score) == pytest.approx(formula(2, 1, 2, 2))
    assert "resources:exact+stem+wordnet|wordnet:of one pair" in score.signature
    assert float(meteor(["a cat"], ["a dog"])) == pytest.approx(formula(1, 1, 2, 2))


def test_a_wordnet_that_is_not_there_is_never_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent(Synonyms):
        def ensure_loaded(self) -> None:
            raise LookupError("Resource wordnet not found.")

    monkeypatch.setattr("nltk.corpus.wordnet", Absent())
    with pytest.raises(
        LookupError, match="resources: got 'exact.stem.wordnet', expected WordNet .*nltk.downloader wordnet"
    ):
        meteor(["a"], ["a"], resources="exact+stem+wordnet")


def test_what_is_refused() -> None:
    with pytest.raises(
        ValueError, match="resources: got 'wordnet', expected one of 'exact.stem', 'exact.stem.wordnet'"
    ):
        meteor(["a"], ["a"], resources="wordnet")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"truth\[0\]: got '', expected a reference with words in it"):
        meteor(["a"], [""])
