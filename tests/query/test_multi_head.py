"""Several attentions side by side."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import regard as rg
from tests import oracles
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, NAMES, normal, weighted, weights_of

OPTIONS = {
    "scaled dot": {},
    "biased": {"bias": True},
    "additive": {"score": "additive", "hidden_dim": 7, "bias": True},
    "multi-dimensional": {"score": "additive", "features": True},
    "grouped": {"key_heads": 2},
    "one key head, general": {"key_heads": 1, "score": "general"},
    "different": {"score": ["additive", "scaled-dot", "general", "dot"], "key_heads": 2, "bias": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
every_execution = pytest.mark.parametrize("execution", EXECUTIONS, ids=str)


def make(**options) -> rg.MultiHeadAttention:
    return rg.MultiHeadAttention((3, 5, 7), 4, head_dim=(2, 3), **options)


def one_head(score: nn.Module, h: int) -> nn.Module:
    """The score of a head by itself."""
    alone = nn.Module()
    alone.__dict__.update({k: v for k, v in score.__dict__.items() if not k.startswith("_")})
    own = {name: p[h] if score.head_shape else p for name, p in score.named_parameters()}
    for name, p in own.items():
        object.__setattr__(alone, name, p)
    object.__setattr__(alone, "named_parameters", own.items)
    return alone


def oracle(m: rg.MultiHeadAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed) -> torch.Tensor:
    """One query of one example, head by head."""

    def through(W, b, x):
        return oracles.times(W, x) + (0 if b is None else b)

    heads = []
    for h in range(4):
        g = h // (4 // m.key_heads)
        score = m.attention.score if m.heads is None else m.heads[h].score
        name = NAMES[type(score)]
        bias = [(None if b is None else b[i]) for b, i in ((m.b_Q, h), (m.b_K, g), (m.b_V, g))]
        own = through(m.W_Q[h], bias[0], q)
        alone = one_head(score, h)
        e = [
            oracles.SCORES[name](alone, own, through(m.W_K[g], bias[1], x))
            for x, ok in zip(k, allowed, strict=True)
            if ok
        ]
        heads.append(weighted(e, [through(m.W_V[g], bias[2], x) for x, ok in zip(v, allowed, strict=True) if ok]))
    return through(m.W_O, m.b_O, torch.cat(heads))


def some_pairs(*shape: int) -> torch.Tensor:
    allowed = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.6
    allowed[..., 0] = True
    return allowed


@every_option
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(options, lead):
    m = make(**options)
    key, value = torch.randn(*lead, 11, 5), torch.randn(*lead, 11, 7)
    assert m(torch.randn(*lead, 13, 3), key, value).shape == (*lead, 13, 3)
    assert m(torch.randn(*lead, 3), key, value).shape == (*lead, 3)


@every_execution
@every_option
def test_oracle(options, execution):
    m = scrambled(make(**options))
    x = [normal(2, n, d, seed=d).requires_grad_() for n, d in ((5, 3), (6, 5), (6, 7))]
    mask = some_pairs(2, 5, 6)
    with rg.execution(execution[0], panel=execution[1]):
        found = m(*x, mask=mask)
        mine = torch.autograd.grad(found.square().sum(), [*x, *m.parameters()])
    expected = torch.stack(
        [torch.stack([oracle(m, x[0][b, i], x[1][b], x[2][b], mask[b, i]) for i in range(5)]) for b in range(2)]
    )
    theirs = torch.autograd.grad(expected.square().sum(), [*x, *m.parameters()])
    assert_same(found, expected)
    for a, b in zip(mine, theirs, strict=True):
        assert_same(a + 1, b + 1)


@every_option
def test_gradients(options):
    m = scrambled(make(**options))
    leaves = [normal(2, n, d, seed=d).requires_grad_() for n, d in ((3, 3), (4, 5), (4, 7))]
    assert torch.autograd.gradcheck(lambda *x: m(*x, mask=some_pairs(2, 3, 4)), leaves, fast_mode=True)


@pytest.mark.parametrize("options", [OPTIONS["biased"], OPTIONS["different"]], ids=["together", "one by one"])
def test_masks_of_every_kind(options):
    """Tensors with and without heads, objects, combinations, a single query: the same where they say the same."""
    m = scrambled(make(**options))
    query, key, value = normal(2, 6, 3), normal(2, 6, 5), normal(2, 6, 7)
    real = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    pairs = real[:, None, :] & causal
    expected = m(query, key, value, mask=pairs)
    dirty_key = torch.where(real[..., None], key, math.nan)
    for mask in (
        pairs[:, None].expand(2, 4, 6, 6),
        rg.Causal() & rg.Keys(real),
        rg.Causal() & real[:, None, :],
        rg.Causal() & rg.Padding(torch.tensor([6, 4])),
    ):
        assert_same(m(query, dirty_key, value, mask=mask), expected)
    assert_same(m(query[:, 3], key, value, mask=pairs[:, 3]), expected[:, 3])
    by_head = some_pairs(2, 4, 6, 6)
    found = m(query, key, value, mask=by_head)
    rows = [
        torch.stack([_by_head(m, query[b, i], key[b], value[b], by_head[b, :, i]) for i in range(6)]) for b in (0, 1)
    ]
    assert_same(found, torch.stack(rows))


def _by_head(m, q, k, v, allowed):
    """Each head with its own mask: what a head writes is what changes when the others are silenced."""
    total = oracle(m, q, k, v, [True] * len(k)) * 0
    for h in range(4):
        alone = oracle_of_blocks(m, q, k, v, allowed[h])
        total = total + alone[h]
    return total + (0 if m.b_O is None else m.b_O)


def oracle_of_blocks(m, q, k, v, allowed):
    """What each head adds to the result, without the bias of the output."""
    W_O, parts = m.W_O.detach().clone(), []
    for h in range(4):
        silenced = torch.zeros_like(W_O)
        silenced[:, 3 * h : 3 * h + 3] = W_O[:, 3 * h : 3 * h + 3]
        with torch.no_grad():
            kept = m.W_O.clone()
            m.W_O.copy_(silenced)
            parts.append(oracle(m, q, k, v, allowed) - (0 if m.b_O is None else m.b_O))
            m.W_O.copy_(kept)
    return parts


def test_a_bias_is_added_to_the_scores_of_every_head_or_of_each():
    m = scrambled(make())
    x = normal(2, 5, 3), normal(2, 6, 5), normal(2, 6, 7)
    hidden = some_pairs(2, 5, 6)
    as_bias = torch.where(hidden, 0.0, -math.inf).double()
    assert_same(m(*x, bias=as_bias), m(*x, mask=hidden))
    assert_same(m(*x, bias=as_bias[:, None].expand(2, 4, 5, 6)), m(*x, mask=hidden))
    assert_same(
        m(*x, bias=lambda i, j: -((i - j) ** 2.0)), m(*x, bias=-((torch.arange(5)[:, None] - torch.arange(6)) ** 2.0))
    )
    different = scrambled(make(**OPTIONS["different"]))
    assert_same(different(*x, bias=as_bias[:, None].expand(2, 4, 5, 6)), different(*x, mask=hidden))


def test_a_query_with_nothing_to_attend_to_is_zero_in_spite_of_the_biases():
    m, mask = scrambled(make(bias=True)), some_pairs(2, 5, 6)
    mask[1, 2] = False
    found = m(normal(2, 5, 3), normal(2, 6, 5), normal(2, 6, 7), mask=mask)
    assert not found[1, 2].any()
    assert found[1, 1].any()


CONFIGURATIONS = {
    "plain": {},
    "without biases": {"bias": False},
    "other widths": {"kdim": 5, "vdim": 7},
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_it_is_torch_with_the_same_weights(options, padded, causal):
    theirs = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64, dropout=0.3, **options).eval()
    scrambled(theirs)
    ours = rg.MultiHeadAttention.from_torch(theirs)
    assert not ours.training
    assert ours.attention.dropout == 0.3
    query = normal(2, 6, 12)
    key, value = normal(2, 6, options.get("kdim", 12), seed=1), normal(2, 6, options.get("vdim", 12), seed=2)
    ignored = torch.tensor([[False] * 6, [False] * 4 + [True] * 2]) if padded else None
    above = torch.ones(6, 6, dtype=torch.bool).triu(1) if causal else None
    leaves = [x.requires_grad_() for x in (query, key, value)]
    expected, weights = theirs(*leaves, key_padding_mask=ignored, attn_mask=above, average_attn_weights=False)
    masks = ([rg.Keys(~ignored)] if padded else []) + ([rg.Causal()] if causal else [])
    mask = None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]
    found = ours(*leaves, mask=mask)
    assert_same(found, expected)
    assert_same(weights_of(ours, *leaves, mask=mask)["attention"].weights, weights)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (found, expected)), strict=True):
        assert_same(a, b)


def test_polarity_is_converted_not_copied():
    """True means *ignore* in torch and *may attend* here."""
    theirs = scrambled(nn.MultiheadAttention(12, 3, batch_first=True)).eval()
    ours, x = rg.MultiHeadAttention.from_torch(theirs), normal(2, 6, 12)
    ignored = torch.tensor([[False, True] * 3] * 2)
    expected = theirs(x, x, x, key_padding_mask=ignored)[0]
    assert_same(ours(x, mask=rg.Keys(~ignored)), expected)
    assert not torch.allclose(ours(x, mask=rg.Keys(ignored)), expected)


def test_dropout_is_of_weights_and_only_while_training():
    m = scrambled(rg.MultiHeadAttention(6, 2, dropout=0.5))
    x = normal(2, 50, 6)
    assert not torch.equal(m(x), m(x))
    m.eval()
    assert torch.equal(m(x), m(x))


def test_heads_share_no_parameters():
    """Each head has matrices of its own: half the heads, half the parameters that are not of the output."""
    full, half = (rg.MultiHeadAttention(12, h, head_dim=3, score="additive") for h in (4, 2))
    for name, p in full.named_parameters():
        other = dict(half.named_parameters())[name]
        assert p.numel() == 2 * other.numel(), name
        if name != "W_O":
            assert p.shape[0] == 4
    m, x = scrambled(full), normal(2, 5, 12)
    before = weights_of(m, x).weights
    with torch.no_grad():
        m.W_Q[1] += 1
    after = weights_of(m, x).weights
    assert [torch.equal(before[:, h], after[:, h]) for h in range(4)] == [True, False, True, True]


def test_grouped_heads_share_keys_and_values_and_nothing_else():
    m = scrambled(make(key_heads=2))
    assert (m.W_K.shape[0], m.W_V.shape[0], m.W_Q.shape[0]) == (2, 2, 4)
    full = scrambled(make())
    with torch.no_grad():
        for name in ("W_Q", "W_O"):
            getattr(full, name).copy_(getattr(m, name))
        for name in ("W_K", "W_V"):
            getattr(full, name).copy_(getattr(m, name)[[0, 0, 1, 1]])
    x = normal(2, 5, 3), normal(2, 6, 5), normal(2, 6, 7)
    assert_same(m(*x), full(*x))


def test_paths():
    x = torch.randn(2, 5, 3), torch.randn(2, 6, 5), torch.randn(2, 6, 7)
    trace = weights_of(make(), *x)
    assert list(trace) == ["attention"]
    assert trace["attention"].weights.shape == (2, 4, 5, 6)
    trace = weights_of(make(**OPTIONS["different"]), *x)
    assert list(trace) == ["heads.0", "heads.1", "heads.2", "heads.3"]
    assert trace["heads.2"].weights.shape == (2, 1, 5, 6)


def test_concatenated_queries_are_attention_asked_several_times():
    m = scrambled(rg.MultiQueryConcat("general", query_dim=3, key_dim=5))
    query, key, value = normal(2, 7, 3), normal(2, 11, 5), normal(2, 11, 13)
    mask = some_pairs(2, 7, 11)
    found = m(query, key, value, mask=mask)
    assert found.shape == (2, 7 * 13)
    each = [m.attention(query[:, k], key, value, mask=mask[:, k]) for k in range(7)]
    assert_same(found, torch.cat(each, -1))
    assert sum(p.numel() for p in m.parameters()) == 15  # the queries share the score: nothing is projected


def test_refusals():
    with pytest.raises(ValueError, match="heads: got 4, expected a divisor of the width 6"):
        rg.MultiHeadAttention(6, 4)
    with pytest.raises(ValueError, match="key_heads: got 3, expected a divisor of heads=4"):
        rg.MultiHeadAttention(8, 4, key_heads=3)
    with pytest.raises(ValueError, match=r"dim: got \(3, 5\)"):
        rg.MultiHeadAttention((3, 5), 1)
    with pytest.raises(ValueError, match="score: got 2 of them, expected one for each step"):
        rg.MultiHeadAttention(8, 4, score=["dot", "additive"])
    with pytest.raises(ValueError, match=r"module: got one with keys of its own.*regard\.adopt"):
        rg.MultiHeadAttention.from_torch(nn.MultiheadAttention(4, 2, add_zero_attn=True))
    with pytest.raises(TypeError, match="module: got Linear"):
        rg.MultiHeadAttention.from_torch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="query: got shape"):
        rg.MultiHeadAttention(4, 2)(torch.randn(4), torch.randn(2, 3, 4))
    with pytest.raises(ValueError, match="query: got 2 axes, expected as many as the key, 3"):
        rg.MultiQueryConcat()(torch.randn(2, 4), torch.randn(2, 3, 4))
