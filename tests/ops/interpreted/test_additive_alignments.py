"""Every alignment with additive scores by the kernels, with the draws, empty windows and choices of the dense execution."""

from __future__ import annotations

import itertools

import pytest
import torch

import regard as rg
from regard.ops import fused
from regard.ops.triton import additive_sine, align, attend
from tests.ops.additive_cases import ALIGNMENTS, WIDTH, Case, check

F16, F32 = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _kernels_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "why_not_kernel", lambda call: None)


def cases() -> list[Case]:
    """Every alignment in both dtypes, the rest taken in turn."""
    masks, dropouts = (
        itertools.cycle(("pairs", "none", "causal", "padding", "window")),
        itertools.cycle((0.3, 0.0, 0.4)),
    )
    acts, biased = itertools.cycle(("tanh", "relu", "sigmoid", "gelu", "leaky_relu")), itertools.cycle((False, True))
    found = []
    for name, dtype in itertools.product(ALIGNMENTS, (F32, F16)):
        for _ in range(2):
            act, mask, p, bias = next(acts), next(masks), next(dropouts), next(biased)
            found.append(Case(name, act, dtype, mask, dropout=p, bias=bias))
    found += [Case(dtype=F16, mask=mask, dropout=0.3, nq=20, n=40) for mask in ("pairs", "causal")]
    hard = [name for name in ALIGNMENTS if "straight" in name or name in ("reinforce", "gumbel")]
    found += [Case(name, train=False, mask="pairs") for name in hard]
    found += [Case(name, nq=70, n=70, mask="pairs", hidden=3) for name in ("straight-through", "predictive")]
    found += [Case(name, n=1, nq=1, dropout=0.5) for name in ("soft", "gumbel", "predictive")]
    return found


def quicker(found: list[Case]) -> list[object]:
    """Every other one of those that come in pairs is for the slow tier."""
    pairs = 4 * len(ALIGNMENTS)
    return [pytest.param(case, marks=pytest.mark.slow) if k < pairs and k % 2 else case for k, case in enumerate(found)]


@pytest.mark.parametrize("case", quicker(cases()), ids=str)
def test_as_exact_as_the_dense_execution(case: Case) -> None:
    check(case, "cpu")


@pytest.mark.parametrize("case", [Case(dtype=F16, mask=mask, nq=150, n=33) for mask in ("none", "causal")], ids=str)
def test_gradients_of_a_series_by_panels_of_queries(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows of a panel are a multiple of 128.
    monkeypatch.setattr(additive_sine, "PANEL_ELEMENTS", 2 * 33 * 128)
    check(case, "cpu")


def test_the_first_of_equals_is_chosen() -> None:
    attend_, x = rg.Attention("additive", rg.Hard(), query_dim=4, key_dim=4, hidden_dim=3).eval(), torch.randn(1, 3, 4)
    key, value = torch.randn(1, 1, 4).expand(1, 150, 4), torch.randn(1, 150, 5)
    with rg.execution("fused"):
        assert torch.equal(attend_(x, key, value), value[:, :1].expand(1, 3, 5))


@pytest.mark.parametrize("name", ["straight-through", "reinforce", "predictive", "soft"])
def test_nan_is_seen_as_the_dense_execution_sees_it(name: str) -> None:
    torch.manual_seed(0)
    case = Case(name, train=False)
    attend_, q, k = case.attention(), torch.randn(1, 19, WIDTH), torch.randn(1, 150, WIDTH)
    k[0, 5] = k[0, 140] = torch.nan
    mask = torch.rand(1, 19, 150) > 0.3
    mask[0, :4, 5] = mask[0, :4, 140] = mask[0, 4, 5] = False
    value = torch.randn(1, 150, 2)
    with rg.execution("dense"):
        expected = attend_(q, k, value, mask=mask)
    with rg.execution("fused"):
        found = attend_(q, k, value, mask=mask)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found[0, :4].isfinite().all()


def test_an_empty_window_does_not_fall_back_to_what_a_bias_forbids() -> None:
    torch.manual_seed(0)
    attend_ = rg.Attention("additive", rg.Local(1), query_dim=4, key_dim=4, hidden_dim=3)
    x, value = torch.randn(1, 9, 4), torch.randn(1, 9, 2)
    bias, mask = torch.zeros(1, 9, 9), torch.ones(1, 9, 9, dtype=torch.bool)
    mask[0, 4, 3:6], bias[0, 4, 2] = False, -torch.inf
    with rg.execution("dense"):
        expected = attend_(x, x, value, mask=mask, bias=bias)
    with rg.execution("fused"):
        found = attend_(x, x, value, mask=mask, bias=bias)
    torch.testing.assert_close(found[0, 4], value[0, 6] * torch.exp(torch.tensor(-8.0)))
    torch.testing.assert_close(found, expected)


def test_everything_dropped_reads_nothing() -> None:
    attend_ = rg.Attention("additive", query_dim=4, key_dim=4, hidden_dim=3, dropout=1.0).train()
    x = torch.randn(2, 5, 4, requires_grad=True)
    with rg.execution("fused"):
        context = attend_(x, x)
    assert (context == 0).all()
    assert torch.equal(torch.autograd.grad(context.sum(), x)[0], torch.zeros_like(x))


@pytest.mark.parametrize("name", ["soft", "gumbel-straight-through", "predictive"])
def test_the_operator_with_everything_is_registered_as_torch_asks(name: str) -> None:
    torch.manual_seed(0)
    a, u, w, v = (torch.randn(*shape, requires_grad=True) for shape in ((2, 5, 3), (2, 7, 3), (1, 3), (2, 7, 4)))
    bias, seed = torch.randn(1, 5, 7, requires_grad=True), torch.tensor([11])
    known = {
        "soft": align.Align(seed, dropout=0.3),
        "gumbel-straight-through": align.Align(seed, rate=2.0, noise=True, choice=align.SAMPLED),
        "predictive": align.Align(None, torch.rand(2, 5) * 7, window=2.0, gaussian=align.SCALED),
    }
    torch.library.opcheck(
        torch.ops.regard.additive, (a, u, w, v, None, bias, *known[name].flat(), True, "tanh"),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip
    out, _, soft, pick, _ = attend.additive(a, u, w, v, None, bias, *known[name].flat(), False, "tanh")
    assert out.shape == (2, 5, 4)
    assert (soft is not None) == (name == "gumbel-straight-through")
    assert (pick is not None) == (name != "soft")


@pytest.mark.parametrize("name", ["predictive", "straight-through"])
def test_compiles_as_one_graph(name: str) -> None:
    case = Case(name, nq=5, n=7)
    attend_, x = case.attention(), torch.randn(2, 5, WIDTH)
    with rg.execution("fused"):
        torch.manual_seed(3)
        expected = attend_(x, x)
        torch.manual_seed(3)
        found = torch.compile(attend_, fullgraph=True, backend="aot_eager")(x, x)
    torch.testing.assert_close(found, expected)


def test_queries_of_a_later_rank_draw_as_in_the_whole() -> None:
    torch.manual_seed(0)
    a, u, w, v = (torch.randn(*shape) for shape in ((1, 20, 3), (1, 30, 3), (1, 3), (1, 30, 4)))
    for choice, dropout in ((align.ALL, 0.4), (align.SAMPLED, 0.0)):
        whole, part = (align.Align(torch.tensor([5]), first_query=k, choice=choice, dropout=dropout) for k in (0, 7))
        expected = attend.additive(a, u, w, v, None, None, *whole.flat(), False, "tanh")[0]
        found = attend.additive(a[:, 7:], u, w, v, None, None, *part.flat(), False, "tanh")[0]
        torch.testing.assert_close(found, expected[:, 7:])


@pytest.mark.parametrize("masked", [-1e9, -467526975488.0, -1e30])
def test_a_row_that_a_finite_bias_masks_poisons_no_gradient(masked: float) -> None:
    torch.manual_seed(0)
    attention = rg.Attention("additive", query_dim=3, key_dim=3, hidden_dim=4)
    x, bias = torch.randn(1, 7, 3), torch.zeros(7, 7)
    bias[:, 5:] = bias[5:] = masked
    found = []
    for execution in ("dense", "fused"):
        attention.zero_grad()
        with rg.execution(execution):
            context = attention(x, x, bias=bias)
        context[:, :5].square().sum().backward()
        found.append((context, *(parameter.grad for parameter in attention.parameters())))
    for exact, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-4, rtol=1e-4)
