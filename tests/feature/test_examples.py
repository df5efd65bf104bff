"""The applications in examples/: each runs, learns, and looks where it should."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import torch

import regard as rg

FOLDER = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_recommendation():
    found = load("recommendation").main(steps=250)
    assert found["hit rate"] > 0.9
    assert found["weight on the item"] > 2 * found["chance"]


def test_recommendation_reads_the_past_before_the_session():
    example = load("recommendation")
    model = example.Recommender(users=3, items=7, dim=5)
    with rg.record(model) as trace:
        scores = model(torch.tensor([0, 2]), torch.tensor([[1, 2, 3]] * 2), torch.tensor([[4, 5]] * 2))
    assert scores.shape == (2, 7)
    assert list(trace) == ["past", "session"]
    assert trace["past"].weights.shape == (2, 3)
    assert trace["session"].weights.shape == (2, 3)  # the long-term vector and two items


def test_video():
    found = load("video").main(steps=150)
    assert found["accuracy"] > 0.9
    assert found["weight on the frame"] > 0.8


def test_domains():
    found = load("domains").main(steps=150)
    assert found["accuracy in the other domain"] > 0.9
    assert found["weight on pivots"] > 1.3 * found["share of pivots"]


def test_domains_reverse_the_gradient_and_cover_pivots():
    example = load("domains")
    x = torch.randn(3, 4, requires_grad=True)
    example.Reverse.apply(x).sum().backward()
    assert torch.equal(x.grad, -torch.ones(3, 4))
    model, batch = example.TransferNetwork(8), example.Reviews().draw(5, torch.Generator().manual_seed(0))
    with rg.record(model) as trace:
        model(**batch.inputs)
    covered = model.pivots.leaf_weights(trace, at="pivots") >= model.covered
    assert not model.others.leaf_weights(trace, at="others")[covered].any()


def test_dialogue():
    found = load("dialogue").main(steps=250)
    assert found["accuracy"] > 0.9
    assert found["weight on the word"] > 0.8


def test_dialogue_reads_words_in_the_light_of_the_next_utterance():
    example = load("dialogue")
    torch.manual_seed(0)
    model = example.DialogueAttention(3, 4, 5).double()
    state, words = torch.randn(2, 3).double(), torch.randn(2, 3, 6, 4).double()
    mask = torch.ones(2, 3, 6, dtype=torch.bool)

    def weights(words: torch.Tensor) -> list[torch.Tensor]:
        with rg.record(model) as trace:
            model(state, words, mask)
        return [call.weights for call in reversed(trace["word"])]

    before, changed = weights(words), words.clone()
    changed[:, 1] += 1.0
    after = weights(changed)
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[2], before[2])
    # A padded utterance passes on what came after it.
    mask[:, 1] = False
    assert torch.allclose(model(state, words, mask), model(state, words[:, [0, 2]], mask[:, [0, 2]]), rtol=1e-12)


def test_crowd():
    found = load("crowd").main(steps=120)
    assert found["mean error"] < 0.4 * found["of the mean count"]


def test_crowd_gates_places_and_channels():
    example = load("crowd")
    x = torch.rand(2, 8, 5, 7)
    with rg.record(spatial := example.SpatialGate(8)) as trace:
        out = spatial(x)
    assert torch.allclose(out, x * trace.weights.view(2, 1, 5, 7))
    with rg.record(channel := example.ChannelGate(8)) as trace:
        out = channel(x)
    assert trace.weights.shape == (2, 8, 1)
    assert torch.allclose(out, x * trace.weights.view(2, 8, 1, 1))


def test_latent_tree():
    found = load("latent_tree").main(steps=80)
    assert found["accuracy"] >= 0.85
    assert found["saliency"] + found["focus"] <= 1 + 1e-6
