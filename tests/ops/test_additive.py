"""Additive scores by tiles: values and gradients of the equation, safe in any range, a well-behaved operator."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

import regard as rg
from regard.ops import additive, additive_units
from regard.ops.activations import activation
from regard.ops.additive import additive_scores, additive_scores_backward
from tests import cases, oracles
from tests.cases import assert_same, assert_within_budget

NAMES = sorted(oracles.ACTIVATIONS)
LOGISTIC = ["tanh", "tanh:5.0", "sigmoid"]


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def operands(nq: int = 5, n: int = 7, width: int = 3, features: int = 2, lead: tuple[int, ...] = ()) -> list[Tensor]:
    return [normal(*lead, nq, width), normal(*lead, n, width), normal(*lead, width, features)]


def equation(a: Tensor, u: Tensor, weight: Tensor, act: str) -> Tensor:
    """E_ijf = sum_d W_df act(a_id + u_jd), all at once."""
    hidden = activation(act)(a[..., :, None, :] + u[..., None, :, :])
    return (hidden @ weight[..., None, :, :]).movedim(-1, -3)


class Paths:
    """Which tiles were computed from factors, and which by the function itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.factors, self.exact = 0, 0
        original = additive._Hidden.reciprocal

        def reciprocal(hidden: Any, box: Any) -> Tensor | None:
            found = original(hidden, box)
            self.factors += found is not None
            self.exact += found is None
            return found

        monkeypatch.setattr(additive._Hidden, "reciprocal", reciprocal)


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> Paths:
    return Paths(monkeypatch)


@pytest.fixture
def by_units(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Units one by one from the first pair on, in tiles of 24 pairs; which of the two passes did so."""
    monkeypatch.setattr(additive_units, "FEWEST_PAIRS", 1)
    monkeypatch.setattr(additive_units, "TILE_PAIRS", 24)
    taken: list[str] = []
    for name in ("scores", "backward"):
        original = getattr(additive_units, name)

        def noted(*args: Any, name: str = name, original: Any = original) -> Any:
            taken.append(name)
            return original(*args)

        monkeypatch.setattr(additive_units, name, noted)
    return taken


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of six pairs of three hidden units in float64."""
    monkeypatch.setattr(additive, "CPU_TILE_BYTES", 8 * 3 * 6)


@pytest.mark.parametrize("act", NAMES)
@pytest.mark.parametrize("features", [1, 2])
def test_scores_and_gradients_are_those_of_the_loops(act: str, features: int) -> None:
    a, u, weight = (x.requires_grad_() for x in operands(3, 5, 2, features))
    expected = torch.stack(
        [
            torch.stack(
                [
                    torch.stack([oracles.dot(weight[:, f], oracles.each(oracles.ACTIVATIONS[act], x + y)) for y in u])
                    for x in a
                ]
            )
            for f in range(features)
        ]
    )
    actual = additive_scores(a, u, weight, act)
    assert_same(actual, expected)
    cotangent = normal(features, 3, 5)
    for x, y in zip(*(torch.autograd.grad(e, (a, u, weight), cotangent) for e in (actual, expected)), strict=True):
        assert_same(x, y)


@settings(max_examples=80)
@given(data=st.data())
def test_any_shape_and_tile_gives_the_equation(data: Any) -> None:
    nq, n = (data.draw(st.sampled_from([0, 1, 2, 3, 5, 11])) for _ in range(2))
    width, features = data.draw(st.sampled_from([1, 2, 5])), data.draw(st.sampled_from([1, 3]))
    lead = data.draw(st.sampled_from([(), (2,), (3, 2)]))
    leads = [
        tuple(1 if data.draw(st.booleans()) else s for s in lead)[data.draw(st.integers(0, len(lead))) :] for _ in "aub"
    ]
    act = data.draw(st.sampled_from(NAMES))
    shapes = [(nq, width), (n, width), (width, features)]
    a, u, weight = (normal(*l, *s).requires_grad_() for l, s in zip(leads, shapes, strict=True))  # noqa: E741
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(additive, "CPU_TILE_BYTES", data.draw(st.sampled_from([1, 100, 1000, 4 << 20])))
        actual, expected = additive_scores(a, u, weight, act), equation(a, u, weight, act)
        assert_same(actual, expected)
        cotangent = torch.randn_like(expected)
        got, want = (torch.autograd.grad(e, (a, u, weight), cotangent) for e in (actual, expected))
    for x, y in zip(got, want, strict=True):
        assert_same(x, y)


def test_tiles_are_taken_and_cover_everything(small_tiles: None, paths: Paths) -> None:
    a, u, weight = operands()
    additive_scores(a, u, weight, "tanh")
    # Seven keys do not fit six pairs: rows of one, keys in six and one.
    assert paths.factors == 5 * 2
    assert paths.exact == 0


def test_small_leading_entries_share_a_tile(monkeypatch: pytest.MonkeyPatch, paths: Paths) -> None:
    monkeypatch.setattr(additive, "CPU_TILE_BYTES", 8 * 3 * 35 * 2)
    a, u, weight = operands(lead=(5,))
    assert_same(additive_scores(a, u, weight, "tanh"), equation(a, u, weight, "tanh"))
    assert paths.factors == 3, "five entries, two in a tile"


@pytest.mark.parametrize("act", [name for name in NAMES if activation(name).logistic is None])
def test_other_activations_take_no_factors(act: str, paths: Paths) -> None:
    a, u, weight = operands()
    additive_scores(a, u, weight, act)
    assert (paths.factors, paths.exact) == (0, 1)


def wild(dtype: torch.dtype) -> list[Tensor]:
    """Both signs and every size up to 1e4 within one tile."""
    a, u, weight = operands(11, 13, 3)
    sizes = torch.tensor([0.0, 1e-3, 1.0, 30.0, 60.0, 100.0, 400.0, 1e3, 1e4], dtype=torch.float64)
    a = sizes[torch.arange(11) % 9][:, None] * torch.tensor([1.0, -1.0, 1.0]).double() + 0.1 * a
    u = sizes[(2 * torch.arange(13)) % 9][:, None] * torch.tensor([-1.0, -1.0, 1.0]).double() + 0.1 * u
    return [x.to(dtype) for x in (a, u, weight)]


@pytest.mark.parametrize("act", NAMES)
def test_large_operands_of_both_signs_are_safe(act: str) -> None:
    a, u, weight = (x.requires_grad_() for x in wild(torch.float64))
    actual, expected = additive_scores(a, u, weight, act), equation(a, u, weight, act)
    assert_same(actual, expected)
    cotangent = torch.randn_like(expected)
    got, want = (torch.autograd.grad(e, (a, u, weight), cotangent) for e in (actual, expected))
    for x, y in zip(got, want, strict=True):
        assert_same(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act", LOGISTIC)
@pytest.mark.parametrize("size", [1.0, 20.0, "wild"])
def test_low_precision_stays_within_the_budget_of_the_equation(
    act: str, size: float | str, dtype: torch.dtype, small_tiles: None
) -> None:
    a, u, weight = wild(dtype) if size == "wild" else [x.to(dtype) for x in operands(11, 13, 5)]
    if isinstance(size, float):
        a, u = a * size, u * size
    exact = equation(a.double(), u.double(), weight.double(), act)
    dense = equation(a.float(), u.float(), weight.float(), act)
    actual = additive_scores(a, u, weight, act)
    assert actual.dtype == torch.float32
    assert_within_budget(actual, dense, exact, "scores")
    cotangent = torch.randn_like(exact)
    gradients = []
    for function, dtype_of in ((additive_scores, dtype), (equation, dtype), (equation, torch.float64)):
        x = [t.to(dtype_of).requires_grad_() for t in (a, u, weight)]
        inner = [t.float() for t in x] if function is equation and dtype_of != torch.float64 else x
        gradients.append(torch.autograd.grad(function(*inner, act), x, cotangent.to(function(*inner, act).dtype)))
    for mine, same, wide, name in zip(*gradients, ("a", "u", "weight"), strict=True):
        assert_within_budget(mine, same, wide, f"gradient of {name}")


def test_only_unsafe_tiles_leave_the_factors(small_tiles: None, paths: Paths) -> None:
    a, u, weight = operands()
    a[2] = 1e4
    actual = additive_scores(a, u, weight, "tanh")
    assert (paths.factors, paths.exact) == (8, 2), "one of five rows, in two tiles of keys"
    assert_same(actual, equation(a, u, weight, "tanh"))
    u[6] = -1e4
    actual = additive_scores(a, u, weight, "tanh")
    assert (paths.factors, paths.exact) == (8 + 4, 2 + 6), "and of the last tile of keys, all rows"
    assert_same(actual, equation(a, u, weight, "tanh"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("act", LOGISTIC)
def test_the_edge_of_the_safe_range_is_exact_on_both_sides(act: str, dtype: torch.dtype, paths: Paths) -> None:
    limit = (80.0 if dtype == torch.float32 else 700.0) / activation(act).logistic.rate
    for inside in (True, False):
        paths.factors = paths.exact = 0
        edge = limit * (0.999 if inside else 1.001)
        a = torch.tensor([[edge], [-edge], [0.0]], dtype=dtype)
        u = torch.tensor([[edge], [-edge], [0.5], [-0.5]], dtype=dtype)
        weight = torch.ones(1, 1, dtype=dtype)
        actual = additive_scores(a, u, weight, act)
        assert (paths.factors > 0) == inside
        exact = equation(a.double(), u.double(), weight.double(), act)
        dense = equation(a, u, weight, act)
        if dtype == torch.float64:
            assert_same(actual, exact)
        else:
            assert_within_budget(actual, dense, exact)


@pytest.mark.parametrize("act", LOGISTIC)
@pytest.mark.parametrize("sizes", [(5, 7, 3), (29, 31, 19), (1, 67, 33)])
@pytest.mark.parametrize("lead", [(), (5,), (2, 3)])
def test_units_one_by_one_are_the_equation(
    act: str, sizes: tuple[int, int, int], lead: tuple[int, ...], by_units: list[str]
) -> None:
    a, u, weight = (x.requires_grad_() for x in operands(*sizes, features=1, lead=lead))
    actual, expected = additive_scores(a, u, weight, act), equation(a, u, weight, act)
    assert_same(actual, expected)
    cotangent = torch.randn_like(expected)
    got, want = (torch.autograd.grad(e, (a, u, weight), cotangent) for e in (actual, expected))
    for x, y in zip(got, want, strict=True):
        assert_same(x, y)
    assert by_units == ["scores", "backward"]


@pytest.mark.parametrize("act", LOGISTIC)
@pytest.mark.parametrize("size", [1.0, 9.0])
def test_units_one_by_one_stay_within_the_budget(act: str, size: float, by_units: list[str]) -> None:
    a, u, weight = (x.float() for x in operands(37, 41, 64, features=1))
    a, u = (a * size).clamp(-5, 5), (u * size).clamp(-5, 5)
    cotangent = torch.randn(1, 37, 41)
    results = []
    for function, dtype in ((additive_scores, torch.float32), (equation, torch.float32), (equation, torch.float64)):
        x = [t.to(dtype).requires_grad_() for t in (a, u, weight)]
        scores = function(*x, act)
        results.append([scores.detach(), *torch.autograd.grad(scores, x, cotangent.to(dtype))])
    for mine, same, wide, name in zip(*results, ("scores", "a", "u", "weight"), strict=True):
        assert_within_budget(mine, same, wide, name)
    assert by_units == ["scores", "backward"]


@pytest.mark.parametrize("far", ["query", "key", "weight", "nan"])
def test_units_go_together_where_one_by_one_has_no_room(far: str, by_units: list[str]) -> None:
    a, u, weight = (x.float() for x in operands(11, 13, 5, features=1))
    if far == "query":
        a[3, 2] = -31.0
    elif far == "key":
        u[3, 2] = 31.0
    else:
        weight[1] = 1e10 if far == "weight" else math.nan
    actual = additive_scores(a, u, weight, "tanh")
    assert by_units == []
    if far == "nan":
        assert actual.isnan().all()
    else:
        exact = equation(a.double(), u.double(), weight.double(), "tanh")
        assert_within_budget(actual, equation(a, u, weight, "tanh"), exact)


def test_many_pairs_go_unit_by_unit(by_units: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(additive_units, "FEWEST_PAIRS", 36)
    for nq, n in ((5, 7), (6, 6)):
        additive_scores(*operands(nq, n, features=1), "tanh")
        additive_scores(*operands(nq, n, features=2), "tanh")
        additive_scores(*operands(nq, n, features=1), "relu")
    assert by_units == ["scores"]


@pytest.mark.parametrize("act", LOGISTIC)
def test_infinite_operands_give_the_limits(act: str) -> None:
    a = torch.tensor([[math.inf], [-math.inf], [0.3]], dtype=torch.float64)
    u = torch.tensor([[0.1], [-5.0]], dtype=torch.float64)
    weight = torch.ones(1, 1, dtype=torch.float64)
    assert_same(additive_scores(a, u, weight, act), equation(a, u, weight, act))


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("impl", ["dense", "blockwise"])
def test_junk_in_keys_that_nobody_may_read_is_not_read(junk: float, impl: str, paths: Paths) -> None:
    attend = cases.scrambled(rg.Attention(rg.Additive(3, 5, 4), impl=impl))
    x = cases.inputs((2,), 7, 11, 3, 5, 13)
    mask = rg.Padding(torch.tensor([6, 11]))
    plain = cases.run(attend, {k: t.requires_grad_() for k, t in x.items()}, mask=mask)
    other = {k: t.detach().clone() for k, t in x.items()}
    other["key"][0, 6:], other["value"][0, 6:] = junk, junk
    cases.compare(cases.run(attend, {k: t.requires_grad_() for k, t in other.items()}, mask=mask), plain)
    assert paths.exact == 0
    assert (paths.factors > 0) == (impl == "blockwise")


@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided"])
@pytest.mark.parametrize("act", ["tanh", "relu", "identity"])
def test_any_layout_is_accepted(layout: str, act: str) -> None:
    if layout == "transposed":
        a, u, weight = normal(3, 5).T, normal(3, 7).T, normal(2, 3).T
    elif layout == "expanded":
        a, u, weight = normal(1, 3).expand(5, 3), normal(7, 1).expand(7, 3), normal(1, 1).expand(3, 2)
    else:
        a, u, weight = normal(10, 6)[::2, ::2], normal(7, 9)[:, ::3], normal(3, 4)[:, 1:3]
    dense = [x.contiguous().requires_grad_() for x in (a, u, weight)]
    given = [x.requires_grad_() for x in (a.detach(), u.detach(), weight.detach())]
    actual, expected = additive_scores(*given, act), equation(*dense, act)
    assert_same(actual, expected)
    cotangent = torch.randn_like(expected)
    for x, y in zip(
        torch.autograd.grad(actual, given, cotangent), torch.autograd.grad(expected, dense, cotangent), strict=True
    ):
        assert_same(x, y)


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("act", ["tanh", "relu"])
def test_the_operators_are_well_behaved(act: str, lead: tuple[int, ...]) -> None:
    a, u, weight = (x.requires_grad_() for x in operands(3, 5, 2, 2, lead))
    opcheck(additive_scores, (a, u, weight, act))
    opcheck(additive_scores, (a.detach().bfloat16(), u.detach().bfloat16(), weight.detach().bfloat16(), act))
    # The backward refuses to be differentiated, so it is checked without gradients.
    grad = normal(*lead, 2, 3, 5)
    opcheck(additive_scores_backward, (grad, a.detach(), u.detach(), weight.detach(), act))


def test_second_derivatives_are_refused_by_name() -> None:
    a, u, weight = (x.requires_grad_() for x in operands())
    (first,) = torch.autograd.grad(additive_scores(a, u, weight, "tanh").sum(), a, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives of the additive form.*Fix: use impl='dense'"):
        first.sum().backward()


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 1, None), (2, None, 0), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("lead", [(), (2,)])
def test_vmap_is_a_loop(in_dims: tuple[int | None, ...], lead: tuple[int, ...]) -> None:
    size, plain = 3, operands(5, 7, 2, 2, lead)
    mapped = [
        x if dim is None else torch.stack([x * (k + 1) for k in range(size)], dim)
        for x, dim in zip(plain, in_dims, strict=True)
    ]

    def one(k: int) -> list[Tensor]:
        return [x if dim is None else x.select(dim, k) for x, dim in zip(mapped, in_dims, strict=True)]

    def scores(a: Tensor, u: Tensor, weight: Tensor) -> Tensor:
        return additive_scores(a, u, weight, "tanh")

    together = torch.func.vmap(scores, in_dims=in_dims)(*mapped)
    for k in range(size):
        assert_same(together[k], scores(*one(k)))


@pytest.mark.parametrize("lead", [(), (2,)])
def test_a_batch_of_cotangents_is_a_loop(lead: tuple[int, ...]) -> None:
    """The vmap of the backward, as vectorised Jacobians use it."""
    x = [t.requires_grad_() for t in operands(3, 5, 2, 2, lead)]
    cotangents = normal(7, *lead, 2, 3, 5)
    scores = additive_scores(*x, "tanh")
    together = torch.autograd.grad(scores, x, cotangents, is_grads_batched=True, retain_graph=True)
    for k in range(7):
        for found, expected in zip(
            together, torch.autograd.grad(scores, x, cotangents[k], retain_graph=True), strict=True
        ):
            assert_same(found[k], expected)


@pytest.mark.parametrize("nq", [7, 257])
def test_per_sample_gradients_of_attention_are_a_loop(nq: int) -> None:
    """torch.func cannot differentiate an operator: `auto` takes the equation under it, however large."""
    attend = cases.scrambled(rg.Attention(rg.Additive(3, 5, 4)))
    parameters = dict(attend.named_parameters())
    x = cases.inputs((3,), nq, 131, 3, 5, 11)

    def loss(parameters: dict[str, Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.func.functional_call(attend, parameters, (query, key, value)).sin().sum()

    mapped = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))(parameters, *x.values())
    for b in range(3):
        expected = torch.func.grad(loss)(parameters, *(t[b] for t in x.values()))
        alone = torch.autograd.grad(loss(parameters, *(t[b] for t in x.values())), list(parameters.values()))
        for (name, found), other, ordinary in zip(mapped.items(), expected.values(), alone, strict=True):
            assert_same(found[b], other, name)
            assert_same(found[b], ordinary, name)


def test_half_precision_operands_are_summed_in_float32() -> None:
    a, u, weight = (x.bfloat16() for x in operands(5, 7, 64, 1))
    scores = additive_scores(a, u, weight, "tanh")
    assert scores.dtype == torch.float32
    a, u, weight = (x.requires_grad_() for x in (a, u, weight))
    for x, g in zip(
        (a, u, weight), torch.autograd.grad(additive_scores(a, u, weight, "tanh").sum(), (a, u, weight)), strict=True
    ):
        assert g.dtype == x.dtype
        assert g.shape == x.shape
