"""Are our alignment error rates the known ones? Link files of known systems against the gold links of the Hansards.

The English-French test set of the NAACL 2003 workshop (447 sentences, 4038 sure and 17438 possible links), aligned by fast_align, by
GIZA++ in both directions and with their usual combinations, and by awesome-align. Each row has our rate beside the known one. The last
rows are what the same files give when they are misread, in the ways that link files are.

The files are not part of the project: `REGARD_DATA` names the folder with `enfr.gold`, `enfr.src-tgt` and `systems`, or one that holds
it as `word_alignment`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regard._errors import refusal
from regard.bench.measure import Row
from regard.evaluate.links import corpus_aer

QUESTION = "alignment-error"
# File, what made it, whether it is written target-source, and its known rate in per cent.
SYSTEMS = (
    ("fastalign.enfr.talp", "fast_align, forward", False, 16.4),
    ("fastalign.enfr.reverse.talp", "fast_align, reverse", True, 15.9),
    ("fastalign.enfr.intersection.talp", "fast_align, intersection", False, 11.2),
    ("fastalign.enfr.union.talp", "fast_align, union", False, 19.5),
    ("fastalign.enfr.grow-diagonal.talp", "fast_align, grow-diagonal", False, 10.5),
    ("fastalign.enfr.grow-diagonal-final.talp", "fast_align, grow-diagonal-final", False, 12.1),
    ("giza.enfr.talp", "GIZA++, forward", False, 8.0),
    ("giza.enfr.reverse.talp", "GIZA++, reverse", True, 9.8),
    ("giza.enfr.intersection.talp", "GIZA++, intersection", False, 7.6),
    ("giza.enfr.union.talp", "GIZA++, union", False, 9.9),
    ("giza.enfr.grow-diagonal.talp", "GIZA++, grow-diagonal", False, 5.9),
    ("giza.enfr.grow-diagonal-final.talp", "GIZA++, grow-diagonal-final", False, 6.2),
    ("awesome-align.enfr.links", "awesome-align", False, 4.1),
)


def folder_of(path: str | Path | None) -> Path:
    """Where the gold links and the systems lie."""
    if path is None:
        fix = "Fix: set REGARD_DATA to the folder that holds enfr.gold, enfr.src-tgt and systems."
        raise ValueError(refusal("path", None, "where the alignments of the Hansards lie", fix))
    found = next(
        (place for place in (Path(path), Path(path) / "word_alignment") if (place / "enfr.gold").is_file()), None
    )
    if found is None:
        raise ValueError(refusal("path", repr(str(path)), "a folder with enfr.gold, or with word_alignment/enfr.gold"))
    return found


def rows(path: str | Path | None = None) -> Iterator[Row]:
    """One a system.

    Args:
        path: of the folder; that of `REGARD_DATA` when not given.
    """
    folder = folder_of(os.environ.get("REGARD_DATA") if path is None else path)
    gold = _lines(folder / "enfr.gold")
    lengths = [_lengths(line) for line in _lines(folder / "enfr.src-tgt")]
    systems = folder / "systems"
    for file, what, transpose, known in SYSTEMS:
        options: dict[str, Any] = {"found_base": 0, "gold_base": 1, "transpose": transpose, "lengths": lengths}
        yield _row("as it is written", what, known, _lines(systems / file), gold, options)
    best = _lines(systems / "awesome-align.enfr.links")
    right = {"found_base": 0, "gold_base": 1}
    all_sure = [line.replace("p", "-") for line in gold]
    sure_alone = [" ".join(link for link in line.split() if "p" not in link) for line in gold]
    yield _row("gold counted from 0", "awesome-align", None, best, gold, {"found_base": 0, "gold_base": 0})
    yield _row("possible links as sure", "awesome-align", None, best, all_sure, right)
    yield _row("possible links dropped", "awesome-align", None, best, sure_alone, right)
    reverse = _lines(systems / "fastalign.enfr.reverse.talp")
    yield _row("source and target exchanged", "fast_align, reverse", None, reverse, gold, right)


def _row(
    case: str, what: str, known: float | None, found: list[str], gold: list[str], options: Mapping[str, Any]
) -> Row:
    score = corpus_aer(found, gold, **options)
    beside = "" if known is None else f", known {known} %"
    note = "AER {:.1f} %{}; precision {precision:.3f}, recall {recall:.3f}".format(
        100 * float(score), beside, **score.details
    )
    extra = {"aer": float(score), "known": known and known / 100, "signature": score.signature, **score.details}
    return Row(QUESTION, f"En-Fr, {len(gold)} sentences, {case}", what, note=note, extra=extra)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _lengths(line: str) -> tuple[int, int]:
    source, target = line.split(" ||| ")
    return len(source.split()), len(target.split())
