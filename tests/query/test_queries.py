"""What asks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import regard as rg
from regard.recipes.planted import Classifier, Lookup, accuracy, fit
from tests.cases import assert_same, scrambled
from tests.feature.common import holes, normal, weights_of


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(lead):
    features = torch.randn(*lead, 7, 5)
    assert rg.LearnableQuery(3)(features).shape == (3,)
    assert rg.LearnableQuery(3, count=11)(features).shape == (*lead, 11, 3)
    assert rg.ConstantQuery(torch.randn(11, 3))(features).shape == (*lead, 11, 3)
    assert rg.PooledQuery()(features).shape == rg.PooledQuery("max")(features).shape == (*lead, 5)
    assert rg.AuxiliaryQuery(5, 3)(features).shape == (*lead, 7, 3)
    read = rg.ContextQuery(rg.Attention("query-free", key_dim=5, hidden_dim=2))
    assert read(None, features).shape == (*lead, 5)


@pytest.mark.parametrize("pool", ["mean", "max"])
def test_pooling_sees_the_real_features_alone(pool):
    x, mask = normal(3, 7, 5), holes(3, 7, empty=[2])
    dirty = torch.where(mask[..., None], x, math.nan).requires_grad_()
    found = rg.PooledQuery(pool)(dirty, mask)
    for b in range(2):
        real = [row for row, ok in zip(x[b], mask[b], strict=True) if ok]
        rows = torch.stack(real)
        assert_same(found[b], sum(real) / len(real) if pool == "mean" else rows.max(0).values)
    assert not found[2].any()
    found.sum().backward()
    assert dirty.grad.isfinite().all()
    assert not dirty.grad[~mask].any()


def test_the_mean_divides_by_the_true_length():
    x = normal(1, 4, 5)
    padded = torch.cat([x, torch.zeros(1, 9, 5, dtype=x.dtype)], 1)
    assert_same(rg.PooledQuery()(padded, torch.arange(13) < 4), rg.PooledQuery()(x))


def test_gradients():
    x = normal(2, 4, 3).requires_grad_()
    mask = holes(2, 4)
    for ask in (rg.PooledQuery(), rg.PooledQuery("max"), scrambled(rg.AuxiliaryQuery(3, 2))):
        assert torch.autograd.gradcheck(lambda x, ask=ask: ask(x, mask), [x], fast_mode=True)


def test_a_learned_query_is_a_parameter_and_a_constant_one_is_saved_but_not_trained():
    learned, constant = rg.LearnableQuery(5), rg.ConstantQuery(torch.ones(5))
    assert [name for name, _ in learned.named_parameters()] == ["query"]
    assert not list(constant.parameters())
    assert list(constant.state_dict()) == ["query"]


def test_without_a_query_and_with_a_constant_one_are_one_reading():
    """Additive with W1 = 0 is query-free; and a learned query under dot is general of a constant one, W q = q*."""
    features = normal(2, 7, 5)
    additive, free = scrambled(rg.Additive(3, 5, 11)), scrambled(rg.QueryFree(5, 11))
    with torch.no_grad():
        additive.W1.zero_()
        free.W.copy_(additive.W2)
        free.b.copy_(additive.b)
        free.w.copy_(additive.w)
    ask = rg.ConstantQuery(normal(3))
    assert_same(rg.Attention(additive)(ask(features), features), rg.Attention(free)(None, features))
    learned, general = scrambled(rg.LearnableQuery(5)), scrambled(rg.General(3, 5))
    with torch.no_grad():
        learned.query.copy_(general.W @ ask.query)
    assert_same(rg.Attention("dot")(learned(), features), rg.Attention(general)(ask(), features))


def test_batch_entries_are_asked_the_same_and_follow_their_permutation():
    features, attend, ask = normal(3, 7, 5), rg.Attention("dot"), scrambled(rg.LearnableQuery(5, count=2))
    order = [2, 0, 1]
    assert_same(attend(ask(features[order]), features[order]), attend(ask(features), features)[order])


def test_states_as_torch_gives_them():
    x = torch.randn(2, 7, 3)
    out, h = nn.GRU(3, 5, num_layers=2, batch_first=True)(x)
    assert torch.equal(rg.RNNStateQuery()(h), out[:, -1])
    out, (h, c) = nn.LSTM(3, 5, num_layers=2, batch_first=True, bidirectional=True)(x)
    found = rg.RNNStateQuery(bidirectional=True)((h, c))
    assert torch.equal(found, torch.cat([out[:, -1, :5], out[:, 0, 5:]], -1))
    state = nn.GRUCell(3, 5)(x[:, 0])
    assert torch.equal(rg.RNNStateQuery()(state), state)


def test_a_missing_variable_is_read_as_zero():
    ask, x = scrambled(rg.AuxiliaryQuery(3, 5)), normal(2, 3)
    x[1] = math.nan
    found = ask(x, torch.tensor([True, False]))
    assert_same(found[1], ask.b.detach())
    assert_same(found[0], x[0] @ ask.W.mT + ask.b)
    found.sum().backward()
    assert ask.W.grad.isfinite().all()


def test_the_module_that_is_asked_first_is_in_the_trace():
    first = rg.Attention("query-free", key_dim=5, hidden_dim=2)
    model = nn.ModuleDict({"query": rg.ContextQuery(first), "attention": rg.Attention("dot")})
    image, question = torch.randn(2, 7, 5), torch.randn(2, 3, 5)
    with rg.record(model) as trace:
        model["attention"](model["query"](None, question), image)
    assert list(trace) == ["query.attention", "attention"]


class Asking(nn.Module):
    """A query from an auxiliary variable, and the attention it asks."""

    def __init__(self, ask: nn.Module, dim: int) -> None:
        super().__init__()
        self.ask, self.attention = ask, rg.Attention("dot")

    def forward(self, query, key):
        return self.attention(self.ask(query), key)


def test_an_auxiliary_variable_finds_what_a_learned_query_cannot():
    task, found = Lookup(), {}
    for name, ask in (("auxiliary", rg.AuxiliaryQuery(12, 13)), ("learnable", rg.LearnableQuery(13))):
        torch.manual_seed(0)
        model = Classifier(Asking(ask if name == "auxiliary" else _blind(ask), 13), 13, task.classes)
        fit(model, task, lr=0.03)
        found[name] = accuracy(model, task)
        if name == "auxiliary":
            batch = task.draw(256, torch.Generator().manual_seed(2))
            looked = weights_of(model, **batch.inputs).weights.argmax(-1)
            assert (looked == batch.truth["key"]).float().mean() >= 0.95
    print(found)
    assert found["auxiliary"] >= 0.95
    assert found["learnable"] < 0.6


def _blind(ask: nn.Module) -> nn.Module:
    """The same, whatever it is given."""

    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ask

        def forward(self, query):
            return self.inner()

    return Blind()


def test_refusals():
    with pytest.raises(
        ValueError, match="features: got None, expected the features, for whose batch there are 3 queries"
    ):
        rg.LearnableQuery(5, count=3)()
    with pytest.raises(ValueError, match=r"query: got shape \(2, 3, 4\)"):
        rg.ConstantQuery(torch.randn(2, 3, 4))
    with pytest.raises(ValueError, match="state: got 3 states, expected two for each layer"):
        rg.RNNStateQuery(bidirectional=True)(torch.randn(3, 2, 5))
    with pytest.raises(ValueError, match="pool: got 'sum', expected one of mean, max"):
        rg.PooledQuery("sum")
    with pytest.raises(TypeError, match="module: got Tensor, expected a module"):
        rg.ContextQuery(torch.ones(2))
    with pytest.raises(TypeError, match="module: got one that gives tuple"):
        rg.ContextQuery(nn.GRU(2, 2))(torch.randn(2, 3, 2))


def test_a_variable_that_does_not_fit_is_refused():
    ask = rg.AuxiliaryQuery(3, 5)
    with pytest.raises(ValueError, match=r"variable: got shape \(2, 4\), expected width 3"):
        ask(torch.zeros(2, 4))
    with pytest.raises(TypeError, match="mask: got a tensor of torch.float32, expected booleans"):
        ask(torch.zeros(2, 3), torch.ones(2))
