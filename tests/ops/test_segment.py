"""The operator for soft attention along edges, beside loops over queries and their edges."""

from __future__ import annotations

import pytest
import torch

from regard.ops import segment, segment_layout
from regard.ops.random import DROPOUT, uniform
from regard.ops.segment import edge_attention
from regard.ops.segment_layout import laid_out, steps
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


def oracle(a, u, value, weight, product=False):
    """One query, head and edge at a time."""
    value, rows = u if value is None else value, []
    for i in range(NQ):
        edges = range(int(BOUNDS[i]), int(BOUNDS[i + 1]))
        for h in range(H):
            if product:
                score = [(weight[h] * a[i, h] * u[KEYS[e], h]).sum() for e in edges]
            else:
                z = [a[i, h] + u[KEYS[e], h] for e in edges]
                score = [(weight[h] * torch.where(x > 0, x, 0.2 * x)).sum() for x in z]
            total = sum(torch.exp(e) for e in score)
            read = [torch.exp(s) / total * value[VALUES[e], h] for s, e in zip(score, edges, strict=True)]
            rows.append(sum(read) if read else torch.zeros(value.shape[-1], dtype=a.dtype))
    return torch.stack(rows).view(NQ, H, -1)


NO_DROPOUT = (None, 0.0)
UNKNOWN = (None,) * 4


def run(x, panel=0, shared=False, act=ACT, layout=UNKNOWN):
    return edge_attention(*x, act, KEYS, KEYS if shared else VALUES, BOUNDS, panel, *NO_DROPOUT, *layout)


# Operators that find the layout themselves merge what is rare; a layout may also be given.
LAYOUTS = {"found": UNKNOWN, "one degree a panel": laid_out(BOUNDS, 0), "two a panel": laid_out(BOUNDS, 2)}


@pytest.mark.parametrize("act", [ACT, segment.PRODUCT])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("panel", [0, 1, 2])
def test_oracle(panel, layout, act):
    x = operands()
    found, expected = run(x, panel, act=act, layout=layout), oracle(*x, product=act == segment.PRODUCT)
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
    expected = edge_attention(a, u, u, weight, ACT, KEYS, KEYS, BOUNDS, panel, *NO_DROPOUT, *UNKNOWN)
    assert_same(found, expected)
    for one, other in zip(
        *(torch.autograd.grad(y.square().sum(), [a, u, weight]) for y in (found, expected)), strict=True
    ):
        assert_same(one, other)


@pytest.mark.parametrize("act", ["leaky_relu:0.2", "tanh", "sigmoid", "gelu", "elu", segment.PRODUCT])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dropout", [NO_DROPOUT, (torch.tensor([3]), 0.4)], ids=["", "dropout"])
def test_gradients(act, shared, dropout):
    a, u, value, weight = operands(shared)
    index = KEYS if shared else VALUES
    rest = (BOUNDS, 0, *dropout, *UNKNOWN)
    if shared:
        assert torch.autograd.gradcheck(
            lambda a, u, w: edge_attention(a, u, None, w, act, KEYS, index, *rest), (a, u, weight), fast_mode=True
        )
    else:
        assert torch.autograd.gradcheck(
            lambda *x: edge_attention(*x, act, KEYS, index, *rest), (a, u, value, weight), fast_mode=True
        )


@pytest.mark.parametrize("shared", [False, True])
def test_torchs_own_checks(shared):
    rest = (BOUNDS, 2, torch.tensor([3]), 0.4, *laid_out(BOUNDS, 1))
    torch.library.opcheck(edge_attention, (*operands(shared), ACT, KEYS, KEYS if shared else VALUES, *rest))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype):
    x = operands(dtype=dtype)
    found = run(x)
    assert found.dtype == torch.float32
    exact = oracle(*(y.double() for y in x))
    assert ((found.double() - exact).abs() <= 1e-5 * exact.abs().max()).all()
    assert all(g.dtype == dtype for g in torch.autograd.grad(found.sum(), x))


DEGREES = [3, 0, 3, 1, 3, 3, 2, 1]


# Some of the edges of most queries; all, and none, of two queries with one.
ALLOWED = torch.tensor([0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0], dtype=torch.bool)


@pytest.mark.parametrize("allowed", [None, ALLOWED], ids=["", "some allowed"])
@pytest.mark.parametrize("spare", [0, 1, 2, 100])
@pytest.mark.parametrize("most", [0, 1, 2])
def test_panels_hold_queries_of_about_one_degree_and_all_their_edges(most, spare, allowed):
    bounds = torch.tensor([0, *torch.tensor(DEGREES).cumsum(0)])
    layout = laid_out(bounds, spare, allowed)
    allowed = torch.ones(16, dtype=torch.bool) if allowed is None else allowed
    seen = []
    for step in steps(layout.panels, row_bytes=8, budget=1 << 20, most=most):
        assert most == 0 or len(step) <= most
        slots = layout.slots[step.slots].view(len(step), step.degree)
        empty = layout.empty[step.slots].view(len(step), step.degree)
        assert step.has_empty or not empty.any()
        for query, row, is_empty in zip(layout.rows[step.queries].tolist(), slots, empty, strict=True):
            seen.append(query)
            own = [edge for edge in range(int(bounds[query]), int(bounds[query + 1])) if allowed[edge]]
            assert row[~is_empty].tolist() == own
            assert set(row.tolist()) == set(own)
            # In its own place, by which dropout is drawn.
            places = torch.arange(step.degree)[~is_empty]
            assert torch.equal(row[~is_empty] - bounds[query], places)
    assert sorted(seen) == [0, 2, 3, 4, 5, 6, 7][: 7 if allowed.all() else 6]
    queries, widths, empty = layout.panels.unbind(1)
    assert (queries * widths).sum() - empty.sum() == allowed.sum()
    assert empty.sum() == layout.empty.sum()
    if allowed.all():
        assert (empty <= spare).all()
        assert len(layout.panels) == {0: 3, 1: 2, 2: 2, 100: 1}[spare]


def test_a_hub_goes_alone():
    """A query with more edges than a panel should hold is a panel by itself, whole: its softmax needs all of them."""
    n = segment.CPU_PANEL_BYTES // 8 + 5
    layout = laid_out(torch.tensor([0, n, n + 1]), segment.spare_slots(2))
    found = steps(layout.panels, row_bytes=8, budget=segment.CPU_PANEL_BYTES, most=0)
    assert [(step.degree, len(step)) for step in found] == [(1, 1), (n, 1)]


@pytest.mark.parametrize("p", [0.0, 0.3, 0.999, 1.0])
def test_dropout_is_what_every_execution_draws(p, monkeypatch):
    bounds = torch.tensor([0, *torch.tensor([9, 0, 4, 5, 1]).cumsum(0)])
    layout, seed = laid_out(bounds, 3), torch.tensor([77])
    parts = steps(layout.panels, row_bytes=8, budget=60, most=0)
    assert len(parts) > 2
    drawn = uniform(seed, (H,), None, range(5), range(9), DROPOUT)
    for most in (1, 1 << 14):
        monkeypatch.setattr(segment_layout, "DRAWN_COUNTERS", most)
        found = list(segment_layout.kept(layout.rows, parts, H, seed, p, torch.float32))
        assert len(found) == len(parts)
        for part, factor in zip(parts, found, strict=True):
            expected = (drawn[:, layout.rows[part.queries], : part.degree] >= p).float()
            assert torch.equal(factor, (expected / (1 - p) if p < 1 else expected).permute(1, 2, 0))


def test_no_edges_and_no_queries():
    a, u, value, weight = operands()
    none, rest = torch.zeros(0, dtype=torch.long), (*NO_DROPOUT, *UNKNOWN)
    found = edge_attention(a, u, value, weight, ACT, none, none, torch.zeros(NQ + 1, dtype=torch.long), 0, *rest)
    assert not found.any()
    assert not any(g.any() for g in torch.autograd.grad(found.sum(), [a, u, value, weight]))
    assert edge_attention(a[:0], u, value, weight, ACT, none, none, none.new_zeros(1), 0, *rest).shape == (0, H, DV)
