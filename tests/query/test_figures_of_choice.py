"""A figure of what structured attention, and queries that are chosen, look at."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from tests.feature.common import normal, weights_of

pytest.importorskip("matplotlib")

from regard.report.figures import arcs, heatmap, save, token_strips, trace_strips

WORDS = ["the", "sea", "food", "was", "fresh"]


def x(n: int, d: int = 4) -> torch.Tensor:
    return normal(2, n, d).float()


@pytest.mark.parametrize("align", [rg.LinearChain(), rg.Budget(2)], ids=lambda align: type(align).__name__)
def test_what_is_selected_beside_what_was_drawn(align, tmp_path):
    attend = rg.Attention("dot", align)
    trace = weights_of(attend, x(1)[:, 0], x(5))
    drawn = align.distribution(trace.call).sample(torch.Generator().manual_seed(0))[0, 0].float()
    figure = token_strips({"marginals": (WORDS, trace.weights[0]), "a sample": (WORDS, drawn)})
    assert len(figure.axes[0].patches) == 5
    assert save(figure, tmp_path / "segments.svg").stat().st_size > 1000


def test_a_tree_and_its_marginals(tmp_path):
    parse = rg.SelfAttention(4, align=rg.DependencyTree(single_root=True))
    trace = weights_of(parse, x(5))["attention"]
    likely = arcs(trace.weights[0], WORDS, title="marginals")
    tree = parse.attention.align.distribution(trace.call).sample(torch.Generator().manual_seed(0))[0]
    one = arcs(tree, WORDS, title="a sample")
    assert len(likely.axes[0].patches) > len(one.axes[0].patches) == 5
    assert save(likely, tmp_path / "tree.svg").stat().st_size > 1000


def test_a_matching_is_a_heat_map(tmp_path):
    cross = rg.CrossModalAttention((4, 3), 5, align=rg.Sinkhorn())
    trace = weights_of(cross, x(5), x(3, 3))
    figure = heatmap(trace["first"].weights[0], queries=WORDS, keys=["sky", "sea", "sand"])
    assert save(figure, tmp_path / "matching.svg").stat().st_size > 1000


def test_who_asks_and_what_each_looks_at(tmp_path):
    routing = rg.QueryRouting(4, experts=3, top_k=2, mix="context")
    trace = weights_of(routing, x(5), x(5))
    gates = heatmap(trace["router"].weights[0], queries=WORDS, keys=["expert 0", "expert 1", "expert 2"])
    looks = heatmap(trace["attention"].weights[0], queries=WORDS, keys=WORDS)
    assert len(looks.axes) == 4
    assert save(gates, tmp_path / "gates.svg").stat().st_size > 1000


def test_how_heads_distribute_themselves():
    trace = weights_of(rg.AgreementAttention(4, 2), x(5))["agreement.routing"]
    assert len(heatmap(trace[-1].weights[0], queries=["head 0", "head 1"]).axes) == 6


def test_what_a_conditioned_query_reads():
    shape, attend = rg.FiLMQuery(4, 3), rg.Attention("dot")
    trace = weights_of(attend, shape(x(1)[:, 0], x(1, 3)[:, 0]), x(5))
    assert len(trace_strips(trace, {"": WORDS}).axes[0].patches) == 5
    latent = rg.LatentQueries(4, 2, 3)(x(1, 3)[:, 0])
    heatmap(weights_of(attend, latent, x(5)).weights[0], keys=WORDS)


def test_which_candidate_is_chosen():
    trace = weights_of(rg.EnergySelection(4, steps=2), x(3), x(5))
    figure = trace_strips(trace, {"select": ["first", "second", "third"]})
    assert len(figure.axes[0].patches) == 3
    heatmap(trace["attention"].weights[0], queries=["first", "second", "third"], keys=WORDS)
