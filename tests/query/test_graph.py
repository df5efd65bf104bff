"""Graph attention: any score and alignment along edges, beside loops over nodes and neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.ops.dispatch import choose
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, normal, weighted

N, E, D, H, HEAD = 7, 17, 5, 3, 2
every_execution = pytest.mark.parametrize("execution", EXECUTIONS, ids=str)

OPTIONS = {
    "gatv2": {},
    "gat": {"score": "gat"},
    "mean, own loops only": {"join": "mean", "self_loops": False, "bias": False},
    "features of edges": {"edge_dim": 4},
    "gat, features of edges": {"score": "gat", "edge_dim": 4, "self_loops": False},
    "types of edges": {"edge_types": 3},
    "types and features": {"edge_types": 3, "edge_dim": 4, "score": "gat"},
    "scaled dot": {"score": "scaled-dot"},
    "general, features of edges": {"score": "general", "edge_dim": 4},
    "additive": {"score": "additive", "hidden_dim": 11},
    "negative L2": {"score": "negative-l2"},
    "activated general": {"score": "activated-general"},
    "cosine": {"score": "cosine"},
    "query-free": {"score": "query-free"},
    "sparsemax": {"align": "sparsemax"},
    "entmax, dot": {"align": "entmax", "score": "dot"},
    "temperature": {"align": rg.Soft(temperature=0.5, learnable=True)},
    "multi-dimensional": {"score": "additive", "features": HEAD},
    "general, multi-dimensional": {"score": "general", "features": HEAD},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def drawn(seed: int = 0, n: int = N, m: int | None = None, edges: int = E) -> Tensor:
    """Edges with some that stand twice, some loops, and a last target without any."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(n if m is None else m, (edges,), generator=generator)
    target = torch.randint(n - 1, (edges,), generator=generator)
    found = torch.stack([source, target])
    if m is None:
        found[0, :2] = found[1, :2]
    found[:, 3] = found[:, 2]
    return found


def arguments(module: rg.GraphAttention, edges: int = E) -> dict[str, Tensor]:
    more = {}
    if module.W_E is not None:
        more["edge_attr"] = normal(edges, module.W_E.shape[-1], seed=3)
    if module.edge_types is not None:
        more["edge_type"] = torch.randint(module.edge_types, (edges,), generator=torch.Generator().manual_seed(4))
    return more


def leaky(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.2 * x)


def score(s: rg.Score, h: int, q: Tensor, k: Tensor) -> Tensor:
    """Of one head, for one query and one key."""
    if isinstance(s, rg.GATScore):
        return leaky(s.a_centre[h] @ q + s.a_neighbour[h] @ k)
    if isinstance(s, rg.GATv2Score):
        return s.w[h] @ leaky(q + k)
    one = type(s).__new__(type(s))
    torch.nn.Module.__init__(one)
    vars(one).update({name: x for name, x in vars(s).items() if not name.startswith("_")})
    for name, p in s.named_parameters():
        setattr(one, name, torch.nn.Parameter(p[h]))
        one._parameters[name] = p[h]
    return type(s).forward(one, q[None], k[None])[0, 0]


def align(a: rg.Alignment, e: list[Tensor]) -> list[Tensor]:
    """Of one row."""
    stacked = torch.stack(e, -1)
    if isinstance(a, rg.Soft):
        return list((stacked / a.temperature_of_softmax).softmax(-1).unbind(-1))
    alpha = a.alpha if isinstance(a, rg.Entmax) and not isinstance(a, rg.Sparsemax) else 2.0
    import entmax

    function = entmax.sparsemax if float(alpha) == 2.0 else entmax.entmax15
    return list(function(stacked, -1).unbind(-1))


def oracle(m: rg.GraphAttention, x: Tensor, edges: Tensor, mask: Tensor, source: Tensor | None = None, **more: Tensor):
    """Loops over nodes, heads and neighbours. A neighbour is what an edge leads from, of which type, with which features."""
    read = x if source is None else source
    results = []
    for i in range(len(x)):
        found = [
            (int(edges[0, e]), int(more["edge_type"][e]) if "edge_type" in more else 0, more.get("edge_attr", {}), e)
            for e in range(edges.shape[1])
            if int(edges[1, e]) == i and mask[e] and not (m.self_loops and edges[0, e] == edges[1, e])
        ]
        neighbours = [(j, t, f[e] if isinstance(f, Tensor) else None) for j, t, f, e in found]
        if m.self_loops:
            features = [f for _, _, f in neighbours if f is not None]
            own = None
            if m.W_E is not None:
                own = sum(features) / len(features) if features else torch.zeros(m.W_E.shape[-1], dtype=x.dtype)
            neighbours.append((i, m.W_K.shape[0] - 1, own))
        heads = []
        for h in range(m.heads):
            W_Q, b_Q = (m.W_K[0], m.b_K[0] if m.b_K is not None else None) if m.W_Q is None else (m.W_Q, m.b_Q)
            q = W_Q[h] @ x[i] + (0 if b_Q is None else b_Q[h])
            e, values = [], []
            for j, t, f in neighbours:
                k = m.W_K[t, h] @ read[j] + (0 if m.b_K is None else m.b_K[t, h])
                values.append(k if m.W_V is None else m.W_V[t, h] @ read[j])
                e.append(score(m.attention.score, h, q, k if f is None else k + m.W_E[h] @ f))
            if not e:
                heads.append(torch.zeros(m.W_K.shape[-2], dtype=x.dtype))
                continue
            if e[0].dim():
                heads.append(weighted(e, values))
            else:
                heads.append(sum(a * v for a, v in zip(align(m.attention.align, e), values, strict=True)))
        joined = torch.cat(heads) if m.join == "concat" else torch.stack(heads).mean(0)
        results.append(joined if m.b is None else joined + m.b)
    return torch.stack(results)


@every_option
def test_shapes(options):
    m = rg.GraphAttention(D, H, head_dim=HEAD, **options)
    width = HEAD if m.join == "mean" else H * HEAD
    more = {name: x.float() if x.is_floating_point() else x for name, x in arguments(m).items()}
    assert m(torch.randn(N, D), drawn(), **more).shape == (N, width)
    assert m(torch.randn(N, D), drawn()[:, :0], **{name: x[:0] for name, x in more.items()}).shape == (N, width)
    two = rg.GraphAttention((D, 11), H, head_dim=HEAD, **options | {"self_loops": False})
    assert two(torch.randn(N, D), drawn(m=13), torch.randn(13, 11), **more).shape == (N, width)


@every_execution
@every_option
def test_oracle(options, execution):
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD, **options))
    edges, mask, more = drawn(), torch.rand(E, generator=torch.Generator().manual_seed(1)) < 0.8, arguments(m)
    leaves = {"x": normal(N, D), **{name: x for name, x in more.items() if x.is_floating_point()}}
    leaves = {name: x.clone().requires_grad_() for name, x in leaves.items()}
    given = more | {name: x for name, x in leaves.items() if name != "x"}
    with rg.execution(execution[0], panel=execution[1]):
        found = m(leaves["x"], edges, mask=mask, **given)
        cotangent = normal(*found.shape, seed=5)
        wanted = [*leaves.values(), *m.parameters()]
        mine = torch.autograd.grad(found, wanted, cotangent, allow_unused=True)
    expected = oracle(m, leaves["x"], edges, mask, **given)
    theirs = torch.autograd.grad(expected, wanted, cotangent, allow_unused=True)
    assert_same(found, expected)
    for a, b, like in zip(mine, theirs, wanted, strict=True):
        a, b = (torch.zeros_like(like) if x is None else x for x in (a, b))
        assert_same(a + 1, b + 1)


@every_execution
@pytest.mark.parametrize(
    "options", [{}, {"score": "gat"}, {"edge_types": 3}, {"edge_dim": 4, "align": "sparsemax"}], ids=str
)
def test_two_kinds_of_nodes(options, execution):
    m = scrambled(rg.GraphAttention((D, 4), H, head_dim=HEAD, self_loops=False, **options))
    x, source, edges, mask, more = normal(N, D), normal(11, 4, seed=1), drawn(m=11), torch.ones(E).bool(), arguments(m)
    with rg.execution(execution[0], panel=execution[1]):
        assert_same(m(x, edges, source, **more), oracle(m, x, edges, mask, source, **more))


@pytest.mark.parametrize("impl", ["dense", "blockwise"])
@pytest.mark.parametrize("name", ["gatv2", "gat", "types and features", "temperature", "sparsemax"])
def test_gradients(name, impl):
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD, impl=impl, **OPTIONS[name]))
    more = arguments(m)
    features = more.pop("edge_attr", torch.zeros(E, 0, dtype=torch.float64)).requires_grad_()
    names, parameters = zip(*m.named_parameters(), strict=True)

    def function(x, features, *values):
        given = more | ({"edge_attr": features} if m.W_E is not None else {})
        return torch.func.functional_call(m, dict(zip(names, values, strict=True)), (x, drawn()), given)

    leaves = [normal(N, D).requires_grad_(), features, *(p.detach().requires_grad_() for p in parameters)]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


def test_the_operator_is_what_runs_and_panels_do_not_matter():
    """Degrees of many kinds, more than one panel of each."""
    edges = torch.stack([torch.randint(50, (600,)), torch.randint(25, (600,)) * torch.randint(2, (600,))])
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD))
    x = normal(50, D).requires_grad_()
    with rg.record(m) as trace:
        m(x, edges)
    assert trace["attention"].call.why_not_segment() is None
    assert choose(trace["attention"].call.with_(), "auto").path in ("dense", "blockwise")
    found = []
    for impl, panel in (("dense", None), ("blockwise", None), ("blockwise", 1), ("blockwise", 3)):
        with rg.execution(impl, panel=panel):
            result = m(x, edges)
            found.append((result, *torch.autograd.grad(result.square().sum(), [x, *m.parameters()])))
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            assert_same(a, b)


def test_second_derivatives_are_refused_by_name():
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD, impl="blockwise"))
    x = normal(N, D).requires_grad_()
    (first,) = torch.autograd.grad(m(x, drawn()).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives of attention along edges .* impl='dense'"):
        first.sum().backward()


@every_execution
@pytest.mark.parametrize("name", ["gatv2", "gat", "sparsemax", "types and features"])
def test_isolated_nodes_read_nothing(name, execution):
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD, **OPTIONS[name] | {"self_loops": False}))
    x, edges, more = normal(N, D).requires_grad_(), drawn(), arguments(m)
    with rg.execution(execution[0], panel=execution[1]):
        found = m(x, edges, **more)
    assert torch.equal(found[-1], m.b)
    found[-1].sum().backward()
    assert not x.grad.any()


@every_execution
@pytest.mark.parametrize("name", ["gatv2", "gat", "sparsemax", "features of edges", "scaled dot"])
def test_what_nobody_reads_never_matters(name, execution):
    """Nodes without edges, features of masked edges, and a masked edge from a node that others read."""
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD, **OPTIONS[name] | {"self_loops": False}))
    edges, more = drawn(), arguments(m)
    edges[edges == 5] = 4
    mask = edges[0] != 3
    outcomes = []
    for garbage in (0.0, math.nan, math.inf):
        x = normal(N, D)
        x[[3, 5]] = garbage
        x[5] = garbage
        if "edge_attr" in more:
            more["edge_attr"] = torch.where(mask[:, None], more["edge_attr"], garbage)
        # Node 3 asks as well, so what it asks with is its own affair; leave it out of the targets.
        kept = mask & (edges[1] != 3)
        x.requires_grad_()
        with rg.execution(execution[0], panel=execution[1]):
            found = m(x, edges, mask=kept, **more)
            grads = torch.autograd.grad(found.sum(), [x, *m.parameters()])
        outcomes.append((found, *grads))
    for other in outcomes[1:]:
        for a, b in zip(other, outcomes[0], strict=True):
            assert torch.equal(a, b)


@every_execution
def test_nan_stays_with_those_that_read_it(execution):
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD))
    edges, x = torch.tensor([[0, 1, 1, 2], [1, 2, 3, 3]]), normal(4, D)
    x[0] = math.nan
    mask = torch.tensor([True, True, True, True])
    with rg.execution(execution[0], panel=execution[1]):
        found = m(x, edges, mask=mask)
        assert found[:2].isnan().all()
        assert found[2:].isfinite().all()
        mask[0] = False
        assert m(x, edges, mask=mask)[1:].isfinite().all()


@every_option
def test_nodes_and_edges_may_be_renamed(options):
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD, **options))
    x, edges, more = normal(N, D), drawn(), arguments(m)
    generator = torch.Generator().manual_seed(7)
    nodes, order = torch.randperm(N, generator=generator), torch.randperm(E, generator=generator)
    renamed = nodes.argsort()[edges][:, order]
    found = m(x[nodes], renamed, **{name: value[order] for name, value in more.items()})
    assert_same(found, m(x, edges, **more)[nodes])


def test_two_graphs_are_one():
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD))
    x, y, first, second = normal(N, D), normal(5, D, seed=1), drawn(), drawn(1, 5)
    together = m(torch.cat([x, y]), torch.cat([first, second + N], 1))
    assert_same(together, torch.cat([m(x, first), m(y, second)]))


def test_loops_that_are_there_count_once():
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD))
    x, edges = normal(N, D), drawn()
    apart = edges[:, edges[0] != edges[1]]
    assert apart.shape[1] < E
    assert_same(m(x, edges), m(x, apart))
    without = rg.GraphAttention(D, H, head_dim=HEAD, self_loops=False).double()
    without.load_state_dict(m.state_dict())
    own = torch.arange(N).expand(2, N)
    assert_same(m(x, edges), without(x, torch.cat([apart, own], 1)))


# Observation


def recorded(m: rg.GraphAttention, *args, **more):
    with rg.record(m) as trace:
        m(*args, **more)
    return trace["attention"]


@every_execution
def test_the_trace_has_one_weight_an_edge(execution):
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD, self_loops=False))
    x, edges = normal(N, D), drawn()
    with rg.execution(execution[0], panel=execution[1]):
        found = recorded(m, x, edges)
        assert found.weights.shape == found.scores.shape == (H, E)
        e = torch.stack([score(m.attention.score, h, *_ends(m, x, edges[:, k], h)) for h in range(H) for k in range(E)])
        assert_same(found.scores, e.view(H, E))
        for i in range(N):
            of_node = edges[1] == i
            row = found.scores[:, of_node].softmax(-1)
            assert_same(found.weights[:, of_node], row)
            assert_same(found.entropy()[:, i] + 1, 1 - (row * row.log()).sum(-1))
            if of_node.any():
                assert_same(found.log_sum_exp()[:, i], found.scores[:, of_node].logsumexp(-1))
                values, index = found.topk(1)
                assert torch.equal(values[:, i, 0], row.amax(-1))
                assert of_node[index[:, i, 0]].all()
        assert torch.equal(found.mass_received(), found.weights)
        region = edges[0] < 3
        total = torch.zeros(H, N, dtype=torch.float64).index_add(1, edges[1], found.weights * region)
        assert_same(found.mass_on(region) + 1, total + 1)
        with pytest.raises(ValueError, match="expected keys that have positions"):
            found.expected_position()
        with pytest.raises(ValueError, match="along edges every query has keys of its own"):
            found.expected_loss(lambda context: context.sum(-1))


def _ends(m, x, edge, h):
    source, target = edge.tolist()
    return m.W_Q[h] @ x[target] + m.b_Q[h], m.W_K[0, h] @ x[source] + m.b_K[0, h]


def test_named_fields_are_saved_and_loaded(tmp_path):
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD))
    with rg.record(m, "weights", "entropy") as trace:
        m(normal(N, D), drawn())
    trace.save(tmp_path / "trace.safetensors")
    assert rg.load_trace(tmp_path / "trace.safetensors")["attention"].weights.shape == (H, E + N)


def test_multi_dimensional_weights_have_their_features_last():
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD, score="additive", features=HEAD))
    assert recorded(m, normal(N, D), drawn()).weights.shape == (H, E + N, HEAD)


@every_execution
@pytest.mark.parametrize("name", ["gatv2", "sparsemax", "multi-dimensional"])
def test_interventions(name, execution):
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD, **OPTIONS[name]))
    x, edges = normal(N, D), drawn()
    m.self_loops = False
    with rg.execution(execution[0], panel=execution[1]):
        plain, weights = m(x, edges), recorded(m, x, edges).weights
        with rg.intervene(m, weights):
            assert_same(m(x, edges), plain)
        with rg.intervene(m, "frozen"):
            assert_same(m(x, edges), plain)
        degree = torch.bincount(edges[1], minlength=N)
        with rg.intervene(m, "uniform"):
            found = recorded(m, x, edges).weights
            like = (1 / degree.double())[edges[1]]
            assert_same(found, (like if found.dim() == 2 else like[:, None]).expand(found.shape))
        gone = torch.zeros(E).bool()
        gone[[0, 7]] = True
        for keys in ([0, 7], gone):
            with rg.intervene(m, "erased", keys=keys):
                assert_same(m(x, edges), m(x, edges, mask=~gone))
                assert not recorded(m, x, edges).weights[:, gone].any()
        of_head = gone.expand(H, E).clone()
        of_head[1:] = False
        with rg.intervene(m, "erased", keys=of_head):
            found = m(x, edges)
        without = m(x, edges, mask=~gone)
        assert_same(found[:, :HEAD], without[:, :HEAD])
        assert_same(found[:, HEAD:], plain[:, HEAD:])
        for how in ("permuted", "random", rg.Hard(), rg.Sparsemax()):
            with rg.intervene(m, how):
                found = recorded(m, x, edges).weights
            total = torch.zeros(H, N, *found.shape[2:], dtype=torch.float64).index_add(1, edges[1], found)
            assert_same(total[:, degree > 0], torch.ones_like(total[:, degree > 0]))


def test_given_weights_must_fit():
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD))
    with rg.intervene(m, torch.ones(H, E)), pytest.raises(ValueError, match=r"how: got weights of shape \(3, 17\)"):
        m(normal(N, D), drawn())


@pytest.mark.parametrize("align", [rg.Hard(), rg.Hard("gumbel", temperature=0.5), rg.Hard("reinforce")], ids=str)
def test_a_hard_choice_is_one_neighbour_and_the_same_in_every_execution(align):
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD, align=align)).train()
    x, edges, found = normal(N, D), drawn(), []
    for impl, panel in EXECUTIONS:
        with rg.execution(impl, panel=panel), rg.record(m) as trace:
            torch.manual_seed(0)
            found.append(m(x, edges))
            weights = trace["attention"].weights.detach()
        if align.gradient != "gumbel":
            assert set(weights.flatten().tolist()) <= {0.0, 1.0}
            assert trace["attention"].log_prob().shape == (H, N)
        ends = torch.cat([edges[1], torch.arange(N)])
        assert_same(torch.zeros(H, N, dtype=torch.float64).index_add(1, ends, weights), torch.ones(H, N).double())
    for other in found[1:]:
        assert_same(other, found[0])


def test_dropout_is_the_same_in_every_execution_and_gone_in_evaluation():
    m = scrambled(rg.GraphAttention(D, H, head_dim=HEAD, dropout=0.4)).train()
    x, edges, found = normal(N, D), drawn(), []
    for impl, panel in EXECUTIONS:
        with rg.execution(impl, panel=panel):
            torch.manual_seed(0)
            found.append(m(x, edges))
    for other in found[1:]:
        assert_same(other, found[0])
    assert not torch.equal(found[0], m.eval()(x, edges))
    assert torch.equal(m(x, edges), m(x, edges))


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 2}, "heads: got 2, expected a divisor of the width 5. Fix: pass head_dim"),
        ({"join": "sum"}, "join: got 'sum', expected one of concat, mean"),
        ({"edge_types": 0}, "edge_types: got 0"),
        ({"align": "local-monotonic", "window": 2}, "align: got Local, expected an alignment that needs no positions"),
        ({"score": "aditive"}, "score: got 'aditive'"),
        ({"score": rg.General(5, 5, heads=2)}, r"score: got heads=\(2,\), expected heads=1"),
        ({"score": "additive", "features": 3}, "features: got 3, expected the width of a head, 5"),
        ({"score": rg.Attention("dot", key_map=torch.nn.Linear(5, 5))}, "score: got an attention with maps of its own"),
    ],
)
def test_what_cannot_be_made_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        rg.GraphAttention(D, **{"heads": 1} | options)


X, EDGES = torch.randn(N, D), drawn()


@pytest.mark.parametrize(
    ("options", "args", "more", "message"),
    [
        ({}, (X[:, :4], EDGES), {}, r"nodes: got shape \(7, 4\), expected \(N, 5\)"),
        ({}, (X, EDGES.float()), {}, r"edge_index: got a tensor of torch.float32"),
        ({}, (X, EDGES.mT), {}, r"edge_index: .* expected integers \(2, E\), sources above targets"),
        ({}, (X[:4], EDGES), {}, r"edge_index: got indices from 0 to .*, expected indices of 4 sources"),
        ({}, (X, EDGES, X), {}, "source: got nodes of their own, .* Fix: self_loops=False"),
        ({}, (X, EDGES), {"edge_attr": X}, "edge_attr: got a tensor, expected nothing, without edge_dim"),
        ({"edge_dim": 3}, (X, EDGES), {}, r"edge_attr: got None, expected features \(E, 3\)"),
        ({"edge_dim": 3}, (X, EDGES), {"edge_attr": X}, r"edge_attr: got shape \(7, 5\), expected \(17, 3\)"),
        ({"edge_types": 3}, (X, EDGES), {}, r"edge_type: got None, expected the type of each edge"),
        ({"edge_types": 3}, (X, EDGES), {"edge_type": EDGES[0]}, "edge_type: .* expected indices of 3 edge types"),
        ({}, (X, EDGES), {"mask": torch.ones(E)}, r"mask: got a tensor of torch.float32, .* booleans over the edges"),
    ],
)
def test_what_does_not_fit_is_refused(options, args, more, message):
    with pytest.raises((ValueError, IndexError), match=message):
        rg.GraphAttention(D, H, head_dim=HEAD, **options)(*args, **more)


@pytest.mark.parametrize("align", [rg.DependencyTree(), rg.Sinkhorn()])
def test_an_alignment_of_whole_matrices_does_not_go_along_edges(align):
    name = type(align).__name__
    with pytest.raises(ValueError, match=f"align: got {name}, expected an alignment that needs no positions"):
        rg.GraphAttention(4, heads=2, align=align)


@pytest.mark.parametrize("align", [rg.Sinkhorn(), rg.Local(window=1)])
def test_nor_is_it_put_in_by_an_intervention(align):
    attend, edges = rg.GraphAttention(4, heads=2), torch.tensor([[0, 1], [1, 2]])
    with rg.intervene(attend, align), pytest.raises(ValueError, match="align: got .* that needs no positions"):
        attend(torch.zeros(3, 4), edges)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"edge_index": [[0], [1]]}, TypeError, "edge_index: got list, expected a tensor"),
        ({"edge_index": torch.ones(2, 3).bool()}, ValueError, "edge_index: got a tensor of torch.bool"),
        ({"edge_type": torch.ones(3).bool()}, ValueError, "edge_type: got a tensor of torch.bool"),
        ({"mask": rg.Causal()}, TypeError, "mask: got Causal, expected a tensor"),
        ({"nodes": torch.zeros(3, 4).double()}, TypeError, "nodes: got a tensor of torch.float64, expected the module"),
        ({"nodes": None}, TypeError, "nodes: got NoneType, expected a floating-point tensor"),
        (
            {"edge_attr": torch.zeros(3, 2).long()},
            TypeError,
            "edge_attr: got a tensor of torch.int64, expected a float",
        ),
    ],
)
def test_inputs_of_another_type_are_refused(given, error, message):
    fine = {
        "nodes": torch.zeros(3, 4),
        "edge_index": torch.tensor([[0, 1, 2], [1, 2, 0]]),
        "edge_type": torch.zeros(3, dtype=torch.long),
        "edge_attr": torch.zeros(3, 2),
    }
    attend = rg.GraphAttention(4, heads=2, edge_types=2, edge_dim=2)
    attend(**fine)
    with pytest.raises(error, match=message):
        attend(**fine | given)


@every_execution
def test_a_graph_seen_in_inference_can_be_learned_from(execution):
    module, x, edges = scrambled(rg.GraphAttention(D, H, head_dim=HEAD)), normal(N, D), drawn()
    mask = torch.arange(E) != 5
    with rg.execution(execution[0], panel=execution[1]):
        with torch.inference_mode():
            expected = module(x, edges, mask=mask)
        found = module(x, edges, mask=mask)
        found.sum().backward()
    assert_same(found, expected.clone())


def test_hooks_before_the_score_run():
    module, x, edges, seen = rg.GraphAttention(D, H, head_dim=HEAD).float(), torch.randn(N, D), drawn(), []
    for part in (module.attention.score, module.attention.align):
        part.register_forward_pre_hook(lambda part, args: seen.append(type(part).__name__))
    module(x, edges)
    assert seen == ["GATv2Score", "Soft"]


def test_edges_that_may_not_be_read_under_another_default_dtype():
    module, edges, mask = rg.GraphAttention(D, H, head_dim=HEAD), drawn(), torch.arange(E) % 3 > 0
    x = torch.randn(N, D)
    expected = module(x, edges, mask=mask)
    torch.set_default_dtype(torch.float64)
    try:
        found = module(x, edges.clone(), mask=mask)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_indices_are_of_any_whole_numbers(dtype):
    attend = rg.GraphAttention(4, 4, edge_types=2)
    nodes, edges = torch.randn(5, 4), torch.tensor([[0, 1, 2, 4], [1, 2, 3, 3]])
    types = torch.tensor([0, 1, 1, 0])
    given = edges.to(dtype), types.to(dtype)
    for _ in range(2):  # the second time from what is remembered
        assert torch.equal(attend(nodes, given[0], edge_type=given[1]), attend(nodes, edges, edge_type=types))
    with pytest.raises(IndexError, match="edge_index: got indices from 0 to 7"):
        attend(nodes, torch.tensor([[0, 7], [1, 1]]).to(dtype), edge_type=types[:2])


def test_several_graphs_under_vmap_are_refused_by_name():
    attend, nodes, edges = rg.GraphAttention(4, 4), torch.randn(5, 4), torch.tensor([[0, 1, 2], [1, 2, 3]])
    with pytest.raises(ValueError, match=r"edge_index: got several under torch.vmap, expected that of one graph. Fix"):
        torch.func.vmap(lambda edges: attend(nodes, edges))(torch.stack([edges, edges]))
    several = torch.randn(3, 5, 4)
    found = torch.func.vmap(lambda nodes: attend(nodes, edges))(several)
    assert torch.allclose(found[1], attend(several[1], edges), atol=1e-6)
