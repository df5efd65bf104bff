"""Encoder, decoder, and both: torch's weights, order, causality, padding, and decoding by portions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import regard as rg
from tests.cases import assert_same, scrambled
from tests.feature.common import normal
from tests.transformer.common import EXECUTIONS, POSITIONS, REAL

TARGET = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])


def dirty(x, mask):
    return torch.where(mask[..., None], x, math.nan)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_is_torchs_with_the_same_weights(norm_first, execution):
    layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True, norm_first=norm_first)
    final = nn.LayerNorm(12, eps=1e-3) if norm_first else None
    theirs = scrambled(nn.TransformerEncoder(layer, 3, final, enable_nested_tensor=False)).eval()
    ours, x = rg.TransformerEncoder.from_torch(theirs), normal(2, 7, 12)
    for pairs, above in ((None, None), (rg.Causal(), torch.ones(7, 7, dtype=torch.bool).triu(1))):
        expected = theirs(x, mask=above, src_key_padding_mask=~REAL)
        with EXECUTIONS[execution]():
            found = ours(dirty(x, REAL), REAL, pairs=pairs)
        assert_same(found[REAL], expected[REAL])
        assert not found[~REAL].any()
        assert_same(ours(x), theirs(x))


@pytest.mark.parametrize("norm_first", [False, True])
def test_both_are_torchs_with_the_same_weights(norm_first):
    theirs = scrambled(nn.Transformer(12, 3, 2, 2, 20, batch_first=True, norm_first=norm_first)).eval()
    ours, x, y = rg.Transformer.from_torch(theirs), normal(2, 7, 12), normal(2, 5, 12, seed=1)
    leaves = [x.requires_grad_(), y.requires_grad_()]
    expected = theirs(
        *leaves,
        tgt_mask=torch.ones(5, 5, dtype=torch.bool).triu(1),
        src_key_padding_mask=~REAL,
        tgt_key_padding_mask=~TARGET,
        memory_key_padding_mask=~REAL,
    )
    found = ours(*leaves, REAL, TARGET)
    assert_same(found[TARGET], expected[TARGET])
    assert not found[~TARGET].any()
    for a, b in zip(*(torch.autograd.grad(z[TARGET].square().sum(), leaves) for z in (found, expected)), strict=True):
        assert_same(a, b)


def test_a_decoder_sees_nothing_that_comes_later():
    m, x, memory = scrambled(rg.TransformerDecoder(8, 2, 2)), normal(2, 7, 8), normal(2, 5, 8, seed=1)
    before, changed = m(x, memory), x.clone()
    changed[:, 4] += 1
    after = m(changed, memory)
    assert_same(after[:, :4], before[:, :4])
    assert not torch.allclose(after[:, 4:], before[:, 4:])


def test_a_memory_of_one_is_read_by_all_alike():
    """The weight is one, so every token reads the same."""
    m, x = scrambled(rg.TransformerDecoder(8, 2, 1)), normal(2, 7, 8)
    with rg.record(m) as trace:
        m(x, normal(2, 1, 8, seed=1))
    assert_same(trace["layers.0.cross.attention"].weights, torch.ones(2, 2, 7, 1, dtype=torch.float64))
    layer = m.layers[0]
    read = layer.cross(x, normal(2, 1, 8, seed=1))
    assert_same(read, read[:, :1].expand_as(read))


def test_a_memory_of_nothing_adds_nothing():
    m, x, memory = scrambled(rg.TransformerDecoder(8, 2, 1)), normal(2, 7, 8), normal(2, 5, 8, seed=1)
    none = torch.tensor([[False] * 5, [True] * 5])
    read = m.layers[0].cross(x, memory, mask=rg.Keys(none))
    assert not read[0].any()
    assert read[1].any()
    assert m(x, dirty(memory, none), memory_mask=none).isfinite().all()


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("position", [None, *POSITIONS])
def test_every_position_in_every_execution(position, execution):
    m = scrambled(rg.TransformerEncoder(8, 2, 2, position=position, norm="pre", feedforward_dim=5))
    x = normal(2, 7, 8).requires_grad_()

    def outcome():
        out = m(x, REAL)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *m.parameters()], allow_unused=True)]

    with rg.execution("dense"):
        expected = outcome()
    with EXECUTIONS[execution]():
        found = outcome()
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_same(a + 1, b + 1)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("position", [None, *POSITIONS])
def test_decoding_by_portions_is_decoding_at_once(position, grad):
    m = scrambled(rg.TransformerDecoder(8, 2, 2, position=position, norm="pre"))
    x, memory = normal(2, 7, 8), normal(2, 7, 8, seed=1)
    whole, cache = m(x, memory, memory_mask=REAL), m.cache()
    with torch.set_grad_enabled(grad):
        parts = [m(x[:, a:b], memory, memory_mask=REAL, cache=cache) for a, b in ((0, 2), (2, 3), (3, 4), (4, 7))]
    assert cache.length == 7
    assert_same(torch.cat(parts, 1), whole)


def test_portions_may_be_padded_and_their_gradients_are_those_of_the_whole():
    m, x = scrambled(rg.TransformerDecoder(8, 2, 2, cross=False, position="relative")), normal(2, 7, 8).requires_grad_()
    whole, cache = m(x, None, REAL), m.cache()
    parts = [m(x[:, a:b], None, REAL[:, a:b] if a else None, cache=cache) for a, b in ((0, 2), (2, 5), (5, 7))]
    joined = torch.cat(parts, 1)
    assert_same(joined, whole)
    gradients = [torch.autograd.grad(y.square().sum(), [x, *m.parameters()]) for y in (joined, whole)]
    for a, b in zip(*gradients, strict=True):
        assert_same(a, b)


def test_a_reordered_cache_goes_on_from_the_rows_it_was_given():
    m, x, memory = scrambled(rg.TransformerDecoder(8, 2, 2, position="alibi")), normal(3, 7, 8), normal(3, 5, 8, seed=1)
    rows, cache = torch.tensor([2, 0, 0]), m.cache()
    with torch.no_grad():
        m(x[:, :4], memory, cache=cache)
        cache.reorder(rows)
        found = m(x[:, 4:], memory[rows], cache=cache)
    assert_same(found, m(torch.cat([x[rows, :4], x[:, 4:]], 1), memory[rows])[:, 4:])


def test_a_spread_cache_has_each_row_several_times():
    m, x = scrambled(rg.TransformerDecoder(8, 2, 1, cross=False)), normal(2, 5, 8)
    cache = m.cache()
    with torch.no_grad():
        m(x[:, :4], cache=cache)
        cache.spread(3)
        found = m(x[:, 4:].repeat_interleave(3, 0), cache=cache)
    assert_same(found, m(x)[:, 4:].repeat_interleave(3, 0))


def test_pairs_beside_causality():
    m, x = scrambled(rg.TransformerDecoder(8, 2, 1, cross=False)), normal(2, 7, 8)
    band = torch.ones(7, 7, dtype=torch.bool).tril() & torch.ones(7, 7, dtype=torch.bool).triu(-1)
    assert_same(m(x, pairs=rg.Window(1)), m(x, pairs=band))
    assert not torch.allclose(m(x, pairs=rg.Window(1)), m(x))


def test_positions_are_one_for_each_layer_or_shared():
    own = rg.TransformerEncoder(8, 2, 3, position="relative")
    assert len({id(layer.attention.position.r) for layer in own.layers}) == 3
    shared = rg.TransformerEncoder(8, 2, 3, position=rg.ShawPosition(4))
    assert len({id(layer.attention.position.r) for layer in shared.layers}) == 1
    assert rg.TransformerEncoder(8, 2, 3, position="learned").position.P.shape == (512, 8)


def test_a_final_norm_comes_with_norms_before():
    assert rg.TransformerEncoder(8, 2, 1, norm="pre").final_norm is not None
    assert rg.TransformerEncoder(8, 2, 1).final_norm is None
    assert rg.TransformerDecoder(8, 2, 1, norm="pre", final_norm=False).final_norm is None


def test_any_leading_axes():
    m, x = scrambled(rg.TransformerEncoder(8, 2, 1, position="transformer-xl")), normal(3, 2, 7, 8)
    mask = REAL.expand(3, 2, 7)
    assert_same(m(x, mask), torch.stack([m(part, REAL) for part in x]))
    assert_same(m(x[0, 0]), m(x[0])[0])


def test_layers_may_be_ready_made():
    layers = [rg.EncoderLayer(8, 2), rg.EncoderLayer(8, 4, score="additive")]
    assert rg.TransformerEncoder(8, 2, layers, position="sinusoidal")(torch.randn(2, 5, 8)).shape == (2, 5, 8)
    with pytest.raises(TypeError, match="score: got 'dot', expected nothing beside layers that are ready-made"):
        rg.TransformerEncoder(8, 2, layers, score="dot")
    with pytest.raises(
        ValueError, match="position: got RotaryPosition, expected one of tokens beside ready-made layers"
    ):
        rg.TransformerEncoder(8, 2, layers, position="rotary")


def test_refusals():
    with pytest.raises(ValueError, match="layers: got 0"):
        rg.TransformerEncoder(8, 2, 0)
    with pytest.raises(ValueError, match="heads: got 3, expected a divisor of the width 8"):
        rg.TransformerEncoder(8, 3, 1)
    with pytest.raises(
        ValueError, match="attention: got one TransformerAttention, expected parameters for 2 layers. Fix"
    ):
        rg.TransformerEncoder(8, 2, 2, attention=rg.TransformerAttention(8, 2))
    with pytest.raises(TypeError, match="mask of tokens: got Causal"):
        rg.TransformerEncoder(8, 2, 1)(torch.randn(2, 5, 8), rg.Causal())
    with pytest.raises(TypeError, match="scroe: got 'dot'"):
        rg.TransformerEncoder(8, 2, 1, scroe="dot")
    for cls, expected in (
        (rg.TransformerEncoder, "an nn.TransformerEncoder"),
        (rg.TransformerDecoder, "an nn.TransformerDecoder"),
        (rg.Transformer, "an nn.Transformer"),
    ):
        with pytest.raises(TypeError, match=f"module: got Linear, expected {expected}"):
            cls.from_torch(nn.Linear(2, 2))
    strange = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 1, nn.Linear(8, 8))
    with pytest.raises(TypeError, match="module: got one that ends in Linear"):
        rg.TransformerEncoder.from_torch(strange)


def test_a_cache_is_of_one_decoder_one_batch_and_one_memory():
    decode = scrambled(rg.TransformerDecoder(8, 2, 2, position="rotary")).eval()
    x, memory = normal(2, 7, 8), normal(2, 5, 8, seed=1)
    cache = decode.cache()
    first = decode(x[:, :3], memory, cache=cache)
    with pytest.raises(
        ValueError, match=r"tokens: got leading axes \(1,\), expected \(2,\), as the cache has seen. Fix"
    ):
        decode(x[:1, 3:], memory[:1], cache=cache)
    with pytest.raises(ValueError, match="memory: got 4 places, expected the 5 that the cache remembers. Fix"):
        decode(x[:, 3:], memory[:, :4], cache=cache)
    with pytest.raises(ValueError, match="cache: got one of 2 layers, expected one of 1"):
        rg.TransformerDecoder(8, 2, 1)(x, memory, cache=cache)
    with pytest.raises(TypeError, match="cache: got dict, expected what"):
        decode(x, memory, cache={})
    # What was refused has left nothing behind.
    assert_same(torch.cat([first, decode(x[:, 3:], memory, cache=cache)], 1), decode(x, memory))


def test_an_attention_that_keeps_nothing_cannot_decode_in_portions():
    causal = lambda dim, heads: rg.LongShortAttention(dim, heads, causal=True)  # noqa: E731
    model = rg.LanguageModel(11, 8, 2, 1, attention=causal)
    assert model(torch.tensor([[3, 4, 5]])).shape == (1, 3, 11)
    with pytest.raises(TypeError, match="cache: got one, expected none: LongShortAttention reads all tokens at once"):
        model.generate(torch.tensor([[3, 4, 5]]), steps=2)


def test_widths_are_refused_by_their_names():
    decode = rg.TransformerDecoder(8, 2, 1, cross=6)
    for call in (rg.TransformerEncoder(8, 2, 1), decode):
        with pytest.raises(ValueError, match="tokens: got width 7, expected 8"):
            call(torch.randn(2, 5, 7))
    with pytest.raises(ValueError, match="memory: got width 8, expected 6"):
        decode(torch.randn(2, 5, 8), torch.randn(2, 5, 8))
    with pytest.raises(ValueError, match="heads: got 0, expected a whole number >= 1"):
        rg.TransformerEncoder(8, 0, 1)
    for made in (rg.TransformerEncoder, rg.TransformerDecoder):
        with pytest.raises(ValueError, match="feedforward_dim: got 0, expected a whole number >= 1"):
            made(8, 2, 1, feedforward_dim=0)
    with pytest.raises(ValueError, match="dropout: got 'much', expected a probability"):
        rg.TransformerEncoder(8, 2, 1, dropout="much")


def test_a_window_moves_on_over_the_memory_from_portion_to_portion():
    decode = scrambled(rg.TransformerDecoder(8, 2, 2, align="local-monotonic", window=1)).eval()
    x, memory, cache = normal(2, 7, 8), normal(2, 5, 8, seed=1), decode.cache()
    parts = [decode(part, memory, cache=cache) for part in x.split([2, 1, 1, 3], 1)]
    assert_same(torch.cat(parts, 1), decode(x, memory))


@pytest.mark.parametrize("portions", [[1] * 7, [2, 1, 1, 3], [6, 1]])
@pytest.mark.parametrize("padded", [False, True])
def test_a_predicted_window_is_the_same_in_every_portion(portions, padded):
    """It is predicted within the prefix, which a token sees alike in the whole sequence and in a portion."""
    decode = scrambled(rg.TransformerDecoder(8, 2, 2, align="local-predictive", window=1.5, query_dim=4)).eval()
    x, memory, cache = normal(2, 7, 8), normal(2, 5, 8, seed=1), decode.cache()
    real = (
        torch.tensor([[True] * 7, [False, True, True, False, True, True, True]]) if padded else torch.ones(2, 7).bool()
    )
    parts = [
        decode(part, memory, mask if padded else None, cache=cache)
        for part, mask in zip(x.split(portions, 1), real.split(portions, 1), strict=True)
    ]
    assert_same(torch.cat(parts, 1), decode(x, memory, real if padded else None))


def test_layers_and_attentions_that_are_none_are_refused():
    for layers in ("2", 2.0, None):
        with pytest.raises(
            TypeError, match="layers: got .*, expected a whole number >= 1, or a list of ready-made layers"
        ):
            rg.TransformerEncoder(8, 2, layers)
    with pytest.raises(TypeError, match="attention: got str, expected a module, or a function of width and heads"):
        rg.TransformerEncoder(8, 2, 1, attention="lsh-attention")


class Computed(TorchDispatchMode):
    """How many operations give something new: no views."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not any(result.alias_info for result in function._schema.returns)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_mask_of_tokens_is_written_once_for_all_layers(norm):
    """Each further layer computes as much with padding as without, and no more than torch's."""
    x, real = torch.randn(4, 8, 16), torch.arange(8) < torch.tensor([[8], [5], [7], [4]])

    def of_one_layer(run):
        counts = []
        for layers in (2, 3):
            with Computed() as seen:
                run(layers).sum().backward()
            counts.append(seen.count)
        return counts[1] - counts[0]

    ours = {k: rg.TransformerEncoder(16, 2, k, norm=norm) for k in (2, 3)}
    layer = nn.TransformerEncoderLayer(16, 2, 64, 0.0, batch_first=True, norm_first=norm == "pre")
    theirs = {k: nn.TransformerEncoder(layer, k, enable_nested_tensor=False) for k in (2, 3)}
    without, padded = of_one_layer(lambda k: ours[k](x)), of_one_layer(lambda k: ours[k](x, real))
    torchs = of_one_layer(lambda k: theirs[k](x, src_key_padding_mask=~real))
    print(f"operations of a layer, {norm}-norm: {without}, padded {padded}, torch's padded {torchs}")
    assert padded == without < torchs


def test_a_sequence_of_padding_alone_is_zero_and_is_seen_as_zero():
    attend, x = scrambled(rg.TransformerAttention(8, 2)), normal(2, 5, 8)
    real = torch.tensor([[True] * 5, [False] * 5])
    x[1] = math.nan
    with rg.record(attend) as trace:
        found = attend(x.requires_grad_(), mask=rg.Keys(real))
    assert not found[1].any()
    (grad,) = torch.autograd.grad(found.sum(), x)
    assert not grad[1].any()
    assert grad.isfinite().all()
    assert not trace["attention"].weights[1].any()


TOGETHER = {
    "sinkhorn": rg.Sinkhorn,
    "tree": rg.DependencyTree,
    "pairs": lambda: rg.ReinforcedPairs(4),
    "reinforced, context": lambda: rg.Reinforced(4, context=True),
}


CAUSAL = {
    "decoder": lambda **options: rg.TransformerDecoder(8, 2, 1, cross=False, **options),
    "transformer-xl": lambda **options: rg.TransformerXL(8, 2, 1, memory=3, **options),
    "transformer-xl language model": lambda **options: rg.TransformerXLLanguageModel(9, 8, 2, 1, memory=3, **options),
    "long-short": lambda **options: rg.LongShortAttention(16, 2, causal=True, **options),
    "reformer": lambda **options: rg.Reformer(
        8, 2, 1, causal=True, attention=lambda dim, heads: rg.TransformerAttention(dim, heads, **options)
    ),
}


@pytest.mark.parametrize("align", TOGETHER.values(), ids=TOGETHER)
@pytest.mark.parametrize("make", CAUSAL.values(), ids=CAUSAL)
def test_weights_that_all_tokens_decide_together_are_refused_where_no_token_sees_later_ones(make, align):
    make(align=rg.Local(2))
    with pytest.raises(ValueError, match="align: got .*, expected one that decides each row by itself"):
        make(align=align())


def test_weights_that_all_tokens_decide_together_are_taken_where_nothing_is_promised():
    rg.LongShortAttention(16, 2, align=rg.Sinkhorn())
    rg.Reformer(8, 2, 1, attention=lambda dim, heads: rg.TransformerAttention(dim, heads, align=rg.Sinkhorn()))


def test_a_memory_may_be_looked_at_as_a_whole():
    x, memory = torch.randn(2, 5, 8), torch.randn(2, 4, 8)
    own = {"attention": rg.TransformerAttention}
    decode = rg.TransformerDecoder(8, 2, 1, align=rg.Reinforced(4, context=True), **own).eval()
    assert torch.allclose(decode(x, memory)[:, :3], decode(x[:, :3], memory), atol=1e-6)
    with pytest.raises(ValueError, match="align: got Sinkhorn"):
        rg.TransformerDecoder(8, 2, 1, align=rg.Sinkhorn(), **own)


@pytest.mark.parametrize("mask", [rg.Packed([2, 3]), rg.Causal()], ids=repr)
def test_a_mask_of_pairs_in_place_of_one_of_tokens_is_shown_its_place(mask):
    name = type(mask).__name__
    with pytest.raises(TypeError, match=rf"mask of tokens: got {name}, .* Fix: .* pass it as pairs="):
        rg.TransformerEncoder(8, 2, 1)(torch.randn(5, 8), mask)
    rg.TransformerEncoder(8, 2, 1)(torch.randn(5, 8), pairs=mask)
