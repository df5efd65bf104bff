"""vmap of the kernels' operators is a loop over them; attention takes the kernels under vmap where nothing is random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.ops import activated, axes, fused, multi
from regard.ops.triton import attend, bilinear_attend, mapped  # noqa: F401
from regard.ops.triton import multi as multi_attend  # noqa: F401
from regard.ops.triton.align import SAMPLED, SCALED, Align

SIZE, L, NQ, N, D, DV = 3, 2, 5, 7, 3, 4
TENSORS = {
    "a": (L, NQ, D),
    "u": (L, N, D),
    "w": (1, D),
    "matrix": (L, D, DV),
    "v": (L, N, DV),
    "q": (L, 2, NQ, 16),
    "k": (L, 2, N, 16),
    "values": (L, 2, N, DV),
    "bias": (1, NQ, N),
    "key_bias": (L, 2, N),
    "rate": (1,),
    "position": (L, NQ),
    "positions": (L * 2, NQ),
}


def drawn(name: str) -> Tensor:
    if name == "position" or name == "positions":
        return torch.rand(TENSORS[name]) * N
    return torch.rand(TENSORS[name]) + 0.5 if name == "rate" else torch.randn(TENSORS[name])


def looped(operator: Callable[..., Any], mapped: dict[str, int], names: list[str]) -> None:
    """Every output of the operator, mapped over some operands, against one call after the other."""
    torch.manual_seed(0)
    given = {name: drawn(name) for name in names}
    given |= {name: torch.stack([drawn(name) for _ in range(SIZE)], dim) for name, dim in mapped.items()}
    together = torch.func.vmap(lambda *x: operator(*x), in_dims=tuple(mapped.get(name) for name in names))(
        *given.values()
    )
    for k in range(SIZE):
        one = [x.select(mapped[name], k).contiguous() if name in mapped else x for name, x in given.items()]
        assert torch.equal(together[k], operator(*one))


def additive(align: Align, **fixed: Any) -> Callable[..., Tensor]:
    def run(
        a: Tensor, u: Tensor, w: Tensor, v: Tensor, bias: Tensor | None = None, position: Tensor | None = None
    ) -> Tensor:
        seed, _, numbers, kinds = align.flat()
        mask = fixed.get("mask")
        return torch.ops.regard.additive(a, u, w, v, mask, bias, seed, position, numbers, kinds, False, "tanh")[0]

    return run


@pytest.mark.parametrize(
    "mapped", [{"a": 0}, {"a": 2, "u": 1, "w": 0, "v": 3}, {"w": 1}, {"v": 0}, {"bias": 1, "u": 0}], ids=str
)
def test_additive(mapped: dict[str, int]) -> None:
    looped(additive(Align()), mapped, ["a", "u", "w", "v", "bias"])
    mask = (torch.rand(L, NQ, N) > 0.3).to(torch.uint8)
    looped(
        additive(Align(), mask=mask), {k: d for k, d in mapped.items() if k != "bias"} or {"a": 0}, ["a", "u", "w", "v"]
    )


@pytest.mark.parametrize("mapped", [{"position": 1}, {"a": 0, "v": 1}], ids=str)
def test_additive_windows(mapped: dict[str, int]) -> None:
    local, run = Align(position=torch.zeros(1, 1), window=2.0, gaussian=SCALED), additive
    operator = run(local)
    looped(lambda a, u, w, v, position: operator(a, u, w, v, None, position), mapped, ["a", "u", "w", "v", "position"])


def bilinear(align: Align) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, rate: Tensor, position: Tensor | None = None) -> Tensor:
        seed, _, numbers, kinds = align.flat()
        tensors = (q, k, v, None, key_bias, rate, position, None, seed)
        return torch.ops.regard.bilinear_attention(*tensors, True, 0.25, 1.0, "tanh", numbers, kinds)[0]

    return run


BILINEAR = ["q", "k", "values", "key_bias", "rate"]


@pytest.mark.parametrize(
    "mapped", [{"q": 0}, {"q": 4, "k": 2, "values": 1}, {"key_bias": 3}, {"rate": 0, "values": 0}], ids=str
)
def test_bilinear(mapped: dict[str, int]) -> None:
    looped(bilinear(Align()), mapped, BILINEAR)


@pytest.mark.parametrize("mapped", [{"positions": 0}, {"k": 0}], ids=str)
def test_bilinear_windows(mapped: dict[str, int]) -> None:
    local = Align(position=torch.zeros(1, 1), window=2.0, gaussian=SCALED)
    looped(bilinear(local), mapped, [*BILINEAR, "positions"])


def features(align: Align) -> Callable[..., Tensor]:
    def run(a: Tensor, u: Tensor, w: Tensor, v: Tensor, position: Tensor | None = None) -> Tensor:
        seed, _, numbers, kinds = align.flat()
        return torch.ops.regard.multi_attend(a, u, w, v, None, True, "tanh", seed, position, numbers, kinds)[0]

    return run


@pytest.mark.parametrize("mapped", [{"a": 0}, {"a": 1, "u": 3, "matrix": 2, "v": 0}, {"matrix": 1}], ids=str)
def test_multi_dimensional(mapped: dict[str, int]) -> None:
    looped(features(Align()), mapped, ["a", "u", "matrix", "v"])


@pytest.mark.parametrize("mapped", [{"position": 2}, {"v": 0}], ids=str)
def test_multi_dimensional_windows(mapped: dict[str, int]) -> None:
    local = Align(position=torch.zeros(1, 1), window=2.0, gaussian=SCALED)
    looped(features(local), mapped, ["a", "u", "matrix", "v", "position"])


def test_what_is_drawn_is_drawn_as_in_the_loop() -> None:
    """Numbers count the leading index of a call, which the mapped axis is not part of."""
    random = Align(torch.tensor([5]), dropout=0.4, choice=SAMPLED)
    looped(additive(random), {"a": 0}, ["a", "u", "w", "v"])
    looped(bilinear(random), {"q": 1}, BILINEAR)
    looped(features(random), {"u": 0}, ["a", "u", "matrix", "v"])


def test_more_entries_than_a_launch_has_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    real = axes.why_too_many
    monkeypatch.setattr(axes, "MOST_LEADS", SIZE * L - 1)
    monkeypatch.setattr(mapped, "why_too_many", lambda leads: launched.append(leads) or real(leads))
    looped(additive(Align()), {"a": 0}, ["a", "u", "w", "v"])
    looped(features(Align()), {"u": 0}, ["a", "u", "matrix", "v"])
    looped(bilinear(Align()), {"q": 1}, BILINEAR)
    assert launched == [SIZE * L, SIZE * L, SIZE * L * 2]


def test_two_mapped_axes() -> None:
    torch.manual_seed(0)
    a, u, w, v = torch.randn(2, 3, L, NQ, D), torch.randn(3, L, N, D), torch.randn(1, D), torch.randn(L, N, DV)
    run = additive(Align())
    inner = torch.func.vmap(lambda a, u: run(a, u, w, v))
    found = torch.func.vmap(lambda a: inner(a, u))(a)
    for i in range(2):
        for j in range(3):
            assert torch.equal(found[i, j], run(a[i, j], u[j], w, v))


SCORES = {
    "additive": lambda: rg.Additive(4, 4, 3),
    "activated": lambda: rg.ActivatedGeneral(4, 4),
    "multi": lambda: rg.Additive(4, 4, 3, features=4),
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "why_not_kernel", lambda call: None)
    monkeypatch.setattr(fused, "why_not_activated", lambda call: None)
    monkeypatch.setattr(fused, "why_not_multi", lambda call: None)
    assert activated.kernel_problem("bilinear_attend", "tanh") == multi.kernel_problem("multi", "tanh") == ""


@pytest.mark.parametrize("mask", [None, rg.Causal()], ids=["all", "causal"])
@pytest.mark.parametrize("score", SCORES)
def test_attention_under_vmap_is_a_loop_with_its_gradients(score: str, mask: object, kernels: None) -> None:
    torch.manual_seed(0)
    module = rg.Attention(SCORES[score](), rg.Soft(0.7))
    x = torch.randn(3, 2, 6, 4, requires_grad=True)
    with rg.execution("fused"):
        together = torch.func.vmap(lambda y: module(y, y, mask=mask))(x)
        alone = torch.stack([module(y, y, mask=mask) for y in x])
    torch.testing.assert_close(together, alone)
    wanted = [x, *module.parameters()]
    cotangent = torch.randn_like(alone)
    for found, expected in zip(*(torch.autograd.grad(y, wanted, cotangent) for y in (together, alone)), strict=True):
        torch.testing.assert_close(found, expected)
