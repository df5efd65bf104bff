"""Dates: write a date, in words or digits, as ISO.

The smallest task in which attention has a right answer: every character of `1998-05-03` comes from one field of
`the third of May, 1998`, and a copied digit from one character.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from regard._errors import refusal
from regard.evaluate.alignment import AlignmentCounts
from regard.feature import RecurrentEncoder
from regard.model import POSSIBLE, SURE, Chain, Embedding, Example, SequenceDecoder, TaskModel
from regard.observe import record
from regard.recipes.choice import make_attention
from regard.recipes.recipe import Judged, Recipe, without_padding
from regard.recipes.writing import weights_read

MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
_UNITS = ("", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_TEENS = ("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
_NUMBERS = (*_UNITS, *_TEENS)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_ORDINALS = (
    *("", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"),
    *("eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth"),
    *("nineteenth", "twentieth"),
)
_LETTERS = " ,-./0123456789ADFJMNOSabcdefghilmnoprstuvwxy"
_DIGITS = "0123456789-"

# Pieces of a date in every order that people write it; a piece in braces is a field.
_PATTERNS = (
    *("{d} {Month} {y}", "{Month} {d}, {y}", "{d}. {Mon} {y}", "{Mon} {d} {y}", "{y}, {Month} {d}"),
    *("{d}-{Mon}-{y}", "{y}/{m}/{d}", "{y}.{0m}.{0d}", "the {dth} of {Month}, {y}", "{Month} the {dth}, {y}"),
    *("the {dth} of {Month} {year}", "{Month} {d}, {year}"),
)


def words_of(number: int) -> str:
    """A number below a hundred in words."""
    if number < 20:
        return _NUMBERS[number]
    tens, units = divmod(number, 10)
    return _TENS[tens] + (f"-{_UNITS[units]}" if units else "")


def year_in_words(year: int) -> str:
    """A year as it is said: nineteen ninety-eight, two thousand five."""
    century, rest = divmod(year, 100)
    if century == 20 and rest < 10:
        return f"two thousand {words_of(rest)}".strip()
    if rest == 0:
        return f"{words_of(century)} hundred"
    return f"{words_of(century)} {'o-' if rest < 10 else ''}{words_of(rest)}"


def ordinal(day: int) -> str:
    """A day of the month in words."""
    if day <= 20:
        return _ORDINALS[day]
    return "thirtieth" if day == 30 else f"{_TENS[day // 10]}-{_ORDINALS[day % 10]}"


def fields(date: datetime.date) -> dict[str, tuple[str, str]]:
    """How every piece of a pattern is written, and which field of the date it is."""
    month = MONTHS[date.month - 1]
    return {
        "d": ("day", str(date.day)),
        "0d": ("day", f"{date.day:02}"),
        "dth": ("day", ordinal(date.day)),
        "m": ("month", str(date.month)),
        "0m": ("month", f"{date.month:02}"),
        "Month": ("month", month),
        "Mon": ("month", month[:3]),
        "y": ("year", str(date.year)),
        "year": ("year", year_in_words(date.year)),
    }


def written(date: datetime.date, pattern: str) -> tuple[str, list[str | None]]:
    """The date in a pattern, and for every character the field that it belongs to."""
    pieces, of = fields(date), []
    text = ""
    while pattern:
        if pattern[0] == "{":
            name, _, pattern = pattern[1:].partition("}")
            field, piece = pieces[name]
        else:
            field, piece, pattern = None, pattern[0], pattern[1:]
        text += piece
        of += [field] * len(piece)
    return text, of


# Place of every field in 1998-05-03.
_PLACES = {"year": range(0, 4), "month": range(5, 7), "day": range(8, 10)}


def links(date: datetime.date, text: str, of: list[str | None]) -> torch.Tensor:
    """Known links (11, N): copied digits are sure, the other characters of their field possible; dashes, padding and end have none."""
    iso = date.isoformat()
    gold = torch.zeros(len(iso) + 1, len(text), dtype=torch.int8)
    for field, places in _PLACES.items():
        inside = [j for j, name in enumerate(of) if name == field]
        piece = "".join(text[j] for j in inside)
        digits = piece.isdigit()
        written_as = piece if digits else str(int(iso[places.start : places.stop]))
        padding = len(places) - len(written_as)
        for k, t in enumerate(places):
            if k < padding:
                continue
            gold[t, inside] = POSSIBLE
            if digits:
                gold[t, inside[k - padding]] = SURE
    return gold


@dataclass(frozen=True)
class DateExamples:
    """Drawn dates, the same for the same seed; those of different splits do not overlap.

    Example:
        >>> example = DateExamples("train", 5, seed=0)[0]
        >>> "".join(example.words["target"])[4], example.gold.shape[1] == len(example.words["tokens"])
        ('-', True)
    """

    split: str
    count: int
    seed: int = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self.count:
            raise IndexError(index)
        draw = random.Random(f"{self.seed} {index} {self.split}")
        # Days are shared out among the splits: what is asked was never seen, in whatever pattern.
        part, parts = {"train": (0, 8), "validation": (8, 9), "test": (9, 10)}[self.split]
        while True:
            date = datetime.date(1800, 1, 1) + datetime.timedelta(days=draw.randrange(300 * 365))
            if part <= (date.toordinal() * 7919) % 10 < parts:
                break
        text, of = written(date, draw.choice(_PATTERNS))
        tokens = torch.tensor([_LETTERS.index(letter) for letter in text])
        target = torch.tensor([*(_DIGITS.index(letter) for letter in date.isoformat()), len(_DIGITS)])
        words = {"tokens": list(text), "target": [*date.isoformat(), "end"]}
        return Example({"tokens": tokens}, target, gold=links(date, text, of), words=words)


@dataclass(kw_only=True)
class Dates(Recipe):
    """Write a date as ISO: a recurrent encoder, an attention, a recurrent decoder."""

    name: ClassVar[str] = "dates"
    about: ClassVar[str] = "write a date in words or digits as ISO; nothing to download"
    watch: ClassVar[str] = "exact_match"
    alternatives: ClassVar[tuple[str, ...]] = (
        *("additive", "general", "dot", "scaled-dot", "cosine", "negative-l2", "biased-general", "activated-general"),
        *("low-rank-general", "token-to-token", "local-predictive", "hard", "sparsemax", "entmax", "multi-head"),
    )

    steps: int = 300
    lr: float = 3e-3
    embedding_dim: int = 32
    hidden_dim: int = 128
    train_size: int = 8000
    test_size: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data is not None:
            raise ValueError(refusal("data", repr(self.data), "nothing: the dates of this recipe are drawn"))

    def examples(self, split: str) -> Sequence[Example]:
        count = self.train_size if split == "train" else self.test_size
        drawn = DateExamples(split, count, self.seed)
        return [drawn[k] for k in range(count)]

    def build(self) -> TaskModel:
        h, d = self.hidden_dim, self.embedding_dim
        features = Chain(Embedding(len(_LETTERS), d), RecurrentEncoder(d, h // 2))
        widths = {
            "query_dim": h,
            "key_dim": h,
            "hidden_dim": h // 2,
            "value_dim": h,
            "dim": h,
            "heads": 4,
            "rank": h // 4,
        }
        attention = make_attention(self.attention, self.options, **widths)
        return TaskModel(features, None, attention, SequenceDecoder(len(_DIGITS) + 1, d, h, h))

    def parse(self, text: str) -> Example:
        unknown = sorted(set(text) - set(_LETTERS))
        if unknown or not text:
            got = repr(text) if not unknown else f"{text!r}, with {' '.join(map(repr, unknown))}"
            raise ValueError(refusal("text", got, "a date in the letters of English dates"))
        return Example(
            {"tokens": torch.tensor([_LETTERS.index(letter) for letter in text])}, words={"tokens": list(text)}
        )

    def right_answer(self, example: Example) -> str:
        return "".join(example.words["target"][:-1])

    @torch.no_grad()
    def judge(self, model: TaskModel, examples: Sequence[Example], device: torch.device | str = "cpu") -> Judged:
        """Exact match of what is written, and the alignment error rate of where the attention looked while it was."""
        right, counts, answers = 0, AlignmentCounts(), []
        decoder = model.output
        assert isinstance(decoder, SequenceDecoder)
        for batch in self.batches(examples):
            batch = batch.to(device)
            found = model.encode(batch)
            decoded = decoder.generate(model.reader(found), found, len("1998-05-03") + 1)
            written_ = without_padding(decoded.tokens, decoder.end)
            answers += ["".join(_DIGITS[k] for k in answer) for answer in written_]
            if batch.target is None or batch.gold is None:
                continue
            right += sum(map(list.__eq__, written_, without_padding(batch.target, decoder.end)))
            with record(model) as trace:
                model(batch)
            counts += AlignmentCounts.of_weights(weights_read(trace), batch.gold)
        metrics = {"exact_match": right / max(1, len(examples)), "aer": counts.error_rate}
        return Judged(metrics, answers)


RECIPE = Dates
