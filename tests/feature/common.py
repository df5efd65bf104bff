"""What the tests of this family share: inputs with holes, one attention as loops, and the comparison with an oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import regard as rg
from regard.recipes.planted import Classifier, MatchingPair, accuracy, fit
from tests import oracles
from tests.cases import assert_same, scrambled

Tokens = list[Tensor]  # the real tokens of one input, one vector each
Oracle = Callable[[Any, list[Tokens]], Tensor]

NAMES = {
    rg.Additive: "additive",
    rg.QueryFree: "query-free",
    rg.Dot: "dot",
    rg.ScaledDot: "scaled-dot",
    rg.General: "general",
    rg.ActivatedGeneral: "activated-general",
}
EXECUTIONS = [("auto", None), ("dense", None), ("blockwise", 2)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def holes(*shape: int, seed: int = 0, empty: Sequence[int] = ()) -> Tensor:
    """A mask with gaps anywhere; every sequence has a token, but for the batch entries named."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[..., seed % shape[-1]] = True
    mask[list(empty)] = False
    return mask


def attend(attention: rg.Attention, query: Tensor | None, tokens: Tokens, values: Tokens | None = None) -> Tensor:
    """Soft attention of one query on a list of tokens."""
    values = tokens if values is None else values
    name = NAMES[type(attention.score)]
    e = [oracles.SCORES[name](attention.score, query, k) for k in tokens]
    return weighted(e, values)


def weighted(e: list[Tensor], values: Tokens) -> Tensor:
    """The sum of values by the softmax of their scores: numbers, or vectors with a score for each feature."""
    if e[0].dim() == 0:
        weights = oracles.soft(e, [True] * len(e))
        return sum((a * v for a, v in zip(weights, values, strict=True)), torch.zeros_like(values[0]))
    columns = []
    for f in range(len(e[0])):
        weights = oracles.soft([x[f] for x in e], [True] * len(e))
        columns.append(sum((a * v[f] for a, v in zip(weights, values, strict=True)), oracles.zero()))
    return torch.stack(columns)


def mean(tokens: Tokens) -> Tensor:
    return sum(tokens[1:], tokens[0]) / len(tokens)


def real(x: Tensor, mask: Tensor) -> Tokens:
    return [token for token, ok in zip(x, mask, strict=True) if ok]


def check(
    module: nn.Module, oracle: Oracle, inputs: list[Tensor], masks: list[Tensor], execution: tuple[str, int | None]
) -> None:
    """Results and all gradients are those of the oracle, which sees one example at a time, without its padding.

    The padding holds NaN.
    """
    scrambled(module)
    leaves = [torch.where(m[..., None], x, math.nan).requires_grad_() for x, m in zip(inputs, masks, strict=True)]
    plain = [x.detach().nan_to_num(0.0).requires_grad_() for x in leaves]
    with rg.execution(execution[0], panel=execution[1]):
        found = module(*leaves, tuple(masks))
    examples = [
        oracle(module, [real(x[b], m[b]) for x, m in zip(plain, masks, strict=True)]) for b in range(len(found))
    ]
    expected = torch.stack(examples)
    assert_same(found, expected, "result")
    cotangent = normal(*found.shape, seed=5)
    parameters = dict(module.named_parameters())
    ours = torch.autograd.grad(found, [*leaves, *parameters.values()], cotangent, allow_unused=True)
    theirs = torch.autograd.grad(expected, [*plain, *parameters.values()], cotangent, allow_unused=True)
    names = [f"input {k}" for k in range(len(leaves))] + list(parameters)
    for name, x, y in zip(names, ours, theirs, strict=True):
        like = plain[0] if x is None and y is None else (x if y is None else y)
        x, y = (torch.zeros_like(like) if g is None else g for g in (x, y))
        # Where all scores of an example are equal its gradient is rounding in one way of summing, zero in another.
        assert_same(x + 1, y + 1, f"gradient of {name}")


def weights_of(module: nn.Module, *inputs: Any, **named: Any) -> rg.Trace:
    with rg.record(module) as trace:
        module(*inputs, **named)
    return trace


def assert_finds_the_pair(make: Callable[[MatchingPair], nn.Module], steps: int = 300, at: str = "attention") -> None:
    """Trained on one matching pair among distractors, it finds the pair and looks at it; its means are at chance."""
    task = MatchingPair()

    def trained(**options: Any) -> Classifier:
        torch.manual_seed(0)
        attention = make(task)
        copies = attention(**task.draw(1, torch.Generator()).inputs).shape[-1] // (2 * task.dim)
        model = Classifier(attention, copies * 2 * task.dim, task.classes, task.readout.repeat(1, copies))
        with rg.intervene(model, **options) if options else nullcontext():
            fit(model, task, lr=0.03, steps=steps)
            scores.append(accuracy(model, task))
        return model

    scores: list[float] = []
    model = trained()
    trained(how="uniform")
    print(f"accuracy {scores[0]:.3f}, without attention {scores[1]:.3f}, chance {1 / task.classes}")
    assert scores[0] >= 0.95
    assert abs(scores[1] - 1 / task.classes) < 0.03
    batch = task.draw(512, torch.Generator().manual_seed(2))
    trace = weights_of(model, **batch.inputs)
    for side in ("first", "second"):
        found = trace[f"{at}.{side}"][-1].weights.argmax(-1)
        assert (found == batch.truth[side]).float().mean() >= 0.95
