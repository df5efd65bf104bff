"""Multi-dimensional attention by the kernels, run by Triton's interpreter: as exact as the dense execution in the same dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.ops.call import assuming
from regard.ops.dense import dense
from regard.ops.multi import multi_kernel, why_not_multi
from regard.ops.ready import kernel_problem
from regard.ops.triton import multi_product_grads, multi_product_pair
from regard.ops.triton.align import SAMPLED, SCALED, Align
from regard.ops.triton.multi import multi_attend
from regard.ops.triton.multi_parts import Operands
from tests.ops import multi_cases as cases
from tests.ops.autograd_cases import check_gradients
from tests.ops.multi_cases import Case, check

F16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def registered_and_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written is seen."""
    assert kernel_problem("multi", "tanh") == ""

    def poisoned(make):
        def filled(*args, **kwargs):
            made = make(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        return filled

    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))


CASES = (
    Case(mask="pairs"),
    Case(mask="causal", nq=7, n=19, hidden=20, features=35),
    Case(mask="causal", nq=19, n=7),
    Case(mask="padding", heads=True),
    Case(act="tanh:5.0", mask="causal and padding", dtype=F16, nq=17),
    Case(act="sigmoid", dtype=BF16, mask="pairs"),
    Case(act="relu", dtype=F16),
    Case(act="leaky_relu:0.1", dtype=BF16, mask="window"),
    Case(act="gelu", heads=True, dtype=F16, mask="causal"),
    Case(act="identity", mask="padding"),
    Case(n=1),
    Case(nq=1, dtype=F16, mask="padding"),
    Case(hidden=1, features=1, dtype=BF16),
    Case(hidden=0, act="tanh:5.0", mask="pairs"),
    Case(hidden=0, act="tanh", features=70, mask="causal", nq=5, n=9, dtype=F16),
    Case(hidden=0, act="sigmoid", mask="padding", dtype=BF16),
    Case(hidden=0, act="relu", features=1, mask="window"),
    Case(hidden=0, act="gelu", n=1),
    Case(hidden=0, act="leaky_relu:0.1", nq=1, mask="padding"),
    Case(hidden=0, act="identity", mask="causal and padding", nq=17),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_as_exact_as_the_dense_execution(case: Case) -> None:
    ours = check(case, multi_kernel)
    if case.mask == "pairs":
        assert (ours["o"][0, case.nq // 2] == 0).all()
        assert (ours["da"][0, case.nq // 2] == 0).all()


ALIGNED = (
    Case(dropout=0.3, mask="causal"),
    Case(dropout=0.3, dtype=F16, hidden=0, mask="padding"),
    Case(dropout=1.0, nq=3, n=5),
    Case(align=cases.tempered, dtype=BF16),
    Case(align=cases.tempered, hidden=0),
    Case(align=cases.straight_through, mask="pairs", dropout=0.2),
    Case(align=cases.straight_through, hidden=0, mask="causal", training=False, dtype=F16),
    Case(align=cases.reinforced_choice, mask="padding"),
    Case(align=cases.reinforced_choice, hidden=0, dropout=0.2),
    Case(align=cases.relaxed, dtype=BF16, hidden=0),
    Case(align=cases.relaxed, mask="causal and padding", nq=17),
    Case(align=cases.relaxed_choice, hidden=0, mask="pairs"),
    Case(align=cases.relaxed_choice, act="relu"),
    Case(align=cases.monotonic, nq=17, n=17, mask="padding"),
    Case(align=cases.monotonic, hidden=0, mask="pairs", dropout=0.3, dtype=F16),
    Case(align=cases.flat_window, mask="causal", nq=19, n=7),
    Case(align=cases.predictive, mask="pairs"),
    Case(align=cases.predictive, hidden=0, features=7, mask="causal", nq=11),
    Case(align=cases.predictive_normal, dropout=0.3, mask="padding"),
    Case(align=cases.predictive_normal, hidden=0, features=7, mask="pairs"),
)


@pytest.mark.parametrize("case", ALIGNED, ids=str)
def test_every_alignment_has_the_same_draws_and_gradients(case: Case) -> None:
    check(case, multi_kernel)


@pytest.mark.parametrize(("module", "align"), [(multi_product_grads, rg.Soft), (multi_product_pair, cases.flat_window)])
def test_programs_that_sum_over_several_blocks(monkeypatch: pytest.MonkeyPatch, module, align) -> None:
    monkeypatch.setattr(module, "PROGRAMS", 3)
    name = "grad_kernel" if module is multi_product_grads else "query_grad_kernel"
    seen = cases.launches(monkeypatch, module, name)
    check(Case(nq=37, n=37, mask="padding", align=align), multi_kernel)
    assert all(launch["SPAN"] > 1 for launch in seen)
    assert len(seen) == 2


PANELS = (
    Case(nq=37, n=19, mask="pairs"),
    Case(nq=37, n=19, mask="causal", dtype=BF16, hidden=20, features=70),
    Case(nq=37, n=37, mask="causal", dtype=F16, heads=True),
    Case(nq=17, n=1, mask="padding", dtype=BF16),
    Case(nq=17, n=16, dtype=BF16, dropout=0.3),
    Case(nq=17, n=19, align=cases.relaxed, dtype=BF16),
    Case(nq=17, n=19, align=cases.straight_through, mask="causal and padding"),
)


@pytest.mark.parametrize("case", PANELS, ids=str)
def test_queries_come_in_panels_whose_parts_are_bounded(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    monkeypatch.setattr(multi_product_grads, "PANEL", 1)
    monkeypatch.setattr(multi_product_grads, "PROGRAMS", 3)
    seen = cases.launches(monkeypatch, multi_product_grads, "grad_kernel")
    check(case, multi_kernel)
    begins = list(range(0, case.nq, 8))
    assert [(x["begin"], x["end"]) for x in seen] == 2 * [(x, min(x + 8, case.nq)) for x in begins]


@pytest.mark.parametrize("align", [cases.monotonic, cases.reinforced_choice])
def test_windows_and_choices_that_do_not_learn_write_no_parts(monkeypatch: pytest.MonkeyPatch, align) -> None:
    parts = cases.launches(monkeypatch, multi_product_grads, "grad_kernel")
    of_keys = cases.launches(monkeypatch, multi_product_pair, "key_grad_kernel")
    check(Case(align=align, nq=17, n=17), multi_kernel)
    assert (len(parts), len(of_keys)) == (0, 2)


def operands(
    *, units: bool = False, align: Align | None = None, dtype: torch.dtype = torch.float32
) -> tuple[object, ...]:
    torch.manual_seed(0)
    a, u, v = (torch.randn(2, n, 6, dtype=dtype, requires_grad=True) for n in (5, 7, 7))
    w = torch.randn(1, 6, requires_grad=True) if units else torch.randn(1, 6, 6, requires_grad=True)
    return a, u, w, v, None, True, "tanh", *(align or Align()).flat()


def test_the_operator_is_registered_as_torch_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    local = Align(position=torch.rand(2, 5, requires_grad=True) * 7, window=2.0, gaussian=SCALED)
    drawn = Align(torch.tensor([3]), choice=SAMPLED, dropout=0.2)
    torch.library.opcheck(torch.ops.regard.multi_attend, operands(align=drawn))
    for dtype in (torch.float32, BF16):
        torch.library.opcheck(torch.ops.regard.multi_attend, operands(units=True, align=local, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("local", [False, True])
def test_both_ways_to_the_kernels_give_the_same_bits(dtype: torch.dtype, units: bool, local: bool) -> None:
    position = torch.rand(1, 5, requires_grad=True) * 7
    align = Align(position=position, window=2.0, gaussian=SCALED) if local else Align()
    a, u, w, v, *rest = operands(units=units, align=align, dtype=dtype)
    leaves = [a, u, w, v]
    found = []
    for operator in (multi_attend, torch.ops.regard.multi_attend):
        out = operator(*leaves, *rest)[0]
        assert out.dtype == dtype
        wanted = [*leaves, *([position] if local else [])]
        found.append([out, *torch.autograd.grad(out, wanted, torch.ones_like(out), retain_graph=True)])
    for eager, registered in zip(*found, strict=True):
        assert torch.equal(eager, registered)


@pytest.mark.parametrize("operator", [multi_attend, torch.ops.regard.multi_attend])
@pytest.mark.parametrize("units", [False, True])
def test_second_derivatives_are_refused_by_name(operator, units: bool) -> None:
    a, *rest = operands(units=units)
    (da,) = torch.autograd.grad(operator(a, *rest)[0].sum(), a, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives.*impl='dense'"):
        da.sum().backward()


@pytest.mark.parametrize("units", [False, True])
def test_several_gradients_at_once_and_none(units: bool) -> None:
    given = operands(units=units)
    check_gradients(multi_attend(*given)[0], given[:4])


@pytest.mark.parametrize(
    "score", [rg.TokenToToken(4), rg.Additive(4, 4, 3, activation="relu", features=4)], ids=["units", "matrix"]
)
def test_of_equal_scores_the_first_is_chosen_within_a_block_and_between_blocks(score: rg.Score) -> None:
    # Eighths through relu: sums are exact in any order. A processor's matrix product rounds equal columns differently.
    for parameter in score.parameters():
        parameter.data = (8 * torch.randn(parameter.shape)).round() / 8
    value = torch.randn(1, 19, 4)
    same = torch.ones(1, 19, 4)
    call = rg.Attention(score, rg.Hard()).eval().call(same[:, :3], same, value, mask=torch.arange(19) > 1)
    assert torch.equal(multi_kernel(call).detach(), value[:, 2:3].expand(1, 3, 4))


def test_of_equally_near_keys_the_first_is_read_between_blocks() -> None:
    x = torch.randn(1, 1, 3)
    position = torch.tensor([[63.5]])
    far = Operands(
        x, torch.randn(1, 70, 3), torch.ones(1, 3), x, None, False, "tanh", Align(position=position, window=0.3)
    )
    assert far.reach().flatten().tolist() == [63, 63]


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize(("nq", "n"), [(7, 19), (19, 7)])
def test_a_causal_flag_is_the_mask_that_ends_with_the_last_key(
    monkeypatch: pytest.MonkeyPatch, units: bool, nq: int, n: int
) -> None:
    monkeypatch.setattr(multi_product_grads, "PANEL", 1)
    torch.manual_seed(0)
    leaves = [torch.randn(1, k, 6, requires_grad=True) for k in (nq, n)]
    leaves += [torch.randn(1, 6) if units else torch.randn(1, 6, 6), torch.randn(1, n, 6, requires_grad=True)]
    mask = torch.ones(1, nq, n, dtype=torch.uint8).tril(n - nq)
    found = []
    for given in ((None, True), (mask, False)):
        out = torch.ops.regard.multi_attend(*leaves, *given, "tanh", *Align().flat())[0]
        found.append([out, *torch.autograd.grad(out.square().sum(), [leaves[0], leaves[1], leaves[3]])])
    for by_flag, by_mask in zip(*found, strict=True):
        assert torch.equal(by_flag, by_mask)


def test_empty_axes_read_nothing() -> None:
    for nq, n in ((0, 3), (3, 0)):
        call = rg.Attention(rg.TokenToToken(4)).call(torch.randn(2, nq, 4), torch.randn(2, n, 4))
        assert torch.equal(multi_kernel(call), torch.zeros(2, nq, 4))


def test_nan_is_seen_where_it_is_read_and_nowhere_else() -> None:
    for attend in (rg.Attention(rg.TokenToToken(4)), rg.Attention(rg.Additive(4, 4, 3, features=4))):
        x = torch.randn(1, 6, 4)
        x[0, 5] = float("nan")
        mask = torch.arange(6)[None, :] < torch.arange(2, 7)[:, None]
        context = multi_kernel(attend.call(x[:, :5], x, torch.randn(1, 6, 4), mask=mask))
        assert context[0, :4].isfinite().all()
        assert context[0, 4].isnan().all()


@pytest.mark.parametrize("gradient", ["straight-through", "gumbel-straight-through", "reinforce"])
def test_nan_is_seen_by_a_choice(gradient: str) -> None:
    for score in (rg.TokenToToken(4), rg.Additive(4, 4, 3, features=4)):
        attend = rg.Attention(score, rg.Hard(gradient))
        x = [torch.randn(1, 3, 4), torch.randn(1, 5, 4), torch.randn(1, 5, 4)]
        x[1][0, 2] = torch.nan
        mask = torch.tensor([[True] * 5, [True, True, False, True, True], [False, False, True, False, False]])
        torch.manual_seed(0)
        expected = dense(attend.call(*x, mask=mask))
        torch.manual_seed(0)
        got = multi_kernel(attend.call(*x, mask=mask))
        assert expected[0, (0, 2)].isnan().all()
        torch.testing.assert_close(got, expected, equal_nan=True)


REFUSED = {
    "activation": (
        lambda: rg.Attention(rg.Additive(4, 4, 3, activation="elu", features=4)),
        {},
        "'elu:1.0' has no kernel",
    ),
    "alignment": (lambda: rg.Attention(rg.TokenToToken(4), rg.Sparsemax()), {}, "alignment Sparsemax"),
    "bias": (
        lambda: rg.Attention(rg.TokenToToken(4)),
        {"bias": torch.zeros(5, 5)},
        "a bias on multi-dimensional scores",
    ),
    "width": (
        lambda: rg.Attention(rg.Additive(4, 4, 129, features=4)),
        {},
        "more than 128 hidden units before a matrix, in torch.float32",
    ),
    "width in half precision": (
        lambda: rg.Attention(rg.Additive(4, 4, 257, features=4)).bfloat16(),
        {},
        "more than 256 hidden units before a matrix, in torch.bfloat16",
    ),
    "width of a choice": (
        lambda: rg.Attention(rg.Additive(4, 4, 129, features=4), rg.Hard()).bfloat16(),
        {},
        "more than 128 hidden units before a matrix, in torch.float32",
    ),
    "double": (lambda: rg.Attention(rg.TokenToToken(4)).double(), {}, "torch.float64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_kernel_is_refused_by_name(case: str) -> None:
    make, rest, reason = REFUSED[case]
    attend = make()
    x = torch.randn(5, 4, dtype=next(attend.parameters()).dtype)
    call = attend.call(x, x, **rest)
    assert "only on CUDA" in str(why_not_multi(call))
    with assuming("cuda"):
        assert reason in str(why_not_multi(call))
