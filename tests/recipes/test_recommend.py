"""Recommend: what is asked was not seen, rankings are among all items, and users are recommended what they will want."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

from regard.model import collate
from regard.recipes.recipe import configured
from regard.recipes.recommend import RECIPE, Recommend
from regard.recipes.recommend.models import Cloze, Following, LongShort
from regard.recipes.recommend.recipe import unseen
from regard.recipes.recommend.walks import GROUPS, OF_EACH, made_up, read
from tests.recipes.checks import assert_learns, assert_reaches
from tests.recipes.text_data import write

SMALL = {"train_size": 30, "dim": 8}


def test_walks_go_from_group_to_group() -> None:
    walks = made_up(400, seed=0)
    assert walks == made_up(400, seed=0)
    assert walks != made_up(400, seed=1)
    counts = torch.zeros(GROUPS, GROUPS)
    for walk in walks:
        assert len(set(walk)) == len(walk) >= 3
        for a, b in pairwise(walk):
            counts[int(a.split(".")[0]), int(b.split(".")[0])] += 1
    best = counts.max(-1)
    # A circle through all groups.
    assert sorted(best.indices.tolist()) == list(range(GROUPS))
    assert (best.values.sum() / counts.sum()) > 0.85


def test_the_last_item_is_tested_and_the_one_before_validates(tmp_path: Path) -> None:
    folder = str(write(tmp_path, {"beauty.txt.gz": "7 a\n7 b\n9 b\n7 c\n7 d\n9 a\n9 e\n3 a\n3 b\n"}))
    assert read(folder) == [["a", "b", "c", "d"], ["b", "a", "e"]]
    task = configured("recommend", {"data": folder, "length": 2})
    assert isinstance(task, Recommend)
    # The third user has too few items, the second too few to train on.
    assert task.known == {"items": ["a", "b", "c", "d", "e"], "users": 2}
    (train,), (validation, _), (test, other) = (task.examples(split) for split in ("train", "validation", "test"))
    assert train.words["items"] == ["a", "b"]
    assert (validation.words["items"], validation.target) == (["a", "b"], torch.tensor(2))
    assert (test.words["items"], test.target) == (["b", "c"], torch.tensor(3))
    assert (other.inputs["items"].tolist(), other.target, other.variables["user"]) == (
        [1, 0],
        torch.tensor(4),
        torch.tensor(2),
    )


def test_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"also has beauty\.txt"):
        read(str(write(tmp_path / "empty", {})))
    with pytest.raises(ValueError, match="line 2: '1 2 3'.*a user and an item"):
        read(str(write(tmp_path / "broken", {"beauty.txt": "1 2\n1 2 3\n"})))
    with pytest.raises(ValueError, match="1 users with fewer than three items"):
        read(str(write(tmp_path / "few", {"beauty.txt": "1 2\n1 3\n"})))


@pytest.mark.parametrize("attention", [*RECIPE.alternatives, "sparsemax", "rotary-position"])
def test_every_alternative_learns(attention: str) -> None:
    assert_learns("recommend", attention=attention, **SMALL)


def test_an_attention_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="attention: got 'rotatory'"):
        configured("recommend", {"attention": "rotatory", **SMALL}).build()


@pytest.mark.parametrize("attention", RECIPE.alternatives)
def test_padding_never_matters(attention: str) -> None:
    task = configured("recommend", {"attention": attention, **SMALL})
    model, examples = task.build().eval(), sorted(task.examples("test"), key=lambda e: len(e.inputs["items"]))
    short, long = examples[0], examples[-1]
    assert len(short.inputs["items"]) < len(long.inputs["items"])
    with torch.no_grad():
        alone, together = model(collate([short])).logits[0], model(collate([short, long])).logits[0]
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5)


def test_bert4rec_recommends_as_the_library_does() -> None:
    task = configured("recommend", SMALL)
    model, batch = task.build().eval(), collate(list(task.examples("test"))[:7])
    assert isinstance(model.attention, Cloze)
    with torch.no_grad():
        expected = model.attention.model.recommend(batch.inputs["items"], batch.masks["items"])
        torch.testing.assert_close(model(batch).logits, expected, rtol=1e-5, atol=1e-6)
        model.train()
        torch.manual_seed(3)
        found = model.loss(model(batch), batch)
        torch.manual_seed(3)
        whole = model.attention.model.loss(batch.inputs["items"], batch.masks["items"])
    # Dropout draws after the hidden items are chosen: the same in both.
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)


def test_no_item_is_told_from_itself() -> None:
    for attention, kind in (("transformer-decoder", Following), ("hierarchical", LongShort)):
        task = configured("recommend", {"attention": attention, "dropout": 0.0, "masked": 1.0, **SMALL})
        model, example = task.build(), max(task.examples("train"), key=lambda e: len(e.inputs["items"]))
        recommender, batch = model.attention, collate([example])
        assert isinstance(recommender, kind)
        items, mask, n = batch.inputs["items"], batch.masks["items"], len(example.inputs["items"])
        more = {"user": batch.variables["user"]} if kind is LongShort else {}
        torch.manual_seed(0)
        asked = recommender(items, mask=mask, **more)
        assert asked.item.tolist() == items[0, 1:].tolist()
        changed = items.clone()
        changed[0, n - 1] = (changed[0, n - 1] + 1) % 20
        torch.manual_seed(0)
        torch.testing.assert_close(recommender(changed, mask=mask, **more).state, asked.state)
        changed[0, n - 2] = (changed[0, n - 2] + 1) % 20
        torch.manual_seed(0)
        assert not torch.allclose(recommender(changed, mask=mask, **more).state[-1], asked.state[-1])


def test_long_and_short_term_preference() -> None:
    task = configured("recommend", {"attention": "dot", "recent": 2, **SMALL})
    model = task.build().eval()
    shan = model.attention
    assert isinstance(shan, LongShort)
    for example in list(task.examples("test"))[:3]:
        batch = collate([example])
        found = shan(batch.inputs["items"], batch.variables["user"], batch.masks["items"]).state[0]
        u, x = shan.U[int(example.variables["user"])], shan.E[example.inputs["items"]]
        old, new = x[:-2], x[-2:]
        long_term = torch.softmax(old @ u, 0) @ old
        both = torch.stack([long_term, *new])
        torch.testing.assert_close(found, torch.softmax(both @ u, 0) @ both, rtol=1e-4, atol=1e-6)


def test_seen_items_are_left_out_unless_right() -> None:
    scores = torch.arange(10.0).view(2, 5)
    items, mask = torch.tensor([[4, 3], [2, 0]]), torch.tensor([[True, True], [True, False]])
    found = unseen(scores, items, mask, torch.tensor([3, 1]))
    assert found.isinf().tolist() == [[False, False, False, False, True], [False, False, True, False, False]]
    assert torch.equal(unseen(scores, items, mask, None).isinf().sum(-1), torch.tensor([2, 1]))


def test_rankings_are_among_all_items(monkeypatch: pytest.MonkeyPatch) -> None:
    task = configured("recommend", SMALL)
    model, examples = task.build().eval(), task.examples("test")
    judged = task.judge(model, examples)
    hits, gain = 0, 0.0
    for example, answer in zip(examples, judged.answers, strict=True):
        assert len(answer) == 10
        assert not set(answer) & set(example.words["items"])
        with torch.no_grad():
            logits = model(collate([example])).logits[0]
        seen = set(example.inputs["items"].tolist())
        target = int(example.target)  # type: ignore[arg-type]
        rank = 1 + sum(
            float(logits[k]) >= float(logits[target]) for k in range(len(logits)) if k not in seen and k != target
        )
        hits, gain = hits + (rank <= 10), gain + (1 / math.log2(1 + rank) if rank <= 10 else 0.0)
    assert judged.metrics["hit_rate_10"] == pytest.approx(hits / len(examples))
    assert judged.metrics["ndcg_10"] == pytest.approx(gain / len(examples))
    assert "seen=left out" in judged.signatures["ndcg_10"]
    few = configured("recommend", {**SMALL, "users": 5})
    assert len(few.glance(model, examples).answers) == 5


@pytest.mark.parametrize("attention", ["bert4rec", "hierarchical"])
def test_a_short_training_learns_it(tmp_path: Path, attention: str) -> None:
    settings = {"train_size": 800, "steps": 250, "every": 125}
    # Ten of sixty items are a sixth; nine walks of ten go where the group leads.
    run = assert_reaches(tmp_path, "recommend", "hit_rate_10", 0.6, attention=attention, **settings)
    assert (run.folder / "attention.svg").is_file()
    task = run.recipe()
    (answer,) = task.judge(run.model(), [task.parse("3.0 3.1")]).answers
    assert len(answer) == 10
    assert not {"3.0", "3.1"} & set(answer)
    assert len(task.known["items"]) == GROUPS * OF_EACH


def test_unknown_items_are_refused() -> None:
    for text in ("", "3.0 99.9"):
        with pytest.raises(ValueError, match="items that were seen in training"):
            configured("recommend", SMALL).parse(text)
    with pytest.raises(ValueError, match="recent: got 0"):
        configured("recommend", {"recent": 0})
