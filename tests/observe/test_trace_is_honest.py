"""A trace says what was, or refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import regard as rg

B, NQ, N, D = 2, 3, 5, 4


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(B, NQ, D), torch.randn(B, N, D)


def test_a_step_of_the_optimiser_makes_a_trace_stale() -> None:
    attend = rg.Attention("additive", query_dim=D, key_dim=D, hidden_dim=7)
    optimiser = torch.optim.SGD(attend.parameters(), 1.0)
    query, key = inputs()
    with rg.record(attend) as trace:
        context = attend(query, key)
    before = trace.weights
    context.sum().backward(retain_graph=True)
    optimiser.step()
    with pytest.raises(RuntimeError, match="changed in place since.*Fix: read the trace before"):
        _ = trace.weights
    assert before.shape == (B, NQ, N)


def test_an_operation_in_place_on_an_input_makes_a_trace_stale() -> None:
    attend, (query, key) = rg.Attention("dot"), inputs()
    with rg.record(attend) as trace:
        attend(query, key)
    key.zero_()
    with pytest.raises(RuntimeError, match="changed in place since"):
        trace.entropy()


def test_named_fields_do_not_grow_stale() -> None:
    attend, (query, key) = rg.Attention("dot"), inputs()
    with rg.record(attend, "weights") as trace:
        attend(query, key)
    expected = trace.weights.clone()
    key.zero_()
    assert torch.equal(trace.weights, expected)


def test_named_fields_refuse_another_argument() -> None:
    attend, (query, key) = rg.Attention("dot"), inputs()
    with rg.record(attend, topk=2) as trace:
        attend(query, key)
    assert trace.topk()[0].shape == (B, NQ, 2)
    with pytest.raises(ValueError, match="topk: got 3, expected nothing, or what was given when recording"):
        trace.topk(3)
    region = torch.arange(N) < 2
    with rg.record(attend, mass_on=region) as trace:
        attend(query, key)
    region[2] = True
    with pytest.raises(ValueError, match=rf"mass_on: got a tensor of shape \({N},\), expected nothing, or what was"):
        trace.mass_on(region)


@pytest.mark.parametrize("features", [None, D])
def test_named_fields_take_the_argument_they_were_named_with(features: int | None, tmp_path: Path) -> None:
    attend = rg.Attention("additive", query_dim=D, key_dim=D, hidden_dim=7, features=features)
    region = torch.arange(N) < 2
    with rg.record(attend, topk=2, mass_on=region) as trace:
        attend(*inputs())
    for found, again in zip(trace.topk(2), trace.topk(), strict=True):
        assert torch.equal(found, again)
    assert torch.equal(trace.mass_on(region.clone()), trace.mass_on())
    # Saved with what it was recorded with, or with nothing said.
    trace.save(tmp_path / "trace.safetensors", topk=2, mass_on=region)
    saved = rg.load_trace(tmp_path / "trace.safetensors")
    assert torch.equal(saved.topk(2)[0], trace.topk()[0])
    # A file does not say of which region.
    assert torch.equal(saved.mass_on(), trace.mass_on())
    with pytest.raises(ValueError, match="mass_on: got a tensor of shape"):
        saved.mass_on(region)


def test_what_was_recorded_without_gradients_has_none() -> None:
    attend = rg.Attention("additive", query_dim=D, key_dim=D, hidden_dim=7)
    with torch.no_grad(), rg.record(attend) as trace:
        attend(*inputs())
    assert not trace.weights.requires_grad
    with rg.record(attend) as trace:
        attend(*inputs())
    assert trace.weights.requires_grad


def test_reward_teaches_only_what_was_sampled_for_it() -> None:
    x = torch.randn(B, N, D, requires_grad=True)
    attend = rg.Attention("dot", rg.Hard("reinforce")).eval()
    with rg.record(attend) as trace:
        attend(x, x)
    with pytest.raises(ValueError, match="nothing in it was sampled"):
        rg.reinforce(trace, torch.ones(B))
    attend = rg.Attention("dot", rg.Hard("straight-through"))
    with rg.record(attend) as trace:
        attend(x, x)
    with pytest.raises(ValueError, match="nothing in it was sampled"):
        rg.reinforce(trace, torch.ones(B))


def test_an_intervention_must_give_a_call_and_take_no_stray_keys() -> None:
    attend, (query, key) = rg.Attention("dot"), inputs()
    with rg.intervene(attend, lambda call: None), pytest.raises(TypeError, match="one that gives a Call"):
        attend(query, key)
    with (
        pytest.raises(ValueError, match="keys: got \\[1\\], expected nothing"),
        rg.intervene(attend, "uniform", keys=[1]),
    ):
        pass


def test_a_baseline_of_another_shape_is_refused() -> None:
    x = torch.randn(B, N, D, requires_grad=True)
    attend = rg.Attention("dot", rg.Hard("reinforce"))
    with rg.record(attend) as trace:
        attend(x, x)
    with pytest.raises(ValueError, match=r"baseline: got shape \(2, 1\), expected that of the reward, \(2,\)"):
        rg.reinforce(trace, torch.ones(B), baseline=torch.zeros(B, 1))


def test_overlapping_records_leave_the_compiler_as_it_was() -> None:
    stance = torch._dynamo.eval_frame._stance.stance
    first, second = (rg.record(rg.Attention("dot")) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    second.__exit__(None, None, None)
    assert torch._dynamo.eval_frame._stance.stance == stance


def test_a_region_with_too_many_axes_is_refused() -> None:
    attend, (query, key) = rg.Attention("dot"), inputs()
    with rg.record(attend) as trace:
        attend(query, key)
    with pytest.raises(ValueError, match="region: got shape"):
        trace.mass_on(torch.ones(B, 1, N, dtype=torch.bool))
