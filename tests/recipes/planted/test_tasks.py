"""Planted tasks: what they promise about where the answer is, and where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard as rg
from regard.recipes.planted import (
    AttributeLookup,
    Batch,
    Classifier,
    Dialects,
    InformativeSource,
    Lookup,
    MarkedWord,
    MatchingPair,
    NoisySegments,
    PairedViews,
    StoredPattern,
    TargetSentiment,
    WordThenCharacter,
    accuracy,
    fit,
)
from regard.recipes.planted.task import hidden_signs

TASKS = [
    MatchingPair(),
    Lookup(),
    TargetSentiment(),
    MarkedWord(),
    WordThenCharacter(),
    InformativeSource(),
    NoisySegments(),
]
every_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
COUNT = 4096


def drawn(task: Any, seed: int = 0, count: int = COUNT) -> Batch:
    return task.draw(count, torch.Generator().manual_seed(seed))


def flat(x: Any) -> list[torch.Tensor]:
    return [x] if isinstance(x, torch.Tensor) else [y for part in x for y in flat(part)]


@every_task
def test_the_same_seed_draws_the_same_batch(task):
    one, two, other = (drawn(task, seed, 64) for seed in (3, 3, 4))
    tensors = [flat([*b.inputs.values(), b.target, *b.truth.values()]) for b in (one, two, other)]
    assert all(torch.equal(x, y) for x, y in zip(tensors[0], tensors[1], strict=True))
    assert any(not torch.equal(x, y) for x, y in zip(tensors[0], tensors[2], strict=True))


@every_task
def test_classes_are_equally_frequent(task):
    target = drawn(task).target
    share = torch.bincount(target.flatten(), minlength=task.classes) / target.numel()
    assert ((share - 1 / task.classes).abs() < 0.04).all()


@every_task
def test_an_example_has_its_tensors_in_one_order(task):
    batch = drawn(task, count=7)
    assert all(len(x) == 7 for x in flat([*batch.inputs.values(), batch.target, *batch.truth.values()]))


def at(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x[torch.arange(len(index)), index]


def test_the_pair_matches_and_nothing_else_does():
    batch = drawn(MatchingPair())
    first, second = batch.inputs["first"], batch.inputs["second"]
    matches = first[..., :-1] @ second[..., :-1].mT
    assert (matches.sum((1, 2)) == 1).all()
    assert (at(at(matches, batch.truth["first"]), batch.truth["second"]) == 1).all()
    signs = [at(x, batch.truth[name])[:, -1] > 0 for name, x in batch.inputs.items()]
    assert torch.equal(2 * signs[0].long() + signs[1].long(), batch.target)


def test_the_lookup_has_the_code_of_the_query():
    batch = drawn(Lookup())
    found = at(batch.inputs["key"], batch.truth["key"])
    assert torch.equal(found[:, :-1], batch.inputs["query"])
    assert torch.equal((found[:, -1] > 0).long(), batch.target)


def test_the_opinion_is_on_the_target():
    batch = drawn(TargetSentiment())
    asked = batch.inputs["target"][:, 0, :-2]
    sides = {"left": batch.inputs["masks"][1], "right": batch.inputs["masks"][2]}
    assert ((batch.truth["left"] >= 0) != (batch.truth["right"] >= 0)).all()
    for name, mask in sides.items():
        here = batch.truth[name] >= 0
        found = at(batch.inputs[name], batch.truth[name].clamp(min=0))[here]
        assert torch.equal(found[:, :-2], asked[here])
        assert torch.equal((found[:, -2] > 0).long(), batch.target[here])
        assert at(mask, batch.truth[name].clamp(min=0))[here].all()
        assert 0.1 < (~mask.any(-1)).float().mean() < 0.25
        others = ((batch.inputs[name][..., :-2] @ asked[..., None]).squeeze(-1) > 0) & mask
        assert torch.equal(others.sum(-1), here.long())


def test_the_marked_word_is_real():
    batch = drawn(MarkedWord())
    features, mask = batch.inputs["features"], batch.inputs["mask"]
    word = at(at(features, batch.truth["sentence"]), batch.truth["word"])
    assert (word[:, 0] == 1).all()
    assert (features[..., 0].sum((1, 2)) == 1).all()
    assert torch.equal(word[:, 1:5].argmax(-1), batch.target)
    assert at(at(mask, batch.truth["sentence"]), batch.truth["word"]).all()
    assert (~mask.any(-1)).any(), "some sentences are empty"


def test_the_word_names_the_character():
    batch = drawn(WordThenCharacter())
    word = at(batch.inputs["words"], batch.truth["words"])
    character = at(batch.inputs["characters"], batch.truth["characters"])
    assert torch.equal(word[:, :8], batch.inputs["query"])
    assert torch.equal(word[:, 8:], character[:, :8])
    assert torch.equal((character[:, -1] > 0).long(), batch.target)


def test_the_flagged_source_knows():
    task = InformativeSource()
    batch = drawn(task)
    for k, source in enumerate(batch.inputs["sources"]):
        mixing = torch.linalg.qr(torch.randn(task.widths[k], 6, generator=torch.Generator().manual_seed(k))).Q
        plain = source @ mixing
        knows = batch.truth["source"] == k
        assert torch.equal(plain[..., -1] > 0.5, knows)
        assert torch.equal(plain[..., :5].argmax(-1)[knows], batch.target[knows])


@pytest.mark.parametrize("n", [2, 3, 4, 6, 7])
def test_sums_do_not_tell_the_hidden_sign(n):
    place = torch.randint(n, (20000,), generator=torch.Generator().manual_seed(0))
    signs = hidden_signs(place, n, torch.Generator().manual_seed(1))
    assert set(signs.flatten().tolist()) == {-1.0, 1.0}
    hidden, total = at(signs, place), signs.sum(-1)
    for value in total.unique():
        assert abs(hidden[total == value].mean()) < 0.05
    # Leaving it out tells it only where the others are extreme.
    others = total - hidden
    best = torch.stack([hidden[others == value].sum().abs() for value in others.unique()]).sum() / len(place)
    assert abs(float(best) - 1 / (n - 1)) < 0.02


def test_fit_is_repeatable_and_leaves_the_generator_alone():
    task, states = Lookup(), []
    for _ in range(2):
        torch.manual_seed(0)
        model = Classifier(rg.Attention("general", query_dim=12, key_dim=task.dim, dropout=0.2), task.dim, task.classes)
        before = torch.get_rng_state()
        losses = fit(model, task, steps=5)
        assert torch.equal(before, torch.get_rng_state())
        states.append([*model.state_dict().values(), torch.tensor(losses)])
    assert all(torch.equal(x, y) for x, y in zip(*states, strict=True))
    assert not model.training


def test_attention_looks_up_and_its_mean_does_not():
    task = Lookup()
    for uniform in (False, True):
        torch.manual_seed(0)
        attention = rg.Attention("general", query_dim=task.codes, key_dim=task.dim)
        model = Classifier(attention, task.dim, task.classes, task.readout)
        if uniform:
            with rg.intervene(model, "uniform"):
                fit(model, task, lr=0.03)
                assert abs(accuracy(model, task) - 0.5) < 0.04
            continue
        losses = fit(model, task, lr=0.03)
        assert accuracy(model, task) >= 0.95
        assert losses[-1] < 0.1 < losses[0]
        batch = drawn(task)
        with rg.record(model) as trace:
            model(**batch.inputs)
        assert (trace.weights.argmax(-1) == batch.truth["key"]).float().mean() >= 0.95


def test_another_loss_may_be_given():
    task = Lookup()
    model = Classifier(rg.Attention("general", query_dim=task.codes, key_dim=task.dim), task.dim, task.classes)
    seen = []

    def supervised(model, batch):
        with rg.record(model) as trace:
            model(**batch.inputs)
        seen.append(trace.log_sum_exp().shape)
        return (trace.log_sum_exp() - at(trace.scores, batch.truth["key"])).mean()

    losses = fit(model, task, steps=100, lr=0.03, loss=supervised)
    assert seen[0] == (64,)
    assert losses[-1] < losses[0] / 2


def test_segments_are_two_runs_that_hold_one_sign():
    task = NoisySegments()
    batch = drawn(task)
    inside, value = batch.truth["inside"], batch.inputs["value"].squeeze(-1)
    runs = (inside & ~torch.nn.functional.pad(inside, (1, 0))[:, :-1]).sum(-1)
    # Two that touch are one.
    assert ((runs == 2) | (runs == 1)).all()
    assert (runs == 2).float().mean() > 0.9
    assert ((inside.sum(-1) >= 2 * task.shortest) & (inside.sum(-1) <= 2 * task.longest)).all()
    sign = (2.0 * batch.target - 1)[:, None].expand_as(value)
    assert torch.equal(value[inside], sign[inside])
    evidence = batch.inputs["key"][..., 0]
    wrong = ((evidence > 0) != inside).float().mean()
    assert 0.2 < wrong < 0.3


def test_a_dialect_tells_between_two_items_that_are_both_there():
    task = Dialects()
    batch = drawn(task)
    dialect, named = batch.inputs["query"][:, :2].argmax(-1), batch.inputs["query"][:, 2:].argmax(-1)
    codes = batch.inputs["key"].argmax(-1)
    for reading in (0, 1):
        assert ((codes == ((named + reading) % task.codes)[:, None]).sum(-1) == 1).all()
    assert torch.equal(at(codes, batch.truth["key"]), (named + dialect) % task.codes)
    assert torch.equal(at(batch.inputs["value"].squeeze(-1), batch.truth["key"]) > 0, batch.target == 1)


def test_the_condition_tells_between_colour_and_shape():
    batch = drawn(AttributeLookup())
    query, key, which = (batch.inputs[name] for name in ("query", "key", "condition"))
    alike = (query[:, None] * key).unflatten(-1, (2, -1)).sum(-1)
    assert (alike.sum(1) == 1).all()
    assert (alike.sum(-1) <= 1).all()
    assert (at(alike, batch.truth["key"]) == which).all()


def test_the_views_are_of_the_same_things():
    task = PairedViews(noise=0.0)
    batch = drawn(task, count=64)
    things = [
        batch.inputs[n] @ torch.linalg.pinv(task._map(d, s)).mT for n, d, s in (("first", 8, 1), ("second", 11, 2))
    ]
    partner = batch.target.unsqueeze(-1).expand_as(things[1])
    assert torch.allclose(things[0], things[1].gather(1, partner), atol=1e-4)


def test_the_query_that_is_meant_lies_by_its_key():
    batch = drawn(StoredPattern())
    near = (batch.inputs["query"] @ batch.inputs["key"].mT).flatten(1).argmax(-1)
    found = torch.stack([near // 6, near % 6], -1)
    assert (found == torch.stack([batch.truth["query"], batch.truth["key"]], -1)).all(-1).float().mean() > 0.99
