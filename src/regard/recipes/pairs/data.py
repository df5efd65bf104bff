"""Pairs of texts: read from files, or made up."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from regard._errors import refusal
from regard.recipes.data import Folder, numbered
from regard.recipes.made import shared_out
from regard.recipes.text import ordinary, separate_words

# The set whose pairs are ranked: the candidates of a question.
RANKED = "wikiqa"
CLASSES = {
    "sick": ("contradiction", "neutral", "entailment"),
    "snli": ("contradiction", "neutral", "entailment"),
    RANKED: ("wrong", "right"),
}
# Every so many premises of the part that SNLI is trained on, one is for validation.
_SHARE = 10

_KINDS = {
    "animal": ("dog", "cat", "horse", "cow"),
    "person": ("man", "woman", "child", "nurse"),
    "vehicle": ("car", "bus", "truck", "van"),
}
_DOES = ("moves", "waits", "turns", "stops")
_COLOURS = ("red", "white", "black", "brown")
_WHERE = ("in the park", "by the river", "near a house", "on the road", "at night")


class Pair(NamedTuple):
    """Two texts, the class of the pair, and where pairs are ranked the number of the question that they share."""

    first: list[str]
    second: list[str]
    label: int | None = None
    group: int = 0


def read(data: str, name: str) -> dict[str, list[Pair]]:
    """The pairs of a data folder by split."""
    return {"sick": _sick, "snli": _snli, RANKED: _wikiqa}[name](data)


def _sick(data: str) -> dict[str, list[Pair]]:
    files = {"train": "SICK_train.txt", "validation": "SICK_trial.txt", "test": "SICK_test_annotated.txt"}
    folder = Folder(data, *files.values())
    found: dict[str, list[Pair]] = {}
    for split, file in files.items():
        found[split] = []
        for number, line in enumerate(folder.lines(file)[1:], 2):
            cells = line.split("\t")
            where = f"{folder.path / file}, line {number}"
            if len(cells) != 5:
                raise ValueError(refusal("data", f"{where}: {len(cells)} columns", "5, between tabulators"))
            label = _class(cells[4].strip().lower(), "sick", where)
            found[split].append(Pair(separate_words(cells[1]), separate_words(cells[2]), label))
    return found


def _snli(data: str) -> dict[str, list[Pair]]:
    """Trained on the official development part, of which one premise in ten is for validation."""
    file = "snli_esnli_dev_test.jsonl"
    folder = Folder(data, file)
    found: dict[str, list[Pair]] = {"train": [], "validation": [], "test": []}
    premises: dict[str, int] = {}
    for number, row in enumerate(folder.rows(file), 1):
        where = f"{folder.path / file}, line {number}"
        texts: list[Any] = [row.get(key) for key in ("premise", "hypothesis", "label", "split")]
        if not all(isinstance(text, str) for text in texts) or row["split"] not in ("dev", "test"):
            expected = "texts under premise, hypothesis and label, and a split, dev or test"
            raise ValueError(refusal("data", f"{where}: {sorted(row)}", expected))
        pair = Pair(separate_words(texts[0]), separate_words(texts[1]), _class(texts[2], "snli", where))
        if row["split"] == "test":
            found["test"].append(pair)
        else:
            place = premises.setdefault(texts[0], len(premises))
            found["train" if place % _SHARE else "validation"].append(pair)
    return found


def _wikiqa(data: str) -> dict[str, list[Pair]]:
    parts = {"train": "train", "validation": "dev", "test": "test"}
    ends = ("a.toks", "b.toks", "sim.txt", "id.txt")
    folder = Folder(data, *(f"{part}.{end}" for part in parts.values() for end in ends))
    found: dict[str, list[Pair]] = {}
    for split, part in parts.items():
        columns = [folder.lines(f"{part}.{end}") for end in ends]
        if len({len(column) for column in columns}) > 1:
            got = ", ".join(f"{part}.{end}: {len(column)}" for end, column in zip(ends, columns, strict=True))
            raise ValueError(refusal("data", f"lines of {got}", "equally many"))
        questions: dict[str, int] = {}
        found[split] = []
        for number, (question, answer, label, asked) in enumerate(zip(*columns, strict=True), 1):
            right = numbered(label.strip(), CLASSES[RANKED], f"{folder.path / part}.sim.txt, line {number}")
            group = questions.setdefault(asked.strip(), len(questions))
            found[split].append(Pair(ordinary(question), ordinary(answer), right, group))
    return found


def _class(label: str, name: str, where: str) -> int:
    if label not in CLASSES[name]:
        raise ValueError(refusal("data", f"{where}: {label!r}", "one of " + ", ".join(CLASSES[name])))
    return CLASSES[name].index(label)


def made_up(count: int, seed: int) -> dict[str, list[Pair]]:
    """What one does, and a claim: of the same one, or of its kind, it is true or false; of another, it may be either.

    Example:
        >>> pair = made_up(1, seed=0)["train"][0]
        >>> pair.label in (0, 1, 2)
        True
    """
    return shared_out(_drawn, lambda pair: " ".join([*pair.first, "?", *pair.second]), count, seed)


def _drawn(draw: random.Random) -> Pair:
    label = draw.randrange(len(CLASSES["sick"]))
    kind, other = draw.sample(sorted(_KINDS), 2)
    who = draw.choice(_KINDS[kind])
    does, instead = draw.sample(_DOES, 2)
    first = ["the", draw.choice(_COLOURS), who, does, *draw.choice(_WHERE).split()]
    # Neutral claims are about another kind, doing the same or not.
    subject, claimed = {
        0: (kind, instead),
        1: (other, draw.choice((does, instead))),
        2: (kind, does),
    }[label]
    named = (who if subject == kind else draw.choice(_KINDS[subject])) if draw.random() < 0.5 else subject
    return Pair(first, ["the", named, claimed], label)
