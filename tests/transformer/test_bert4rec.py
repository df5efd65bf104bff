"""BERT4Rec: both sides, masked items only, tied logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import regard as rg
from regard.transformer.bert4rec import cloze_loss
from tests.cases import assert_same, scrambled
from tests.transformer.common import REAL

ITEMS = torch.randint(0, 5, (2, 7), generator=torch.Generator().manual_seed(0))


def model(**options):
    return scrambled(rg.BERT4Rec(5, 8, 2, 2, length=11, **options))


def test_logits_are_the_equation():
    m = model()
    h = m.encoder(m.E[ITEMS], REAL)
    for b in range(2):
        for t in range(7):
            if REAL[b, t]:
                z = F.gelu(m.W_P @ h[b, t] + m.b_P)
                expected = torch.stack([m.E[v] @ z + m.b_O[v] for v in range(5)])
                assert_same(m(ITEMS, REAL)[b, t], expected)
    assert m(ITEMS, REAL).shape == (2, 7, 5)
    assert not m(ITEMS, REAL)[~REAL].any()


def test_a_cloze_masks_real_items_at_the_rate_asked_for_and_always_one():
    torch.manual_seed(0)
    m, items = model(masked=0.4, last=0.0), torch.zeros(3000, 7, dtype=torch.long)
    real = REAL[1].expand(3000, 7)
    asked, chosen = m.cloze(items, real)
    assert (asked[chosen] == m.mask_token).all()
    assert torch.equal(asked[~chosen], items[~chosen])
    assert not chosen[:, 4:].any()
    assert chosen.any(-1).all()
    spared = 0.6**4
    rate = chosen[:, :4].float().mean(0)
    expected = torch.tensor([0.4, 0.4, 0.4, 0.4 + spared])
    assert ((rate - expected).abs() < 0.04).all()
    _, last = model(last=1.0).cloze(items, real)
    assert torch.equal(last, (torch.arange(7) == 3).expand(3000, 7))


def test_to_recommend_a_masked_item_is_appended_to_the_real_ones():
    m = model()
    found = m.recommend(ITEMS, REAL)
    for b in range(2):
        real = ITEMS[b][REAL[b]]
        alone = m(torch.cat([real, torch.tensor([m.mask_token])])[None])[0, -1]
        assert_same(found[b], alone)
    assert_same(m.recommend(ITEMS)[0], found[0])


def test_the_loss_learns():
    m = rg.BERT4Rec(5, 8, 2, 1, length=11)
    loss = m.loss(ITEMS, REAL)
    loss.backward()
    assert all(p.grad is not None for p in m.parameters())


def test_refusals():
    with pytest.raises(TypeError, match="items: got a tensor of torch.float32, expected integers"):
        rg.BERT4Rec(5, 8, 2, 1)(torch.randn(2, 7))
    with pytest.raises(ValueError, match="masked: got 2"):
        rg.BERT4Rec(5, 8, 2, 1, masked=2)
    with pytest.raises(ValueError, match="tokens: got 12 places, expected at most length=11"):
        model()(torch.zeros(1, 12, dtype=torch.long))


def test_no_real_item_is_overwritten_where_others_are_missing_before_it():
    model = scrambled(rg.BERT4Rec(20, 8, 2, 1, length=10)).eval()
    real = torch.tensor([[False, True, True]])
    last = [model.recommend(torch.tensor([[0, 5, item]]), real) for item in (1, 2)]
    assert not torch.allclose(*last)
    asked = model(torch.tensor([[0, 5, 1, model.mask_token]]), torch.tensor([[False, True, True, True]]))
    assert_same(last[0], asked[:, -1])


def test_the_loss_of_half_precision_is_summed_in_single():
    logits, items = torch.randn(2, 7, 20, dtype=torch.bfloat16), torch.randint(20, (2, 7))
    loss = cloze_loss(logits, items, torch.ones(2, 7, dtype=torch.bool))
    expected = F.cross_entropy(logits.float().flatten(0, 1), items.flatten())
    torch.testing.assert_close(loss, expected)
