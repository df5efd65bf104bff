"""Links in files: both notations, both bases, and what is refused rather than scored wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.evaluate.links import Links, corpus_aer, counted, read_pharaoh, read_wpt, write_pharaoh, write_wpt

pair = st.tuples(st.integers(0, 6), st.integers(0, 4))
sentence = st.builds(Links.of, st.frozensets(pair, max_size=6), st.frozensets(pair, max_size=6))
found_only = st.builds(Links.of, st.frozensets(pair, max_size=6))
corpus = st.lists(st.tuples(found_only, sentence), min_size=1, max_size=5)

FOUND = ["0-0 1-1 2-2\n", "\n", "0-1 1-0\n"]
GOLD = ["1-1 2p2 3-4\n", "1-1\n", "1-2 2p1\n"]


@given(st.lists(sentence, max_size=5), st.sampled_from([0, 1]))
def test_what_was_written_is_read(links: list[Links], base: int) -> None:
    assert read_pharaoh(write_pharaoh(links, base=base), base=base) == links
    assert read_wpt(write_wpt(links), sentences=len(links)) == links


def test_notation_by_hand(tmp_path: Path) -> None:
    links = [Links.of({(0, 0), (2, 1)}, {(1, 1)}), Links()]
    assert write_pharaoh(links, base=0) == ["0-0 2-1 1p1", ""]
    assert write_pharaoh(links, base=1) == ["1-1 3-2 2p2", ""]
    assert write_wpt(links) == ["0001 1 1 S", "0001 3 2 S", "0001 2 2 P"]
    path = tmp_path / "links"
    path.write_text("\n".join(write_pharaoh(links, base=1)) + "\n")
    with path.open() as lines:
        assert read_pharaoh(lines, base=1) == links


def test_what_is_sure_is_possible_however_it_is_written() -> None:
    assert read_pharaoh(["0-0"], base=0) == read_pharaoh(["0-0 0p0"], base=0)
    assert read_wpt(["1 1 1 P", "1 1 1 S"], sentences=1) == read_wpt(["1 1 1"], sentences=1)
    with pytest.raises(ValueError, match="possible: got sure links that are not possible, expected all sure links"):
        Links(frozenset({(0, 0)}), frozenset())


def test_fields_beyond_the_mark_and_empty_lines_are_not_read() -> None:
    assert read_wpt(["", "0002 1 3 S 0.9"], sentences=2) == [Links(), Links.of({(0, 2)})]


def test_error_rate_by_hand() -> None:
    # A: 5 links; S: 1-1 3-4 | 1-1 | 1-2, 4 links; A in S: 1-1, 1-2; A in P: those and 2p2, 2p1.
    score = corpus_aer(FOUND, GOLD, found_base=0, gold_base=1)
    assert float(score) == pytest.approx(1 - (2 + 4) / (5 + 4))
    assert score.details["precision"] == 4 / 5
    assert score.details["recall"] == 2 / 4
    assert not score.higher
    assert "level:corpus|found_base:0|gold_base:1|transpose:False|sentences:3" in score.signature


def test_files_are_read_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "found").write_text("".join(FOUND))
    (tmp_path / "gold").write_text("".join(GOLD))
    with (tmp_path / "found").open() as found, (tmp_path / "gold").open() as gold:
        assert corpus_aer(found, gold, found_base=0, gold_base=1) == corpus_aer(FOUND, GOLD, found_base=0, gold_base=1)


@given(corpus)
def test_a_sentence_has_the_rate_of_nltk_and_a_corpus_adds_counts(drawn: list[tuple[Links, Links]]) -> None:
    metrics = pytest.importorskip("nltk.translate.metrics")
    for found, gold in drawn:
        if found.sure or gold.sure:
            expected = metrics.alignment_error_rate(set(gold.sure), set(found.sure), set(gold.possible))
            assert counted([found], [gold]).error_rate == pytest.approx(expected)
    found_all, gold_all = ([pair[k] for pair in drawn] for k in (0, 1))
    whole = counted(found_all, gold_all)
    assert whole == counted(found_all[:2], gold_all[:2]) + counted(found_all[2:], gold_all[2:])
    lines = write_pharaoh(found_all, base=0), write_pharaoh(gold_all, base=1)
    assert float(corpus_aer(*lines, found_base=0, gold_base=1)) == whole.error_rate


@given(corpus)
def test_direction(drawn: list[tuple[Links, Links]]) -> None:
    found, gold = ([pair[k] for pair in drawn] for k in (0, 1))
    turned = write_pharaoh([links.transposed() for links in found], base=1)
    score = corpus_aer(turned, write_pharaoh(gold, base=1), found_base=1, gold_base=1, transpose=True)
    assert float(score) == counted(found, gold).error_rate
    assert "transpose:True" in score.signature


def test_the_gold_itself_is_without_error_and_what_is_not_possible_is_all_error() -> None:
    gold = ["1-1 2-2", "1-2"]
    assert float(corpus_aer(gold, gold, found_base=1, gold_base=1)) == 0.0
    assert float(corpus_aer(["0-1", "1-0"], gold, found_base=0, gold_base=1)) == 1.0
    assert float(corpus_aer([""], [""], found_base=0, gold_base=0)) == 0.0


def test_bases_must_be_said() -> None:
    with pytest.raises(TypeError, match="found_base"):
        corpus_aer(FOUND, GOLD, gold_base=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="base"):
        read_pharaoh(FOUND)  # type: ignore[call-arg]
    for wrong in (2, -1, None, True):
        with pytest.raises(ValueError, match="found_base: got .*, expected 0 or 1, the number of the first word"):
            corpus_aer(FOUND, GOLD, found_base=wrong, gold_base=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gold_base: got 3, expected 0 or 1"):
        corpus_aer(FOUND, GOLD, found_base=0, gold_base=3)


def test_a_wrong_base_is_seen_where_it_can_be() -> None:
    with pytest.raises(
        ValueError, match="found_lines, line 1: got '0-0', expected words counted from 1. Fix: found_base=0"
    ):
        corpus_aer(FOUND, GOLD, found_base=1, gold_base=1)
    with pytest.raises(ValueError, match="gold_lines, line 1: got '0-0', .* from 1. Fix: gold_base=0, if words"):
        corpus_aer(FOUND, FOUND, found_base=0, gold_base=1)
    with pytest.raises(ValueError, match="lines, line 1: got '0-0', .* from 1. Fix: base=0, if words"):
        read_pharaoh(FOUND, base=1)
    lengths = [(3, 4), (1, 1), (2, 2)]
    assert float(corpus_aer(FOUND, GOLD, found_base=0, gold_base=1, lengths=lengths)) == pytest.approx(1 / 3)
    with pytest.raises(
        ValueError, match=r"gold, sentence 1: got a link \(3, 4\), .*expected words of 3 source and 4 target"
    ):
        corpus_aer(FOUND, GOLD, found_base=0, gold_base=0, lengths=lengths)
    with pytest.raises(ValueError, match=r"found, sentence 1: got a link \(2, 2\), .*another base, or transpose"):
        corpus_aer(FOUND, GOLD, found_base=0, gold_base=1, lengths=[(2, 4), (1, 1), (2, 2)])


def test_what_is_refused() -> None:
    options = {"found_base": 0, "gold_base": 1}
    with pytest.raises(ValueError, match="gold: got 2 sentences, expected as many as were found, 3"):
        corpus_aer(FOUND, GOLD[:2], **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lengths: got 2 sentences, expected as many as have links, 3"):
        corpus_aer(FOUND, GOLD, lengths=[(3, 4), (1, 1)], **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="found_lines: got str '0-0 1-1', expected lines, one a sentence. Fix: open"):
        corpus_aer("0-0 1-1", GOLD, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="found_lines, line 2: got a link that is only possible, expected i-j"):
        corpus_aer(["0-0", "0p0", ""], GOLD, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gold_lines, line 3: got '1:1', expected links such as 3-4 or 3p4"):
        corpus_aer(FOUND, ["", "", "1-1 1:1"], **options)  # type: ignore[arg-type]
    for wrong, message in (
        (None, "found_lines: got a NoneType"),
        ([b"0-0"], "line 1: got a bytes, .*open the file as text"),
    ):
        with pytest.raises(TypeError, match=message):
            corpus_aer(wrong, GOLD, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="line 1: got '9999.*, expected links such as"):
        read_pharaoh(["9" * 5000 + "-0"], base=0)
    with pytest.raises(ValueError, match="line 1: got '² 1 1 S', expected 'sentence source target'"):
        read_wpt(["² 1 1 S"], sentences=3)
    with pytest.raises(ValueError, match="lines, line 1: got '-1-2', expected links such as"):
        read_pharaoh(["-1-2"], base=0)


def test_what_is_refused_of_the_other_notation() -> None:
    with pytest.raises(ValueError, match="lines, line 2: got '1 1', expected 'sentence source target', then S or P"):
        read_wpt(["1 1 1", "1 1"], sentences=1)
    with pytest.raises(ValueError, match="lines, line 1: got '1 1 1 X'"):
        read_wpt(["1 1 1 X"], sentences=1)
    with pytest.raises(ValueError, match="lines, line 1: got sentence 2, expected 1 to 1"):
        read_wpt(["2 1 1"], sentences=1)
    with pytest.raises(ValueError, match="lines, line 1: got sentence 0, expected 1 to 1"):
        read_wpt(["0 1 1"], sentences=1)
    with pytest.raises(
        ValueError, match="lines, line 1: got a link 0 2 to nothing, expected words from 1. Fix: drop_null"
    ):
        read_wpt(["1 0 2"], sentences=1)
    assert read_wpt(["1 0 2", "1 2 2"], sentences=1, drop_null=True) == [Links.of({(1, 1)})]
