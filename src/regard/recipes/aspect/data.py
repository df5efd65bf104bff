"""Opinions about a target in a sentence: read from files, or made up."""

from __future__ import annotations

import random
from typing import NamedTuple

from regard._errors import refusal
from regard.recipes.data import Folder
from regard.recipes.made import shared_out
from regard.recipes.text import ordinary

CLASSES = ("negative", "neutral", "positive")
SETS = (
    *("semeval14_restaurant", "semeval14_laptop", "semeval15_restaurant", "semeval16_restaurant"),
    *("twitter_acl14", "haabsa2015_restaurant", "haabsa2016_restaurant"),
)
_MARK = "$T$"
_LABELS = {"-1": 0, "0": 1, "1": 2}
# Every so many sentences of the training part, one is for validation.
_SHARE = 10

_TARGETS = ("food", "staff", "wine", "music", "price", "table", "soup", "service", "view", "bar")
_SAID = (
    ("awful", "rude", "cold", "stale", "terrible", "bad"),
    ("wooden", "usual", "local", "round", "ordinary", "small"),
    ("great", "kind", "fresh", "lovely", "tasty", "good"),
)


class Opinion(NamedTuple):
    """A sentence, in which the words from `start` to before `end` are the target, and what is said of it."""

    words: list[str]
    start: int
    end: int
    polarity: int | None = None


def read(data: str, name: str) -> dict[str, list[Opinion]]:
    """The opinions of a data folder by split.

    Sentences with several targets stand once for each. One sentence in ten of the training part is for validation, with all its
    targets: otherwise the answer to one would have been seen with another.
    """
    files = [f"{name}.train.raw", f"{name}.test.raw"]
    folder = Folder(data, *files)
    train, test = (_opinions(folder, file) for file in files)
    sentences = {sentence: k for k, sentence in enumerate(dict.fromkeys(tuple(o.words) for o in train))}
    parts: dict[str, list[Opinion]] = {"train": [], "validation": [], "test": test}
    for opinion in train:
        parts["train" if sentences[tuple(opinion.words)] % _SHARE else "validation"].append(opinion)
    return parts


def _opinions(folder: Folder, file: str) -> list[Opinion]:
    lines = [line.strip() for line in folder.lines(file)]
    if len(lines) % 3:
        got = f"{folder.path / file}: {len(lines)} lines"
        raise ValueError(refusal("data", got, "three an example: a sentence, its target, -1, 0 or 1"))
    found = []
    for k in range(0, len(lines), 3):
        sentence, target, label = lines[k : k + 3]
        if _MARK not in sentence or not target or label not in _LABELS:
            got = f"{folder.path / file}, line {k + 1}: {sentence[:40]!r}, {target!r}, {label!r}"
            raise ValueError(refusal("data", got, f"a sentence with {_MARK}, its target, and -1, 0 or 1"))
        found.append(_opinion(sentence, target, _LABELS[label]))
    return found


def _opinion(sentence: str, target: str, polarity: int | None = None) -> Opinion:
    """Of a sentence with a mark in place of its target; where the target comes again, it is a word like others."""
    before, _, after = sentence.partition(_MARK)
    left, middle = ordinary(before.replace(_MARK, target)), ordinary(target)
    return Opinion(
        [*left, *middle, *ordinary(after.replace(_MARK, target))], len(left), len(left) + len(middle), polarity
    )


def bracketed(text: str) -> Opinion:
    """A sentence of a user's own, its target in brackets.

    Example:
        >>> bracketed("the [red wine] was cold")
        Opinion(words=['the', 'red', 'wine', 'was', 'cold'], start=1, end=3, polarity=None)
    """
    before, opened, rest = text.partition("[")
    target, closed, after = rest.partition("]")
    if not opened or not closed or not target.strip():
        expected = "a sentence with its target in brackets"
        raise ValueError(refusal("text", repr(text), expected, "Fix: the [food] was great."))
    return _opinion(f"{before} {_MARK} {after}", target)


def made_up(count: int, seed: int) -> dict[str, list[Opinion]]:
    """Sentences about two things, of each of which something else is said; one of them is the target.

    Example:
        >>> opinion = made_up(1, seed=0)["train"][0]
        >>> opinion.words[opinion.start] in _TARGETS
        True
    """
    return shared_out(_drawn, lambda opinion: " ".join(opinion.words), count, seed)


def _drawn(draw: random.Random) -> Opinion:
    things = draw.sample(_TARGETS, 2)
    polarities = draw.sample(range(len(CLASSES)), 2)
    said = [draw.choice(_SAID[polarity]) for polarity in polarities]
    words: list[str] = []
    places = []
    for k, (thing, word) in enumerate(zip(things, said, strict=True)):
        words += ["but"] if k else []
        # What is said comes before the thing or after it.
        before = draw.random() < 0.5
        places.append(len(words) + (2 if before else 1))
        words += ["the", word, thing] if before else ["the", thing, draw.choice(("is", "was", "seems")), word]
    asked = draw.randrange(2)
    return Opinion(words, places[asked], places[asked] + 1, polarities[asked])
