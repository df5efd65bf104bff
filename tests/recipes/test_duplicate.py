"""Duplicate: the second word is asked for, and told from the first; hashed attentions with any number of rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

from regard.recipes.duplicate import RECIPE
from regard.recipes.recipe import configured
from regard.transformer import LSHAttention
from tests.recipes.checks import assert_learns, assert_no_split_shares, assert_reaches

SMALL = {"size": 5, "symbols": 7, "dim": 12, "train_size": 40, "test_size": 20}


def test_the_second_word_is_asked_for() -> None:
    for example in configured("duplicate", SMALL).examples("test"):
        tokens, target, gold = example.inputs["tokens"], example.target, example.gold
        assert target is not None
        assert gold is not None
        assert tokens.tolist() == [*tokens[:6].tolist(), *tokens[:6].tolist()]
        assert target.tolist() == [-1] * 6 + tokens[1:6].tolist() + [-1]
        for place in range(12):
            (told_from,) = gold[place].nonzero().flatten().tolist() or [None]
            if target[place] >= 0:
                assert tokens[told_from] == target[place]
                assert told_from < 6
            else:
                assert told_from is None


def test_long_words_have_no_links() -> None:
    task = configured("duplicate", {**SMALL, "size": 100})
    assert {example.gold is None for example in task.examples("test")} == {True}


def test_splits() -> None:
    assert_no_split_shares("duplicate", **SMALL)


@pytest.mark.parametrize("attention", RECIPE.alternatives)
def test_every_alternative_learns(attention: str) -> None:
    assert_learns("duplicate", attention=attention, **SMALL)


@pytest.mark.parametrize("attention", ["lsh-attention", "reformer"])
def test_hashed_attentions_are_judged_with_other_rounds(attention: str) -> None:
    task = configured("duplicate", {**SMALL, "attention": attention, "rounds": "1, 3"})
    model, examples = task.build().eval(), task.examples("test")
    hashed = [module for module in model.modules() if isinstance(module, LSHAttention)]
    assert [module.chunk for module in hashed] == [4]
    first, again = task.judge(model, examples), task.judge(model, examples)
    assert first == again
    assert set(first.metrics) == {"accuracy", "accuracy_rounds_1", "accuracy_rounds_3"}
    assert [module.rounds for module in hashed] == [2]
    plain = configured("duplicate", {**SMALL, "attention": "transformer-decoder"})
    assert set(plain.judge(plain.build().eval(), examples).metrics) == {"accuracy"}


@pytest.mark.parametrize("attention", ["lsh-attention", pytest.param("relative-position", marks=pytest.mark.slow)])
def test_a_short_training_learns_it(tmp_path: Path, attention: str) -> None:
    small = {
        "size": 7,
        "symbols": 9,
        "dim": 32,
        "train_size": 2000,
        "test_size": 100,
        "steps": 300,
        "every": 100,
        "lr": 1e-2,
    }
    run = assert_reaches(tmp_path, "duplicate", "accuracy", 0.8, attention=attention, **small)
    task = run.recipe()
    (answer,) = task.judge(run.model(), [task.parse("4 9 1 1 2 7 3")]).answers
    assert sum(a == b for a, b in zip(answer, (4, 9, 1, 1, 2, 7, 3), strict=True)) >= 5


def test_what_cannot_be_is_refused() -> None:
    for rounds in ("0", "1,,2", "two"):
        with pytest.raises(ValueError, match="rounds: got"):
            configured("duplicate", {"rounds": rounds})
    with pytest.raises(ValueError, match="expected nothing"):
        configured("duplicate", {"data": "somewhere"})
    for text in ("1 2 3", "1 2 3 4 8", "1 2 3 4 five", "0 1 2 3 4"):
        with pytest.raises(ValueError, match="5 numbers from 1 to 7"):
            configured("duplicate", SMALL).parse(text)
    assert torch.equal(
        configured("duplicate", SMALL).parse("1 2 3 4 7").inputs["tokens"][:6], torch.tensor([0, 1, 2, 3, 4, 7])
    )
