"""Graph attention beside torch_geometric: the same weights, results, gradients and weights of edges."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, normal
from tests.query.test_graph import HEAD, D, E, H, N, drawn

every_execution = pytest.mark.parametrize("execution", EXECUTIONS, ids=str)

CONVOLUTIONS = [
    {},
    {"edge_dim": 4},
    {"concat": False},
    {"bias": False},
    {"add_self_loops": False},
    {"negative_slope": 0.5},
]


@every_execution
@pytest.mark.parametrize("more", [*CONVOLUTIONS, {"share_weights": True}], ids=str)
@pytest.mark.parametrize("kind", ["GATConv", "GATv2Conv"])
def test_torch_geometric_agrees(kind, more, execution):
    nn = pytest.importorskip("torch_geometric.nn")
    if kind == "GATConv" and "share_weights" in more:
        pytest.skip("a GATConv has one matrix in any case")
    torch.manual_seed(0)
    theirs = scrambled(getattr(nn, kind)(D, HEAD, heads=H, **more))
    ours = rg.GraphAttention.from_geometric(theirs)
    x, edges = normal(N, D).requires_grad_(), drawn()
    attr = normal(E, 4, seed=1) if "edge_dim" in more else None
    with rg.execution(execution[0], panel=execution[1]):
        found = ours(x, edges, edge_attr=attr)
        (mine,) = torch.autograd.grad(found.square().sum(), x)
        with rg.record(ours) as trace:
            ours(x, edges, edge_attr=attr)
    expected, (ends, weights) = theirs(x, edges, attr, return_attention_weights=True)
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    assert_same(found, expected)
    assert_same(mine, gradient)
    call = trace["attention"].call
    kept = torch.ones(call.n).bool() if call.mask.allowed is None else call.mask.allowed
    assert torch.equal(call.edges.edge_index[:, kept], ends)
    assert_same(trace["attention"].weights[:, kept].mT, weights)


@pytest.mark.parametrize("kind", ["GATConv", "GATv2Conv"])
def test_torch_geometric_agrees_on_two_kinds_of_nodes(kind):
    nn = pytest.importorskip("torch_geometric.nn")
    theirs = scrambled(getattr(nn, kind)((4, D), HEAD, heads=H, add_self_loops=False))
    ours = rg.GraphAttention.from_geometric(theirs)
    x, source, edges = normal(N, D), normal(11, 4, seed=1), drawn(m=11)
    assert_same(ours(x, edges, source), theirs((source, x), edges))


def test_what_cannot_be_loaded_is_refused():
    nn = pytest.importorskip("torch_geometric.nn")
    with pytest.raises(TypeError, match="module: got Linear, expected a GATConv or a GATv2Conv"):
        rg.GraphAttention.from_geometric(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="module: got one with residual=True"):
        rg.GraphAttention.from_geometric(nn.GATv2Conv(D, HEAD, residual=True))
    with pytest.raises(ValueError, match="module: got fill_value='add', expected 'mean'"):
        rg.GraphAttention.from_geometric(nn.GATConv(D, HEAD, edge_dim=4, fill_value="add"))
    state = nn.GATv2Conv(D, HEAD, heads=H, edge_dim=4).state_dict()
    with pytest.raises(ValueError, match="state: got no W_E, expected what this module has"):
        rg.GraphAttention(D, H, head_dim=HEAD, edge_dim=4).load_geometric(
            {name: x for name, x in state.items() if name != "lin_edge.weight"}
        )
    with pytest.raises(
        ValueError, match=r"state: got \['att', .*'lin_r.weight'\], expected the weights of a layer for GATScore"
    ):
        rg.GraphAttention(D, H, head_dim=HEAD, score="gat").load_geometric(state)
    with pytest.raises(ValueError, match="state: got W_E, expected what this module has"):
        rg.GraphAttention(D, H, head_dim=HEAD).load_geometric(state)
    with pytest.raises(ValueError, match="score='gat' or 'gatv2'"):
        rg.GraphAttention(D, H, head_dim=HEAD, score="dot").load_geometric(state)


@pytest.mark.parametrize("more", [{}, {"share_weights": True}, {"bias": False}, {"edge_dim": 4}], ids=str)
def test_both_learn_the_same(more):
    nn = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    theirs = scrambled(nn.GATv2Conv(D, HEAD, heads=H, **more))
    ours = rg.GraphAttention.from_geometric(theirs)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    x, edges = normal(N, D), drawn()
    attr = normal(E, 4, seed=1) if "edge_dim" in more else None
    outputs = []
    for layer, call in ((theirs, lambda: theirs(x, edges, attr)), (ours, lambda: ours(x, edges, edge_attr=attr))):
        optimiser = torch.optim.SGD(layer.parameters(), 0.1)
        for _ in range(3):
            optimiser.zero_grad()
            call().square().mean().backward()
            optimiser.step()
        outputs.append(call())
    assert_same(outputs[1], outputs[0])


def test_one_matrix_for_those_that_ask_and_those_that_are_read():
    ours = scrambled(rg.GraphAttention(D, H, head_dim=HEAD, shared=True))
    assert ours.W_Q is None
    assert ours.b_Q is None
    two = rg.GraphAttention(D, H, head_dim=HEAD).double()
    two.load_state_dict(ours.state_dict() | {"W_Q": ours.W_K[0], "b_Q": ours.b_K[0]})
    x, edges = normal(N, D), drawn()
    assert_same(ours(x, edges), two(x, edges))
    for more in ({"dim": (D, 4), "self_loops": False}, {"dim": D, "edge_types": 2}):
        with pytest.raises(ValueError, match="shared: got True beside .*, expected False where nodes or edges are of"):
            rg.GraphAttention(**more, heads=H, head_dim=HEAD, shared=True)
    with pytest.raises(ValueError, match="state: got lin_r.weight that is not lin_l.weight, expected one matrix"):
        ours.load_geometric({"lin_l.weight": torch.ones(6, D), "lin_r.weight": torch.zeros(6, D)})


def test_weights_are_loaded_of_a_layer_as_of_its_state():
    nn = pytest.importorskip("torch_geometric.nn")
    theirs = nn.GATv2Conv(D, HEAD, heads=H)
    of_layer, of_state = (rg.GraphAttention(D, H, head_dim=HEAD) for _ in range(2))
    of_layer.load_geometric(theirs)
    of_state.load_geometric(theirs.state_dict())
    assert all(torch.equal(x, of_state.state_dict()[key]) for key, x in of_layer.state_dict().items())
    with pytest.raises(TypeError, match="state: got str, expected a GATConv or a GATv2Conv, or its state_dict"):
        of_layer.load_geometric("weights.pt")


@pytest.mark.parametrize(
    ("name", "shape", "at"),
    [("att", (1, 3, 2), "attention.score.w"), ("lin_l.weight", (4, 6), "W_K"), ("bias", (2,), "b")],
)
def test_weights_of_other_heads_or_widths_are_refused_and_nothing_is_changed(name, shape, at):
    ours = rg.GraphAttention((5, 4), 2, head_dim=3, self_loops=False)
    state = {
        "lin_l.weight": torch.ones(6, 4),
        "lin_l.bias": torch.ones(6),
        "lin_r.weight": torch.ones(6, 5),
        "lin_r.bias": torch.ones(6),
        "att": torch.ones(1, 2, 3),
        "bias": torch.ones(6),
    }
    before = {key: x.clone() for key, x in ours.state_dict().items()}
    with pytest.raises(ValueError, match=f"state: got {at} of shape .*, expected the heads and widths of this module"):
        ours.load_geometric(state | {name: torch.ones(shape)})
    assert all(torch.equal(x, before[key]) for key, x in ours.state_dict().items())
    ours.load_geometric(state)
    assert all(bool((x == 1).all()) for x in ours.parameters())
