"""Key-value memory."""

from __future__ import annotations

import math

import pytest
import torch

import regard as rg
from regard.recipes.planted import Classifier, FactChain, accuracy, fit
from tests.cases import assert_same, scrambled
from tests.feature.common import EXECUTIONS, attend, holes, normal, weights_of

OPTIONS = {
    "plain": {"score": "general"},
    "additive": {"score": "additive", "hidden_dim": 7},
    "hops": {"score": "general", "hops": 3},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
every_execution = pytest.mark.parametrize("execution", EXECUTIONS, ids=str)


def oracle(m, q, keys, values):
    o = attend(m.attention, q, keys, values)
    for R in m.R:
        q = R @ (q + o)
        o = attend(m.attention, q, keys, values)
    return o


@every_option
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_shapes(options, lead):
    m = rg.KeyValueMemory((3, 5, 3), **options)
    key, value = torch.randn(*lead, 11, 5), torch.randn(*lead, 11, 3)
    assert m(torch.randn(*lead, 3), key, value).shape == (*lead, 3)
    assert m(torch.randn(*lead, 13, 3), key, value).shape == (*lead, 13, 3)


@every_execution
@every_option
def test_oracle(options, execution):
    m = scrambled(rg.KeyValueMemory((3, 5, 3), **options))
    clean = [x.requires_grad_() for x in (normal(2, 3), normal(2, 6, 5), normal(2, 6, 3))]
    mask = holes(2, 6)
    dirty = [clean[0].detach().clone(), *(torch.where(mask[..., None], x.detach(), math.nan) for x in clean[1:])]
    dirty = [x.requires_grad_() for x in dirty]
    with rg.execution(execution[0], panel=execution[1]):
        found = m(*dirty, mask)
        mine = torch.autograd.grad(found.square().sum(), [*dirty, *m.parameters()])
    rows = [oracle(m, clean[0][b], list(clean[1][b][mask[b]]), list(clean[2][b][mask[b]])) for b in range(2)]
    expected = torch.stack(rows)
    theirs = torch.autograd.grad(expected.square().sum(), [*clean, *m.parameters()])
    assert_same(found, expected)
    for a, b in zip(mine, theirs, strict=True):
        assert_same(a + 1, b + 1)


@every_option
def test_gradients(options):
    m, mask = scrambled(rg.KeyValueMemory((3, 5, 3), **options)), holes(2, 4)
    leaves = [x.requires_grad_() for x in (normal(2, 3), normal(2, 4, 5), normal(2, 4, 3))]
    assert torch.autograd.gradcheck(lambda *x: m(*x, mask), leaves, fast_mode=True)


def test_keys_address_and_are_not_counts():
    """Values read through the identity are the weights; repeating a slot doubles its weight, whatever is in the key."""
    m, query, key = rg.KeyValueMemory((4, 4, 7)), normal(2, 4), normal(2, 7, 4)
    found = m(query, key, torch.eye(7, dtype=torch.float64).expand(2, 7, 7))
    assert_same(found, torch.einsum("bq,bnq->bn", query, key).softmax(-1))
    assert_same(found.sum(-1), torch.ones(2, dtype=torch.float64))
    larger = m(query, torch.cat([key[:, :1] * 5, key[:, 1:]], 1), torch.ones(2, 7, 7, dtype=torch.float64))
    assert_same(larger, torch.ones(2, 7, dtype=torch.float64))


def test_a_map_of_the_values_may_be_applied_before_or_after():
    m, query, key, value, W = rg.KeyValueMemory((4, 4, 5)), normal(2, 4), normal(2, 7, 4), normal(2, 7, 5), normal(5, 5)
    assert_same(m(query, key, value @ W), m(query, key, value) @ W)


def test_with_values_as_keys_it_is_plain_attention():
    query, key = normal(2, 3, 4), normal(2, 7, 4)
    assert_same(rg.KeyValueMemory(4)(query, key), rg.Attention("dot")(query, key))


def test_what_is_written_bit_by_bit_is_what_is_written_at_once():
    m = scrambled(rg.KeyValueMemory((3, 5, 3), 2, score="general"))
    query, key, value, mask = normal(2, 3), normal(2, 7, 5), normal(2, 7, 3), holes(2, 7)
    memory = None
    for part in (slice(0, 2), slice(2, 6), slice(6, 7)):
        memory = m.write(memory, key[:, part], value[:, part], mask[:, part])
    read = m.read(query, memory)
    assert_same(m.read(m.hop(query, read), memory), m(query, key, value, mask))


def test_a_full_memory_forgets_the_oldest():
    m = rg.KeyValueMemory(4, capacity=3)
    first = m.write(None, normal(2, 2, 4), normal(2, 2, 4, seed=1))
    both = m.write(first, normal(2, 2, 4, seed=2), normal(2, 2, 4, seed=3))
    assert both.keys.shape == both.values.shape == (2, 3, 4)
    assert torch.equal(both.keys[:, 0], first.keys[:, 1])
    assert first.keys.shape == (2, 2, 4)  # writing makes a new memory


def test_an_empty_memory_answers_zero():
    m = rg.KeyValueMemory(4)
    memory = m.write(None, normal(2, 3, 4), mask=torch.zeros(2, 3, dtype=torch.bool))
    assert not m.read(normal(2, 4), memory).any()


def test_paths():
    trace = weights_of(rg.KeyValueMemory(4, 3), torch.randn(2, 4), torch.randn(2, 7, 4))
    assert len(trace["attention"]) == 3
    assert trace["attention"][2].weights.shape == (2, 7)


class Apart(torch.nn.Module):
    """Codes of questions and of answers in halves of their own, so that a sum of both can be told apart."""

    def __init__(self, codes: int, hops: int) -> None:
        super().__init__()
        self.memory = rg.KeyValueMemory((2 * codes, codes, 2 * codes), hops, score="general")

    def forward(self, query, key, value):
        pad = torch.nn.functional.pad
        return self.memory(pad(query, (0, query.shape[-1])), key, pad(value, (value.shape[-1], 0)))


def test_hops_follow_facts_through_the_memory():
    task, found = FactChain(2), {}
    for hops in (1, 2):
        torch.manual_seed(0)
        model = Classifier(Apart(task.codes, hops), 2 * task.codes, task.classes)
        fit(model, task, steps=400, lr=0.03)
        found[hops] = accuracy(model, task)
    print("accuracy by hops", found)
    assert found[1] <= 0.4
    assert found[2] >= 0.95


def test_refusals():
    with pytest.raises(ValueError, match="hops: got 2 with queries of width 3 and values of width 5"):
        rg.KeyValueMemory((3, 3, 5), 2)
    with pytest.raises(ValueError, match=r"values: got shape \(2, 6, 4\), expected one for each key: \(2, 7\)"):
        rg.KeyValueMemory(4).write(None, torch.randn(2, 7, 4), torch.randn(2, 6, 4))
    with pytest.raises(ValueError, match="number: got 1, expected a hop that another follows, of 1"):
        rg.KeyValueMemory(4, 2).hop(torch.randn(2, 4), torch.randn(2, 4), 1)


def test_a_query_of_another_batch_is_refused():
    with pytest.raises(ValueError, match=r"query: got shape \(2, 5, 3\) beside a key of shape \(7, 11, 3\)"):
        rg.KeyValueMemory(3)(torch.zeros(2, 5, 3), torch.zeros(7, 11, 3))


def test_only_a_memory_is_read():
    with pytest.raises(TypeError, match="memory: got NoneType, expected a Memory. Fix: one that `write` gave"):
        rg.KeyValueMemory(3).read(torch.zeros(2, 3), None)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((torch.zeros(4), torch.zeros(2, 5, 4), torch.zeros(2, 5, 3)), ValueError, "value: got width 3, expected 4"),
        ((torch.zeros(()), torch.zeros(5, 4)), ValueError, r"query: got shape \(\), expected a query or several"),
        (([0.0] * 4, torch.zeros(5, 4)), TypeError, "query: got list, expected a floating-point"),
        ((torch.zeros(4), [[0.0] * 4]), TypeError, "key: got list, expected a floating-point tensor"),
        ((torch.zeros(4), torch.zeros(4)), ValueError, r"key: got shape \(4,\), expected at least two axes"),
    ],
)
def test_inputs_are_refused_by_their_own_names(given, error, message):
    with pytest.raises(error, match=message):
        rg.KeyValueMemory(4)(*given)
