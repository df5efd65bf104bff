"""Pieces of words: byte-pair encoding, learnt from the training text."""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from regard._errors import refusal

UNKNOWN = "<unknown>"
BLANK = "▁"  # stands for the blank before a word, so that pieces can be put together again
_TOKEN = re.compile(r"\s?\w+|\s?[^\w\s]")


def tokens_of(text: str) -> list[str]:
    """Words and marks, each with the blank before it; together they are the text.

    Example:
        >>> tokens_of("A dog, there.")
        ['▁A', '▁dog', ',', '▁there', '.']
    """
    return [re.sub(r"^\s", BLANK, token) for token in _TOKEN.findall(" " + " ".join(text.split()))]


class Subwords:
    """Byte-pair encoding (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909).

    A word is its characters, and then, in the order in which they were learnt, every pair of neighbours that is one becomes one
    piece. A character that was never seen is a piece by itself, whose number is that of the unknown.

    Args:
        characters: of the training text.
        merges: pairs of pieces that become one, the first learnt first.

    Example:
        >>> pieces = Subwords.learnt(["low lower lowest", "slow slower"], merges=2)
        >>> pieces.cut("lower")
        ['▁', 'low', 'e', 'r']
        >>> pieces.joined(pieces.cut("A slow one")), pieces.numbers("A")
        ('A slow one', [0])
    """

    def __init__(self, characters: Sequence[str], merges: Iterable[Sequence[str]]) -> None:
        self.characters = list(characters)
        self.merges = [(first, second) for first, second in merges]
        self.rank = {pair: k for k, pair in enumerate(self.merges)}
        joined = (first + second for first, second in self.merges)
        self.pieces = list(dict.fromkeys([UNKNOWN, *self.characters, *joined]))
        self.number = {piece: k for k, piece in enumerate(self.pieces)}
        self._cut: dict[str, list[str]] = {}

    def __len__(self) -> int:
        return len(self.pieces)

    @staticmethod
    def learnt(texts: Iterable[str], merges: int) -> Subwords:
        """The commonest pair becomes one piece, so many times, or until none occurs twice."""
        if merges < 0:
            raise ValueError(refusal("merges", merges, "a whole number >= 0"))
        counts = Counter(token for text in texts for token in tokens_of(text))
        letters = Counter[str]()
        for token, count in counts.items():
            for letter in token:
                letters[letter] += count
        characters = sorted(letters, key=lambda letter: (-letters[letter], letter))
        return Subwords(characters, _merges(counts, merges))

    def cut(self, text: str) -> list[str]:
        """Pieces of a text."""
        return [piece for token in tokens_of(text) for piece in self.cut_token(token)]

    def cut_token(self, token: str) -> list[str]:
        """Pieces of a word or mark."""
        found = self._cut.get(token)
        if found is None:
            found = self._cut[token] = self._merged(list(token))
        return found

    def _merged(self, pieces: list[str]) -> list[str]:
        while len(pieces) > 1:
            last = len(self.rank)
            rank, at = min((self.rank.get((pieces[k], pieces[k + 1]), last), k) for k in range(len(pieces) - 1))
            if rank == last:
                break
            pieces = [*pieces[:at], pieces[at] + pieces[at + 1], *pieces[at + 2 :]]
        return pieces

    def numbers(self, pieces: Iterable[str]) -> list[int]:
        """Of pieces; 0 for what is unknown."""
        return [self.number.get(piece, 0) for piece in pieces]

    def joined(self, pieces: Iterable[str]) -> str:
        """The text that pieces spell."""
        return "".join(pieces).replace(BLANK, " ").strip()


def _merges(counts: Counter[str], merges: int) -> list[tuple[str, str]]:
    """The pairs, by a heap of counts that is put right when an entry comes to the top."""
    words = [list(token) for token in counts]
    often = list(counts.values())
    pairs: Counter[tuple[str, str]] = Counter()
    where: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for k, word in enumerate(words):
        for pair in pairwise(word):
            pairs[pair] += often[k]
            where[pair].add(k)
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    found: list[tuple[str, str]] = []
    while heap and len(found) < merges:
        count, best = heapq.heappop(heap)
        if -count != pairs[best]:
            continue  # an entry of before; the right one is in the heap too
        if -count < 2:
            break
        found.append(best)
        changed = set()
        for k in sorted(where.pop(best)):
            for pair in pairwise(words[k]):
                pairs[pair] -= often[k]
                changed.add(pair)
            words[k] = _joined_in(words[k], best)
            for pair in pairwise(words[k]):
                pairs[pair] += often[k]
                where[pair].add(k)
                changed.add(pair)
        for pair in sorted(changed):
            if pairs[pair] > 0:
                heapq.heappush(heap, (-pairs[pair], pair))
    return found


def _joined_in(word: list[str], pair: tuple[str, str]) -> list[str]:
    """A word in which a pair is one piece, from the left."""
    found, k = [], 0
    while k < len(word):
        if k + 1 < len(word) and (word[k], word[k + 1]) == pair:
            found.append(word[k] + word[k + 1])
            k += 2
        else:
            found.append(word[k])
            k += 1
    return found
