"""Dates: what is written can be read back, and the known links are those of the characters."""

from __future__ import annotations

import datetime

import pytest
import torch

from regard.model import POSSIBLE, SURE, collate
from regard.recipes.dates import _LETTERS, _PATTERNS, DateExamples, links, ordinal, written, year_in_words
from regard.recipes.recipe import configured, recipe


def test_numbers_in_words() -> None:
    years = {1998: "nineteen ninety-eight", 1900: "nineteen hundred", 1905: "nineteen o-five", 2000: "two thousand"}
    years |= {2005: "two thousand five", 2016: "twenty sixteen", 1820: "eighteen twenty"}
    assert {year: year_in_words(year) for year in years} == years
    days = {1: "first", 12: "twelfth", 20: "twentieth", 21: "twenty-first", 30: "thirtieth", 31: "thirty-first"}
    assert {day: ordinal(day) for day in days} == days


def test_every_letter_is_known() -> None:
    for pattern in _PATTERNS:
        for days in range(0, 110_000, 97):
            text, of = written(datetime.date(1800, 1, 1) + datetime.timedelta(days), pattern)
            assert set(text) <= set(_LETTERS)
            assert len(of) == len(text)


def test_links_of_copied_digits_and_of_names() -> None:
    date = datetime.date(1998, 5, 3)
    text, of = written(date, "{d} {Month} {y}")
    assert text == "3 May 1998"
    gold = links(date, text, of)
    assert gold.shape == (11, 10)
    for t, j in zip(range(4), range(6, 10), strict=True):
        row = [POSSIBLE if 6 <= k < 10 else 0 for k in range(10)]
        row[j] = SURE
        assert gold[t].tolist() == row
    assert gold[6].tolist() == [0, 0, POSSIBLE, POSSIBLE, POSSIBLE, 0, 0, 0, 0, 0], "a name: possible, nothing sure"
    assert gold[9].tolist() == [SURE, *[0] * 9]
    for t in (4, 5, 7, 8, 10):
        assert not gold[t].any(), "dashes, padding zeros and the end have no links"


def test_links_of_digits_that_are_padded_in_the_text() -> None:
    date = datetime.date(2003, 11, 7)
    text, of = written(date, "{y}.{0m}.{0d}")
    gold = links(date, text, of)
    assert gold[8].tolist().count(SURE) == 1, "a zero that is written is copied"
    assert [int(row.argmax()) for row in gold[[0, 5, 9]]] == [0, 5, 9]


def test_splits_share_no_date_and_repeat_themselves() -> None:
    found = {
        split: {"".join(e.words["target"]) for e in (DateExamples(split, 300)[k] for k in range(300))}
        for split in ("train", "validation", "test")
    }
    assert not found["train"] & found["test"]
    assert not found["train"] & found["validation"]
    first, again = DateExamples("test", 5)[2], DateExamples("test", 5)[2]
    assert torch.equal(first.inputs["tokens"], again.inputs["tokens"])
    with pytest.raises(IndexError):
        DateExamples("test", 5)[5]


@pytest.mark.parametrize("attention", recipe("dates").alternatives)
def test_any_attention_fits(attention: str) -> None:
    task = configured("dates", {"attention": attention, "hidden_dim": 16, "test_size": 7})
    model, examples = task.build(), task.examples("test")
    batch = collate(examples)
    loss = model.loss(model(batch), batch)
    loss.backward()
    assert loss.isfinite()
    judged = task.judge(model.eval(), examples)
    assert len(judged.answers) == 7
    assert 0 <= judged.metrics["aer"] <= 1
