"""Facts: stories are true, files are read as they are, and hops find the facts that are needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

from regard.model import Embedding, collate
from regard.recipes.facts import RECIPE, Facts
from regard.recipes.facts.parts import Answer, Sentences
from regard.recipes.facts.recipe import hop_weights
from regard.recipes.facts.stories import asked_in, made_up, read
from regard.recipes.recipe import configured
from tests.recipes.checks import assert_learns, assert_no_split_shares, assert_reaches
from tests.recipes.text_data import archive, write

SMALL = {"train_size": 60, "dim": 8}
BABI = """1 Mary moved to the bathroom.
2 Mary got the football there.
3 Where is Mary? \tbathroom\t1
4 Mary went back to the garden.
5 Where is the football? \tgarden\t2 4
1 John is here.
2 Where is John? \there\t1
"""


@pytest.mark.parametrize("needed", [1, 2, 3])
def test_answers_follow_from_the_needed_facts(needed: int) -> None:
    for story in made_up(200, needed, seed=0)["train"]:
        assert len(set(story.needed)) == needed
        asked = story.question[-1]
        for k in story.needed:
            fact = story.facts[k]
            assert asked in fact
            # A fact leads to the next by its other end.
            asked = fact[0] if fact[-1] == asked else fact[-1]
            if fact[0] == "the":
                asked = fact[-1]
        assert asked == story.answer
        walk = story.needed[-1]
        assert not [later for later in story.facts[walk + 1 :] if later[0] == story.facts[walk][0] and "to" in later]


@pytest.mark.parametrize("needed", [1, 2, 3])
def test_splits(needed: int) -> None:
    assert_no_split_shares("facts", needed=needed, train_size=100)


def test_babi_stories() -> None:
    (first, second), (third,) = asked_in(BABI, "qa2")
    assert first.facts == (["mary", "moved", "to", "the", "bathroom"], ["mary", "got", "the", "football", "there"])
    assert (first.question, first.answer, first.needed) == (["where", "is", "mary"], "bathroom", [0])
    # The line of a question is no fact.
    assert (len(second.facts), second.needed) == (3, [1, 2])
    assert (len(third.facts), third.needed) == (1, [0])


def babi(folder: Path, **changed: str) -> str:
    files = {f"en/qa2_two-supporting-facts_{part}.txt": changed.get(part, BABI) for part in ("train", "test")}
    return str(write(folder, {"babi.tar.gz": archive(files)}))


def test_babi_files(tmp_path: Path) -> None:
    folder = babi(tmp_path, train=BABI * 10)
    parts = read(folder, 2, "1k")
    # Twenty stories of one and a half questions each, the last two of which validate.
    assert {split: len(stories) for split, stories in parts.items()} == {"train": 27, "validation": 3, "test": 3}
    with pytest.raises(ValueError, match="archives with en/qa3_…_train"):
        read(folder, 3, "1k")
    with pytest.raises(ValueError, match="archives with en-10k/qa2_"):
        read(folder, 2, "10k")
    # Task 1 is not task 11, and folders do as well as archives.
    write(
        tmp_path / "tasks" / "en", {"qa11_basic-coreference_train.txt": BABI, "qa11_basic-coreference_test.txt": BABI}
    )
    assert len(read(str(tmp_path / "tasks"), 11, "1k")["test"]) == 3
    with pytest.raises(ValueError, match="en/qa1_"):
        read(str(tmp_path / "tasks"), 1, "1k")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2 Mary is here.\n", "line 1: '2 Mary is here.'"),
        ("1 Mary is here.\nno number\n", "line 2: 'no number'"),
        ("1 Mary is here.\n2 Where?\there\t3\n", "line 2.*lines of facts"),
        ("1 Mary is here.\n2 Where?\t\t1\n", "line 2.*a question, its answer"),
    ],
)
def test_broken_babi_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asked_in(text, "qa2")


def test_unknown_answers_and_old_facts(tmp_path: Path) -> None:
    folder = babi(tmp_path, train=BABI * 2, test=BABI.replace("\tgarden", "\tpark"))
    task = configured("facts", {"data": folder, "task": 2, "memory": 2, "dim": 8})
    assert isinstance(task, Facts)
    assert task.classes == ["bathroom", "garden", "here", "<another>"]
    _, second, _ = task.examples("test")
    assert second.target is not None
    assert task.classes[second.target] == "<another>"
    assert second.gold is not None
    assert second.gold.tolist() == [[2, 2]]
    assert second.words["key"] == ["mary got the football there", "mary went back to the garden"]


def test_sentences_are_weighted_by_the_places_of_their_words() -> None:
    read_ = Sentences(Embedding(11, 5), times=3).eval()
    words = torch.randint(11, (2, 4, 7))
    mask = torch.arange(7) < torch.tensor([[7, 3, 1, 2], [5, 1, 0, 0]]).unsqueeze(-1)
    found = read_(words, mask)
    assert read_.T is not None
    for b, lengths in enumerate(mask.sum(-1).tolist()):
        real = sum(x > 0 for x in lengths)
        for i, J in enumerate(lengths):
            expected = torch.zeros(5)
            for j in range(1, J + 1):
                for k in range(1, 6):
                    weight = (1 - j / J) - (k / 5) * (1 - 2 * j / J)
                    expected[k - 1] += weight * read_.table.table.weight[words[b, i, j - 1], k - 1].detach()
            if J:
                expected += read_.T[min(real - 1 - i, 2)].detach()
            torch.testing.assert_close(found[b, i], expected, rtol=1e-5, atol=1e-5)
    assert read_.mask_after(mask).tolist() == [[True] * 4, [True, True, False, False]]


def test_noise_only_widens_distances() -> None:
    read_ = Sentences(Embedding(3, 5), times=100, noise=0.5)
    real = torch.ones(20, 30, dtype=torch.bool)
    ages = read_.ages(real)
    steps = ages[:, :-1] - ages[:, 1:]
    assert (ages[:, -1] == 0).all()
    assert steps.unique().tolist() == [1, 2]
    assert (read_.eval().ages(real)[0] == torch.arange(29, -1, -1)).all()


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("attention", RECIPE.alternatives)
def test_every_alternative_learns(attention: str, recurrent: bool) -> None:
    task = assert_learns("facts", attention=attention, recurrent=recurrent, **SMALL)
    examples = list(task.examples("train"))[:5]
    weights = hop_weights(task.build().eval(), collate(examples))
    assert len(weights) == (3 if "hop" in attention or attention == "key-value" else 1)


@pytest.mark.parametrize("attention", RECIPE.alternatives)
def test_padding_never_matters(attention: str) -> None:
    task = configured("facts", {"attention": attention, **SMALL})
    model = task.build().eval()
    short = task.parse("Mary is here. Where is Mary?")
    long = task.parse("John is in the garden. Mary went to the old office. Mary is here. Where in the garden is Mary?")
    with torch.no_grad():
        alone, together = model(collate([short]))[0], model(collate([short, long]))[0]
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5)


def test_an_attention_with_a_context_for_each_fact_is_refused() -> None:
    task = configured("facts", {"attention": "self-attention", **SMALL})
    with pytest.raises(ValueError, match="one context for a question, 8 wide|asks for"):
        task.build()(collate([task.examples("train")[0]]))
    with pytest.raises(ValueError, match="one context for a question"):
        Answer(8, 3)(torch.randn(2, 5, 8), None)


def test_hops_are_judged_by_the_needed_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.recipes.facts import recipe

    task = configured("facts", SMALL)
    model, examples = task.build().eval(), task.examples("test")

    def told(model: object, batch: object) -> list[torch.Tensor]:
        needed = (batch.gold[:, 0] == 2).float()  # type: ignore[attr-defined]
        last = needed.shape[1] - 1 - needed.flip(-1).argmax(-1, keepdim=True)
        second = torch.zeros_like(needed).scatter_(1, last, 1.0)
        return [needed - second, second]

    monkeypatch.setattr(recipe, "hop_weights", told)
    metrics = task.judge(model, examples).metrics
    assert metrics["fact_accuracy"] == metrics["fact_weight"] == 1.0
    monkeypatch.setattr(recipe, "hop_weights", lambda model, batch: told(model, batch)[:1])
    metrics = task.judge(model, examples).metrics
    assert (metrics["fact_accuracy"], metrics["fact_weight"]) == (0.0, 1.0)


@pytest.mark.parametrize(("needed", "attention"), [(1, "additive"), (2, "multi-hop")])
def test_a_short_training_learns_it(tmp_path: Path, needed: int, attention: str) -> None:
    settings = {"steps": 200 * needed, "every": 200, "train_size": 1000 * needed**2}
    run = assert_reaches(tmp_path, "facts", "accuracy", 0.8, attention=attention, needed=needed, **settings)
    assert (run.metrics() or {})["fact_accuracy"] > 0.7
    assert (run.folder / "attention.svg").is_file()
    task = run.recipe()
    took = "" if needed == 1 else "John took the key. Mary took the milk."
    asked = "mary" if needed == 1 else "the milk"
    story = task.parse(f"Mary went to the office. {took} John went to the garden. Where is {asked}?")
    assert task.judge(run.model(), [story]).answers == ["office"]


def test_what_cannot_be_is_refused() -> None:
    for key, value in (("task", 21), ("needed", 4), ("size", "5k")):
        with pytest.raises(ValueError, match=f"{key}: got"):
            configured("facts", {key: value})
    for text in ("", "Where is Mary?", "Mary is here. ?"):
        with pytest.raises(ValueError, match="facts and a question"):
            configured("facts", SMALL).parse(text)
