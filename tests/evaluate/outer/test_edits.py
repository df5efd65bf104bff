"""Error rates of words, characters and phones: the fewest edits, of a corpus, beside jiwer."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.evaluate.outer import EditCounts, cer, edits, per, wer
from regard.evaluate.outer.phones import DROPPED, TIMIT39

sequences = st.text("abcd", max_size=9)
sentences = st.lists(st.lists(st.sampled_from(["a", "bb", "c"]), max_size=6).map(" ".join), min_size=1, max_size=4)


def fewest(predicted: str, truth: str) -> tuple[int, int]:
    """Edits, and of them insertions and deletions, by trying everything."""

    @cache
    def go(i: int, j: int) -> tuple[int, int]:
        if i == 0 or j == 0:
            return i + j, i + j
        (a, b), (c, d), (e, f) = go(i - 1, j), go(i, j - 1), go(i - 1, j - 1)
        return min((a + 1, b + 1), (c + 1, d + 1), (e + (truth[i - 1] != predicted[j - 1]), f))

    return go(len(truth), len(predicted))


@given(sequences, sequences)
def test_the_edits_are_the_fewest(predicted: str, truth: str) -> None:
    counts = EditCounts.of(predicted, truth)
    assert (counts.edits, counts.insertions + counts.deletions) == fewest(predicted, truth)
    assert counts.length == len(truth)
    assert counts.hits + counts.substitutions + counts.insertions == len(predicted)
    assert min(counts.hits, counts.substitutions, counts.insertions, counts.deletions) >= 0


@given(sequences, sequences, sequences)
def test_edits_are_a_distance(x: str, y: str, z: str) -> None:
    def distance(a: str, b: str) -> int:
        return EditCounts.of(a, b).edits

    assert distance(x, y) == distance(y, x)
    assert (distance(x, y) == 0) == (x == y)
    assert distance(x, z) <= distance(x, y) + distance(y, z)
    assert abs(len(x) - len(y)) <= distance(x, y) <= max(len(x), len(y))
    there, back = EditCounts.of(x, y), EditCounts.of(y, x)
    assert (there.insertions, there.deletions) == (back.deletions, back.insertions)


@given(st.lists(st.tuples(sequences, sequences), max_size=5))
def test_a_corpus_adds_counts_not_rates(pairs: list[tuple[str, str]]) -> None:
    each = [EditCounts.of(p, t) for p, t in pairs]
    added = sum(each, EditCounts())
    assert added.edits == sum(counts.edits for counts in each)
    assert added.length == sum(len(t) for _, t in pairs)


@given(sentences, st.data())
def test_rates_are_jiwers(truth: list[str], data: st.DataObject) -> None:
    jiwer = pytest.importorskip("jiwer")
    predicted = data.draw(st.lists(sentences.map(" ".join), min_size=len(truth), max_size=len(truth)))
    words, characters = wer(predicted, truth), cer(predicted, truth)
    theirs = jiwer.process_words(truth, predicted)
    assert float(words) == pytest.approx(theirs.wer)
    assert float(characters) == pytest.approx(jiwer.cer(truth, predicted))
    # Several sets of edits may be the shortest: theirs need not be the one with fewest insertions and deletions.
    total = theirs.substitutions + theirs.deletions + theirs.insertions
    assert sum(words.details[key] for key in ("substitutions", "deletions", "insertions")) == total
    assert words.details["deletions"] <= theirs.deletions
    assert words.details["insertions"] <= theirs.insertions


@given(st.text("abc", max_size=25), st.text("abc", max_size=25))
def test_the_band_is_wide_enough(predicted: str, truth: str) -> None:
    widest = EditCounts.of(predicted, truth)
    for band in (0, 1, 3):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(edits, "_BAND", band)
            assert EditCounts.of(predicted, truth) == widest


def test_long_texts_that_are_alike_take_no_longer_than_their_edits() -> None:
    truth = [k * k % 7919 for k in range(30_000)]
    predicted = [unit for k, unit in enumerate(truth) if k % 1000 != 7]
    assert EditCounts.of(predicted, truth) == EditCounts(0, 30, 0, 29_970)


@given(sentences)
def test_the_same_is_without_error(texts: list[str]) -> None:
    for metric in (wer, cer, per):
        score = metric(texts, texts)
        assert float(score) == 0.0
        assert not score.higher


@pytest.mark.parametrize(
    ("predicted", "truth", "expected"),
    [
        ([""], [""], 0.0),
        (["a b c"], [""], 3.0),  # of nothing, the number of insertions
        (["a b c", "x"], ["", "x y"], 4 / 2),
        ([""], ["a b"], 1.0),
        (["a a a a"], ["b"], 4.0),  # may exceed one
        (["The cat"], ["the cat"], 0.5),
        (["  the   cat "], ["the cat"], 0.0),
    ],
)
def test_word_error_rates_by_hand(predicted: list[str], truth: list[str], expected: float) -> None:
    assert float(wer(predicted, truth)) == expected


def test_the_parts_by_hand() -> None:
    assert EditCounts.of("kitten", "sitting") == EditCounts(substitutions=2, deletions=1, insertions=0, hits=4)
    assert EditCounts.of("ba", "ab") == EditCounts(substitutions=2)  # rather than one deleted and one inserted
    assert EditCounts.of("abc", "") == EditCounts(insertions=3)
    assert EditCounts.of("", "abc") == EditCounts(deletions=3)
    assert EditCounts.of([1, (2, 3)], [1, "x"]) == EditCounts(substitutions=1, hits=1)


def test_characters_are_code_points_with_inner_blanks() -> None:
    assert float(cer(["ab"], ["a b"])) == 1 / 3
    assert float(cer([" ab "], ["ab"])) == 0.0
    assert float(cer(["猫が"], ["猫は"])) == 0.5


def test_phones_in_lists_or_in_texts() -> None:
    assert per(["sh iy hh"], [["sh", "ih", "hh"]]) == per([["sh", "iy", "hh"]], ["sh ih hh"])
    assert float(per(["sh iy hh"], ["sh ih hh"])) == 1 / 3
    assert float(per([["aɪ", "tʃ"]], ["aɪ t"])) == 0.5


def test_sixty_one_phones_become_thirty_nine() -> None:
    given_as_is = {phone for phone in TIMIT39 if phone != "sil"} | {DROPPED}
    assert len(given_as_is) == 61
    assert len(set(TIMIT39.values())) == 39
    assert all(TIMIT39[one] == one for one in TIMIT39.values())
    plain, folded = (per(["h# q ao l ix"], ["pau aa el ih"], fold=fold) for fold in ("none", "timit39"))  # type: ignore[arg-type]
    assert (float(plain), float(folded)) == (5 / 4, 0.0)
    assert "fold:none" in plain.signature
    assert "fold:timit39" in folded.signature


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="phone: got 'axx', expected one of TIMIT's 61. Did you mean 'ax'"):
        per(["axx"], ["ax"], fold="timit39")
    with pytest.raises(ValueError, match="fold: got 'timit48', expected one of 'none', 'timit39'"):
        per(["a"], ["a"], fold="timit48")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"truth\[0\]: got a list, expected phones"):
        per(["a"], [[1]])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"truth\[0\]: got a list, expected a text"):
        wer(["a"], [["a"]])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        EditCounts() + 1
