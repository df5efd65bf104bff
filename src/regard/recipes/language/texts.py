"""Texts: of a data folder, or made up by a small grammar."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from regard._errors import refusal
from regard.recipes.data import Folder

_WORDS = re.compile(r"\S+|\n")
_ONE = (
    ("the dog", "the cat", "a child", "the king"),
    ("sees", "hears", "follows", "knows"),
    ("runs", "sleeps", "sings", "waits"),
)
_MANY = (
    ("the dogs", "the cats", "two children", "the kings"),
    ("see", "hear", "follow", "know"),
    ("run", "sleep", "sing", "wait"),
)


def read_texts(data: str, name: str) -> dict[str, str]:
    """Texts by split.

    `shakespeare`: `input.txt`, nine tenths, a twentieth and a twentieth of it in order. `wikitext2`: `valid.txt`, of which the last tenth
    validates, and `test.txt`; the training part of that set is not used.
    """
    if name == "shakespeare":
        text = Folder(data, "input.txt").text("input.txt")
        parts = _cut(text, (0.9, 0.05))
        return dict(zip(("train", "validation", "test"), parts, strict=True))
    folder = Folder(data, "valid.txt", "test.txt")
    train, validation = _cut(folder.text("valid.txt"), (0.9,))
    return {"train": train, "validation": validation, "test": folder.text("test.txt")}


def _cut(text: str, shares: Sequence[float]) -> list[str]:
    """Parts of a text in order; the last is what is left."""
    if len(text) < 100:
        raise ValueError(refusal("data", f"a text of {len(text)} characters", "a hundred or more"))
    parts, begin = [], 0
    for share in shares:
        end = begin + int(share * len(text))
        parts.append(text[begin:end])
        begin = end
    return [*parts, text[begin:]]


def made_up(sentences: int, seed: int) -> dict[str, str]:
    """Sentences in which a verb agrees with a noun that may stand far before it.

    Example:
        >>> made_up(3, seed=0)["train"].count(".")
        3
    """
    found = {}
    for split, count in {
        "train": sentences,
        "validation": max(1, sentences // 10),
        "test": max(1, sentences // 10),
    }.items():
        draw = random.Random(f"{seed} {split}")
        found[split] = "".join(f"{_sentence(draw)}.\n" for _ in range(count))
    return found


def _sentence(draw: random.Random) -> str:
    nouns, verbs, ends = draw.choice((_ONE, _MANY))
    inner = ""
    if draw.random() < 0.5:
        # Another noun, of either number, between the first one and its verb.
        inner = f" that {draw.choice(verbs)} {draw.choice(draw.choice((_ONE, _MANY))[0])}"
    return f"{draw.choice(nouns)}{inner} {draw.choice(ends)}"


def pieces_of(text: str, unit: str) -> list[str]:
    """Characters, or words with the ends of lines among them."""
    return list(text) if unit == "character" else _WORDS.findall(text)
