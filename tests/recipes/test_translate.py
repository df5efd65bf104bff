"""Translate: the made-up language, the files, every attention, and a short training."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from regard.model import POSSIBLE, SURE, collate
from regard.observe import record
from regard.recipes import run
from regard.recipes.recipe import configured
from regard.recipes.translate import Translate
from regard.recipes.translate.language import ARTICLES, NOUNS, Pair, Word, pairs, sentence
from regard.recipes.writing import weights_read

SMALL = {"hidden_dim": 16, "embedding_dim": 7, "heads": 2, "train_size": 13}


def test_a_sentence_is_inflected_and_reordered() -> None:
    import random

    for k in range(50):
        pair = sentence(random.Random(k))
        words = [word.text for word in pair.target]
        assert pair.texts == (" ".join(pair.source[:-1]) + ".", " ".join(words[:-1]) + ".")
        assert words[-2].endswith(("et", "ent", "il")), "the verb is the last word"
        for here, after in zip(pair.target, pair.target[1:], strict=False):
            if pair.source[here.sure[0]] in ARTICLES:
                singular = pair.source[after.sure[0]].removesuffix("s")
                irregular = {"children": "child", "women": "woman", "men": "man"}
                _, gender = NOUNS[irregular.get(singular, singular)]
                assert here.text.rstrip("s").endswith(gender), "an article has the gender of its noun"
                assert here.text.endswith("s") == after.text.endswith("s"), "and its number"


def test_splits_share_no_sentence_and_repeat_themselves() -> None:
    found = {split: {pair.texts for pair in some} for split, some in pairs(200, seed=3).items()}
    assert not found["train"] & found["test"]
    assert not found["train"] & found["validation"]
    assert pairs(5, seed=3) == pairs(5, seed=3)
    assert pairs(5, seed=3) != pairs(5, seed=4)


def test_links_of_pieces_are_those_of_their_words() -> None:
    pair = Pair(["the", "dogs", "."], [Word("los", (0,), (1,)), Word("kanos", (1,)), Word(".", (2,))])
    task = Translate(train_size=1)
    task.known = {"characters": list("▁theduogslkan."), "merges": [["▁", "t"], ["▁t", "h"], ["▁th", "e"]]}
    example = task._linked(pair)
    assert example.words["tokens"] == ["▁the", "▁", "d", "o", "g", "s", "."]
    assert example.words["target"] == ["▁", "l", "o", "s", "▁", "k", "a", "n", "o", "s", ".", "end"]
    assert example.gold is not None
    assert example.gold[0].tolist() == [SURE, *[POSSIBLE] * 5, 0], (
        "a word of one piece is sure, one of several possible"
    )
    assert example.gold[5].tolist() == [0, *[POSSIBLE] * 5, 0]
    assert example.gold[10].tolist() == [0, 0, 0, 0, 0, 0, SURE]
    assert not example.gold[11].any()


@pytest.mark.parametrize("attention", [*Translate.alternatives, "hard", "sparsemax"])
def test_any_attention_fits(attention: str) -> None:
    task = configured("translate", {**SMALL, "attention": attention, "beam": 2})
    model, examples = task.build(), task.examples("train")[:5]
    batch = collate(examples)
    loss = model.loss(model(batch), batch)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.attention.parameters())
    judged = task.judge(model.eval(), examples)
    assert {"bleu", "chrf", "perplexity", "aer"} <= set(judged.metrics)
    assert "case:mixed" in judged.signatures["bleu"]
    assert len(judged.answers) == 5


def test_an_attention_that_reads_no_context_for_each_token_is_refused() -> None:
    with pytest.raises(ValueError, match="attention: "):
        configured("translate", {**SMALL, "attention": "self-attention"}).build()


def test_feeding_and_layers_are_told_alike() -> None:
    task = configured("translate", {**SMALL, "feeding": True, "layers": 2})
    model, examples = task.build().eval(), task.examples("train")[:3]
    batch = collate(examples)
    with record(model) as trace:
        logits = model(batch)
    assert batch.gold is not None
    assert weights_read(trace).shape == batch.gold.shape == (*logits.shape[:2], batch.inputs["tokens"].shape[1])


def test_lowercase_forgets_case_in_text_and_score() -> None:
    task = configured("translate", {**SMALL, "lowercase": True})
    assert task.parse("The Dog").words["tokens"] == task.parse("the dog").words["tokens"]
    examples = task.examples("test")[:2]
    assert "case:lc" in task.judge(task.build().eval(), examples).signatures["bleu"]


def test_real_files(tmp_path: Path) -> None:
    sentences = {
        "en": ["Two dogs run.", "A cat.", "   ", "A man sees."],
        "de": ["Zwei Hunde rennen.", "Eine Katze.", "x", "Ein Mann sieht."],
    }
    for language, lines in sentences.items():
        (tmp_path / f"train.{language}.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
        (tmp_path / f"val.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (tmp_path / f"test_2016_flickr.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    task = configured("translate", {"data": str(tmp_path), "merges": 5, "validation_size": 2, "hidden_dim": 8})
    train = task.examples("train")
    assert len(train) == 3, "a pair of which one is empty is left out"
    assert len(task.examples("validation")) == 2
    assert task.pieces.joined(train[0].words["target"][:-1]) == "Zwei Hunde rennen."
    assert train[0].target is not None
    assert int(train[0].target[-1]) == len(task.pieces)
    assert task.dropout == 0.5, "the real data have the settings of the real task"
    judged = task.judge(task.build().eval(), task.examples("test"))
    assert "aer" not in judged.metrics
    back = configured("translate", {"data": str(tmp_path), "source": "de", "target": "en"})
    assert back.pieces.joined(back.examples("test")[1].words["tokens"]) == "Eine Katze."


def test_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train.en, train.de, val.en"):
        configured("translate", {"data": str(tmp_path)}).examples("train")
    for name in ("train", "val", "test_2016_flickr"):
        (tmp_path / f"{name}.en").write_text("a\nb\n", encoding="utf-8")
        (tmp_path / f"{name}.de").write_text("a\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"train.en of 2 lines and train.de of 1"):
        configured("translate", {"data": str(tmp_path)}).examples("train")
    with pytest.raises(ValueError, match="target: got 'en'"):
        configured("translate", {"target": "en"})
    with pytest.raises(ValueError, match="test: got '2018'"):
        configured("translate", {"test": "2018"})
    with pytest.raises(ValueError, match="text: got ' '"):
        configured("translate", SMALL).parse(" ")


@pytest.mark.parametrize(
    ("attention", "width"), [("additive", 128), pytest.param("transformer", 64, marks=pytest.mark.slow)]
)
def test_a_short_training_translates(attention: str, width: int, tmp_path: Path) -> None:
    settings = {"train_size": 1000, "steps": 200, "every": 200, "beam": 2, "hidden_dim": width}
    found = run("translate", out=tmp_path, progress=False, attention=attention, **settings)
    metrics = found.metrics()
    assert metrics is not None
    print(attention, metrics)
    assert metrics["bleu"] > 20
    assert (found.folder / "attention.svg").is_file()
    task = found.recipe()
    (answer,) = task.judge(found.model(), [task.parse("the red dog sees a house.")]).answers
    assert answer.endswith(".")
