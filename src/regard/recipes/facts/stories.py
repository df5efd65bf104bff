"""Stories with a question: of the bAbI tasks, or made up."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from regard._errors import refusal
from regard.recipes.data import Folder, lines_of, text_of
from regard.recipes.made import shared_out
from regard.recipes.text import words_of

SIZES = {"1k": "en", "10k": "en-10k"}
TASKS = range(1, 21)
MOST_NEEDED = 3
_NUMBERED = re.compile(r"(\d+) (.+)")

_PEOPLE = ("mary", "john", "sandra", "daniel")
_PLACES = ("garden", "kitchen", "office", "bedroom", "hallway", "bathroom")
_BOXES = ("box", "bag", "crate", "chest")
_THINGS = ("football", "apple", "milk", "key")
_GO = ("went to", "moved to", "travelled to")
_TAKE = ("took", "picked up", "got")


@dataclass(frozen=True)
class Story:
    """Facts in the order in which they happened, and a question about them.

    Attributes:
        facts: words of each.
        question: its words.
        answer: None where it is not known.
        needed: positions of the facts from which the answer follows; none where they are not known.
    """

    facts: Sequence[list[str]]
    question: list[str]
    answer: str | None = None
    needed: Sequence[int] = field(default_factory=list)


def sentence(text: str) -> list[str]:
    """Words without marks."""
    return [word for word in words_of(text) if word[0].isalnum()]


def read(data: str, task: int, size: str) -> dict[str, list[Story]]:
    """The stories of a bAbI task by split; those of the last tenth of the training stories validate.

    Files are `en/qa1_…_train.txt` and `en/qa1_…_test.txt`, those of ten thousand questions in `en-10k`; in folders or archives.
    """
    parts = {}
    files = Folder(data).collected(".txt")
    for split in ("train", "test"):
        pattern = re.compile(rf"(^|.*/){SIZES[size]}/qa{task}_[^/]*_{split}\.txt")
        name = next((name for name in files if pattern.fullmatch(name)), None)
        if name is None:
            fix = "Fix: docs/data.md shows the files of every data set."
            expected = f"a folder or archives with {SIZES[size]}/qa{task}_…_{split}.txt"
            raise ValueError(refusal("data", repr(data), expected, fix))
        parts[split] = asked_in(text_of(files[name], name), name)
    # All questions of a story stay together: each repeats the facts of those before.
    cut = len(parts["train"]) - max(1, len(parts["train"]) // 10)
    if cut < 1:
        raise ValueError(refusal("data", f"{len(parts['train'])} stories to train on", "two or more"))
    whole = {"train": parts["train"][:cut], "validation": parts["train"][cut:], "test": parts["test"]}
    return {split: [question for story in stories for question in story] for split, stories in whole.items()}


def asked_in(text: str, where: str) -> list[list[Story]]:
    """The questions of each story of a file, with the facts before them."""
    stories: list[list[Story]] = []
    facts: list[list[str]] = []
    place: dict[int, int] = {}  # of the facts, by the number of their line
    for k, line in enumerate(lines_of(text), 1):
        found = _NUMBERED.fullmatch(line)
        if found is None or not (stories or found[1] == "1"):
            got = f"{where}, line {k}: {line!r}"
            raise ValueError(refusal("data", got, "a number and a sentence, from 1 in each story"))
        number, told = int(found[1]), found[2]
        if number == 1:
            stories.append([])
            facts, place = [], {}
        if "\t" not in told:
            place[number] = len(facts)
            facts.append(sentence(told))
            continue
        question, answer, *support = told.split("\t")
        lines = [int(x) if x.isdigit() else -1 for x in " ".join(support).split()]
        if not answer.strip() or any(x not in place for x in lines):
            got = f"{where}, line {k}: {line!r}"
            raise ValueError(refusal("data", got, "a question, its answer, and lines of facts, with tabs between them"))
        stories[-1].append(Story(tuple(facts), sentence(question), answer.strip(), [place[x] for x in lines]))
    return stories


def made_up(count: int, needed: int, seed: int) -> dict[str, list[Story]]:
    """Where is somebody (one fact), something that somebody took (two), something in a box that somebody took (three)?

    People go on walking, with what they took; so the last walk of a person is needed, and which that is follows from the other facts.

    Example:
        >>> story = made_up(1, needed=2, seed=0)["train"][0]
        >>> story.question[:3], len(story.needed), story.answer in story.facts[story.needed[-1]]
        (['where', 'is', 'the'], 2, True)
    """

    def said(story: Story) -> str:
        return " ".join(word for words in (*story.facts, story.question) for word in words)

    return shared_out(lambda draw: _story(draw, needed), said, count, seed)


def _story(draw: random.Random, needed: int) -> Story:
    people = draw.sample(_PEOPLE, 3)
    carried = draw.sample(_BOXES if needed == 3 else _THINGS, 3)
    held = draw.sample(_THINGS, 3)
    # What happens in any order: everybody walks once or more, and takes one thing.
    events = [("go", who) for who in people + draw.choices(people, k=draw.randint(0, 2))]
    events += [("take", who) for who in people if needed > 1]
    events += [("lie", who) for who in people if needed > 2]
    draw.shuffle(events)
    who = draw.choice(people)
    facts: list[str] = []
    at, where = {}, ""
    for kind, person in events:
        thing, inside = carried[people.index(person)], held[people.index(person)]
        if kind == "go":
            place = draw.choice(_PLACES)
            facts.append(f"{person} {draw.choice(_GO)} the {place}")
            where = place if person == who else where
        elif kind == "take":
            facts.append(f"{person} {draw.choice(_TAKE)} the {thing}")
        else:
            facts.append(f"the {inside} is in the {thing}")
        if person == who:
            at[kind] = len(facts) - 1
    asked = who if needed == 1 else f"the {(carried if needed == 2 else held)[people.index(who)]}"
    chain = [at[kind] for kind in ("lie", "take", "go")[-needed:]]
    return Story([fact.split() for fact in facts], f"where is {asked}".split(), where, chain)
