"""Documents: read from files, or made up."""

from __future__ import annotations

import json
import random
import re
from typing import Any, NamedTuple

from regard._errors import refusal
from regard.recipes.data import Folder
from regard.recipes.made import shared_out
from regard.recipes.text import separate_words

CLASSES = {
    "imdb": ("negative", "positive"),
    "newsgroups": ("baseball", "hockey"),
    "movies": ("negative", "positive"),
}
# Every so many documents of the training part, one is for validation, where the data have none.
_SHARE = 10

_BREAK = re.compile(r"<br\s*/?>|\n\s*\n", re.IGNORECASE)
_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9])")
_QUOTED = re.compile(r"\s*[>:|}]")
_CREDITED = re.compile(
    r"(\bwrites|\bwrote|\bsaid|\bsays)\s*:\s*$|^\s*in article\b|^\s*in <|^\s*article from\b", re.IGNORECASE
)
_RULE = re.compile(r"\s*([-_=*~+#/\\|.])\1{4,}\s*$|\s*--\s*$")

_PRAISE = ("good", "fine", "lovely", "clever", "moving", "funny", "fresh", "warm")
_BLAME = ("bad", "dull", "awful", "stupid", "cold", "boring", "stale", "weak")
_OTHERS = ("they", "critics", "friends", "some", "others")
_FILLERS = ("the", "film", "begins", "in", "a", "town", "where", "two", "men", "meet", "and", "drive", "to", "sea")


class Document(NamedTuple):
    """Sentences of words, a class, and where it is known, for every word, whether it is a reason for the class."""

    sentences: list[list[str]]
    label: int | None = None
    reasons: list[list[bool]] | None = None


def sentences_of(text: str) -> list[list[str]]:
    """Sentences of words: they end with `.`, `!` or `?` before a capital, or with a paragraph.

    Example:
        >>> sentences_of("It rains. He said 3.5 times!  Yes?<br />no")
        [['it', 'rains', '.'], ['he', 'said', '3', '.', '5', 'times', '!'], ['yes', '?'], ['no']]
    """
    pieces = [piece for part in _BREAK.split(text) for piece in _END.split(part)]
    return [words for words in map(separate_words, pieces) if words]


def read(data: str, name: str) -> dict[str, list[Document]]:
    """The documents of a data folder by split."""
    if name == "movies":
        return _movies(data)
    file = {"imdb": "imdb_6k.jsonl", "newsgroups": "newsgroups_sports.jsonl"}[name]
    folder = Folder(data, file)
    found: dict[str, list[Document]] = {"train": [], "validation": [], "test": []}
    for number, row in enumerate(folder.rows(file), 1):
        label, text = row.get("label"), row.get("text")
        if row.get("split") not in ("train", "test") or label not in (0, 1) or not isinstance(text, str):
            got = f"{folder.path / file}, line {number}: {sorted(row)}"
            raise ValueError(refusal("data", got, "a text, a label 0 or 1, and a split, train or test"))
        sentences = sentences_of(without_mail(text) if name == "newsgroups" else text)
        if not sentences:
            continue
        split = "validation" if row["split"] == "train" and number % _SHARE == 0 else row["split"]
        found[split].append(Document(sentences, label))
    return found


def without_mail(text: str) -> str:
    r"""What somebody wrote in a message himself: no header, no quotation, no signature, each of which tells where it was sent.

    Example:
        >>> without_mail("From: a@b\nSubject: Re: hockey\n\nA. Bee writes:\n>Who won?\nNobody did.\n--\nA. Cee, fan")
        'Nobody did.'
    """
    _, _, body = text.partition("\n\n")
    lines = body.split("\n")
    for k, line in enumerate(lines):
        # A rule near the end begins a signature; elsewhere it may belong to a table.
        if _RULE.match(line) and (line.strip() == "--" or len(lines) - k <= 10):
            lines = lines[:k]
            break
    kept = [line for line in lines if not _QUOTED.match(line) and not _CREDITED.search(line)]
    return "\n".join(kept).strip()


def _movies(data: str) -> dict[str, list[Document]]:
    folder = Folder(data, "movies.tar.gz")
    files: dict[str, Any] = folder.members("movies.tar.gz", (".jsonl", ".txt"))
    found: dict[str, list[Document]] = {}
    for split, part in (("train", "train"), ("validation", "val"), ("test", "test")):
        name = f"movies/{part}.jsonl"
        if name not in files:
            raise ValueError(refusal("data", f"{folder.path}/movies.tar.gz", f"an archive that has {name}"))
        found[split] = [
            _annotated(line, files, f"{name}, line {number}")
            for number, line in enumerate(files[name].decode().splitlines(), 1)
        ]
    return found


def _annotated(line: str, files: dict[str, bytes], where: str) -> Document:
    """A review and the words that annotators gave as reasons, as places among all its words."""
    try:
        row: Any = json.loads(line)
        name, label = f"movies/docs/{row['annotation_id']}", {"NEG": 0, "POS": 1}[row["classification"]]
        spans = [(int(e["start_token"]), int(e["end_token"])) for group in row["evidences"] for e in group]
        text = files[name].decode()
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(refusal("data", f"{where}: {error!r}", "an annotated review, and its text in docs")) from error
    words = [line.lower().split() for line in text.split("\n")]
    marked = [False] * sum(map(len, words))
    for start, end in spans:
        marked[start:end] = [True] * len(marked[start:end])
    reasons, place = [], 0
    for sentence in words:
        reasons.append(marked[place : place + len(sentence)])
        place += len(sentence)
    kept = [k for k, sentence in enumerate(words) if sentence]
    return Document([words[k] for k in kept], label, [reasons[k] for k in kept])


def made_up(count: int, seed: int) -> dict[str, list[Document]]:
    """Reviews in which several people judge a film, and only the writer counts.

    Example:
        >>> document = made_up(1, seed=0)["train"][0]
        >>> [word for row, marks in zip(*document[::2]) for word, mark in zip(row, marks) if mark][0]
        'i'
    """
    return shared_out(_drawn, lambda document: " . ".join(map(" ".join, document.sentences)), count, seed)


def _drawn(draw: random.Random) -> Document:
    label = draw.randrange(2)
    sentences, reasons = [], []
    for _ in range(draw.randint(1, 4)):
        if draw.random() < 0.5:
            words = draw.choices(_FILLERS, k=draw.randint(2, 8))
        else:
            words = [draw.choice(_OTHERS), "found", "it", draw.choice(draw.choice((_PRAISE, _BLAME)))]
        sentences.append(words)
        reasons.append([False] * len(words))
    place = draw.randint(0, len(sentences))
    sentences.insert(place, ["i", "found", "it", draw.choice((_BLAME, _PRAISE)[label])])
    reasons.insert(place, [True, False, False, True])
    return Document(sentences, label, reasons)
