"""Pairs: claims are true, false or neither, files are read as they are, and both texts are compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

import regard as rg
from regard.model import Batch, Classifier
from regard.model.naming import Available
from regard.recipes.pairs import RECIPE
from regard.recipes.pairs.compare import Compared, EachOverOther
from regard.recipes.pairs.data import _KINDS, made_up, read
from regard.recipes.recipe import configured
from tests.recipes.checks import assert_learns, assert_no_split_shares, assert_reaches
from tests.recipes.text_data import json_lines, write

SMALL = {"train_size": 40, "hidden_dim": 12, "embedding_dim": 8}
HEADER = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"


def test_made_up_claims_are_what_they_are_said_to_be() -> None:
    kind_of = {word: kind for kind, words in _KINDS.items() for word in (*words, kind)}
    for pair in made_up(300, seed=0)["train"]:
        about, does = pair.first[2:4]
        claimed, doing = pair.second[1:]
        known = kind_of[claimed] == kind_of[about]
        assert pair.label == (1 if not known else 2 if does == doing else 0)
        if known and claimed not in _KINDS:
            assert claimed == about


def test_splits() -> None:
    assert_no_split_shares("pairs", train_size=300)


def test_sick(tmp_path: Path) -> None:
    rows = "1\tA man isn't here\tA dog\t3.5\tNEUTRAL\n2\tNo\tYes\t1\tCONTRADICTION\n"
    names = ("SICK_train.txt", "SICK_trial.txt", "SICK_test_annotated.txt")
    folder = write(tmp_path, dict.fromkeys(names, HEADER + rows))
    first, second = read(str(folder), "sick")["train"]
    assert first.first == ["a", "man", "is", "not", "here"]
    assert (first.label, second.label) == (1, 0)
    write(folder, {"SICK_train.txt": HEADER + "1\ta\tb\t3\tMAYBE\n"})
    with pytest.raises(ValueError, match="line 2: 'maybe'.*contradiction, neutral, entailment"):
        read(str(folder), "sick")
    write(folder, {"SICK_train.txt": HEADER + "1\ta\tb\n"})
    with pytest.raises(ValueError, match="line 2: 3 columns"):
        read(str(folder), "sick")


def test_snli_is_cut_by_premise(tmp_path: Path) -> None:
    rows = [
        {"split": part, "premise": f"{part} p{k}", "hypothesis": f"h{claim} .", "label": label, "explanation": ""}
        for part in ("dev", "test")
        for k in range(20)
        for claim, label in enumerate(("neutral", "entailment", "contradiction"))
    ]
    folder = str(write(tmp_path, {"snli_esnli_dev_test.jsonl.gz": json_lines(*rows)}))
    parts = read(folder, "snli")
    assert [len(parts[split]) for split in ("train", "validation", "test")] == [54, 6, 60]
    assert not {tuple(p.first) for p in parts["train"]} & {tuple(p.first) for p in parts["validation"]}
    write(tmp_path / "broken", {"snli_esnli_dev_test.jsonl": json_lines({"split": "train", "premise": "a"})})
    with pytest.raises(ValueError, match="line 1: .'premise', 'split'."):
        read(str(tmp_path / "broken"), "snli")


def wikiqa(folder: Path) -> str:
    part = {
        "a.toks": "who is it\nwho is it\nwhat\n",
        "b.toks": "he is\nno\nthat\n",
        "sim.txt": "0\n1\n1\n",
        "id.txt": "7\n7\n9\n",
    }
    return str(
        write(folder, {f"{name}.{end}": text for name in ("train", "dev", "test") for end, text in part.items()})
    )


def test_wikiqa_is_ranked_by_question(tmp_path: Path) -> None:
    task = configured("pairs", {"data": wikiqa(tmp_path), "set": "wikiqa", "hidden_dim": 8, "embedding_dim": 4})
    assert task.watch == "map"
    assert configured("pairs", {}).watch == "accuracy"
    examples = task.examples("test")
    assert [int(e.variables["group"]) for e in examples] == [0, 0, 1]
    judged = task.judge(task.build().eval(), examples)
    assert set(judged.metrics) == {"map", "mrr"}
    # The only candidate of a question is first; of the other the right one is first or second.
    assert judged.metrics["map"] in (0.75, 1.0)
    assert all(isinstance(answer, float) for answer in judged.answers)
    assert task.judge(task.build().eval(), [task.parse("who | he")]).metrics == {}


def test_broken_wikiqa_is_refused(tmp_path: Path) -> None:
    folder = wikiqa(tmp_path / "broken")
    write(tmp_path / "broken", {"dev.sim.txt": "1\n"})
    with pytest.raises(ValueError, match=r"dev\.sim\.txt: 1.*equally many"):
        read(folder, "wikiqa")
    write(tmp_path / "broken", {"dev.sim.txt": "1\n0\n2\n"})
    with pytest.raises(ValueError, match=r"dev\.sim\.txt, line 3: '2'"):
        read(folder, "wikiqa")
    with pytest.raises(ValueError, match=r"also has train\.a\.toks"):
        read(str(write(tmp_path / "empty", {})), "wikiqa")


@pytest.mark.parametrize("attention", RECIPE.alternatives)
def test_every_alternative_learns(attention: str) -> None:
    assert_learns("pairs", attention=attention, **SMALL)


@pytest.mark.parametrize("scoring", ["aggregated", "max"])
def test_parallel_co_attention_aggregates_either_way(scoring: str) -> None:
    assert_learns("pairs", attention="parallel-co-attention", **{"attention.scoring": scoring}, **SMALL)


def test_an_attention_of_one_text_is_refused() -> None:
    with pytest.raises(ValueError, match="asks for"):
        configured("pairs", {"attention": "self-attention", **SMALL}).build()


def test_contexts_are_compared_pair_by_pair() -> None:
    torch.manual_seed(0)
    output = Compared(3, 2, Classifier(7, 5), 7).double()
    context = torch.randn(2, 12, dtype=torch.float64)
    found = output(context, Available({}, {}, {}))
    for b in range(2):
        parts = []
        for pair in range(2):
            u, v = context[b, 6 * pair : 6 * pair + 3], context[b, 6 * pair + 3 : 6 * pair + 6]
            parts += [u, v, (u - v).abs(), u * v]
        hidden = torch.relu(output.linear(torch.cat(parts)))
        torch.testing.assert_close(found[b], output.output.linear(hidden), rtol=1e-10, atol=0)
    batch = Batch({"first": context}, target=torch.tensor([0, 4]))
    torch.testing.assert_close(-output.reward(found, batch).mean(), output.loss(found, batch), rtol=1e-10, atol=0)
    assert output.decide(found).tolist() == found.argmax(-1).tolist()
    assert output.terms(batch) == 2
    with pytest.raises(ValueError, match="4 times 3"):
        output(context[:, :11], Available({}, {}, {}))


def test_shared_words_stand_beside_what_was_read() -> None:
    task = configured("pairs", SMALL)
    assert task.parse("the dog waits | the dog waits").variables["shared"].tolist() == [1.0, 1.0]
    one, other = task.parse("the dog waits | the").variables["shared"].tolist()
    assert other == 1.0
    assert 0 < one < 1 / 3, "a common word counts less than a rare one"
    assert task.parse("dog | van").variables["shared"].tolist() == [0.0, 0.0]
    torch.manual_seed(0)
    output = Compared(3, 1, Classifier(7, 5), 7, shared=2)
    context, shared = torch.randn(2, 6), torch.rand(2, 2)
    found = output(context, Available({}, {}, {"shared": shared}))
    u, v = context.chunk(2, -1)
    hidden = torch.relu(output.linear(torch.cat([u, v, (u - v).abs(), u * v, shared], -1)))
    torch.testing.assert_close(found, output.output.linear(hidden))
    assert_learns("pairs", **{"shared": False}, **SMALL)


def test_each_text_is_read_over_the_other() -> None:
    torch.manual_seed(0)
    attend, x, y = rg.AttentionOverAttention(5).double(), torch.randn(7, 5).double(), torch.randn(3, 5).double()
    masks = (torch.arange(7)[None] < 4, torch.ones(1, 3, dtype=torch.bool))
    found = EachOverOther(attend)(x[None], y[None], masks)[0]
    first = sum(w * f for w, f in zip(attend(x[:4], y), x[:4], strict=True))
    second = sum(w * f for w, f in zip(attend(y, x[:4]), y, strict=True))
    torch.testing.assert_close(found, torch.cat([first, second]), rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("attention", ["interactive-co-attention", "alternating-co-attention"])
def test_a_short_training_learns_it(tmp_path: Path, attention: str) -> None:
    small = {
        "steps": 200,
        "every": 50,
        "hidden_dim": 32,
        "embedding_dim": 16,
        "train_size": 800,
        "lr": 1e-2,
        "dropout": 0.1,
    }
    run = assert_reaches(tmp_path, "pairs", "accuracy", 0.8, attention=attention, **small)
    task = run.recipe()
    asked = [
        task.parse("the red dog waits in the park | the dog waits"),
        task.parse("the red dog waits at night | the van stops"),
    ]
    assert task.judge(run.model(), asked).answers == ["entailment", "neutral"]


def test_two_texts_are_wanted() -> None:
    for text in ("one", "one |", "| two"):
        with pytest.raises(ValueError, match="between them"):
            configured("pairs", SMALL).parse(text)
