"""The ten words, and how they are said."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from regard.evaluate.outer import EditCounts

LEXICON = {
    "zero": ("z", "iy", "r", "ow"),
    "one": ("w", "ah", "n"),
    "two": ("t", "uw"),
    "three": ("th", "r", "iy"),
    "four": ("f", "ao", "r"),
    "five": ("f", "ay", "v"),
    "six": ("s", "ih", "k", "s"),
    "seven": ("s", "eh", "v", "ah", "n"),
    "eight": ("ey", "t"),
    "nine": ("n", "ay", "n"),
}
WORDS = tuple(LEXICON)
PHONES = tuple(sorted({phone for phones in LEXICON.values() for phone in phones}))
# The longest stretch of phones that may be one word: that of the longest word, and two that do not belong to it.
_LONGEST = max(map(len, LEXICON.values())) + 2


def said(words: Sequence[str]) -> list[str]:
    """Phones of words.

    Example:
        >>> said(["two", "eight"])
        ['t', 'uw', 'ey', 't']
    """
    return [phone for word in words for phone in LEXICON[word]]


def heard(phones: Sequence[str]) -> list[str]:
    """The words whose phones are nearest to these, by the fewest edits; of equally near ones the fewest words.

    Example:
        >>> heard(["t", "uw", "s", "eh", "v", "n"])
        ['two', 'seven']
    """
    best: list[tuple[int, list[str]]] = [(0, [])]
    for stop in range(1, len(phones) + 1):
        ways = []
        for start in range(max(0, stop - _LONGEST), stop):
            word, edits = _nearest(tuple(phones[start:stop]))
            ways.append((best[start][0] + edits, [*best[start][1], word]))
        best.append(min(ways, key=lambda way: (way[0], len(way[1]), way[1])))
    return best[-1][1]


@cache
def _nearest(phones: tuple[str, ...]) -> tuple[str, int]:
    edits = {word: EditCounts.of(phones, known).edits for word, known in LEXICON.items()}
    word = min(WORDS, key=lambda word: edits[word])
    return word, edits[word]
