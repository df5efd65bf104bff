"""Identities of the Transformer family, by number."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import regard as rg
from regard.transformer import Hashes
from regard.transformer.bert4rec import cloze_loss
from regard.transformer.positions import sinusoids
from regard.transformer.reversible import reversible
from tests.cases import assert_same, scrambled
from tests.feature.common import normal
from tests.transformer.common import POSITIONS

ITEMS = torch.randint(0, 5, (2, 7), generator=torch.Generator().manual_seed(0))
ORDER = torch.tensor([3, 0, 6, 2, 5, 1, 4])


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_i24_an_encoder_follows_a_permutation(norm):
    m, x = scrambled(rg.TransformerEncoder(8, 2, 2, norm=norm)), normal(2, 7, 8)
    assert_same(m(x[:, ORDER]), m(x)[:, ORDER])
    assert not torch.allclose(m(x[:, ORDER], pairs=rg.Causal()), m(x, pairs=rg.Causal())[:, ORDER])


@pytest.mark.parametrize("position", POSITIONS)
def test_i24_every_position_breaks_it(position):
    m, x = scrambled(rg.TransformerEncoder(8, 2, 1, position=position)), normal(2, 7, 8)
    assert not torch.allclose(m(x[:, ORDER]), m(x)[:, ORDER])


@pytest.mark.parametrize("d", [6, 8])
def test_i25_sinusoids_rotate(d):
    table = sinusoids(torch.arange(50), d, dtype=torch.float64)
    for k in (1, 7):
        R = torch.zeros(d, d, dtype=torch.float64)
        for t in range(d // 2):
            angle = k / 10000 ** (2 * t / d)
            R[2 * t : 2 * t + 2, 2 * t : 2 * t + 2] = torch.tensor(
                [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]], dtype=torch.float64
            )
        assert_same(table[k:], table[:-k] @ R.mT)
    products = table @ table.mT
    for distance in range(5):
        diagonal = products.diagonal(distance)
        assert_same(diagonal, diagonal[:1].expand_as(diagonal))


def test_i31_the_shift_of_relative_scores_is_a_gather():
    """What a tile takes of its distances is r[i - j], index by index."""
    m, q, k = scrambled(rg.TransformerXLPosition(2, 3)), normal(2, 4, 3), normal(2, 9, 3, seed=1)
    found = m.bias(q, k)(torch.arange(5, 9)[:, None], torch.arange(9)[None])
    for i in range(4):
        for j in range(9):
            r = m.of(torch.tensor([5 + i - j]), torch.float64)[:, 0]
            assert_same(found[:, i, j], ((q[:, i] + m.v) * r).sum(-1) / math.sqrt(3))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chunk", [2, 3, 64])
def test_i32_one_bucket_is_full_attention_without_the_token_itself(causal, chunk):
    x = normal(2, 7, 8)
    # In chunks shorter than the sequence one bucket is not enough: a token sees its own chunk and the neighbouring ones.
    hashed = scrambled(rg.LSHAttention(8, 2, rounds=2, chunk=chunk, buckets=1))
    q, v = (x @ W.flatten(0, 1).mT for W in (hashed.W_QK, hashed.W_V))
    q, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (q, v))
    i, j = torch.arange(7)[:, None], torch.arange(7)[None]
    apart = i // chunk - j // chunk
    seen = (i != j) & (apart.abs() <= 1) & ((j <= i) | (not causal))
    seen[0, 0] = causal
    full = rg.Attention("dot")(q, F.normalize(q, dim=-1), v, mask=seen)
    expected = full.transpose(1, 2).flatten(-2) @ hashed.W_O.mT
    assert_same(hashed(x, mask=rg.Causal() if causal else None), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_i32_rounds_that_hash_alike_are_one_round(causal):
    x, mask = normal(2, 13, 8), rg.Causal() if causal else None
    one = scrambled(rg.LSHAttention(8, 2, rounds=1, chunk=3))
    kept = Hashes()
    expected = one(x, mask=mask, hashes=kept)
    several = Hashes()
    several.ids = kept.ids.repeat_interleave(3, -2)
    assert_same(one(x, mask=mask, hashes=several), expected)
    with rg.execution("dense"):
        assert_same(one(x, mask=mask, hashes=several), expected)


def test_i32_a_reversible_stack_and_its_gradients(monkeypatch):
    model = scrambled(rg.Reformer(8, 2, 3, chunk=3, feedforward_dim=5, activation="gelu")).eval()
    x, cotangent = normal(2, 13, 8).requires_grad_(), normal(2, 13, 8, seed=5)
    streams = x.detach(), normal(2, 13, 8, seed=6)
    with torch.no_grad():
        y = streams
        for layer in model.layers:
            y = layer(*y)
        for layer in reversed(model.layers):
            y = layer.inverse(*y)
    for found, given in zip(y, streams, strict=True):
        assert_same(found, given)
    wanted = [x, *model.parameters()]
    found = torch.autograd.grad((model(x) * cotangent).sum(), wanted)
    assert "_Reversible" in type(reversible(list(model.layers), x, x)[0].grad_fn).__name__
    with rg.execution("dense"):
        expected = torch.autograd.grad((model(x) * cotangent).sum(), wanted)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def test_i35_a_later_item_changes_an_earlier_prediction():
    m, changed = scrambled(rg.BERT4Rec(5, 8, 2, 2, length=11)), ITEMS.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 5
    assert (m(changed)[:, 1] - m(ITEMS)[:, 1]).abs().min() > 1e-9


def test_i35_the_loss_does_not_depend_on_predictions_elsewhere():
    logits = torch.randn(2, 7, 5, dtype=torch.float64, requires_grad=True)
    chosen = torch.zeros(2, 7, dtype=torch.bool)
    chosen[0, 2] = chosen[1, 5] = True
    loss = cloze_loss(logits, ITEMS, chosen)
    assert_same(loss, F.cross_entropy(logits[chosen], ITEMS[chosen]))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert not gradient[~chosen].any()
    assert gradient[chosen].any()
    assert cloze_loss(logits, ITEMS, torch.zeros_like(chosen)) == 0
