"""REINFORCE from a trace, and the exact expectation beside it."""

import itertools
import math

import pytest
import torch

import regard as rg
from tests.cases import assert_same, scrambled

B, NQ, N, D = 2, 3, 4, 5


def setting(align, multi=False):
    attend = scrambled(rg.Attention(rg.General(D, D, features=D if multi else None), align)).train()
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(B, NQ, D, generator=generator, dtype=torch.float64)
    key = torch.randn(B, N, D, generator=generator, dtype=torch.float64)
    mask = torch.ones(B, NQ, N, dtype=torch.bool)
    mask[1, :, 3] = False
    mask[1, 2] = False
    return attend, query, key, mask


def recorded(align, multi=False):
    attend, query, key, mask = setting(align, multi)
    torch.manual_seed(0)
    with rg.record(attend) as trace:
        context = attend(query, key, mask=mask)
    return attend, query, key, mask, trace, context


def log_policy(attend, query, key, mask):
    """Log-probabilities of the keys from the equation, (B, Nq, N)."""
    scores = torch.einsum("bjk,kq,biq->bij", key, attend.score.W, query)
    scores = scores.masked_fill(~mask, -math.inf)
    return torch.where(mask.any(-1, keepdim=True), scores, 0.0).log_softmax(-1)


def test_the_gradient_is_that_of_the_formula():
    attend, query, key, mask, trace, _ = recorded(rg.Hard("reinforce"))
    reward = torch.tensor([1.5, -0.5], dtype=torch.float64)
    rg.reinforce(trace, reward, baseline=0.25, entropy=0.1).backward()
    found = attend.score.W.grad
    chosen = trace.weights.argmax(-1)
    log_p = log_policy(attend, query, key, mask)
    alive = mask.any(-1)
    each = torch.where(alive, log_p.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), 0.0)
    spread = torch.where(alive, -(log_p.exp() * log_p.nan_to_num(neginf=0.0)).sum(-1), 0.0)
    loss = -((reward - 0.25)[:, None] * each).sum(1).mean() - 0.1 * spread.sum(1).mean()
    (expected,) = torch.autograd.grad(loss, attend.score.W)
    assert_same(found, expected)


def test_the_estimate_is_right_on_average():
    """The mean over all choices, each with its probability, is the gradient of the expected reward."""
    attend, query, key, mask = setting(rg.Hard("reinforce"))
    # Scores near zero, so that every choice is soon made.
    query, key, mask = 0.2 * query[:1, :2], key[:1], mask[:1, :2]
    log_p = log_policy(attend, query, key, mask)
    rewards = torch.randn(N, N, dtype=torch.float64)
    expected_reward = sum(
        log_p[0, 0, i].exp() * log_p[0, 1, j].exp() * rewards[i, j] for i, j in itertools.product(range(N), repeat=2)
    )
    (expected,) = torch.autograd.grad(-expected_reward, attend.score.W)
    total, seen = torch.zeros_like(expected), set()
    for seed in range(2000):
        torch.manual_seed(seed)
        with rg.record(attend) as trace:
            attend(query, key, mask=mask)
        i, j = trace.weights.argmax(-1)[0].tolist()
        if (i, j) in seen:
            continue
        seen.add((i, j))
        (grad,) = torch.autograd.grad(rg.reinforce(trace, rewards[i, j].reshape(1)), attend.score.W)
        total += (log_p[0, 0, i] + log_p[0, 1, j]).exp().detach() * grad
        if len(seen) == N * N:
            break
    assert len(seen) == N * N
    assert_same(total, expected)


def test_the_selection_of_a_reinforced_alignment():
    attend, query, key, mask, trace, _ = recorded(rg.Reinforced(D))
    reward = torch.tensor([1.5, -0.5], dtype=torch.float64)
    rg.reinforce(trace, reward).backward()
    policy = attend.align.policy
    logits = torch.nn.functional.elu(key @ policy.W.mT + policy.b) @ policy.w + policy.c
    logits = logits.detach().requires_grad_()
    selected = trace.call.prepared["selected"]
    each = torch.where(selected, logits.sigmoid().log(), (1 - logits.sigmoid()).log())
    each = torch.where(mask.any(1), each, 0.0)
    assert_same(trace.log_prob(), each.sum(-1))
    loss = -(reward * each.sum(-1)).mean()
    (expected,) = torch.autograd.grad(loss, logits)
    assert_same(policy.c.grad, expected.sum().reshape(1))


def test_no_gradient_flows_into_the_reward_or_the_baseline():
    *_, trace, _ = recorded(rg.Hard("reinforce"))
    reward = torch.randn(B, requires_grad=True)
    baseline = torch.randn(B, requires_grad=True)
    rg.reinforce(trace, reward, baseline).backward()
    assert reward.grad is None
    assert baseline.grad is None


def test_baselines_are_subtracted():
    attend, *_, trace, _ = recorded(rg.Hard("reinforce"))
    reward = torch.tensor([2.0, 5.0], dtype=torch.float64)

    def gradient(reward, baseline=0.0):
        return torch.autograd.grad(rg.reinforce(trace, reward, baseline), attend.score.W, retain_graph=True)[0]

    assert_same(gradient(reward, 3.0), gradient(reward - 3.0))
    assert_same(gradient(reward, torch.tensor([1.0, 4.0])), gradient(reward - torch.tensor([1.0, 4.0])))
    assert not gradient(reward, reward).any()


def test_a_moving_baseline_is_used_and_then_updated():
    attend, *_, trace, _ = recorded(rg.Hard("reinforce"))
    baseline = rg.MovingBaseline(decay=0.5)
    reward = torch.tensor([2.0, 4.0], dtype=torch.float64)
    first = rg.reinforce(trace, reward, baseline)
    assert baseline.value == 3.0
    assert_same(first, rg.reinforce(trace, reward))
    second = rg.reinforce(trace, 2 * reward, baseline)
    assert baseline.value == 0.5 * 3.0 + 0.5 * 6.0
    assert_same(second, rg.reinforce(trace, 2 * reward, 3.0))
    with pytest.raises(ValueError, match="decay: got 1.0, expected a number from 0"):
        rg.MovingBaseline(1.0)


def test_a_reward_for_each_query():
    attend, *_, trace, _ = recorded(rg.Hard("reinforce"))
    reward = torch.rand(B, NQ, dtype=torch.float64)
    (found,) = torch.autograd.grad(rg.reinforce(trace, reward), attend.score.W, retain_graph=True)
    (expected,) = torch.autograd.grad(-(reward * trace.log_prob()).sum() / (B * NQ), attend.score.W)
    assert_same(found, expected)


def test_samples_of_every_call_count():
    attend, query, key, mask = setting(rg.Hard("reinforce"))
    soft = rg.Attention("dot")
    both = torch.nn.ModuleDict({"hard": attend, "soft": soft})
    with rg.record(both) as trace:
        attend(query, key, mask=mask)
        attend(2 * query, key, mask=mask)
        soft(query, key)
    reward = torch.tensor([1.0, 2.0], dtype=torch.float64)
    expected = -sum((reward * call.log_prob().sum(-1)).mean() for call in trace["hard"])
    assert_same(rg.reinforce(trace, reward), expected)


def test_log_probabilities_are_laid_out_like_the_weights():
    *_, trace, _ = recorded(rg.Hard("reinforce"), multi=True)
    assert trace.log_prob().shape == (B, NQ, D)
    attend, query, key, _ = setting(rg.Hard("reinforce"))
    with rg.record(attend) as trace:
        attend(query[:, 0], key)
    assert trace.log_prob().shape == (B,)
    chosen = trace.weights.argmax(-1, keepdim=True)
    expected = trace.scores.log_softmax(-1).gather(-1, chosen).squeeze(-1)
    assert_same(trace.log_prob(), expected)


def test_refusals():
    *_, trace, _ = recorded("soft")
    with pytest.raises(
        ValueError, match=r"nothing in it was sampled; expected Hard\(gradient='reinforce'\) or Reinforced"
    ):
        rg.reinforce(trace, torch.zeros(B))
    with pytest.raises(ValueError, match="Soft samples nothing: it has no log-probability"):
        trace.log_prob()
    *_, trace, _ = recorded(rg.Hard("reinforce"))
    with pytest.raises(
        ValueError, match=r"reward: got shape \(3,\), expected axes that are the first ones of the calls"
    ):
        rg.reinforce(trace, torch.zeros(3))
    with pytest.raises(TypeError, match="reward: got None, expected numbers, one for each sequence"):
        rg.reinforce(trace, None)
    with pytest.raises(TypeError, match="baseline: got type, expected a tensor, a number or a MovingBaseline"):
        rg.reinforce(trace, torch.zeros(B), rg.MovingBaseline)
    with pytest.raises(TypeError, match="entropy: got 'a', expected a number"):
        rg.reinforce(trace, torch.zeros(B), entropy="a")
    with pytest.raises(TypeError, match="trace: got Attention, expected what was recorded"):
        rg.reinforce(rg.Attention("dot"), torch.zeros(B))
    with pytest.raises(ValueError, match="decay: got 'a', expected a number from 0"):
        rg.MovingBaseline("a")


def test_a_hit_counts_one():
    *_, trace, _ = recorded(rg.Hard("reinforce"))
    hits = torch.arange(B) % 2 == 0
    assert_same(rg.reinforce(trace, hits), rg.reinforce(trace, hits.double()))


def test_the_expected_loss_is_the_sum_over_all_choices():
    attend, query, key, mask, trace, _ = recorded(rg.Hard("reinforce"))
    target = torch.randn(D, dtype=torch.float64)

    def loss(context):
        return (context - target).square().sum(-1)

    p = log_policy(attend, query, key, mask).exp()
    p = torch.where(mask, p, 0.0)
    expected = torch.zeros(B, NQ, dtype=torch.float64)
    for b, i, j in itertools.product(range(B), range(NQ), range(N)):
        expected[b, i] = expected[b, i] + p[b, i, j] * (key[b, j] - target).square().sum()
    found = trace.expected_loss(loss)
    assert_same(found, expected)
    first, second = (torch.autograd.grad(x.sum(), attend.score.W)[0] for x in (found, expected))
    assert_same(first, second)


def test_the_expected_loss_of_one_query_has_no_query_axis():
    attend, query, key, _ = setting(rg.Hard())
    with rg.record(attend) as trace:
        attend(query[:, 0], key)
    found = trace.expected_loss(lambda context: context.sum(-1))
    assert_same(found, (trace.scores.softmax(-1).unsqueeze(-2) @ key).squeeze(-2).sum(-1))


def test_the_expected_loss_refuses_a_choice_for_each_feature():
    *_, trace, _ = recorded(rg.Hard(), multi=True)
    with pytest.raises(ValueError, match="expected_loss: a multi-dimensional alignment chooses a key for each feature"):
        trace.expected_loss(lambda context: context.sum(-1))


@pytest.mark.parametrize("loss", [lambda c: c, lambda c: c.sum(), lambda c: 1.0, lambda c: c.sum(-1, keepdim=True)])
def test_the_expected_loss_is_one_number_for_each_context(loss):
    *_, trace, _ = recorded(rg.Hard("reinforce"))
    with pytest.raises(
        ValueError, match=r"loss: got a function that gives .*, expected .*, one number for each context"
    ):
        trace.expected_loss(loss)
