"""Every field of a recorded call is what the equations say, computed one weight at a time."""

import math

import pytest
import torch

import regard as rg
from regard.observe.fields import FIELDS
from regard.ops import blockwise
from tests.cases import assert_same, scrambled

B, H, NQ, N, DQ, DK, DV = 2, 3, 5, 7, 2, 11, 4


def single():
    return scrambled(rg.Attention("additive", query_dim=DQ, key_dim=DK, hidden_dim=3)), (B,), False


def heads():
    return scrambled(rg.Attention(rg.Additive(DQ, DK, 3, heads=H))), (B, H), False


def multi():
    return scrambled(rg.Attention(rg.Additive(DQ, DK, 3, features=DV))), (B,), False


def one_query():
    return scrambled(rg.Attention("additive", query_dim=DQ, key_dim=DK, hidden_dim=3)), (B,), True


def one_query_multi():
    return scrambled(rg.Attention(rg.Additive(DQ, DK, 3, features=DV))), (B,), True


KINDS = {f.__name__: f for f in (single, heads, multi, one_query, one_query_multi)}


def recorded(kind, *fields, grad=False, **with_argument):
    """A record of one masked, biased call, with everything needed to compute it again."""
    attend, lead, alone = KINDS[kind]()
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(grad)

    query = normal(*lead, DQ) if alone else normal(*lead, NQ, DQ)
    key, value = normal(*lead, N, DK), normal(*lead, N, DV)
    rows = () if alone else (NQ,)
    mask = torch.rand(*lead, *rows, N, generator=generator) < 0.7
    mask[(0,) * len(lead)][(..., 1, slice(None)) if rows else ...] = False  # one row with nothing to attend to
    bias = normal(*rows, N)
    with rg.record(attend, *fields, **with_argument) as trace:
        attend(query, key, value, mask=mask, bias=bias)
    return trace, attend.score, (query, key, value, mask, bias)


def looped(score, query, key, mask, bias):
    """Scores and weights (..., [Nq], N, F) from the equations, one pair at a time; F is 1 if single-dimensional."""
    alone = query.dim() == key.dim() - 1
    query = query.unsqueeze(-2) if alone else query
    mask, bias = (mask.unsqueeze(-2), bias.unsqueeze(-2)) if alone else (mask, bias)
    out = score.W_d if score.features else score.w.unsqueeze(-1)
    lead = key.shape[:-2]
    scores = torch.zeros(*lead, query.shape[-2], N, out.shape[-1], dtype=torch.float64)
    weights = torch.zeros_like(scores)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in lead)).reshape(-1, len(lead)).tolist():
        at = tuple(at)
        own = at[len(at) - len(score.head_shape) :]
        for i in range(query.shape[-2]):
            for j in range(N):
                hidden = torch.tanh(score.W1[own] @ query[at][i] + score.W2[own] @ key[at][j] + score.b[own])
                scores[at][i, j] = hidden @ out[own] + bias[i, j]
            for f in range(out.shape[-1]):
                total = sum(math.exp(scores[at][i, j, f]) for j in range(N) if mask[at][i, j])
                for j in range(N):
                    if mask[at][i, j]:
                        weights[at][i, j, f] = math.exp(scores[at][i, j, f]) / total
    return (scores.squeeze(-3), weights.squeeze(-3), mask.squeeze(-2)) if alone else (scores, weights, mask)


def shaped(x, kind):
    return x if "multi" in kind else x.squeeze(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_and_weights(kind):
    trace, score, (query, key, _, mask, bias) = recorded(kind)
    with torch.no_grad():
        scores, weights, mask = looped(score, query, key, mask, bias)
    # What a score is made of is not kept where nobody may read it.
    allowed = shaped(mask.unsqueeze(-1), kind)
    assert_same(torch.where(allowed, trace.scores, 0.0), torch.where(allowed, shaped(scores, kind), 0.0))
    assert_same(trace.weights, shaped(weights, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_every_other_field(kind):
    trace, score, (query, key, _, mask, bias) = recorded(kind)
    with torch.no_grad():
        scores, weights, mask = looped(score, query, key, mask, bias)
    rows = weights.movedim(-1, -2)  # (..., F, N)
    entropy, lse, position, mass = (torch.zeros(rows.shape[:-1], dtype=torch.float64) for _ in range(4))
    region = torch.tensor([True, False, True, True, False, False, True])
    top, index = (torch.zeros(*rows.shape[:-1], 3, dtype=torch.float64) for _ in range(2))
    for at in torch.cartesian_prod(*(torch.arange(n) for n in rows.shape[:-1])).tolist():
        at = tuple(at)
        a, e, allowed = rows[at].tolist(), scores.movedim(-1, -2)[at].tolist(), mask[at[:-1]].tolist()
        entropy[at] = -sum(p * math.log(p) for p in a if p > 0)
        exponentials = [math.exp(e[j]) for j in range(N) if allowed[j]]
        lse[at] = math.log(sum(exponentials)) if exponentials else -math.inf
        position[at] = sum(j * a[j] for j in range(N)) / sum(a) if sum(a) else math.nan
        mass[at] = sum(a[j] for j in range(N) if region[j])
        best = sorted(range(N), key=lambda j: -a[j])[:3]
        top[at], index[at] = rows[at][best], torch.tensor(best)

    assert_same(trace.entropy(), shaped(entropy, kind))
    expected = shaped(lse, kind)
    assert torch.equal(trace.log_sum_exp() == -math.inf, expected == -math.inf)
    assert_same(trace.log_sum_exp().nan_to_num(neginf=0.0), expected.nan_to_num(neginf=0.0))
    expected = shaped(position, kind)
    assert torch.equal(trace.expected_position().isnan(), expected.isnan())
    assert expected.isnan().any()
    assert_same(trace.expected_position().nan_to_num(), expected.nan_to_num())
    assert_same(trace.mass_on(region), shaped(mass, kind))
    values, keys = trace.topk(3)
    wanted = top.movedim(-1, -2), index.movedim(-1, -2)
    assert_same(values, shaped(wanted[0], kind))
    # Among equal weights (the zeros of masked keys) any key will do.
    assert torch.equal(keys[values > 0], shaped(wanted[1], kind)[values > 0].long())
    received = weights.sum(-3) if "one" not in kind else weights
    assert_same(trace.mass_received(), shaped(received, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["execution", "budget"])
def test_panels_change_neither_fields_nor_gradients(kind, way, monkeypatch):
    region = torch.arange(N) % 2 == 0

    def everything():
        trace, score, (query, key, value, _, bias) = recorded(kind, grad=True)
        found = {name: trace[""][0]._get(name, {"mass_on": region, "topk": 3}.get(name)) for name in FIELDS}
        loss = sum(x.nan_to_num(neginf=0.0).square().sum() for x in found.values())
        leaves = [query, key, bias, *score.parameters()]
        return found, torch.autograd.grad(loss, leaves)

    with rg.execution("dense"):
        expected, expected_grads = everything()
    panels = []
    original = blockwise.panels

    def counted(call, rows):
        panels.append(original(call, rows))
        return panels[-1]

    monkeypatch.setattr(blockwise, "panels", counted)
    if way == "execution":
        with rg.execution("blockwise", panel=2):
            found, grads = everything()
    else:
        monkeypatch.setattr(blockwise, "CPU_PANEL_ELEMENTS", 2 * 2 * N)
        found, grads = everything()
    if "one" not in kind:
        assert max(len(p) for p in panels) > 1
    for name in FIELDS:
        assert_same(found[name].nan_to_num(neginf=0.0), expected[name].nan_to_num(neginf=0.0), name)
    for first, second in zip(grads, expected_grads, strict=True):
        assert_same(first, second)


@pytest.mark.parametrize("kind", KINDS)
def test_fields_named_up_front_are_those_on_demand(kind):
    region = torch.arange(N) % 3 == 0
    on_demand = recorded(kind)[0]
    named = recorded(kind, "weights", "scores", "entropy", "log_sum_exp", "mass_received", topk=2, mass_on=region)[0]
    for name in ("weights", "scores"):
        assert torch.equal(getattr(named, name), getattr(on_demand, name))
    for name in ("entropy", "log_sum_exp", "mass_received"):
        assert torch.equal(getattr(named, name)(), getattr(on_demand, name)())
    assert torch.equal(named.mass_on(), on_demand.mass_on(region))
    for first, second in zip(named.topk(), on_demand.topk(2), strict=True):
        assert torch.equal(first, second)


def test_topk_of_more_than_there_are_is_filled_with_nothing_at_no_key():
    values, keys = recorded("single")[0].topk(9)
    assert values.shape == keys.shape == (B, NQ, 9)
    assert not values[..., N:].any()
    assert (keys[..., N:] == -1).all()


def test_topk_counts_keys():
    for k in (0, True, 1.5):
        with pytest.raises(ValueError, match=f"k: got {k}, expected a whole number >= 1"):
            recorded("single")[0].topk(k)


def test_topk_without_a_number_is_the_five_largest():
    assert recorded("single")[0].topk()[0].shape == (B, NQ, 5)


@pytest.mark.parametrize("k", [0, -1, 1.5])
def test_topk_refuses(k):
    with pytest.raises(ValueError, match=r"k: got .*, expected a whole number >= 1"):
        recorded("single")[0].topk(k)


def test_a_region_has_the_first_axes_of_the_call():
    trace = recorded("heads")[0]
    region = torch.rand(B, N, generator=torch.Generator().manual_seed(0)) < 0.5
    expected = (trace.weights * region[:, None, None, :]).sum(-1)
    assert_same(trace.mass_on(region), expected)


def test_a_region_must_be_booleans_over_the_keys():
    trace = recorded("single")[0]
    with pytest.raises(TypeError, match="region: got a tensor of torch.int64, expected booleans over the keys"):
        trace.mass_on(torch.arange(N))
    with pytest.raises(TypeError, match="region: got NoneType"):
        trace.mass_on()
    with pytest.raises(ValueError, match=rf"region: got shape \(3,\), expected booleans over the keys, \({B}, {N}\)"):
        trace.mass_on(torch.ones(3, dtype=torch.bool))


def test_weights_can_be_trained_on():
    trace, score, (query, *_) = recorded("single", grad=True)
    trace.entropy().sum().backward()
    assert query.grad.abs().sum() > 0
    assert score.W1.grad.abs().sum() > 0


def test_second_derivatives_of_weights_in_the_dense_execution():
    with rg.execution("dense"):
        trace, _, (query, *_) = recorded("single", grad=True)
        (first,) = torch.autograd.grad(trace.weights.square().sum(), query, create_graph=True)
        first.square().sum().backward()
    assert query.grad.isfinite().all()


def test_fields_are_as_wide_under_autocast_as_the_forward():
    attend = rg.Attention("additive", query_dim=DQ, key_dim=DK, hidden_dim=3, impl="blockwise")
    query, key = torch.randn(B, NQ, DQ), torch.randn(B, N, DK)
    with torch.autocast("cpu", torch.bfloat16), rg.record(attend) as trace:
        attend(query, key)
        inside = trace.weights
    assert inside.dtype == torch.float32
    assert torch.equal(inside, trace.weights)


def test_dropout_does_not_change_the_recorded_weights():
    attend = rg.Attention("scaled-dot", dropout=0.5).train()
    x = torch.randn(B, N, DK)
    with rg.record(attend) as trace:
        attend(x, x)
    assert torch.allclose(trace.weights.sum(-1), torch.ones(B, N))


def test_an_empty_call_has_empty_fields():
    attend = rg.Attention("scaled-dot")
    with rg.record(attend) as trace:
        attend(torch.randn(B, NQ, DK), torch.randn(B, 0, DK))
    assert trace.weights.shape == (B, NQ, 0)
    assert trace.entropy().shape == (B, NQ)
    assert not trace.entropy().any()


@pytest.mark.parametrize("execution", ["dense", "blockwise"])
def test_entropy_of_nan_is_nan(execution):
    query, key = torch.randn(1, 3, 4), torch.randn(1, 7, 4)
    query[0, 1] = math.nan
    attend = rg.Attention("dot")
    with rg.execution(execution), rg.record(attend) as trace:
        attend(query, key)
        assert trace.entropy().isnan().tolist() == [[False, True, False]]
