"""The stored study of alignment error rates, on a corpus of two sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from regard.bench import QUESTIONS
from regard.bench.alignment_error import SYSTEMS, folder_of, rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inner = tmp_path / "word_alignment"
    (inner / "systems").mkdir(parents=True)
    (inner / "enfr.src-tgt").write_text("the cat  ||| le chat  \nno one here ||| personne ici\n")
    (inner / "enfr.gold").write_text("1-1 2-2\n1-1 2p1 3-2\n")
    for file, *_, transpose, _ in SYSTEMS:
        (inner / "systems" / file).write_text("0-0 1-1 \n0-0 1-2\n" if transpose else "0-0 1-1 \n0-0 2-1\n")
    return tmp_path


def test_every_system_is_scored_in_its_own_direction(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_DATA", str(folder))
    found = list(rows())
    assert list(rows(folder / "word_alignment")) == found
    as_written = [row for row in found if row.case.endswith("as it is written")]
    assert [row.what for row in as_written] == [what for _, what, _, _ in SYSTEMS]
    assert {row.extra["aer"] for row in as_written} == {0.0}
    assert as_written[0].extra["known"] == pytest.approx(0.164)


def test_misread_files_are_worse(folder: Path) -> None:
    wrong = {row.case.split(", ", 2)[2]: row.extra["aer"] for row in rows(folder) if "as it is" not in row.case}
    assert wrong == {
        "gold counted from 0": pytest.approx(1 - 3 / 8),
        "possible links as sure": pytest.approx(1 - 8 / 9),
        "possible links dropped": 0.0,
        "source and target exchanged": pytest.approx(1 - 6 / 8),
    }


def test_it_runs_by_name_alone() -> None:
    assert QUESTIONS["alignment-error"] == ("regard.bench.alignment_error", "data")


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGARD_DATA", raising=False)
    with pytest.raises(ValueError, match="path: got None, expected where the alignments .* Fix: set REGARD_DATA"):
        list(rows())
    with pytest.raises(ValueError, match="path: got .*, expected a folder with enfr.gold"):
        folder_of(tmp_path)
