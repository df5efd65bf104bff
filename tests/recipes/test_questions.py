"""Questions about drawn scenes: the truth of them, and co-attention on them."""

import random

import pytest
import torch

from regard.recipes import run
from regard.recipes.questions import Asked, Thing
from regard.recipes.questions.parts import BothSides, Cells
from regard.recipes.questions.scenes import CELL, COLOURS, GRID, KINDS, asked
from regard.recipes.recipe import configured, recipe


def truth(a):
    """The answer from the words of the question alone, apart from how it was made."""
    words, things = a.question.split(), a.things
    if a.kind == "colour":
        return next(t.colour for t in things if t.shape == words[-1])
    if a.kind == "count":
        return str([t.colour for t in things].count(words[-1]))
    if a.kind == "more":
        colours = [t.colour for t in things]
        return "yes" if colours.count(words[3]) > colours.count(words[5]) else "no"
    (anchor,) = (t for t in things if t.shape == words[-1])
    (other,) = (t for t in things if t.colour == words[2])
    return "yes" if other.cell % GRID < anchor.cell % GRID else "no"


def test_answers_are_true_and_the_things_that_decide_are_in_the_scene():
    found = [asked(random.Random(k)) for k in range(400)]
    for a in found:
        assert a.answer == truth(a), a
        assert set(a.deciding) <= {t.cell for t in a.things}
        assert len({t.cell for t in a.things}) == len(a.things)
        if a.kind == "colour":
            assert len(a.deciding) == 1
        if a.kind == "count":
            assert len(a.deciding) == int(a.answer)
    for kind in KINDS:
        assert 60 < sum(a.kind == kind for a in found) < 140
    yes = [a.answer == "yes" for a in found if a.answer in ("yes", "no")]
    assert 0.4 < sum(yes) / len(yes) < 0.6


def test_a_thing_is_drawn_where_it_is():
    a = Asked((Thing("square", "red", 6),), "colour", "what colour is the square", "red", (6,))
    picture = a.picture()
    changed = (picture != 0.5).any(0)
    assert changed[CELL : 2 * CELL, 2 * CELL : 3 * CELL].sum() == changed.sum() == 16
    torch.testing.assert_close(picture[:, CELL + 2, 2 * CELL + 2], torch.tensor(COLOURS["red"]))
    assert a.names()[6] == "red square"
    assert a.names().count("-") == 15


def test_splits_repeat_themselves_and_do_not_overlap():
    task, again = (configured("questions", {"train_size": 60}) for _ in range(2))
    found = {split: {a.said() for a in task._asked[split]} for split in ("train", "validation", "test")}
    assert found == {split: {a.said() for a in again._asked[split]} for split in found}
    assert not found["train"] & found["test"]
    assert not found["train"] & found["validation"]
    example = task.examples("test")[0]
    assert example.gold.shape == (1, 16)
    assert example.words["scene"] == task._asked["test"][0].names()


def test_cells_are_patches_row_by_row():
    cells, image = Cells(8, 24, 6), torch.rand(1, 3, 24, 24)
    other = image.clone()
    other[:, :, 7, 13] += 0.3
    changed = (cells(image) != cells(other)).any(-1)[0]
    assert changed.nonzero().flatten().tolist() == [6]


@pytest.mark.parametrize("attention", recipe("questions").alternatives)
def test_every_attention_learns_and_its_look_at_the_scene_is_known(attention):
    task = configured("questions", {"attention": attention, "train_size": 30, "hidden_dim": 8})
    model = task.build()
    batch = task.batches(task.examples("train")[:5])[0]
    loss = model.loss(model(batch), batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    found = task.judge(model.eval(), task.examples("test"))
    assert 0 < found.metrics["deciding_mass"] < 1
    assert len(found.answers) == len(task.examples("test"))


def test_both_sides_leave_padding_out():
    import regard as rg

    torch.manual_seed(0)
    read = BothSides(rg.CrossModalAttention((3, 5), 4))
    first, second = torch.randn(2, 7, 3), torch.randn(2, 11, 5)
    masks = torch.ones(2, 7).bool(), torch.ones(2, 11).bool()
    masks[0][:, 5:] = False
    torch.testing.assert_close(read(first, second, masks), read(first[:, :5], second))


def test_there_is_no_text_and_no_data_to_read():
    task = configured("questions", {"train_size": 10})
    with pytest.raises(ValueError, match="a question here is about a scene, which text has not"):
        task.parse("what colour is the square")
    with pytest.raises(ValueError, match="the scenes of this recipe are all made up"):
        configured("questions", {"data": "somewhere"})


@pytest.mark.parametrize("attention", ["parallel-co-attention", "multi-hop"])
def test_colours_are_learnt_in_seconds(tmp_path, attention):
    found = run(
        "questions",
        attention=attention,
        train_size=1500,
        steps=150,
        every=75,
        batch=32,
        lr=3e-3,
        warmup=10,
        out=tmp_path,
        progress=False,
    )
    assert found.metrics()["accuracy"] > 0.38
    assert set(found.metrics()) >= {f"accuracy_{kind}" for kind in KINDS}
    assert "</svg>" in (found.folder / "attention.svg").read_text()
