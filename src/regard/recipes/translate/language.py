"""A language pair made up, small and with known alignments: words are inflected, and stand in another order.

The source is like English: `the dogs see a red house near the river .` In the target a noun phrase is article, noun, adjective, all
with the ending of the noun's gender and number; a preposition stands after its noun phrase; and the verb is the last word.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from regard.recipes.made import shared_out

# Stem and gender in the target.
NOUNS = {
    **{
        "dog": ("kan", "o"),
        "cat": ("mirr", "a"),
        "house": ("dom", "o"),
        "river": ("vodal", "a"),
        "tree": ("lign", "o"),
    },
    **{"child": ("pip", "o"), "woman": ("gin", "a"), "man": ("vir", "o"), "bird": ("pluv", "a"), "boat": ("nav", "a")},
    **{"stone": ("petr", "o"), "car": ("rul", "a"), "table": ("mens", "a"), "book": ("libr", "o")},
}
ADJECTIVES = {"red": "rosh", "small": "tin", "big": "grand", "old": "vek", "green": "verd", "young": "yun"}
# Third person, plural, past; and the stem in the target.
VERBS = {
    **{"see": ("sees", "see", "saw", "vid"), "find": ("finds", "find", "found", "trov")},
    **{"like": ("likes", "like", "liked", "plak"), "draw": ("draws", "draw", "drew", "desen")},
    **{"hold": ("holds", "hold", "held", "ten"), "hear": ("hears", "hear", "heard", "aud")},
}
PREPOSITIONS = {"near": "apu", "behind": "retro", "with": "kum", "under": "sub"}
# Endings of articles, by word of the source.
ARTICLES = {"the": "l", "a": "un", "two": "du"}


class Word(NamedTuple):
    """A word of the target, and which words of the source it comes from."""

    text: str
    sure: tuple[int, ...]
    possible: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pair:
    """A sentence in both languages."""

    source: list[str]
    target: list[Word]

    @property
    def texts(self) -> tuple[str, str]:
        """As they are written."""
        return _written(self.source), _written([word.text for word in self.target])


def _written(words: list[str]) -> str:
    return " ".join(words[:-1]) + words[-1]


def sentence(draw: random.Random) -> Pair:
    """One sentence: subject, verb, object, and now and then where."""
    source: list[str] = []
    subject, many = _phrase(draw, source)
    verb = draw.choice(sorted(VERBS))
    third, plural, past, stem = VERBS[verb]
    was = draw.random() < 0.4
    source.append(past if was else plural if many else third)
    says = Word(stem + ("il" if was else "ent" if many else "et"), (len(source) - 1,), () if was else subject[1].sure)
    thing, _ = _phrase(draw, source)
    where: list[Word] = []
    if draw.random() < 0.5:
        preposition = draw.choice(sorted(PREPOSITIONS))
        source.append(preposition)
        after = Word(PREPOSITIONS[preposition], (len(source) - 1,))
        where = [*_phrase(draw, source)[0], after]
    source.append(".")
    return Pair(source, [*subject, *where, *thing, says, Word(".", (len(source) - 1,))])


def _phrase(draw: random.Random, source: list[str]) -> tuple[list[Word], bool]:
    """A noun phrase, appended to the source: its words in the target, and whether there are several of it."""
    article, noun = draw.choice(sorted(ARTICLES)), draw.choice(sorted(NOUNS))
    stem, gender = NOUNS[noun]
    many = article == "two" or (article == "the" and draw.random() < 0.4)
    ending = gender + ("s" if many else "")
    said = draw.choice(sorted(ADJECTIVES)) if draw.random() < 0.5 else None
    at = len(source)
    source += [article, *([said] if said else []), _plural(noun) if many else noun]
    place = len(source) - 1
    found = [Word(ARTICLES[article] + ending, (at,), (place,)), Word(stem + ending, (place,))]
    if said:
        found.append(Word(ADJECTIVES[said] + ending, (at + 1,), (place,)))
    return found, many


def _plural(noun: str) -> str:
    return {"child": "children", "woman": "women", "man": "men"}.get(noun, noun + "s")


def pairs(count: int, seed: int) -> dict[str, list[Pair]]:
    """Sentences by split, so many for training; the same for the same seed, and none in two splits.

    Example:
        >>> pair = pairs(1, seed=0)["train"][0]
        >>> pair.source[-1], pair.target[-1].text
        ('.', '.')
    """
    return shared_out(sentence, lambda pair: " ".join(pair.source), count, seed)
