"""Language: texts are read as they are, every token is asked for, and a stack learns what comes next."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("lightning")

from regard.model import collate
from regard.recipes.language import RECIPE, Language
from regard.recipes.language.texts import _MANY, _ONE, made_up, pieces_of, read_texts
from regard.recipes.recipe import SPLITS, configured
from tests.recipes.checks import assert_learns, assert_reaches
from tests.recipes.text_data import write

SMALL = {"sentences": 40, "dim": 12, "heads": 2, "length": 16, "segment": 5, "continued": 3}


def test_verbs_agree_with_their_nouns() -> None:
    lines = made_up(300, seed=0)["train"].splitlines()
    assert len(lines) == 300
    far = 0
    for line in lines:
        (noun, verbs, ends) = next(
            (n, *number[1:]) for number in (_ONE, _MANY) for n in number[0] if line.startswith(f"{n} ")
        )
        rest = line.removeprefix(noun).removesuffix(".").split()
        assert rest[-1] in ends
        if len(rest) > 1:
            far += 1
            assert rest[0] == "that"
            assert rest[1] in verbs
    assert 0.4 < far / 300 < 0.6


def test_texts_repeat_themselves() -> None:
    assert made_up(50, seed=0) == made_up(50, seed=0)
    assert made_up(50, seed=0)["train"] != made_up(50, seed=1)["train"]
    assert len({*made_up(50, seed=0).values()}) == 3


def test_shakespeare_is_cut_in_order(tmp_path: Path) -> None:
    text = "".join(chr(97 + k % 26) for k in range(1000))
    parts = read_texts(str(write(tmp_path, {"input.txt.gz": text})), "shakespeare")
    assert [len(parts[split]) for split in SPLITS] == [900, 50, 50]
    assert "".join(parts[split] for split in SPLITS) == text


def test_wikitext_is_trained_on_its_validation_part(tmp_path: Path) -> None:
    valid, test = " = Title = \n \n A line <unk> . \n" * 20, " Another one . \n" * 10
    folder = str(write(tmp_path, {"valid.txt": valid, "test.txt.gz": test}))
    parts = read_texts(folder, "wikitext2")
    assert parts["train"] + parts["validation"] == valid
    assert parts["test"] == test
    task = configured("language", {"data": folder, "set": "wikitext2", "unit": "word", "length": 7})
    assert isinstance(task, Language)
    assert {"\n", "Title", "<unk>"} <= set(task.vocabulary.words)
    assert "Another" not in task.vocabulary.words
    assert pieces_of(" A b\n", "word") == ["A", "b", "\n"]


def test_what_is_missing_or_short_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"also has input\.txt"):
        read_texts(str(write(tmp_path / "empty", {})), "shakespeare")
    with pytest.raises(ValueError, match=r"also has test\.txt"):
        read_texts(str(write(tmp_path / "half", {"valid.txt": "a" * 200})), "wikitext2")
    with pytest.raises(ValueError, match="a text of 5 characters"):
        read_texts(str(write(tmp_path / "short", {"input.txt": "short"})), "shakespeare")
    with pytest.raises(ValueError, match="length: got 1"):
        configured("language", {"length": 1})


@pytest.mark.parametrize("unit", ["character", "word"])
def test_every_token_is_asked_for(unit: str) -> None:
    task = configured("language", {**SMALL, "unit": unit})
    assert isinstance(task, Language)
    for split in SPLITS:
        numbers = task.vocabulary.numbers(pieces_of(made_up(40, 0)[split], unit))
        asked = torch.zeros(len(numbers), dtype=torch.long)
        step = 8 if split == "train" else 16
        for k, example in enumerate(task.examples(split)):
            begin, target = k * step, example.target
            assert target is not None
            torch.testing.assert_close(example.inputs["tokens"], numbers[begin : begin + len(target)])
            torch.testing.assert_close(target, numbers[begin + 1 : begin + 1 + len(target)])
            assert len(example.words["tokens"]) == len(target)
            asked[begin + 1 : begin + 1 + len(target)] += 1
        assert asked[0] == 0
        assert (asked[1:] >= 1).all()
        if split != "train":
            assert (asked[1:] == 1).all()


@pytest.mark.parametrize("attention", RECIPE.alternatives)
def test_every_alternative_learns(attention: str) -> None:
    assert_learns("language", attention=attention, **SMALL)


def test_perplexity_is_that_of_the_tokens() -> None:
    task = configured("language", SMALL)
    model, examples = task.build().eval(), task.examples("test")
    judged = task.judge(model, examples)
    losses = []
    with torch.no_grad():
        for example in examples:
            assert example.target is not None
            losses.append(F.cross_entropy(model(collate([example]))[0], example.target, reduction="none"))
    mean = float(torch.cat(losses).mean())
    assert judged.metrics["perplexity"] == pytest.approx(math.exp(mean), rel=1e-4)
    assert judged.metrics["bits_per_character"] == pytest.approx(mean / math.log(2), rel=1e-4)
    assert judged.answers == pytest.approx([math.exp(float(each.mean())) for each in losses], rel=1e-4)


@pytest.mark.parametrize("attention", ["transformer-decoder", pytest.param("transformer-xl", marks=pytest.mark.slow)])
def test_a_short_training_learns_it(tmp_path: Path, attention: str) -> None:
    small = {
        "sentences": 600,
        "dim": 32,
        "length": 24,
        "segment": 12,
        "steps": 150,
        "every": 75,
        "lr": 1e-2,
        "warmup": 10,
    }
    run = assert_reaches(
        tmp_path,
        "language",
        "perplexity",
        1.0,
        attention=attention,
        unit="word",
        layers=1,
        dropout=0.0,
        continued=2,
        **small,
    )
    # The grammar itself has 2.7: 8.5 bits in the six words of a sentence, the end of its line among them.
    assert (run.metrics() or {})["perplexity"] < 3.5
    task = run.recipe()
    (answer,) = task.judge(run.model(), [task.parse("the dog")]).answers
    assert len(answer.split(" ")) == 2


def test_nothing_cannot_be_gone_on_with() -> None:
    with pytest.raises(ValueError, match="a text to go on with"):
        configured("language", SMALL).parse("")
