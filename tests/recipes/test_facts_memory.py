"""Memory networks on facts: adjacent hops, answers that are words, and a start without softmax."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

import regard as rg
from regard.general.alignments import Alignment, Hard, Soft, Sparsemax
from regard.model import Embedding, collate
from regard.model.naming import Available
from regard.recipes import run
from regard.recipes.engine import train
from regard.recipes.facts.memory import AdjacentHops, LinearStart, Memories, Said
from regard.recipes.facts.parts import Sentences
from regard.recipes.facts.recipe import Facts, hop_weights
from regard.recipes.recipe import configured
from regard.recipes.runs import Run
from tests.recipes.checks import assert_learns, assert_reaches
from tests.recipes.test_facts import BABI, babi

SMALL = {"train_size": 60, "dim": 8, "adjacent": True}


@pytest.mark.parametrize("align", [Soft(), Sparsemax(), Hard()])
def test_scores_are_the_weights_until_so_many_updates(align: Alignment) -> None:
    attend = rg.Attention("dot", LinearStart(align, updates=2))
    plain = rg.Attention("dot", align)
    query, key, value = torch.randn(3, 5), torch.randn(3, 7, 5), torch.randn(3, 7, 2)
    mask = torch.arange(7) < torch.tensor([[7], [4], [0]])
    linear = torch.einsum("bd,bnd,bnv,bn->bv", query, key, value, mask.float())
    # What is judged in between is aligned, and is no update.
    for training in (True, False, True, False):
        attend.train(training)
        plain.train(training)
        expected = linear if training else plain(query, key, value, mask=rg.Keys(mask))
        torch.testing.assert_close(attend(query, key, value, mask=rg.Keys(mask)), expected)
    for x in (attend.train(), plain.train()):
        torch.manual_seed(3)
        found = x(query, key, value, mask=rg.Keys(mask))
    torch.manual_seed(3)
    torch.testing.assert_close(attend(query, key, value, mask=rg.Keys(mask)), found)
    assert attend.align.seen == 2


def test_a_masked_fact_has_no_weight_without_softmax_either() -> None:
    attend = rg.Attention("dot", LinearStart(Soft(), updates=9))
    query, key = torch.randn(2, 5), torch.randn(2, 7, 5, requires_grad=True)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    spoilt = torch.where(mask.unsqueeze(-1), key, torch.nan)
    torch.testing.assert_close(
        attend(query, spoilt, mask=rg.Keys(mask)), attend(query, key * mask.unsqueeze(-1), mask=rg.Keys(mask))
    )
    # This score is not zero where keys are.
    attend = rg.Attention("additive", LinearStart(Soft(), updates=9), query_dim=5, key_dim=5, hidden_dim=5)
    with rg.record(attend) as trace:
        attend(query, key, mask=rg.Keys(mask))
    assert (trace[""].scores[1] != 0).all()
    assert (trace[""].weights[1, 4:] == 0).all()
    torch.testing.assert_close(trace[""].weights[0], trace[""].scores[0])


def test_updates_are_counted_on_after_a_resumption() -> None:
    first, second = (LinearStart(Soft(), updates=3) for _ in range(2))
    attend = rg.Attention("dot", first)
    for _ in range(2):
        attend(torch.randn(1, 5), torch.randn(1, 7, 5))
    second.load_state_dict(first.state_dict())
    assert second.seen == 2


def test_hops_find_by_what_the_one_before_read() -> None:
    torch.manual_seed(0)
    tables = [Embedding(11, 5) for _ in range(4)]
    facts = Memories([Sentences(table, times=3) for table in tables]).eval()
    words = torch.randint(11, (2, 6, 4))
    real = torch.arange(4) < torch.tensor([[4, 2, 3, 1, 0, 0], [1, 4, 4, 2, 3, 2]]).unsqueeze(-1)
    memories = facts(words, real)
    attend = AdjacentHops([rg.Attention("dot") for _ in range(3)])
    question = torch.randn(2, 5)
    found = attend(question, memories, facts.mask_after(real))
    for b in range(2):
        u = question[b]
        for s in range(3):
            count = int(facts.mask_after(real)[b].sum())
            m, c = (facts.sentences[s + k](words, real)[b, :count] for k in (0, 1))
            weights = torch.stack([u @ x for x in m]).softmax(0)
            u = u + sum(w * x for w, x in zip(weights, c, strict=True))
        torch.testing.assert_close(found[b], u)


def test_facts_are_as_old_for_every_hop() -> None:
    facts = Memories([Sentences(Embedding(3, 4), times=50, noise=0.5) for _ in range(2)])
    for each in facts.sentences:
        assert isinstance(each, Sentences)
        assert each.T is not None
        # What is left is how old the facts are.
        each.T.data = torch.arange(50.0).unsqueeze(-1).expand(50, 4).clone()
        each.table.table.weight.data.zero_()
    first, second = facts(torch.zeros(3, 20, 2, dtype=torch.long), torch.ones(3, 20, 2, dtype=torch.bool)).chunk(2, -1)
    assert torch.equal(first, second)
    assert first.max() > 19


def test_answers_are_words_of_the_last_hop() -> None:
    table = Embedding(11, 5)
    say = Said(table, torch.tensor([4, -1, 2])).eval()
    say.own.data.normal_()
    context = torch.randn(3, 5)
    logits = say(context, Available({}, {}, {}))
    rows = torch.stack([table.table.weight[4], say.own[1], table.table.weight[2]])
    torch.testing.assert_close(logits, context @ rows.mT)
    logits.sum().backward()
    assert say.own.grad is not None
    assert (say.own.grad.abs().sum(-1) > 0).tolist() == [False, True, False]
    torch.testing.assert_close(say.probabilities(logits).sum(-1), torch.ones(3))


@pytest.mark.parametrize(
    "settings", [{}, {"recurrent": True}, {"attention.align": "sparsemax"}, {"attention.score": "general"}]
)
@pytest.mark.parametrize("hops", [1, 3])
def test_every_hop_learns(settings: dict[str, object], hops: int) -> None:
    task = assert_learns("facts", hops=hops, linear=4, **SMALL, **settings)
    examples = list(task.examples("train"))[:5]
    weights = hop_weights(task.build().eval(), collate(examples))
    assert len(weights) == hops
    if "attention.score" not in settings:
        torch.testing.assert_close(weights[0].sum(-1), torch.ones(5))


def test_padding_never_matters() -> None:
    task = configured("facts", SMALL)
    model = task.build().eval()
    short = task.parse("Mary is here. Where is Mary?")
    long = task.parse("John is in the garden. Mary went to the old office. Mary is here. Where in the garden is Mary?")
    with torch.no_grad():
        torch.testing.assert_close(model(collate([short]))[0], model(collate([short, long]))[0], rtol=1e-4, atol=1e-5)


def test_real_stories_have_adjacent_hops(tmp_path: Path) -> None:
    folder = babi(tmp_path, train=BABI.replace("garden", "Garden") * 2)
    task = configured("facts", {"data": folder, "task": 2})
    assert isinstance(task, Facts)
    assert (task.adjacent, task.linear, task.dim) == (True, 560, 20)
    model = task.build()
    assert isinstance(model.output, Said)
    # An answer is a word in whatever case, and one that no story has is none.
    assert [k >= 0 for k in model.output.words.tolist()] == [True, True, True, False]
    (group,) = task.groups(model)
    assert (group["eps"], group["lr"]) == (task.eps, task.lr)
    other = configured("facts", {"data": folder, "task": 2, "attention": "additive"})
    assert isinstance(other, Facts)
    assert (other.adjacent, other.linear) == (False, 0)


def test_what_adjacent_hops_do_not_have_is_refused() -> None:
    for key, value in (("transform", "gru"), ("share", True), ("see_context", True), ("start", "mean")):
        task = configured("facts", {f"attention.{key}": value, **SMALL})
        with pytest.raises(
            ValueError, match=f"attention.{key}: got .*where hops are adjacent.*Fix: --set adjacent=false"
        ):
            task.build()
    for key in ("linear", "eps"):
        with pytest.raises(ValueError, match=f"{key}: got -1.*, expected a number >= 0"):
            configured("facts", {key: -1})


def test_what_only_adjacent_hops_have_is_refused_elsewhere() -> None:
    with pytest.raises(ValueError, match="adjacent: got True, expected False with 'additive'"):
        configured("facts", {"attention": "additive", "adjacent": True})
    with pytest.raises(ValueError, match="linear: got 5, expected 0 with 'dot', which has no hops"):
        configured("facts", {"attention": "dot", "linear": 5})


@pytest.mark.parametrize("attention", ["multi-hop", "multi-hop-variants"])
@pytest.mark.parametrize("share", [True, False])
def test_other_hops_start_so_too(attention: str, share: bool) -> None:
    settings = {"attention": attention, "attention.share": share, "hops": 3, "linear": 2}
    task = configured("facts", {**SMALL, "adjacent": False, **settings})
    model, batch = task.build(), collate(list(task.examples("train"))[:5])
    for linear in (True, True, False):
        weights = hop_weights(model, batch)
        assert len(weights) == 3
        assert all(bool((each < 0).any()) == linear for each in weights)


def test_a_short_training_learns_it(tmp_path: Path) -> None:
    settings = {"needed": 1, "hops": 1, "train_size": 1000, "adjacent": True, "linear": 50, "lr": 0.4, "eps": 1.0}
    found = assert_reaches(tmp_path, "facts", "accuracy", 0.9, dim=20, steps=300, every=100, **settings)
    assert (found.metrics() or {})["fact_accuracy"] > 0.9
    story = found.recipe().parse("Mary went to the office. John went to the garden. Where is Mary?")
    assert found.recipe().judge(found.model(), [story]).answers == ["office"]


def test_a_run_goes_on_where_its_start_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"linear": 15, "steps": 30, "every": 10, "hops": 2, "eps": 0.1, **SMALL}
    whole = run("facts", out=tmp_path / "whole", progress=False, **settings)
    drawn = Facts.seed_of

    def interrupted(self: Facts, step: int) -> int:
        if step == 12:
            raise KeyboardInterrupt
        return drawn(self, step)

    monkeypatch.setattr(Facts, "seed_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("facts", out=tmp_path / "broken", progress=False, **settings)
    monkeypatch.undo()
    (folder,) = (tmp_path / "broken").iterdir()
    broken = Run.at(folder)
    assert train(broken.recipe(), broken, progress=False)
    expected, found = (torch.load(r.folder / "state.ckpt", weights_only=True)["model"] for r in (whole, broken))
    assert {int(x) for name, x in expected.items() if name.endswith("seen")} == {15}
    assert all(torch.equal(found[name], x) for name, x in expected.items())
