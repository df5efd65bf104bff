"""The operator for additive soft attention along edges, beside loops over queries and their edges."""

from __future__ import annotations

import pytest
import torch

from regard.ops import segment
from regard.ops.segment import edge_attention
from tests.cases import assert_same

NQ, M, H, D, DV = 5, 7, 2, 3, 11
# Two queries of one degree, one without edges, one that reads a key twice.
KEYS = torch.tensor([0, 3, 6, 6, 1, 2, 2, 5, 4])
VALUES = torch.tensor([1, 3, 0, 6, 1, 2, 5, 5, 4])
BOUNDS = torch.tensor([0, 2, 2, 4, 8, 9])
ACT = "leaky_relu:0.2"


def operands(shared: bool = False, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (NQ, H, D), "u": (M, H, D), "value": (M, H, DV), "weight": (H, D)}
    made = {name: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for name, s in shapes.items()}
    made["value"] = None if shared else made["value"]
    return [None if x is None else x.requires_grad_() for x in made.values()]


def oracle(a, u, value, weight):
    """One query, head and edge at a time."""
    value, rows = u if value is None else value, []
    for i in range(NQ):
        edges = range(int(BOUNDS[i]), int(BOUNDS[i + 1]))
        for h in range(H):
            z = [a[i, h] + u[KEYS[e], h] for e in edges]
            score = [(weight[h] * torch.where(x > 0, x, 0.2 * x)).sum() for x in z]
            total = sum(torch.exp(e) for e in score)
            read = [torch.exp(s) / total * value[VALUES[e], h] for s, e in zip(score, edges, strict=True)]
            rows.append(sum(read) if read else torch.zeros(value.shape[-1], dtype=a.dtype))
    return torch.stack(rows).view(NQ, H, -1)


def run(x, panel=0, shared=False):
    return edge_attention(*x, ACT, KEYS, KEYS if shared else VALUES, BOUNDS, panel)


@pytest.mark.parametrize("panel", [0, 1, 2])
def test_oracle(panel):
    x = operands()
    found, expected = run(x, panel), oracle(*x)
    assert found.shape == (NQ, H, DV)
    assert_same(found, expected)
    cotangent = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine, theirs = (torch.autograd.grad(y, x, cotangent) for y in (found, expected))
    for one, other in zip(mine, theirs, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("panel", [0, 1])
def test_keys_that_are_values_are_gathered_once(panel):
    a, u, _, weight = operands(shared=True)
    found = run((a, u, None, weight), panel, shared=True)
    expected = edge_attention(a, u, u, weight, ACT, KEYS, KEYS, BOUNDS, panel)
    assert_same(found, expected)
    for one, other in zip(
        *(torch.autograd.grad(y.square().sum(), [a, u, weight]) for y in (found, expected)), strict=True
    ):
        assert_same(one, other)


@pytest.mark.parametrize("act", ["leaky_relu:0.2", "tanh", "sigmoid", "gelu", "elu"])
@pytest.mark.parametrize("shared", [False, True])
def test_gradients(act, shared):
    a, u, value, weight = operands(shared)
    index = KEYS if shared else VALUES
    if shared:
        assert torch.autograd.gradcheck(
            lambda a, u, w: edge_attention(a, u, None, w, act, KEYS, index, BOUNDS, 0), (a, u, weight), fast_mode=True
        )
    else:
        assert torch.autograd.gradcheck(
            lambda *x: edge_attention(*x, act, KEYS, index, BOUNDS, 0), (a, u, value, weight), fast_mode=True
        )


@pytest.mark.parametrize("shared", [False, True])
def test_torchs_own_checks(shared):
    torch.library.opcheck(edge_attention, (*operands(shared), ACT, KEYS, KEYS if shared else VALUES, BOUNDS, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype):
    x = operands(dtype=dtype)
    found = run(x)
    assert found.dtype == torch.float32
    exact = oracle(*(y.double() for y in x))
    assert ((found.double() - exact).abs() <= 1e-5 * exact.abs().max()).all()
    assert all(g.dtype == dtype for g in torch.autograd.grad(found.sum(), x))


def test_panels_hold_queries_of_one_degree_and_all_of_them_once():
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), torch.tensor([3, 0, 3, 1, 3, 3, 2, 1]).cumsum(0)])
    for most in (0, 1, 2):
        rows, edges = [], []
        for panel in segment._panels(bounds, row_bytes=8, most=most):
            assert (bounds.diff()[panel.rows] == panel.degree).all()
            assert most == 0 or len(panel.rows) <= most
            rows += panel.rows.tolist()
            edges += panel.edges.tolist()
        assert sorted(rows) == [0, 2, 3, 4, 5, 6, 7]
        assert sorted(edges) == list(range(16))


def test_a_hub_goes_alone():
    """A query with more edges than a panel should hold is a panel by itself, whole: its softmax needs all of them."""
    n = segment.CPU_PANEL_BYTES // 8 + 5
    panels = list(segment._panels(torch.tensor([0, n, n + 1]), row_bytes=8, most=0))
    assert [(panel.degree, len(panel.rows)) for panel in panels] == [(1, 1), (n, 1)]


def test_no_edges_and_no_queries():
    a, u, value, weight = operands()
    none = torch.zeros(0, dtype=torch.long)
    found = edge_attention(a, u, value, weight, ACT, none, none, torch.zeros(NQ + 1, dtype=torch.long), 0)
    assert not found.any()
    assert not any(g.any() for g in torch.autograd.grad(found.sum(), [a, u, value, weight]))
    assert edge_attention(a[:0], u, value, weight, ACT, none, none, none.new_zeros(1), 0).shape == (0, H, DV)
