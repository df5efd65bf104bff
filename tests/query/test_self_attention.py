"""Self-attention: every token asks, and every token answers."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

import regard as rg
from tests import oracles
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, NAMES, holes, normal, weighted, weights_of

ALLOWED = {
    None: lambda i, j: True,
    "causal": lambda i, j: j <= i,
    "forward": lambda i, j: j < i,
    "window": lambda i, j: abs(i - j) <= 1,
    "others": lambda i, j: i != j,
}
MASKS = {
    None: None,
    "causal": rg.Causal(),
    "forward": rg.Directional("forward"),
    "window": rg.Window(1),
    "others": rg.Others(),
}
OPTIONS = {
    "scaled dot": {},
    "additive": {"score": "additive", "hidden_dim": 7},
    "multi-dimensional": {"score": "additive", "features": True},
    "general, residual": {"score": "general", "update": "residual"},
    "no maps": {"project": False, "score": "general", "update": "residual"},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
every_mask = pytest.mark.parametrize("pairs", MASKS, ids=str)
every_execution = pytest.mark.parametrize("execution", EXECUTIONS, ids=str)


def oracle(m: rg.SelfAttention, tokens: torch.Tensor, real: torch.Tensor, pairs: str | None) -> torch.Tensor:
    """One sequence, token by token."""

    def through(W, x):
        return x if W is None else oracles.times(W, x)

    score, out = oracles.SCORES[NAMES[type(m.attention.score)]], []
    width = tokens.shape[-1] if m.W_V is None or m.norm is not None else len(m.W_V)
    for i, f in enumerate(tokens):
        if not real[i]:
            out.append(tokens.new_zeros(width))
            continue
        seen = [g for j, g in enumerate(tokens) if real[j] and ALLOWED[pairs](i, j)]
        values = [through(m.W_V, g) for g in seen]
        e = [score(m.attention.score, through(m.W_Q, f), through(m.W_K, g)) for g in seen]
        c = weighted(e, values) if seen else through(m.W_V, f * 0)
        if m.norm is not None:
            x = f + through(m.W_O, c)
            spread = ((x - x.mean()) ** 2).mean()
            c = (x - x.mean()) / torch.sqrt(spread + m.norm.eps) * m.norm.weight + m.norm.bias
        out.append(c)
    return torch.stack(out)


@every_option
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(options, lead):
    m = rg.SelfAttention(5, 3, 11, **options)
    width = 5 if "update" in options else 11
    assert m(torch.randn(*lead, 7, 5)).shape == (*lead, 7, width)


@every_execution
@every_mask
@every_option
def test_oracle(options, pairs, execution):
    m = scrambled(rg.SelfAttention(5, 3, 4, pairs=MASKS[pairs], **options))
    tokens, mask = normal(2, 6, 5), holes(2, 6, seed=1)
    dirty = torch.where(mask[..., None], tokens, math.nan).requires_grad_()
    clean = tokens.clone().requires_grad_()
    with rg.execution(execution[0], panel=execution[1]):
        found = m(dirty, mask)
        mine = torch.autograd.grad(found.square().sum(), [dirty, *m.parameters()], allow_unused=True)
    expected = torch.stack([oracle(m, clean[b], mask[b], pairs) for b in range(2)])
    theirs = torch.autograd.grad(expected.square().sum(), [clean, *m.parameters()], allow_unused=True)
    assert_same(found, expected)
    for x, y in zip(mine, theirs, strict=True):
        assert_same(x + 1, (torch.zeros_like(x) if y is None else y) + 1)


@every_option
def test_gradients(options):
    m, mask = scrambled(rg.SelfAttention(3, 2, 2, pairs=rg.Causal(), **options)), holes(2, 4)
    assert torch.autograd.gradcheck(lambda x: m(x, mask), [normal(2, 4, 3).requires_grad_()], fast_mode=True)


def test_a_mask_may_come_with_the_call_as_tensor_or_object():
    tokens, mask = normal(2, 6, 5), holes(2, 6)
    m = scrambled(rg.SelfAttention(5))
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    expected = m(tokens, mask, pairs=rg.Causal())
    assert_same(m(tokens, mask, pairs=causal), expected)
    m.pairs = rg.Window(3)
    assert_same(m(tokens, mask, pairs=causal), m(tokens, mask, pairs=rg.Causal() & rg.Window(3)))


def test_a_token_that_no_pair_lets_anybody_see_never_matters():
    m, tokens = scrambled(rg.SelfAttention(5)), normal(1, 6, 5)
    pairs = torch.ones(6, 6, dtype=torch.bool)
    pairs[:, 4] = False
    pairs[4, :] = False
    rest = [0, 1, 2, 3, 5]
    dirty = tokens.clone()
    dirty[:, 4] = math.nan
    found = m(dirty, pairs=pairs)[:, rest]
    assert_same(found, m(tokens, pairs=pairs)[:, rest])
    found.sum().backward()
    assert all(p.grad.isfinite().all() for p in m.parameters())


def test_causal_results_do_not_know_the_future():
    m, tokens = scrambled(rg.SelfAttention(5, pairs=rg.Causal())), normal(2, 7, 5)
    later = tokens.clone()
    later[:, 4:] += 1
    assert_same(m(later)[:, :4], m(tokens)[:, :4])
    assert not torch.allclose(m(later)[:, 4:], m(tokens)[:, 4:])


def test_the_softmax_is_over_keys_and_weights_sum_to_one():
    """The axis of a softmax over queries would sum to one along the other side."""
    w = weights_of(scrambled(rg.SelfAttention(5)), normal(2, 7, 5)).weights
    assert_same(w.sum(-1), torch.ones(2, 7, dtype=torch.float64))
    assert not torch.allclose(w.sum(-2), torch.ones(2, 7, dtype=torch.float64))


def test_a_weight_depends_on_its_own_query_and_key():
    """a_ij moves with token i and with token j; of the scores, only those of i and j move."""
    m, tokens = scrambled(rg.SelfAttention(5)), normal(7, 5)
    changed = tokens.clone()
    changed[2] += 1
    moved = (weights_of(m, tokens).scores != weights_of(m, changed).scores).int()
    expected = torch.zeros(7, 7, dtype=torch.int)
    expected[2, :] = expected[:, 2] = 1
    assert torch.equal(moved, expected)


def test_without_queries_everything_is_the_mean_of_values():
    m, tokens = scrambled(rg.SelfAttention(5)), normal(2, 7, 5)
    with torch.no_grad():
        m.W_Q.zero_()
    assert_same(m(tokens), (tokens @ m.W_V.mT).mean(-2, keepdim=True).expand(2, 7, 5))


def test_one_token_reads_itself():
    m, token = scrambled(rg.SelfAttention(5)), normal(2, 1, 5)
    assert_same(m(token), token @ m.W_V.mT)
    assert not scrambled(rg.SelfAttention(5, pairs=rg.Others()))(token).any()


def test_the_matrices_do_not_depend_on_the_input_and_take_any_length():
    m = rg.SelfAttention(5)
    assert [m(torch.randn(2, n, 5)).shape[-2] for n in (1, 3, 17)] == [1, 3, 17]
    assert {name for name, _ in m.named_parameters()} == {"W_Q", "W_K", "W_V"}


def test_paths_copies_and_names():
    m = rg.SelfAttention(5, pairs=rg.Others() & rg.Window(2))
    assert list(weights_of(torch.nn.Sequential(m), torch.randn(2, 3, 5))) == ["0.attention"]
    x = torch.randn(2, 3, 5)
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(other(x), m(x))
    assert "Others()" in repr(m)


@pytest.mark.parametrize(("nq", "n"), [(1, 1), (1, 3), (3, 1), (3, 3), (2, 5), (0, 2), (2, 0)])
def test_others_knows_its_keys_and_rows(nq, n):
    bound = rg.Others().bind(rg.general.bound.Sizes((), nq, n))
    whole = bound.tile(range(nq), range(n), torch.device("cpu"))
    assert torch.equal(bound.keys(torch.device("cpu")), whole.any(0))
    assert torch.equal(bound.rows(torch.device("cpu")), whole.any(1))


def test_refusals():
    with pytest.raises(ValueError, match="update: got 'gate', expected one of replace, residual"):
        rg.SelfAttention(5, update="gate")
    with pytest.raises(TypeError, match=r"mask of tokens: got a tensor of torch\.int64"):
        rg.SelfAttention(5)(torch.randn(2, 3, 5), torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="dim: got 0"):
        rg.SelfAttention(0)


def test_tokens_and_pairs_that_do_not_fit_are_refused():
    attend = rg.SelfAttention(4)
    with pytest.raises(ValueError, match=r"tokens: got shape \(2, 5, 3\), expected width 4"):
        attend(torch.zeros(2, 5, 3))
    with pytest.raises(TypeError, match="tokens: got a tensor of torch.float64, expected the module's dtype"):
        attend(torch.zeros(2, 5, 4).double())
    with pytest.raises(TypeError, match="mask: got str, expected a boolean tensor or a mask object"):
        rg.SelfAttention(4, pairs="causal")
