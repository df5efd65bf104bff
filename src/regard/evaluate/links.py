r"""Alignment links in files: read, written, and scored against gold ones.

Pharaoh's notation has one line a sentence, `i-j` for a sure link from source word $i$ to target word $j$, and `ipj` for one that is
only possible. Some count words from 0 and some from 1, and nothing in a file says which: it must be said, for a wrong base is an error
rate ten times as high, not an error. The `.wa` notation of the WPT workshops has one line a link, `sentence i j S` or `P`, counts all
from 1, and links to 0 what has no counterpart.

Here words are counted from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from regard._errors import refusal
from regard.evaluate.alignment import AlignmentCounts
from regard.evaluate.outer.result import Score, signed

# No sentence has more words than nine digits tell.
_LINK = re.compile(r"(\d{1,9})([-p])(\d{1,9})")

_NUMBER = re.compile(r"\d{1,9}")


@dataclass(frozen=True)
class Links:
    """The links (source, target) of one sentence, counted from 0; what is sure is possible too.

    Example:
        >>> sentence = Links.of(sure=[(0, 0)], possible=[(1, 2)])
        >>> sorted(sentence.possible)
        [(0, 0), (1, 2)]
    """

    sure: frozenset[tuple[int, int]] = frozenset()
    possible: frozenset[tuple[int, int]] = frozenset()

    def __post_init__(self) -> None:
        if not self.sure <= self.possible:
            fix = "Fix: Links.of(sure, possible) adds them."
            raise ValueError(refusal("possible", "sure links that are not possible", "all sure links among them", fix))

    @staticmethod
    def of(sure: Iterable[tuple[int, int]], possible: Iterable[tuple[int, int]] = ()) -> Links:
        """With the sure links added to the possible ones."""
        certain = frozenset(sure)
        return Links(certain, certain | frozenset(possible))

    def transposed(self) -> Links:
        """From target to source."""
        return Links(frozenset((j, i) for i, j in self.sure), frozenset((j, i) for i, j in self.possible))


def read_pharaoh(lines: Iterable[str], *, base: int, name: str = "lines") -> list[Links]:
    """Links from lines such as `0-0 1p2`, one a sentence.

    Args:
        lines: of a file, or of a list; an empty one is a sentence without links.
        base: the number of the first word, 0 or 1.
        name: what errors call them.

    Example:
        >>> read_pharaoh(["1-1 2p3"], base=1)[0] == Links.of({(0, 0)}, {(1, 2)})
        True
    """
    return _read(lines, base, name, "base")


def write_pharaoh(links: Iterable[Links], *, base: int) -> list[str]:
    """One line a sentence, sure links first.

    Example:
        >>> write_pharaoh([Links.of({(0, 0)}, {(1, 2)}), Links()], base=1)
        ['1-1 2p3', '']
    """
    _check_base("base", base)
    return [
        " ".join(
            f"{i + base}{mark}{j + base}"
            for mark, some in (("-", sentence.sure), ("p", sentence.possible - sentence.sure))
            for i, j in sorted(some)
        )
        for sentence in links
    ]


def read_wpt(lines: Iterable[str], *, sentences: int, drop_null: bool = False) -> list[Links]:
    """Links from lines such as `0001 1 1 S`; a link without a mark is sure.

    Args:
        lines: of a file, or of a list; fields beyond the mark are not read.
        sentences: how many there are, for those at the end may have no links.
        drop_null: leave out links to word 0, which stands for nothing; else they are refused.

    Example:
        >>> read_wpt(["1 1 1 S", "3 2 1 P"], sentences=3)[2] == Links.of((), {(1, 0)})
        True
    """
    sure: list[set[tuple[int, int]]] = [set() for _ in range(sentences)]
    possible: list[set[tuple[int, int]]] = [set() for _ in range(sentences)]
    for k, line in enumerate(_lines("lines", lines), 1):
        fields = line.split()
        if not fields:
            continue
        where = f"lines, line {k}"
        if (
            len(fields) < 3
            or not all(_NUMBER.fullmatch(field) for field in fields[:3])
            or fields[3:4] not in ([], ["S"], ["P"])
        ):
            raise ValueError(refusal(where, repr(line.strip()), "'sentence source target', then S or P"))
        sentence, i, j = map(int, fields[:3])
        if not 1 <= sentence <= sentences:
            raise ValueError(refusal(where, f"sentence {sentence}", f"1 to {sentences}"))
        if i == 0 or j == 0:
            if not drop_null:
                fix = "Fix: drop_null=True leaves such links out."
                raise ValueError(refusal(where, f"a link {i} {j} to nothing", "words from 1", fix))
            continue
        (possible if fields[3:4] == ["P"] else sure)[sentence - 1].add((i - 1, j - 1))
    return [Links.of(s, p) for s, p in zip(sure, possible, strict=True)]


def write_wpt(links: Sequence[Links]) -> list[str]:
    """One line a link, sentences and words counted from 1.

    Example:
        >>> write_wpt([Links(), Links.of({(0, 0)}, {(1, 2)})])
        ['0002 1 1 S', '0002 2 3 P']
    """
    return [
        f"{k:04} {i + 1} {j + 1} {mark}"
        for k, sentence in enumerate(links, 1)
        for mark, some in (("S", sentence.sure), ("P", sentence.possible - sentence.sure))
        for i, j in sorted(some)
    ]


def counted(
    found: Sequence[Links], gold: Sequence[Links], *, lengths: Sequence[tuple[int, int]] | None = None
) -> AlignmentCounts:
    """The counts of a corpus.

    Args:
        found: links of each sentence.
        gold: the right ones.
        lengths: how many words source and target have, to refuse links beyond them.
    """
    if len(found) != len(gold):
        raise ValueError(refusal("gold", f"{len(gold)} sentences", f"as many as were found, {len(found)}"))
    if lengths is not None:
        if len(lengths) != len(gold):
            raise ValueError(refusal("lengths", f"{len(lengths)} sentences", f"as many as have links, {len(gold)}"))
        for name, links in (("found", found), ("gold", gold)):
            _check_lengths(name, links, lengths)
    pairs = zip(found, gold, strict=True)
    return sum((AlignmentCounts.of_links(a.possible, g.sure, g.possible) for a, g in pairs), AlignmentCounts())


def corpus_aer(
    found_lines: Iterable[str],
    gold_lines: Iterable[str],
    *,
    found_base: int,
    gold_base: int,
    transpose: bool = False,
    lengths: Sequence[tuple[int, int]] | None = None,
) -> Score:
    r"""Alignment error rate of a corpus, from lines in Pharaoh's notation (Och & Ney 2003, https://aclanthology.org/J03-1002).

    $$\mathrm{AER} = 1 - \frac{|A \cap S| + |A \cap P|}{|A| + |S|}$$

    with the counts of all sentences added first.

    Args:
        found_lines: what a system found, all links sure; a file or a list.
        gold_lines: the right links, sure and possible.
        found_base: the number of the first word in what was found, 0 or 1.
        gold_base: that of the gold links.
        transpose: whether what was found is written `target-source`.
        lengths: how many words source and target of each sentence have; links beyond them are refused, which is how a wrong base is seen.

    Example:
        >>> score = corpus_aer(["0-0 1-1", "0-1"], ["1-1 2p2", "1-1"], found_base=0, gold_base=1)
        >>> round(float(score), 4), score.details["precision"], score.details["recall"]
        (0.4, 0.6666666666666666, 0.5)
    """
    _check_base("gold_base", gold_base)
    found = _read(found_lines, found_base, "found_lines", "found_base")
    for k, sentence in enumerate(found, 1):
        if sentence.sure != sentence.possible:
            fix = "Fix: a system says of a link that it is there or not; write - or leave it out."
            raise ValueError(refusal(f"found_lines, line {k}", "a link that is only possible", "i-j", fix))
    gold = _read(gold_lines, gold_base, "gold_lines", "gold_base")
    counts = counted([sentence.transposed() for sentence in found] if transpose else found, gold, lengths=lengths)
    details = {
        "precision": counts.precision,
        "recall": counts.recall,
        "found": float(counts.found),
        "sure": float(counts.sure),
        "found_sure": float(counts.found_sure),
        "found_possible": float(counts.found_possible),
    }
    signature = signed(
        level="corpus", found_base=found_base, gold_base=gold_base, transpose=transpose, sentences=len(gold)
    )
    return Score("aer", counts.error_rate, signature, higher=False, details=details)


def _lines(argument: str, given: Any) -> Iterable[str]:
    if isinstance(given, str | bytes):
        fix = "Fix: open the file, or split the text into lines."
        raise TypeError(refusal(argument, f"{type(given).__name__} {given[:40]!r}", "lines, one a sentence", fix))
    if not isinstance(given, Iterable):
        raise TypeError(refusal(argument, f"a {type(given).__name__}", "lines, one a sentence"))
    for k, line in enumerate(given, 1):
        if not isinstance(line, str):
            fix = "Fix: open the file as text." if isinstance(line, bytes) else ""
            raise TypeError(refusal(f"{argument}, line {k}", f"a {type(line).__name__}", "a line of text", fix))
        yield line


def _read(lines: Iterable[str], base: int, name: str, argument: str) -> list[Links]:
    """Links from lines that errors call `name`, whose base came as `argument`."""
    _check_base(argument, base)
    return [
        Links.of(*_parsed(line, base, f"{name}, line {k}", argument)) for k, line in enumerate(_lines(name, lines), 1)
    ]


def _parsed(line: str, base: int, where: str, argument: str) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    links: dict[str, set[tuple[int, int]]] = {"-": set(), "p": set()}
    for written in line.split():
        match = _LINK.fullmatch(written)
        if match is None:
            raise ValueError(refusal(where, repr(written), "links such as 3-4 or 3p4"))
        i, j = int(match[1]) - base, int(match[3]) - base
        if i < 0 or j < 0:
            fix = f"Fix: {argument}=0, if words are counted from 0 here."
            raise ValueError(refusal(where, repr(written), f"words counted from {base}", fix))
        links[match[2]].add((i, j))
    return links["-"], links["p"]


def _check_base(argument: str, base: object) -> None:
    if isinstance(base, bool) or base not in (0, 1):
        raise ValueError(refusal(argument, base, "0 or 1, the number of the first word"))


def _check_lengths(name: str, links: Sequence[Links], lengths: Sequence[tuple[int, int]]) -> None:
    for k, (sentence, (n, m)) in enumerate(zip(links, lengths, strict=True), 1):
        beyond = sorted((i, j) for i, j in sentence.possible if i >= n or j >= m)
        if beyond:
            got = f"a link {beyond[0]}, counted from 0"
            fix = "Fix: another base, or transpose, if the links are written so."
            raise ValueError(refusal(f"{name}, sentence {k}", got, f"words of {n} source and {m} target ones", fix))
