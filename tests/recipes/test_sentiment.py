"""Sentiment: made-up sentences mean what they say, files are read as they are, and every attention learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

from regard.recipes.recipe import configured
from regard.recipes.sentiment import _BLAME, _PRAISE, RECIPE, made_up
from tests.recipes.checks import assert_learns, assert_no_split_shares, assert_reaches
from tests.recipes.text_data import vectors, write

SMALL = {"train_size": 40, "hidden_dim": 12, "embedding_dim": 8}
LINES = {"train": "1 a good film\n0 it is n't good\n1 -LRB- fine -RRB-\n", "dev": "0 bad\n", "test": "1 Fine indeed\n"}


def test_the_sign_is_that_of_the_telling_word_turned_by_not() -> None:
    for words, sign in made_up(200, seed=0)["train"]:
        (place,) = (k for k, word in enumerate(words) if word in (*_PRAISE, *_BLAME))
        turned = place > 0 and words[place - 1] == "not"
        assert sign == ((words[place] in _PRAISE) != turned)


def test_splits() -> None:
    assert_no_split_shares("sentiment", train_size=300)


@pytest.mark.parametrize("attention", RECIPE.alternatives)
def test_every_alternative_learns(attention: str) -> None:
    assert_learns("sentiment", attention=attention, **SMALL)


def test_queries_side_by_side_give_as_many_contexts() -> None:
    model = configured("sentiment", {"attention": "multi-query-concat", **SMALL}).build()
    assert model.output.linear.in_features == 4 * 12


def test_an_attention_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="attention"):
        configured("sentiment", {"attention": "rotatory", **SMALL}).build()


def test_files_of_three_splits(tmp_path: Path) -> None:
    folder = write(tmp_path, {f"sst2.{part}": text for part, text in LINES.items()})
    task = configured("sentiment", {"data": str(folder)})
    train = task.examples("train")
    assert [e.words["tokens"] for e in train] == [
        ["a", "good", "film"],
        ["it", "is", "not", "good"],
        ["(", "fine", ")"],
    ]
    assert [int(e.target) for e in train] == [1, 0, 1]
    assert len(task.examples("validation")) == len(task.examples("test")) == 1
    assert task.examples("test")[0].inputs["tokens"].tolist()[1] == 0, "a word that training has not seen"


def test_a_set_of_one_file_is_cut(tmp_path: Path) -> None:
    folder = write(tmp_path, {"mr.all.gz": "".join(f"{k % 2} caf\u00e9 w{k}\n" for k in range(20))})
    # The file is read as Latin-1, in which these bytes are two letters.
    task = configured("sentiment", {"data": str(folder), "set": "mr"})
    assert [len(task.examples(split)) for split in ("train", "validation", "test")] == [16, 2, 2]


def test_what_is_missing_or_broken_is_said(tmp_path: Path) -> None:
    folder = write(tmp_path, {"sst2.train": "1 good\n", "sst2.dev": "1 good\n"})
    with pytest.raises(ValueError, match="also has sst2.test"):
        configured("sentiment", {"data": str(folder)}).examples("train")
    write(folder, {"sst2.test": "1 good\n7 bad\n"})
    with pytest.raises(ValueError, match=r"sst2\.test, line 2: '7'.*from 0 to 1"):
        configured("sentiment", {"data": str(folder)}).examples("train")
    with pytest.raises(ValueError, match="set: got 'sst3'"):
        configured("sentiment", {"set": "sst3"})


def test_pretrained_vectors_start_the_table(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", {f"sst2.{part}": text for part, text in LINES.items()})
    given = vectors(tmp_path / "vectors", ["good", "unseen"], 5)
    task = configured("sentiment", {"data": str(folder), "vectors": str(given)})
    model = task.build()
    task.initialise(model)
    table = model.features.parts[0].table.weight
    assert table.shape == (len(task.vocabulary), 5)
    assert torch.equal(table[task.vocabulary.number["good"]], torch.ones(5))
    assert torch.equal(table[task.vocabulary.number["unseen"]], torch.full((5,), 2.0))


def test_pretrained_vectors_may_learn_more_slowly(tmp_path: Path) -> None:
    given = str(vectors(tmp_path, ["good", "unseen"], 5))
    usual, slow = (
        configured("sentiment", {"vectors": given, **more, **SMALL}) for more in ({}, {"vectors_lr": "1e-4"})
    )
    model = slow.build()
    (everything,) = usual.groups(model)
    rest, table = slow.groups(model)
    assert [len(p) for p in table["params"]] == [len(slow.vocabulary)]
    assert (rest["lr"], table["lr"]) == (1e-3, 1e-4)
    assert len(everything["params"]) == len(rest["params"]) + 1


@pytest.mark.parametrize(("attention", "least"), [("additive", 0.9), ("capsule-based-attention", 0.85)])
def test_a_short_training_learns_it(tmp_path: Path, attention: str, least: float) -> None:
    small = {"steps": 120, "every": 30, "hidden_dim": 32, "embedding_dim": 16, "train_size": 500, "lr": 1e-2}
    run = assert_reaches(tmp_path, "sentiment", "accuracy", least, attention=attention, **small)
    task = run.recipe()
    examples = [task.parse("the film is not bad"), task.parse("a boring story!")]
    judged = task.judge(run.model(), examples)
    assert judged.metrics == {}
    assert judged.answers == ["positive", "negative"]


def test_nothing_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match="expected a sentence"):
        configured("sentiment", SMALL).parse("  ")
