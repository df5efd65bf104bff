"""Recording and altering Transformers: layer by layer, and step by step while they write."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from tests.cases import assert_same, scrambled
from tests.feature.common import normal
from tests.transformer.common import REAL, RELATIVE

OWN, CROSS = "layers.1.attention.attention", "layers.1.cross.attention"


@pytest.mark.parametrize("position", [None, *RELATIVE])
def test_the_weights_of_steps_are_rows_of_the_whole(position):
    m, x, memory = (
        scrambled(rg.TransformerDecoder(8, 2, 2, position=position)),
        normal(2, 7, 8),
        normal(2, 7, 8, seed=1),
    )
    with rg.record(m) as whole:
        m(x, memory, memory_mask=REAL)
    cache = m.cache()
    with torch.no_grad(), rg.record(m) as steps:
        for t in range(7):
            m(x[:, t : t + 1], memory, memory_mask=REAL, cache=cache)
    assert len(steps[OWN]) == len(steps[CROSS]) == 7
    for t in range(7):
        assert_same(steps[OWN][t].weights[..., 0, :], whole[OWN].weights[..., t, : t + 1])
        assert_same(steps[CROSS][t].weights[..., 0, :], whole[CROSS].weights[..., t, :])


def test_an_intervention_reaches_the_layer_it_names_and_no_other():
    m, x, memory = scrambled(rg.TransformerDecoder(8, 2, 2)), normal(2, 7, 8), normal(2, 5, 8, seed=1)
    with rg.record(m) as plain:
        before = m(x, memory)
    with rg.intervene(m, "uniform", at=CROSS), rg.record(m) as trace:
        after = m(x, memory)
    assert_same(trace[CROSS].weights, torch.full((2, 2, 7, 5), 0.2, dtype=torch.float64))
    assert_same(trace["layers.0.cross.attention"].weights, plain["layers.0.cross.attention"].weights)
    assert not torch.allclose(before, after)


def test_uniform_self_attention_leaves_every_token_the_same_update():
    m, x = scrambled(rg.EncoderLayer(8, 2)), normal(2, 7, 8)
    with rg.intervene(m, "uniform"):
        read = m.attention(x)
    assert_same(read, read[:, :1].expand_as(read))


@pytest.mark.parametrize("position", RELATIVE)
def test_a_trace_is_saved_and_loaded(position, tmp_path):
    m, x = rg.TransformerEncoder(8, 2, 1, position=position), torch.randn(2, 7, 8)
    with torch.no_grad(), rg.record(m, "weights") as trace:
        m(x, REAL)
    trace.save(tmp_path / "trace.safetensors")
    loaded = rg.load_trace(tmp_path / "trace.safetensors")
    path = "layers.0.attention.attention"
    assert torch.equal(loaded[path].weights, trace[path].weights)


def test_fields_in_one_pass():
    m, x = scrambled(rg.TransformerEncoder(8, 2, 2, position="alibi")), normal(2, 7, 8)
    with rg.record(m, "entropy", "expected_position") as trace:
        m(x, REAL)
    with rg.record(m) as other:
        m(x, REAL)
    assert_same(trace["layers.1.attention.attention"].entropy(), other["layers.1.attention.attention"].entropy())
