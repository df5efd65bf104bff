"""Documents: sentences are cut and capped, mail is stripped, reasons stay with their words, and levels are read or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

from regard.model import SURE, collate
from regard.recipes.documents import RECIPE, word_weights
from regard.recipes.documents.data import _BLAME, _PRAISE, Document, made_up, read, sentences_of, without_mail
from regard.recipes.recipe import configured
from tests.recipes.checks import assert_learns, assert_no_split_shares, assert_reaches
from tests.recipes.text_data import archive, json_lines, write

SMALL = {"train_size": 40, "hidden_dim": 12, "embedding_dim": 8}


def test_made_up_reviews_are_judged_by_their_writer() -> None:
    for document in made_up(200, seed=0)["train"]:
        (own,) = (words for words in document.sentences if words[0] == "i")
        assert document.label == int(own[-1] in _PRAISE)
        assert own[-1] in (*_PRAISE, *_BLAME)
        assert document.reasons is not None
        told = [
            w
            for words, marks in zip(document.sentences, document.reasons, strict=True)
            for w, m in zip(words, marks, strict=True)
            if m
        ]
        assert told == ["i", own[-1]]


def test_splits() -> None:
    assert_no_split_shares("documents", train_size=300)


def test_sentences_end_before_a_capital_or_with_a_paragraph() -> None:
    text = 'He (Mr. 5) said "No." She did not.\n\nthe end<br /><br />3.5 stars... maybe? "Yes!"'
    assert [" ".join(words) for words in sentences_of(text)] == [
        *("he ( mr .", '5 ) said " no .', "she did not .", "the end", "3 . 5 stars . . . maybe ?", '" yes ! "'),
    ]
    assert sentences_of(" <br> \n\n ") == []


def test_mail_is_stripped_of_what_tells_the_group() -> None:
    text = (
        "From: x@rec.sport.hockey\nSubject: Re: hockey\n\nIn article <1@a> b@c (B) writes:\n> The puck!\n| puck\nI agree.\n"
        "-----------\nnot the end of it\n" + "more\n" * 10 + "Bye: now\n-- \nB, hockey fan\n"
    )
    assert without_mail(text).split("\n") == [
        "I agree.",
        "-----------",
        "not the end of it",
        *["more"] * 10,
        "Bye: now",
    ]
    assert without_mail("no body at all") == ""


def rows(count: int) -> list[dict[str, object]]:
    return [
        {"id": str(k), "split": split, "label": k % 2, "text": f"From: me\n\nOne w{k}. Two!"}
        for split in ("train", "test")
        for k in range(count)
    ]


def test_rows_of_json(tmp_path: Path) -> None:
    folder = write(
        tmp_path, {"imdb_6k.jsonl.gz": json_lines(*rows(20)), "newsgroups_sports.jsonl": json_lines(*rows(20))}
    )
    for name in ("imdb", "newsgroups"):
        parts = read(str(folder), name)
        assert [len(parts[split]) for split in ("train", "validation", "test")] == [18, 2, 20]
    assert read(str(folder), "newsgroups")["train"][0] == Document([["one", "w0", "."], ["two", "!"]], 0)
    write(folder, {"newsgroups_sports.jsonl": json_lines({"text": "a", "split": "train", "label": 2})})
    with pytest.raises(ValueError, match=r"newsgroups_sports\.jsonl, line 1"):
        read(str(folder), "newsgroups")
    with pytest.raises(ValueError, match=r"has imdb_6k\.jsonl"):
        read(str(write(tmp_path / "empty", {})), "imdb")


def movies(**changed: object) -> dict[str, bytes]:
    spans = [[{"docid": "a.txt", "start_token": 2, "end_token": 5}], [{"start_token": 6, "end_token": 7}]]
    row = {"annotation_id": "a.txt", "classification": "POS", "evidences": spans, **changed}
    files = {f"movies/{part}.jsonl": json_lines(row) for part in ("train", "val", "test")}
    return {"movies.tar.gz": archive({**files, "movies/docs/a.txt": "It is\nso very good .\n\nYes indeed\n"})}


def test_reasons_stay_with_their_words(tmp_path: Path) -> None:
    (document,) = read(str(write(tmp_path, movies())), "movies")["test"]
    assert document.sentences == [["it", "is"], ["so", "very", "good", "."], ["yes", "indeed"]]
    assert document.reasons == [[False, False], [True, True, True, False], [True, False]]
    assert document.label == 1
    for broken in ({"annotation_id": "b.txt"}, {"classification": "MAYBE"}, {"evidences": [[{}]]}):
        with pytest.raises(ValueError, match=r"movies/train\.jsonl, line 1"):
            read(str(write(tmp_path, movies(**broken))), "movies")
    with pytest.raises(ValueError, match=r"has movies/train\.jsonl"):
        read(str(write(tmp_path, {"movies.tar.gz": archive({"other": ""})})), "movies")
    with pytest.raises(ValueError, match="a whole file"):
        read(str(write(tmp_path, {"movies.tar.gz": b"nothing"})), "movies")


def test_long_sentences_go_on_and_long_documents_end() -> None:
    task = configured("documents", {"words": 3, "sentences": 3, **SMALL})
    words = [[f"w{k}" for k in range(5)], ["x"], ["y", "z"], ["never"]]
    marks = [[k == 4 for k in range(5)], [False], [True, True], [True]]
    task.known = {"words": [*words[0], "x", "y", "z"], "word_dim": 8, "classes": ["a", "b"]}
    example = task._example(Document(words, 1, marks))
    assert example.inputs["document"].tolist() == [[1, 2, 3], [4, 5, 0], [6, 0, 0]]
    assert example.masks["document"].int().tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert (example.gold == SURE).int().tolist() == [[[0, 0, 0], [0, 1, 0], [0, 0, 0]]]
    flat = configured("documents", {"words": 3, "sentences": 3, "attention": "additive", **SMALL})
    flat.known = task.known
    example = flat._example(Document(words, 1, marks))
    assert example.inputs["document"].tolist() == [1, 2, 3, 4, 5, 6]
    assert (example.gold == SURE).int().tolist() == [[0, 0, 0, 0, 1, 0]]


@pytest.mark.parametrize("attention", RECIPE.alternatives)
def test_every_alternative_learns(attention: str) -> None:
    task = assert_learns("documents", attention=attention, **SMALL)
    model, batch = task.build().eval(), collate(task.examples("test"))
    weights = word_weights(model, batch)
    assert weights.shape == batch.masks["document"].shape
    assert not weights[~batch.masks["document"]].any()


@pytest.mark.parametrize("options", [{"attention.score": "additive"}, {"attention.align": "sparsemax"}])
def test_levels_take_other_scores_and_alignments(options: dict[str, str]) -> None:
    assert_learns("documents", **SMALL, **options)


def test_the_weights_of_all_words_are_one() -> None:
    task = configured("documents", SMALL)
    weights = word_weights(task.build().eval(), collate(task.examples("test")))
    torch.testing.assert_close(weights.sum((1, 2)), torch.ones(len(weights)))


@pytest.mark.parametrize("attention", ["hierarchical", "additive"])
def test_a_short_training_learns_it(tmp_path: Path, attention: str) -> None:
    small = {
        "steps": 150,
        "every": 50,
        "hidden_dim": 24,
        "embedding_dim": 16,
        "train_size": 500,
        "lr": 1e-2,
        "dropout": 0.1,
    }
    run = assert_reaches(tmp_path, "documents", "accuracy", 0.9, attention=attention, **small)
    metrics = run.metrics() or {}
    assert metrics["reasons_map"] > metrics["reasons_share"]
    task = run.recipe()
    asked = [task.parse("They found it bad. I found it good."), task.parse("They found it good. I found it bad.")]
    assert task.judge(run.model(), asked).answers == ["positive", "negative"]


def test_nothing_is_no_document() -> None:
    with pytest.raises(ValueError, match="expected a document"):
        configured("documents", SMALL).parse(" ")
