"""Identities of graph attention, by their numbers in docs/identities.md, and what is claimed for it."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.bench.oversmoothing import Stack, spread
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, normal, weights_of

N, D, H, HEAD = 7, 5, 3, 2
every_execution = pytest.mark.parametrize("execution", EXECUTIONS, ids=str)


def complete(n: int) -> torch.Tensor:
    return torch.stack([torch.arange(n).repeat(n), torch.arange(n).repeat_interleave(n)])


def adjacency(edges: torch.Tensor, n: int) -> torch.Tensor:
    """Which node (row) reads which (column)."""
    allowed = torch.zeros(n, n, dtype=torch.bool)
    allowed[edges[1], edges[0]] = True
    return allowed


def sparse(n: int = N) -> torch.Tensor:
    edges = complete(n)
    kept = torch.rand(edges.shape[1], generator=torch.Generator().manual_seed(0)) < 0.4
    return edges[:, kept & (edges[1] != n - 1)]


@every_execution
def test_i38_in_gat_all_nodes_rank_their_neighbours_alike_and_in_gatv2_not(execution):
    x, orders = normal(N, D), {}
    for score in ("gat", "gatv2"):
        m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD, score=score, self_loops=False))
        with rg.execution(execution[0], panel=execution[1]):
            found = weights_of(m, x, complete(N))["attention"]
            orders[score] = found.scores.view(H, N, N).argsort(-1), found.weights.view(H, N, N).argmax(-1)
    ranking, best = orders["gat"]
    assert (ranking == ranking[:, :1]).all()
    assert (best == best[:, :1]).all()
    ranking, best = orders["gatv2"]
    assert not (ranking == ranking[:, :1]).all()
    assert not (best == best[:, :1]).all()


@every_execution
def test_i38_gatv2_is_additive_attention_under_the_adjacency_mask(execution):
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD, self_loops=False))
    x, edges = normal(N, D), sparse()
    attend = rg.Attention(rg.Additive(D, D, HEAD, activation="leaky_relu:0.2", heads=H)).double()
    with torch.no_grad():
        attend.score.W1.copy_(m.W_Q)
        attend.score.W2.copy_(m.W_K[0])
        attend.score.b.copy_(m.b_Q + m.b_K[0])
        attend.score.w.copy_(m.attention.score.w)
    nodes = x.expand(H, N, D)
    value = nodes @ m.W_K[0].mT + m.b_K[0][:, None]
    with rg.execution(execution[0], panel=execution[1]):
        expected = attend(nodes, nodes, value, mask=adjacency(edges, N))
        assert_same(m(x, edges), expected.movedim(0, 1).flatten(1) + m.b)
        dense = weights_of(attend, nodes, nodes, value, mask=adjacency(edges, N)).weights
        assert_same(weights_of(m, x, edges)["attention"].weights, dense[:, edges[1], edges[0]])


@every_execution
def test_i38_equal_scores_are_mean_aggregation(execution):
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD, self_loops=False))
    with torch.no_grad():
        m.attention.score.w.zero_()
    x, edges = normal(N, D), sparse()
    allowed = adjacency(edges, N).double()
    with rg.execution(execution[0], panel=execution[1]):
        found = m(x, edges)
    projected = x @ m.W_K[0].flatten(0, 1).mT + m.b_K[0].flatten()
    mean = allowed @ projected / allowed.sum(1, keepdim=True).clamp(min=1)
    assert_same(found, mean + m.b)


@every_execution
@pytest.mark.parametrize("score", ["scaled-dot", "general", "additive"])
def test_i38_on_a_complete_graph_it_is_self_attention(score, execution):
    graph = scrambled(rg.GraphAttention(D, 1, score=score, bias=False, self_loops=False))
    tokens = scrambled(rg.SelfAttention(D, score=score))
    with torch.no_grad():
        for name in ("W_Q", "W_K", "W_V"):
            getattr(tokens, name).copy_(getattr(graph, name).reshape(D, D))
        for name, parameter in tokens.attention.score.named_parameters():
            parameter.copy_(dict(graph.attention.score.named_parameters())[name][0])
    x = normal(N, D)
    with rg.execution(execution[0], panel=execution[1]):
        assert_same(graph(x, complete(N)), tokens(x))


def test_one_layer_reaches_one_hop():
    """Not far: on a path, what layer after layer reads comes from one edge further away."""
    path = torch.stack([torch.arange(N - 1), torch.arange(1, N)])
    layers = [scrambled(rg.GraphAttention(D, 1)) for _ in range(N - 1)]
    for depth in range(1, N):
        x = normal(N, D).requires_grad_()
        found = Stack(layers[:depth], residual=False)(x, path)
        (gradient,) = torch.autograd.grad(found[-1].sum(), x)
        assert torch.equal(gradient.any(-1), torch.arange(N) >= N - 1 - depth)


def test_stacked_graph_attentions_over_smooth_unless_they_keep_what_they_were_given():
    torch.manual_seed(0)
    n = 60
    ring = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
    edges = torch.cat([ring, ring.flip(0), torch.randint(n, (2, 3 * n))], 1)
    layers, x = [rg.GraphAttention(16, 4) for _ in range(24)], torch.randn(n, 16)
    with torch.no_grad():
        found = [spread(Stack(layers[:depth], residual=False)(x, edges)) for depth in (2, 8, 24)]
        kept = spread(Stack(layers, residual=True)(x, edges))
    assert found[0] > 5 * found[1] > 25 * found[2]
    assert found[2] < 1e-3 < 0.3 < kept
