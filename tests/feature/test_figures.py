"""A figure of the weights of every mechanism of this family."""

from __future__ import annotations

import pytest
import torch

import regard as rg

pytest.importorskip("matplotlib")

from regard.report.figures import heatmap, save, token_strips, trace_strips

WORDS = ["the", "sea", "food", "was", "fresh"]


def x(n: int) -> torch.Tensor:
    return torch.randn(2, n, 4, generator=torch.Generator().manual_seed(n))


CASES = {
    "alternating": (rg.AlternatingCoAttention(4), (x(5), x(3)), {"first": 5, "second": 3, "summary": 5}),
    "interactive": (rg.InteractiveCoAttention(4), (x(5), x(3)), {"first": 5, "second": 3}),
    "parallel": (rg.ParallelCoAttention(4), (x(5), x(3)), {"first": 5, "second": 3}),
    "multi-grained": (rg.MultiGrainedCoAttention(4), (x(5), x(3)), {"coarse.first": 5, "fine.second": 3}),
    "rotatory": (rg.RotatoryAttention(4, hops=2), (x(2), x(5), x(3)), {"left": 5, "target_left": 2, "right": 3}),
    "multi-dimensional": (rg.InteractiveCoAttention(4, score="additive", features=True), (x(5), x(3)), {"first": 5}),
    "via": (rg.AttentionViaAttention(4, 4), (x(1)[:, 0], x(3), x(5)), {"words": 3, "characters": 5}),
}


@pytest.mark.parametrize("name", CASES)
def test_strips_of_a_trace(name, tmp_path):
    module, inputs, lengths = CASES[name]
    with rg.record(module) as trace:
        module(*inputs)
    tokens = {path: WORDS[:n] for path, n in lengths.items()}
    figure = trace_strips(trace, tokens, example=1, title=name)
    assert [axes.get_title(loc="left") for axes in figure.axes[:-1]] == list(lengths)
    for axes, (path, words) in zip(figure.axes, tokens.items(), strict=False):
        rows = len(trace[path])
        texts = [text.get_text() for text in axes.texts]
        assert texts[: rows * len(words)] == list(words) * rows
        assert len(axes.patches) == rows * len(words)
    assert save(figure, tmp_path / "figure.svg").stat().st_size > 1000


def test_strips_have_one_colour_scale_and_the_weights_colours():
    figure = token_strips({"a": (["x"], [0.2]), "b": (["y", "z"], [[0.2, 0.8], [0.4, 0.1]])})
    first, second = figure.axes[0], figure.axes[1]
    assert first.patches[0].get_facecolor() == second.patches[0].get_facecolor()
    assert second.patches[1].get_facecolor() != second.patches[0].get_facecolor()
    assert [t.get_text() for t in second.texts] == ["y", "z", "y", "z", "0", "1"]


def test_leaves_of_a_document():
    module = rg.HierarchicalAttention(4)
    with rg.record(module) as trace:
        module(torch.randn(2, 3, 5, 4))
    leaves, sentences = module.leaf_weights(trace)[0].detach(), trace["levels.sentence"].weights[0]
    figure = token_strips({f"sentence {k}: {w:.2f}": (WORDS, leaves[k]) for k, w in enumerate(sentences)})
    assert len(figure.axes) == 4


def test_affinity_and_sources_are_heat_maps():
    parallel, embed = rg.ParallelCoAttention(4), rg.MetaEmbedding((4, 3), 5)
    with rg.record(parallel) as trace:
        parallel(x(5), x(3))
    heatmap(trace["affinity"].weights[0].detach(), queries=WORDS, keys=WORDS[:3])
    with rg.record(embed) as trace:
        embed([x(5), x(5)[..., :3]])
    heatmap(trace["attention"].weights[0].detach(), queries=WORDS, keys=["GloVe", "fastText"])


def test_an_empty_text_says_so():
    figure = token_strips({"left": ([], torch.zeros(0)), "right": (["y"], [1.0])})
    assert figure.axes[0].texts[0].get_text() == "no tokens"


def test_refusals():
    with pytest.raises(ValueError, match="parts: got none"):
        token_strips({})
    with pytest.raises(ValueError, match="weights of left: got \\(1, 1, 1\\)"):
        token_strips({"left": (["x"], [[[1.0]]])})
    with pytest.raises(ValueError, match="tokens of left"):
        token_strips({"left": (["x", "y"], [1.0])})
    attend = rg.Attention("dot")
    with rg.record(attend) as trace:
        attend(x(3), x(5))
    with pytest.raises(ValueError, match="those of a single query; draw many with heatmap"):
        trace_strips(trace, {"": WORDS})
