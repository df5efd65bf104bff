"""Figures of the Transformer family: what positions add, and what the decoder reads of the source."""

from __future__ import annotations

import pytest
import torch

import regard as rg

pytest.importorskip("matplotlib")

from regard.report.figures import bias_map, heatmap, save
from tests.transformer.common import RELATIVE


@pytest.mark.parametrize("name", ["alibi", "relative", "transformer-xl"])
def test_the_map_of_a_position(name, tmp_path):
    torch.manual_seed(0)
    attend, x = rg.TransformerAttention(8, 2, position=name), torch.randn(1, 9, 8)
    q, k, _ = attend.project(x, x, x)
    bias = attend.position.bias(q, k)(torch.arange(9)[:, None], torch.arange(9)[None])
    figure = bias_map(bias.reshape(2, 9, 9), title=name)
    assert [axes.get_title() for axes in figure.axes[:2]] == ["head 0", "head 1"]
    assert save(figure, tmp_path / "bias.svg").stat().st_size > 1000


def test_signs_are_told_apart_and_what_is_not_allowed_is_blank():
    values = torch.tensor([[0.0, -1.0], [2.0, -torch.inf]])
    image = bias_map(values).axes[0].images[0]
    assert image.get_clim() == (-2.0, 2.0)
    assert image.get_array().mask.tolist() == [[False, False], [False, True]]
    colours = image.cmap(image.norm([-2.0, 0.0, 2.0]))
    assert colours[0][0] > colours[0][2]
    assert colours[2][2] > colours[2][0]
    assert colours[1][:3].min() > 0.9


@pytest.mark.parametrize("position", RELATIVE)
def test_the_weights_of_every_position(position):
    encode, x = rg.TransformerEncoder(8, 2, 1, position=position), torch.randn(1, 5, 8)
    with rg.record(encode) as trace:
        encode(x)
    figure = heatmap(trace["layers.0.attention.attention"].weights[0], queries=list("abcde"), keys=list("abcde"))
    assert len(figure.axes) == 3


def test_what_the_decoder_reads_of_the_source(tmp_path):
    model = rg.SequenceToSequence(11, 8, 2, 1)
    with rg.record(model) as trace:
        model(torch.tensor([[3, 4, 5]]), torch.tensor([[0, 5]]))
    weights = trace["transformer.decoder.layers.0.cross.attention"].weights[0]
    figure = heatmap(weights, queries=["<s>", "c"], keys=["a", "b", "c"], title="cross-attention")
    assert save(figure, tmp_path / "cross.svg").stat().st_size > 1000


def test_refusals():
    with pytest.raises(ValueError, match=r"bias: got \(3,\)"):
        bias_map([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="bias: got NaN or infinity"):
        bias_map([[float("nan")]])
    with pytest.raises(ValueError, match="names: got 1 of them, expected one for each of 2 panels"):
        bias_map(torch.zeros(2, 3, 3), names=["one"])
    assert bias_map(torch.zeros(0, 3)).axes[0].texts[0].get_text() == "no queries"


def test_what_a_segment_reads_of_its_memory(tmp_path):
    model, text = rg.TransformerXLLanguageModel(11, 8, 2, 1, memory=4), torch.arange(7).unsqueeze(0)
    memory = model(text[:, :4]).memory
    with rg.record(model) as trace:
        model(text[:, 4:], memory)
    weights = trace["decoder.layers.0.attention.attention"].weights[0]
    figure = heatmap(weights, queries=list("efg"), keys=[*"abcd", *"efg"], title="memory and segment")
    assert save(figure, tmp_path / "memory.svg").stat().st_size > 1000


def test_what_linformer_reads_and_how_its_keys_are_mixed(tmp_path):
    model = rg.Linformer(8, 2, 1, length=9, rank=3)
    with rg.record(model) as trace:
        model(torch.randn(1, 5, 8))
    figure = heatmap(trace["layers.0.attention.attention"].weights[0], queries=list("abcde"), keys=["1", "2", "3"])
    assert len(figure.axes) == 3
    mixing = bias_map(model.shorten.E.detach()[:, :, :5], title="projection along the sequence")
    assert save(mixing, tmp_path / "projection.svg").stat().st_size > 1000


@pytest.mark.parametrize("synthesis", ["dense", "random", "factorized-dense", ["random", "dot"]], ids=str)
def test_the_weights_that_are_made_up(synthesis):
    attend = rg.SynthesizerAttention(8, 2, 12, synthesis)
    with rg.record(attend) as trace:
        attend(torch.randn(1, 5, 8), mask=rg.Causal())
    figure = heatmap(trace["attention"].weights[0], queries=list("abcde"), keys=list("abcde"))
    assert len(figure.axes) == 3
