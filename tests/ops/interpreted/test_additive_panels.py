"""Additive scores written out by the kernels, and attention by panels of them, run by Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import regard as rg
from regard.ops import additive, axes, fused, sparse
from regard.ops.additive import additive_scores, additive_scores_backward
from regard.ops.triton import additive_panel
from tests.ops.additive_cases import PANELS, WIDTH, Case
from tests.ops.additive_cases import check as check_attention
from tests.ops.panel_cases import Panel, check, equation, watched
from tests.ops.sparse_cases import watched as watched_rows

F16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def _kernels_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA; what is not written is seen."""
    real, empty = additive.why_not_by_kernel, torch.empty
    monkeypatch.setattr(additive, "why_not_by_kernel", lambda device, *rest: real("cuda", *rest))
    monkeypatch.setattr(fused, "why_not_kernel", lambda call: None)
    monkeypatch.setattr(sparse, "on_device", lambda x: True)

    def poisoned(*args, **kwargs) -> Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


CASES = (
    Panel(width=7, leads=((2,), (2,), ())),
    Panel(reach="both"),
    Panel("sigmoid", reach="both", width=4),
    Panel("relu"),
    Panel("leaky_relu:0.1"),
    Panel("gelu"),
    Panel("identity"),
    *(Panel(act, reach="wide", nq=33, n=70) for act in ("tanh", "sigmoid", "relu", "leaky_relu", "gelu", "identity")),
    Panel(dtype=F16, reach="wide", nq=33, n=70),
    Panel(dtype=BF16, width=5, nq=65, n=67),
    Panel("gelu", dtype=F16, nq=65, n=67),
    Panel(nq=1, n=1, width=1),
    Panel(nq=1, n=130),
    Panel(nq=130, n=1),
    Panel(width=300, nq=3, n=5),
    Panel(leads=((3, 1), (2,), (3, 1)), nq=5, n=7),
    Panel(leads=((2,), (), (2,)), nq=5, n=7),
)


@pytest.mark.parametrize("panel", CASES, ids=str)
def test_as_exact_as_the_equation_in_the_same_dtype(panel: Panel, monkeypatch: pytest.MonkeyPatch) -> None:
    check(panel, "cpu", monkeypatch)


@pytest.mark.parametrize("act", ["tanh", "relu"])
def test_a_program_that_reads_all_of_the_other_side_is_as_exact(act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(additive_panel, "PROGRAMS", 1)
    check(Panel(act, reach="both"), "cpu", monkeypatch)


@pytest.mark.parametrize("programs", [1, 5, 512])
def test_every_program_has_a_place_of_its_own(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that wrote to one place would race on a device, where the interpreter runs one after the other."""
    monkeypatch.setattr(additive_panel, "PROGRAMS", programs)
    grids: list[tuple[int, ...]] = []
    real = additive_panel.side_kernel

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def launch(*args: Tensor, **kwargs: object) -> None:
                grids.append(grid)
                real[grid](*args, **kwargs)
                # Behind two hidden units and the last of 131 keys or 70 queries there is room, which nobody reads.
                dx, dw = (args[at][..., :2, : 131 if kwargs["KEYS"] else 70] for at in (8, 9))
                assert (dx != 0).all()
                assert kwargs["KEYS"] or (dw != 0).all()

            return launch

    monkeypatch.setattr(additive_panel, "side_kernel", Noted())
    check(Panel(width=2), "cpu", monkeypatch)
    # Blocks of the side that is owned, parts of the other, leading entries: 70 queries, 131 keys.
    assert grids[:2] == {1: [(2, 1, 1), (3, 1, 1)], 5: [(2, 2, 1), (3, 1, 1)], 512: [(2, 3, 1), (3, 2, 1)]}[programs]


def test_gradients_may_have_any_strides() -> None:
    a, u, w = Panel(nq=5, n=7).operands("cpu")
    grad = torch.randn(1, 5, 1).expand(1, 5, 7)
    expected = additive_scores_backward(grad.contiguous(), a, u, w, "tanh")
    for given in (grad, grad.contiguous().mT.contiguous().mT):
        assert not given.is_contiguous()
        for x, y in zip(additive_scores_backward(given, a, u, w, "tanh"), expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided"])
def test_operands_may_have_any_strides(layout: str) -> None:
    torch.manual_seed(0)
    if layout == "transposed":
        given = torch.randn(3, 5).T, torch.randn(3, 7).T, torch.randn(1, 3).T
    elif layout == "expanded":
        given = torch.randn(1, 3).expand(2, 5, 3), torch.randn(7, 1).expand(2, 7, 3), torch.randn(1, 1).expand(3, 1)
    else:
        given = torch.randn(10, 6)[::2, ::2], torch.randn(7, 9)[:, ::3], torch.randn(3, 4)[:, 1:2]
    found, expected = (additive_scores(*x, "tanh") for x in (given, [t.contiguous() for t in given]))
    assert torch.equal(found, expected)
    grad = torch.randn_like(found)
    for x, y in zip(
        additive_scores_backward(grad, *given, "tanh"),
        additive_scores_backward(grad, *(t.contiguous() for t in given), "tanh"),
        strict=True,
    ):
        assert torch.equal(x, y)
        assert x.is_contiguous()


def test_nan_is_seen_where_it_is_read_and_nowhere_else() -> None:
    a, u, w = Panel(nq=5, n=70).operands("cpu")
    a[2, 1] = math.nan
    found = additive_scores(a, u, w, "tanh")
    assert found[0, 2].isnan().all()
    assert found[0, [0, 1, 3, 4]].isfinite().all()


def test_empty_panels_need_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = watched(monkeypatch)
    for nq, n in ((0, 3), (3, 0)):
        a, u, w = (x.requires_grad_() for x in Panel(nq=nq, n=n).operands("cpu"))
        scores = additive_scores(a, u, w, "tanh")
        assert scores.shape == (1, nq, n)
        assert all((g == 0).all() for g in torch.autograd.grad(scores.sum(), (a, u, w)))
    assert taken == []


@pytest.mark.parametrize(
    ("panel", "features"),
    [(Panel(nq=3, n=5), 2), (Panel("tanh:5.0", nq=3, n=5), 1), (Panel("elu:1.0", nq=3, n=5), 1),
     (Panel(dtype=torch.float64, nq=3, n=5), 1)],
    ids=["features", "bounded tanh", "activation", "double"],
)  # fmt: skip
def test_what_the_kernels_do_not_know_takes_tiles(panel: Panel, features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = watched(monkeypatch)
    a, u, w = panel.operands("cpu")
    w = w.expand(-1, features)
    torch.testing.assert_close(additive_scores(a, u, w, panel.act), equation(a, u, w, panel.act))
    assert taken == []


def test_more_leading_entries_than_a_launch_has_take_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axes, "MOST_LEADS", 2)
    taken = watched(monkeypatch)
    for leads in (2, 3):
        additive_scores(*Panel(nq=2, n=3, leads=((leads,), (), ())).operands("cpu"), "tanh")
    assert taken == ["panel"]


@pytest.mark.parametrize("act", ["tanh", "relu"])
def test_the_operators_are_well_behaved(act: str) -> None:
    a, u, w = (x.requires_grad_() for x in Panel(nq=3, n=5, leads=((2,), (2,), ())).operands("cpu"))
    opcheck(additive_scores, (a, u, w, act))
    opcheck(additive_scores_backward, (torch.randn(2, 1, 3, 5), a.detach(), u.detach(), w.detach(), act))


def test_vmap_is_a_loop() -> None:
    torch.manual_seed(0)
    a, u, w = torch.randn(3, 5, 2), torch.randn(7, 2), torch.randn(2, 1)
    found = torch.func.vmap(lambda a: additive_scores(a, u, w, "tanh"))(a)
    for k in range(3):
        assert torch.equal(found[k], additive_scores(a[k], u, w, "tanh"))


ATTENTIONS = (
    Case("sparsemax", mask="pairs", panel=8),
    Case("sparsemax", "sigmoid", F16, "padding", bias=True),
    Case("entmax", mask="causal", dropout=0.3, panel=8),
    Case("entmax", "relu", BF16, "pairs"),
    Case("entmax, learned", "gelu", mask="window", panel=11),
    Case("entmax, bisected", bias=True, mask="padding"),
)


@pytest.mark.parametrize("case", ATTENTIONS, ids=str)
def test_attention_by_panels_is_as_exact_as_the_dense_execution(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, rows = watched(monkeypatch), watched_rows(monkeypatch)
    check_attention(case, "cpu")
    panels = math.ceil(case.nq / (case.panel or case.nq))
    # Several panels are computed again in the backward.
    assert taken.count("panel") == 2 * panels * (2 if panels > 1 else 1)
    assert taken.count("gradients") == rows.count("gradients") == 2 * panels
    assert taken.count("panel") == rows.count("aligned")


@pytest.mark.parametrize("name", ["sparsemax", "entmax, learned"])
def test_compiles_as_one_graph(name: str) -> None:
    assert name in PANELS
    attend, x = Case(name).attention(), torch.randn(2, 5, WIDTH)
    with rg.execution("fused", panel=3):
        expected = attend(x, x)
        found = torch.compile(attend, fullgraph=True, backend="aot_eager")(x, x)
    torch.testing.assert_close(found, expected)
