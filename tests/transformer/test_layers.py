"""Layers: their equations, torch's weights, and any attention inside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard as rg
from tests.cases import assert_same, scrambled
from tests.feature.common import normal
from tests.transformer.common import REAL


def norm_of(module, x):
    centred = x - x.mean()
    return centred / (x.var(unbiased=False) + module.eps).sqrt() * module.weight + module.bias


def fed(module, x):
    return module.W2 @ torch.relu(module.W1 @ x + module.b1) + module.b2


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_an_encoder_layer_token_by_token(norm):
    m, x = scrambled(rg.EncoderLayer(6, 2, 5, norm=norm)), normal(3, 6)
    seen = x if norm == "post" else torch.stack([norm_of(m.norm_attention, t) for t in x])
    read = m.attention(seen)
    rows = []
    for t, r in zip(x, read, strict=True):
        if norm == "post":
            t = norm_of(m.norm_attention, t + r)
            t = norm_of(m.norm_feedforward, t + fed(m.feedforward, t))
        else:
            t = t + r
            t = t + fed(m.feedforward, norm_of(m.norm_feedforward, t))
        rows.append(t)
    assert_same(m(x), torch.stack(rows))


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_decoder_layer_token_by_token(norm):
    m, x, memory = scrambled(rg.DecoderLayer(6, 2, 5, cross=4, norm=norm)), normal(3, 6), normal(5, 4, seed=1)

    def added(t, normal_, part):
        return norm_of(normal_, t + part(t)) if norm == "post" else t + part(norm_of(normal_, t))

    rows = []
    for i in range(3):
        before = [x[j] if norm == "post" else norm_of(m.norm_attention, x[j]) for j in range(i + 1)]
        t = added(x[i], m.norm_attention, lambda t, before=before: m.attention(t[None], torch.stack(before))[0])
        t = added(t, m.norm_cross, lambda t: m.cross(t[None], memory)[0])
        rows.append(added(t, m.norm_feedforward, lambda t: fed(m.feedforward, t)))
    assert_same(m(x, memory, mask=rg.Causal()), torch.stack(rows))


CONFIGURATIONS = {
    "post": {},
    "pre": {"norm_first": True},
    "gelu": {"activation": "gelu"},
    "no biases": {"bias": False},
    "a function": {"activation": F.silu, "layer_norm_eps": 1e-3},
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_an_encoder_layer_is_torchs_with_the_same_weights(options, batch_first):
    theirs = nn.TransformerEncoderLayer(12, 3, 20, batch_first=batch_first, dtype=torch.float64, **options)
    scrambled(theirs).eval()
    ours, x = rg.EncoderLayer.from_torch(theirs), normal(2, 7, 12)
    assert not ours.training
    assert (ours.dropout, ours.feedforward.dropout, ours.attention.attention.dropout) == (0.1, 0.1, 0.1)
    laid = x if batch_first else x.transpose(0, 1)
    expected = theirs(laid, src_mask=torch.ones(7, 7, dtype=torch.bool).triu(1), src_key_padding_mask=~REAL)
    expected = expected if batch_first else expected.transpose(0, 1)
    found = ours(x, rg.Causal() & rg.Keys(REAL))
    assert_same(found[REAL], expected[REAL])


@pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_a_decoder_layer_is_torchs_with_the_same_weights(options):
    theirs = nn.TransformerDecoderLayer(12, 3, 20, batch_first=True, dtype=torch.float64, **options)
    scrambled(theirs).eval()
    ours, x, memory = rg.DecoderLayer.from_torch(theirs), normal(2, 5, 12), normal(2, 7, 12, seed=1)
    leaves = [x.requires_grad_(), memory.requires_grad_()]
    above = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = theirs(x, memory, tgt_mask=above, memory_key_padding_mask=~REAL)
    found = ours(x, memory, rg.Causal(), rg.Keys(REAL))
    assert_same(found, expected)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (found, expected)), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_gradients(norm):
    m = scrambled(rg.DecoderLayer(4, 2, 3, norm=norm, activation="gelu"))
    leaves = [normal(2, 3, 4).requires_grad_(), normal(2, 5, 4, seed=1).requires_grad_()]
    assert torch.autograd.gradcheck(lambda x, y: m(x, y, rg.Causal()), leaves, fast_mode=True)


def test_any_attention_of_the_library_inside():
    x = normal(2, 7, 12)
    for options in (
        {"score": "additive"},
        {"score": "general", "align": "entmax"},
        {"score": "additive", "features": True},
        {"score": ["additive", "dot", "cosine"], "align": [None, "sparsemax", None]},
        {"align": "local-monotonic", "window": 2},
    ):
        layer = scrambled(rg.EncoderLayer(12, 3, 5, **options))
        with rg.execution("dense"):
            expected = layer(x, rg.Keys(REAL))
        assert_same(layer(x, rg.Keys(REAL)), expected)


class Mean(nn.Module):
    """The simplest part that fits: the mean of all tokens."""

    def __init__(self, dim, heads):
        super().__init__()
        self.seen = []

    def forward(self, tokens, *, mask=None):
        self.seen.append(mask)
        return tokens.mean(-2, keepdim=True).expand_as(tokens)


def test_the_attention_of_a_layer_is_replaceable():
    layer, x = scrambled(rg.EncoderLayer(6, 2, attention=Mean)), normal(2, 5, 6)
    read = layer.norm_attention(x + x.mean(1, keepdim=True))
    assert_same(layer(x), layer.norm_feedforward(read + layer.feedforward(read)))
    assert layer.attention.seen == [None]
    ready = Mean(6, 2)
    assert rg.EncoderLayer(6, 2, attention=ready).attention is ready
    decoder = scrambled(rg.DecoderLayer(6, 2, attention=Mean, score="additive"))
    assert isinstance(decoder.cross.attention.score, rg.Additive)
    encoder = rg.TransformerEncoder(6, 2, 3, attention=Mean).double()
    encoder(x, torch.ones(2, 5, dtype=torch.bool))
    assert len({id(layer.attention) for layer in encoder.layers}) == 3
    # One mask for all layers.
    assert len({id(layer.attention.seen[0]) for layer in encoder.layers}) == 1


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("where", ["added", "hidden units", "weights"])
def test_dropout_is_where_it_was_asked_for_and_only_while_training(where, norm):
    torch.manual_seed(0)
    options = {"added": {"dropout": 0.5}, "hidden units": {"dropout": 0.5}, "weights": {"attention_dropout": 0.5}}
    layer, x = rg.EncoderLayer(6, 2, norm=norm, **options[where]), torch.randn(2, 5, 6)
    if where == "added":
        layer.feedforward.dropout = 0.0
    else:
        layer.dropout = 0.0
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_refusals():
    with pytest.raises(ValueError, match="norm: got 'middle', expected one of post, pre"):
        rg.EncoderLayer(6, 2, norm="middle")
    with pytest.raises(ValueError, match="dropout: got 1.5"):
        rg.EncoderLayer(6, 2, dropout=1.5)
    with pytest.raises(TypeError, match="score: got 'dot', expected nothing beside an attention of its own"):
        rg.EncoderLayer(6, 2, attention=Mean, score="dot")
    with pytest.raises(TypeError, match="attention: got int, expected a module"):
        rg.EncoderLayer(6, 2, attention=lambda dim, heads: 3)
    x = torch.randn(2, 5, 6)
    with pytest.raises(ValueError, match="memory: got none, expected what the encoder gave"):
        rg.DecoderLayer(6, 2)(x)
    with pytest.raises(ValueError, match="memory: got a tensor, expected nothing: this layer has cross=False"):
        rg.DecoderLayer(6, 2, cross=False)(x, x)
    with pytest.raises(TypeError, match="module: got Linear, expected an nn.TransformerEncoderLayer"):
        rg.EncoderLayer.from_torch(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="module: got Linear, expected an nn.TransformerDecoderLayer"):
        rg.DecoderLayer.from_torch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="feedforward_dim: got -1"):
        rg.EncoderLayer(6, 2, -1)
