"""Directional and reinforced self-attention against their equations, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from tests import cases, oracles
from tests.cases import assert_same, scrambled
from tests.oracles import ACTIVATIONS, each, times, zero

B, N, D, F = 2, 5, 3, 7
DIRECTIONS = pytest.mark.parametrize("direction", ["forward", "backward", "both"])
LENGTHS = [3, N]


def reads(i: int, j: int, direction: str) -> bool:
    return {"forward": j < i, "backward": j > i, "both": j != i}[direction]


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    y = times(layer.weight, x)
    return y if layer.bias is None else y + layer.bias


def looped(
    block: rg.DirectionalSelfAttention,
    tokens: Tensor,
    attends: list[bool] | None = None,
    attended: list[bool] | None = None,
) -> Tensor:
    """One sequence without padding."""
    n = len(tokens)
    h = [each(ACTIVATIONS["elu"], linear(block.input, x)) for x in tokens]
    score = block.attention.score
    somebody = [any(reads(i, j, block.direction) for i in range(n)) for j in range(n)]
    out = []
    for i in range(n):
        allowed = [reads(i, j, block.direction) for j in range(n)]
        context = []
        scores = [oracles.token_to_token(score, h[i], h[j]) for j in range(n)]
        for f in range(F):
            e = [score_of_j[f] for score_of_j in scores]
            if not any(allowed):
                a = [zero()] * n
            elif attends is not None and not attends[i]:
                a = [zero() + ok / sum(somebody) for ok in somebody]
            else:
                a = oracles.reinforced(e, allowed, attended or [True] * n)
            context.append(sum((a[j] * h[j][f] for j in range(n)), zero()))
        c = torch.stack(context)
        gate = each(ACTIVATIONS["sigmoid"], linear(block.gate.of_input, h[i]) + linear(block.gate.of_context, c))
        out.append(gate * h[i] + (1 - gate) * c)
    return torch.stack(out)


def tokens_and_mask() -> tuple[Tensor, Tensor]:
    tokens = torch.randn(B, N, D, dtype=torch.float64)
    return tokens, torch.arange(N) < torch.tensor(LENGTHS)[:, None]


@DIRECTIONS
def test_directional_self_attention_is_its_equation(direction: str) -> None:
    block = scrambled(rg.DirectionalSelfAttention(D, F, direction))
    tokens, mask = tokens_and_mask()
    tokens.requires_grad_()
    encoded = block(tokens, mask)
    assert encoded.shape == (B, N, F)
    assert bool((encoded[~mask] == 0).all())
    expected = torch.zeros(B, N, F, dtype=torch.float64)
    for b, length in enumerate(LENGTHS):
        expected[b, :length] = looped(block, tokens[b, :length])
    assert_same(encoded, expected)
    wanted = [tokens, *block.parameters()]
    cotangent = torch.randn_like(expected)
    for x, y in zip(*(torch.autograd.grad(o, wanted, cotangent) for o in (encoded, expected)), strict=True):
        assert_same(x, y, "gradient")


@pytest.mark.parametrize("cls", [rg.DirectionalSelfAttention, rg.ReinforcedSelfAttention])
@DIRECTIONS
def test_padding_never_matters(cls: type[rg.DirectionalSelfAttention], direction: str) -> None:
    block = scrambled(cls(D, F, direction))
    tokens, mask = tokens_and_mask()
    other = tokens.clone()
    other[~mask] = math.nan
    results = []
    for x in (tokens, other):
        torch.manual_seed(1)
        out = block(x, mask)
        results.append((out, *torch.autograd.grad(out.sum(), list(block.parameters()), allow_unused=True)))
    for x, y in zip(*results, strict=True):
        if x is not None:
            assert_same(x, y)


@DIRECTIONS
def test_with_everything_selected_reinforced_is_directional(direction: str) -> None:
    reinforced = scrambled(rg.ReinforcedSelfAttention(D, F, direction))
    directional = rg.DirectionalSelfAttention(D, F, direction).double()
    missing, unexpected = directional.load_state_dict(reinforced.state_dict(), strict=False)
    assert not missing
    assert all("policy" in name for name in unexpected)
    reinforced.selecting = False
    tokens, mask = tokens_and_mask()
    assert_same(reinforced(tokens, mask), directional(tokens, mask))


@DIRECTIONS
@pytest.mark.parametrize("context", [False, True])
def test_reinforced_self_attention_is_its_equation(direction: str, context: bool) -> None:
    block = scrambled(rg.ReinforcedSelfAttention(D, F, direction, context=context))
    tokens = torch.randn(N, D, dtype=torch.float64)
    for seed in range(4):
        torch.manual_seed(seed)
        with rg.record(block) as trace:
            encoded = block(tokens)
        prepared = trace["attention"].call.prepared
        attends, attended = prepared["attends"].tolist(), prepared["selected"].tolist()
        assert_same(encoded, looped(block, tokens, attends, attended), f"seed {seed}")


@DIRECTIONS
@pytest.mark.parametrize("context", [False, True])
def test_its_log_probability_is_that_of_every_choice_that_matters(direction: str, context: bool) -> None:
    """Tokens that may attend nothing, or that nobody may attend, change nothing whatever is chosen for them."""
    block = scrambled(rg.ReinforcedSelfAttention(D, F, direction, context=context))
    tokens = torch.randn(N, D, dtype=torch.float64)
    with rg.record(block) as trace:
        block(tokens)
    call, align = trace["attention"].call, block.attention.align
    asks = [any(reads(i, j, direction) for j in range(N)) for i in range(N)]
    asked = [any(reads(i, j, direction) for i in range(N)) for j in range(N)]
    expected = zero()
    for policy, valid, chosen in ((align.policy, asked, "selected"), (align.head_policy, asks, "attends")):
        for j in range(N):
            if valid[j]:
                odds = (
                    oracles.log_odds(policy, call.key, j, valid)
                    if chosen == "selected"
                    else oracles.log_odds(policy, call.query, j, valid)
                )
                expected = expected + oracles.log_bernoulli(odds, bool(call.prepared[chosen][j]))
    assert_same(trace.log_prob(), expected)


def test_reinforced_pairs_obey_a_row_without_keys() -> None:
    attend = scrambled(rg.Attention(rg.Dot(), rg.ReinforcedPairs(D)))
    x = torch.randn(B, N, D, dtype=torch.float64)
    mask = torch.ones(B, N, N, dtype=torch.bool)
    mask[0, 2], mask[1] = False, False
    for seed in range(8):
        torch.manual_seed(seed)
        context = attend(x, x, mask=mask)
        assert bool((context[~mask.any(-1)] == 0).all())


@DIRECTIONS
def test_blockwise_is_dense(direction: str) -> None:
    block = scrambled(rg.ReinforcedSelfAttention(D, F, direction))
    tokens, mask = tokens_and_mask()
    x = {"tokens": tokens.requires_grad_()}
    with rg.execution("dense"):
        expected = cases.run(block, x, mask=mask)
    with rg.execution("blockwise", panel=2):
        cases.compare(cases.run(block, x, mask=mask), expected)


def test_an_unknown_direction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^direction: got 'left', expected one of forward, backward, both\.$"):
        rg.DirectionalSelfAttention(D, direction="left")


@pytest.mark.parametrize("block", [rg.DirectionalSelfAttention, rg.ReinforcedSelfAttention])
def test_refusals(block: type) -> None:
    encode, x = block(3), torch.randn(2, 5, 3)
    with pytest.raises(TypeError, match="tokens: got list, expected a floating-point tensor"):
        encode([1.0])
    with pytest.raises(ValueError, match="tokens: got width 4, expected 3"):
        encode(torch.randn(2, 5, 4))
    with pytest.raises(ValueError, match=r"mask of tokens: got shape \(2, 4\), expected .* \(2, 5\)"):
        encode(x, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"mask of tokens: got Padding, expected booleans, .* Fix: what Padding"):
        encode(x, rg.Padding(torch.tensor([3, 4])))
    with pytest.raises(ValueError, match="dim: got 0, expected a whole number >= 1"):
        block(0)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_direction_is_not_given_up_to_an_alignment_that_reads_all_tokens(direction: str) -> None:
    for align in (rg.Sinkhorn(), rg.DependencyTree()):
        with pytest.raises(ValueError, match="align: got .*, expected one that decides each row by itself"):
            rg.DirectionalSelfAttention(D, direction=direction, align=align)
    rg.DirectionalSelfAttention(D, direction=direction, align=rg.Sparsemax())
    rg.DirectionalSelfAttention(D, align=rg.Sinkhorn())
