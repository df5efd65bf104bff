"""Byte-pair encoding: the merges are those of the plain algorithm, and pieces spell the text."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from regard.recipes.subwords import Subwords, tokens_of


def plainly(counts: Counter[str], merges: int) -> list[tuple[str, str]]:
    """The paper's loop: count all pairs anew, join the commonest; of equally common ones the first in the alphabet."""
    words = {token: list(token) for token in counts}
    found = []
    while len(found) < merges:
        pairs: Counter[tuple[str, str]] = Counter()
        for token, pieces in words.items():
            for pair in pairwise(pieces):
                pairs[pair] += counts[token]
        if not pairs or max(pairs.values()) < 2:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        found.append(best)
        for token, pieces in words.items():
            joined: list[str] = []
            k = 0
            while k < len(pieces):
                if tuple(pieces[k : k + 2]) == best:
                    joined.append("".join(best))
                    k += 2
                else:
                    joined.append(pieces[k])
                    k += 1
            words[token] = joined
    return found


def test_merges_are_those_of_the_plain_loop() -> None:
    draw = random.Random(5)
    texts = [" ".join("".join(draw.choices("abc", k=draw.randint(1, 9))) for _ in range(7)) for _ in range(31)]
    counts = Counter(token for text in texts for token in tokens_of(text))
    assert Subwords.learnt(texts, 97).merges == plainly(counts, 97)


def test_pieces_of_a_training_word_are_those_it_was_merged_to() -> None:
    pieces = Subwords.learnt(["aaa aaa aaab ab ab ab"], 11)
    assert pieces.cut("aaa ab") == ["▁aaa", "▁ab"]


@pytest.mark.parametrize("text", ["A dog, there.", "  two   blanks ", "naïve façade №5!", "don't  (stop)", ""])
def test_pieces_spell_the_text(text: str) -> None:
    pieces = Subwords.learnt(["the dog is there", "stop it there"], 13)
    assert pieces.joined(pieces.cut(text)) == " ".join(text.split())


def test_numbers_are_those_of_known_pieces() -> None:
    pieces = Subwords.learnt(["aab aab"], 1)
    cut = pieces.cut("aax")
    numbers = pieces.numbers(cut)
    assert [pieces.pieces[k] for k in numbers[:-1]] == cut[:-1]
    assert numbers[-1] == 0, "x was never seen"
    assert len(pieces) == len(set(pieces.pieces))


def test_no_merges_leave_characters() -> None:
    assert Subwords.learnt(["ab ab"], 0).cut("ab") == ["▁", "a", "b"]
    with pytest.raises(ValueError, match="merges: got -1"):
        Subwords.learnt(["ab"], -1)
