"""What the benchmark compares computes the same, and is measured in turns."""

from __future__ import annotations

import pytest
import torch

from regard.bench import QUESTIONS, transformer_gpu
from regard.bench.transformer_gpu import Size, called, in_turns, measure, pair
from tests.cases import assert_same

SMALL = Size(batch=2, n=6, layers=2, dim=8, heads=2)


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_two_are_one_function(norm, masked):
    ours, theirs = pair(SMALL, norm, "cpu", torch.float64)
    mask = torch.arange(6) < torch.tensor([[6], [4]]) if masked else None
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    who = called(ours, theirs, mask)
    found, expected = (who[name][1](x) for name in ("regard", "nn.TransformerEncoder"))
    real = slice(None) if mask is None else mask
    assert_same(found[real], expected[real])
    gradients = []
    for module, y in ((ours, found), (theirs, expected)):
        y[real].square().sum().backward()
        gradients.append(sum(float(p.grad.square().sum()) for p in module.parameters()))
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-9)


@pytest.mark.parametrize("masked", [False, True])
def test_rows(masked):
    rows = list(measure(SMALL, "pre", masked, "cpu", compiled=False, budget=0.02))
    assert [row.what for row in rows] == ["regard", "nn.TransformerEncoder"] * 2
    assert len({row.case for row in rows}) == 2
    for row in rows:
        assert row.seconds > 0
        assert row.question == transformer_gpu.QUESTION
    assert rows[0].error <= 2 * rows[1].error + 1e-3


def test_it_is_known_to_the_command_line():
    assert QUESTIONS["transformer-gpu"] == ("regard.bench.transformer_gpu", "cuda")


def test_turns():
    seen = []
    found = in_turns({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, "cpu", 0.0, rounds=3)
    assert found.keys() == {"a", "b"}
    first = "".join(seen)
    assert first.index("b") < first.rindex("a")
