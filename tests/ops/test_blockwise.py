"""Panels of rows: the same function in linear memory, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import regard as rg
from regard.ops import additive, blockwise
from regard.ops.blockwise import panel_rows
from tests import cases
from tests.cases import compare, run, scrambled

MAKERS: dict[str, Callable[[bool], rg.Attention]] = {
    "general-soft": lambda multi: rg.Attention(rg.General(3, 5, features=11 if multi else None)),
    "activated-hard": lambda multi: rg.Attention(rg.ActivatedGeneral(3, 5, features=11 if multi else None), rg.Hard()),
    "additive-soft": lambda multi: rg.Attention(rg.Additive(3, 5, 2, features=11 if multi else None), dropout=0.3),
    "additive-local": lambda multi: rg.Attention(
        rg.Additive(3, 5, 2, features=11 if multi else None), rg.Local(1.5, "predictive", query_dim=3)
    ),
    "query-free-reinforced": lambda multi: rg.Attention(
        rg.QueryFree(5, 2, activation="elu", features=11 if multi else None), rg.Reinforced(5)
    ),
    "low-rank-entmax": lambda multi: rg.Attention(
        rg.LowRankGeneral(3, 5, 2, features=11 if multi else None), rg.Entmax(1.5)
    ),
    "additive, any callable": lambda multi: rg.Attention(
        rg.Additive(3, 5, 2, activation=torch.sin, features=11 if multi else None), rg.Sparsemax()
    ),
}


@settings(max_examples=80)
@given(data=st.data())
def test_any_shape_mask_and_panel_gives_the_dense_result(data: Any) -> None:
    attend = scrambled(MAKERS[data.draw(st.sampled_from(sorted(MAKERS)))](data.draw(st.booleans())))
    lead = data.draw(st.sampled_from([(), (2,), (2, 3), (0,)]))
    nq, n = (data.draw(st.sampled_from([0, 1, 2, 5, 7, 11])) for _ in range(2))
    x = cases.inputs(lead, nq, n, 3, 5, 11, grad=True)
    density = data.draw(st.sampled_from([0.0, 0.2, 0.7, 1.0]))
    mask = data.draw(
        st.sampled_from([None, rg.Causal(), rg.Window(2), torch.rand(*lead, nq, n) < density, torch.rand(n) < density])
    )
    shape = data.draw(st.sampled_from([None, (nq, n), (1, n), (nq, 1), (*lead, nq, n)]))
    bias = None if shape is None else torch.randn(shape, dtype=torch.float64).requires_grad_()
    with rg.execution("dense"):
        expected = run(attend, x, mask=mask, bias=bias)
    with rg.execution("blockwise", panel=data.draw(st.integers(1, 12))):
        compare(run(attend, x, mask=mask, bias=bias), expected)


class Memory:
    """What a function allocates: the largest block, and the most at any time, in bytes."""

    def __init__(self, function: Callable[[], object]) -> None:
        with torch.profiler.profile(profile_memory=True) as profile:
            function()
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        held = 0
        self.largest = self.peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            held += event.nbytes()
            self.largest, self.peak = max(self.largest, event.nbytes()), max(self.peak, held)


NQ, N, D_W, D_V = 307, 311, 17, 3


def train(attend: rg.Attention, x: dict[str, Tensor], impl: str) -> Callable[[], object]:
    def step() -> None:
        with rg.execution(impl):
            attend(**x).sum().backward()

    return step


@pytest.fixture
def small_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "CPU_PANEL_ELEMENTS", 16 * N)
    monkeypatch.setattr(additive, "CPU_TILE_BYTES", 4 * 8 * N * D_W)


# A panel of weights, or what is larger: queries, keys or values, whole.
PANEL = 4 * 16 * N
LINEAR = 4 * max(NQ, N) * 32


MEASURED = [("additive", align.name) for align in cases.alignments()] + [
    ("activated-general", "soft"),
    ("query-free", "hard"),
]


@pytest.mark.parametrize(("score", "align"), MEASURED)
def test_memory_is_linear_forward_and_backward(score: str, align: str, small_budgets: None) -> None:
    options = {"query_dim": 5, "key_dim": 7, "hidden_dim": D_W, "window": 3}
    kept = [*rg.catalog.arguments(rg.catalog.find(score)), *rg.catalog.arguments(rg.catalog.find(align))]
    preset = rg.catalog.find(align).preset
    attend = rg.Attention(
        score, align, dropout=0.1, **{k: v for k, v in options.items() if k in kept and k not in preset}
    )
    used = {}
    for impl in ("blockwise", "dense"):
        for half in (1, 2):
            x = cases.inputs((), NQ // half, N // half, 5, 7, D_V)
            used[impl, half] = Memory(train(attend, {k: t.float().requires_grad_() for k, t in x.items()}, impl))
    # Scores and counters of a panel are twice as wide while they are drawn or sorted.
    assert used["blockwise", 1].largest <= max(4 * PANEL, LINEAR, additive.CPU_TILE_BYTES)
    assert used["blockwise", 1].peak <= 2.2 * used["blockwise", 2].peak
    assert used["dense", 1].largest >= 4 * NQ * N * (D_W if score == "additive" else 1), "the measure sees everything"
    assert used["dense", 1].peak >= 3 * used["dense", 2].peak


def test_multi_dimensional_weights_are_never_written_out(small_budgets: None) -> None:
    attend = rg.Attention(rg.Additive(5, 7, D_W, features=D_V))
    x = {k: t.float().requires_grad_() for k, t in cases.inputs((), NQ, N, 5, 7, D_V).items()}
    memory = Memory(train(attend, x, "blockwise"))
    assert memory.largest <= max(4 * PANEL, LINEAR, additive.CPU_TILE_BYTES)
    assert memory.peak < 4 * NQ * N * D_V


@pytest.mark.parametrize("score", [rg.Additive(5, 7, D_W), rg.General(5, 7)], ids=["additive", "general"])
def test_what_waits_for_the_backward_is_linear(score: rg.Score, small_budgets: None) -> None:
    attend = rg.Attention(score, rg.Sparsemax(), dropout=0.1)
    saved = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    sums = {}
    for impl in ("blockwise", "dense"):
        saved.clear()
        x = {k: t.float().requires_grad_() for k, t in cases.inputs((), NQ, N, 5, 7, D_V).items()}
        with rg.execution(impl), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            attend(**x)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
        sums[impl] = sum(storages.values())
    assert sums["blockwise"] <= 4 * (NQ + N) * (5 + 7 + D_W + D_V)
    assert sums["dense"] >= 4 * NQ * N


@pytest.mark.parametrize("impl", ["auto", "blockwise"])
def test_long_inputs_go_in_panels_and_say_so(impl: str, small_budgets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = rg.Attention(rg.Additive(5, 7, D_W), impl=impl)
    x = {k: t.float() for k, t in cases.inputs((), NQ, N, 5, 7, D_V).items()}
    dispatch = rg.explain_dispatch(attend, *x.values())
    assert dispatch.path == "blockwise"
    if impl == "auto":
        assert dispatch.reason.endswith(f"{math.ceil(NQ / 16)} panel(s) of 16 rows")
    counted = []
    original = blockwise.checkpoint
    monkeypatch.setattr(blockwise, "checkpoint", lambda *a, **k: counted.append(a[1]) or original(*a, **k))
    attend(**x)
    assert [i for panel in counted for i in panel] == list(range(NQ)), "every row once, in order"
    assert max(len(panel) for panel in counted) == 16
    counted.clear()
    with torch.no_grad():
        attend(**x)
    assert not counted, "nothing is recomputed without gradients"


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("features", [None, 3])
def test_panels_fit_their_budget(lead: tuple[int, ...], features: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "CPU_PANEL_ELEMENTS", 1000)
    for score in (rg.General(5, 7, features=features), rg.Additive(5, 7, 13, features=features)):
        attend = rg.Attention(score).double()
        call = attend.call(**cases.inputs(lead, 11, 17, 5, 7, 3))
        rows = panel_rows(call)
        one = math.prod(lead) * 17 * (features or 1)
        assert rows == max(1, 1000 // one)
    # Without an operator of its own an activation leaves its hidden layer in memory.
    attend = rg.Attention(rg.Additive(5, 7, 13, activation=torch.sin, features=features)).double()
    call = attend.call(**cases.inputs(lead, 11, 17, 5, 7, 3))
    assert panel_rows(call) == max(1, 1000 // (math.prod(lead) * 17 * 13))


@pytest.mark.parametrize("panel", [1, 2, 5])
@pytest.mark.parametrize(
    "score", [rg.Dot(), rg.General(3, 3), rg.ActivatedGeneral(3, 3), rg.NegativeL2()], ids=lambda s: type(s).__name__
)
def test_second_derivatives_of_bilinear_scores_are_those_of_the_equation(score: rg.Score, panel: int) -> None:
    attend = rg.Attention(score).double()
    x = [t.requires_grad_() for t in cases.inputs((), 3, 5, 3, 3, 2).values()]
    mask = torch.tensor([[True, False, True, True, True], [False] * 5, [True] * 5])

    def second(impl: str) -> list[Tensor]:
        with rg.execution(impl, panel=panel):
            context = attend(*x, mask=mask)
            first = torch.autograd.grad(context.sin().sum(), x, create_graph=True)
            return list(torch.autograd.grad(sum(g.square().sum() for g in first), x))

    for actual, expected in zip(second("blockwise"), second("dense"), strict=True):
        cases.assert_same(actual, expected)


@pytest.mark.parametrize("panel", [2, 5])
def test_second_derivatives_of_additive_scores_are_refused_by_name(panel: int) -> None:
    attend = rg.Attention(rg.Additive(3, 3, 2)).double()
    x = [t.requires_grad_() for t in cases.inputs((), 3, 5, 3, 3, 2).values()]
    with rg.execution("blockwise", panel=panel):
        first = torch.autograd.grad(attend(*x).sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match=r"not available in the blockwise execution.*impl='dense'"):
            torch.autograd.grad(sum(g.sum() for g in first), x)
    with rg.execution("dense"):
        first = torch.autograd.grad(attend(*x).sum(), x, create_graph=True)
        torch.autograd.grad(sum(g.sum() for g in first), x, allow_unused=True)


@pytest.mark.parametrize("impl", ["dense", "blockwise"])
def test_double_backward_of_dense_is_that_of_finite_differences(impl: str) -> None:
    """Also of the additive form, and of every alignment that is smooth."""
    for align in (rg.Soft(0.7), rg.Local(2.5, "predictive", query_dim=3), rg.Entmax(1.5)):
        score = rg.General(3, 3) if impl == "blockwise" else rg.Additive(3, 3, 2)
        attend = scrambled(rg.Attention(score, align))
        x = [t.requires_grad_() for t in cases.inputs((), 2, 3, 3, 3, 2).values()]

        def function(*x: Tensor, attend: nn.Module = attend) -> Tensor:
            with rg.execution(impl, panel=1):
                return attend(*x)

        assert torch.autograd.gradgradcheck(function, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(set(MAKERS) - {"activated-hard"}))
@pytest.mark.parametrize("multi", [False, True], ids=["single", "multi"])
def test_low_precision_stays_within_the_budget_of_dense(name: str, multi: bool, dtype: torch.dtype) -> None:
    attend = scrambled(MAKERS[name](multi)).to(dtype)
    attend.dropout = 0.0
    attend.eval()
    x = {k: t.to(dtype).requires_grad_() for k, t in cases.inputs((2,), 13, 17, 3, 5, 11).items()}
    results = []
    for impl in ("blockwise", "dense"):
        with rg.execution(impl, panel=5):
            results.append(run(attend, x, mask=rg.Padding(torch.tensor([9, 17]))))
    attend = attend.double()
    with rg.execution("dense"):
        exact = run(
            attend,
            {k: t.detach().double().requires_grad_() for k, t in x.items()},
            mask=rg.Padding(torch.tensor([9, 17])),
        )
    mine, same = results
    cases.assert_within_budget(mine[0], same[0], exact[0], "context")
    for key in exact[1]:
        cases.assert_within_budget(mine[1][key], same[1][key], exact[1][key], f"gradient of {key}")


@pytest.mark.parametrize("what", ["key", "value", "bias", "mask", "w"])
@pytest.mark.parametrize("masked", [False, True])
def test_what_was_changed_since_the_forward_is_never_computed_from_again(what: str, masked: bool) -> None:
    torch.manual_seed(0)
    attend = rg.Attention("additive", "entmax", query_dim=4, key_dim=4, hidden_dim=3)
    query = torch.randn(1, 30, 4, requires_grad=True)
    given = {"key": torch.randn(1, 30, 4), "value": torch.randn(1, 30, 4), "bias": torch.randn(30, 30)}
    given |= {"mask": torch.rand(30, 30) < 0.7} if masked else {}
    if what == "mask" and not masked:
        return

    def loss() -> Tensor:
        with rg.execution("blockwise", panel=7):
            return attend(query, **given).square().sum()

    (expected,) = torch.autograd.grad(loss(), query)
    late = loss()
    with torch.no_grad():
        changed = attend.score.w if what == "w" else given[what]
        changed.copy_(~changed if what == "mask" else changed + 1)
    try:
        (found,) = torch.autograd.grad(late, query)
    except RuntimeError as error:
        assert "in place" in str(error)  # noqa: PT017
    else:
        # Of keys, and of values under a mask, there are copies.
        assert what in ("key", "value")
        assert torch.equal(found, expected)


TABLE = torch.zeros(30, 30)


def _held_by(what: str) -> tuple[rg.Attention, dict[str, Any], Tensor]:
    """An attention, what it is called with, and a tensor that it reads through what is given."""
    attend, table, allowed = rg.Attention("scaled-dot", rg.Sparsemax()), torch.zeros(30, 30), torch.ones(30, 30) > 0
    activation = nn.PReLU()
    relative = rg.TransformerXLPosition(1, 4)

    def of_default(i: Tensor, j: Tensor, table: Tensor = table) -> Tensor:
        return table[i, j]

    def of_keyword(i: Tensor, j: Tensor, *, table: Tensor = table) -> Tensor:
        return table[i, j]

    embedding = nn.Embedding(30, 1)
    given: dict[str, Any] = {
        "closure": {"bias": lambda i, j: table[i, j]},
        "default": {"bias": of_default},
        "keyword": {"bias": of_keyword},
        "global": {"bias": lambda i, j: TABLE[i, j]},
        "partial": {"bias": partial(lambda table, i, j: table[i, j], table)},
        "module of a closure": {"bias": lambda i, j: embedding((i - j).abs()).squeeze(-1)},
        "mask": {"mask": rg.Where(lambda i, j: allowed[i, j]) | rg.Window(1)},
        "position": {"bias": relative.bias(torch.randn(1, 30, 4), torch.randn(1, 30, 4)), "start": 0},
    }.get(what, {})
    if what == "activation":
        attend = rg.Attention(rg.Additive(4, 4, 3, activation=activation), rg.Sparsemax())
    held = {
        "activation": activation.weight,
        "global": TABLE,
        "mask": allowed,
        "module of a closure": embedding.weight,
        "position": relative.W_R,
    }
    return attend, given, held.get(what, table)


@pytest.mark.parametrize(
    "what",
    ["activation", "closure", "default", "keyword", "global", "partial", "module of a closure", "mask", "position"],
)
def test_what_a_function_or_module_reads_and_was_changed_since_is_refused(what: str) -> None:
    torch.manual_seed(0)
    attend, given, held = _held_by(what)
    x = torch.randn(1, 30, 4, requires_grad=True)
    for late in (False, True):
        with rg.execution("blockwise", panel=7):
            loss = attend(x, x, **given).square().sum()
        if not late:
            loss.backward()
            continue
        with torch.no_grad():
            held.copy_(~held if held.dtype == torch.bool else held + 1)
        with pytest.raises(RuntimeError, match="changed in place since the forward"):
            loss.backward()


def test_given_weights_that_were_changed_since_are_refused() -> None:
    attend, x = rg.Attention("scaled-dot"), torch.randn(1, 30, 4, requires_grad=True)
    for around in (None, "frozen"):
        weights = torch.rand(30, 30)
        with rg.execution("blockwise", panel=7), rg.intervene(attend, rg.given(weights)):
            with nullcontext() if around is None else rg.intervene(attend, around):
                loss = attend(x, x).square().sum()
        weights.zero_()
        with pytest.raises(RuntimeError, match="changed in place since the forward"):
            loss.backward()


def test_what_a_module_writes_to_its_own_buffers_is_no_change_from_outside() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, z: Tensor) -> Tensor:
            self.seen += 1
            return z.sin()

    attend = rg.Attention(rg.Additive(4, 4, 3, activation=Counting()))
    x = torch.randn(1, 30, 4, requires_grad=True)
    with rg.execution("blockwise", panel=7):
        attend(x, x).sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("where", ["activation", "bias"])
def test_what_a_user_draws_is_drawn_again_alike(where: str) -> None:
    torch.manual_seed(0)
    act = torch.nn.RReLU() if where == "activation" else "tanh"
    bias = (lambda i, j: torch.nn.functional.dropout(-(i - j).abs().float())) if where == "bias" else None
    attend = rg.Attention(rg.Additive(4, 4, 3, activation=act))
    x, v = torch.randn(1, 30, 4), torch.randn(1, 30, 4, requires_grad=True)
    with rg.execution("blockwise", panel=7):
        out = attend(x, x, v, bias=bias)
    (grad,) = torch.autograd.grad(out.sum(), v)
    # Linear in the values.
    torch.testing.assert_close((grad * v).sum(), out.sum())
