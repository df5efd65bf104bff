"""Zeros in place of what must not be read."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from regard.ops import fill
from regard.ops.fill import kept, where


@pytest.fixture(params=["selection", "bits"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(fill, "LARGE_ELEMENTS", 1 if request.param == "bits" else 1 << 60)
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, -0.0, 7.0])
def test_only_what_is_kept_remains_whatever_the_rest_holds(way: str, dtype: torch.dtype, junk: float) -> None:
    keep = torch.rand(3, 5, 1) < 0.5
    x = torch.randn(3, 5, 7).to(dtype).masked_fill(~keep, junk)
    found = kept(x, keep)
    expected = torch.zeros_like(x)
    expected[keep.squeeze(-1)] = x[keep.squeeze(-1)]
    assert torch.equal(found, expected)
    assert not found.signbit().logical_and(~keep).any()


def test_layouts_and_broadcasting(way: str) -> None:
    x, keep = torch.randn(7, 5, 3), torch.rand(5, 1) < 0.5
    for y in (x, x.mT.contiguous().mT, x[:, ::1].flip(0), x[:1].expand(7, 5, 3)):
        assert torch.equal(kept(y, keep), y * keep)
    assert kept(x[:0], keep).shape == (0, 5, 3)


def test_gradients_of_every_order(way: str) -> None:
    keep = torch.rand(3, 5, 1) < 0.5
    x = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: kept(x, keep), x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x: kept(x, keep).square(), x)


def test_a_bad_gradient_stops_at_what_was_dropped(way: str) -> None:
    keep = torch.tensor([[True], [False]])
    x = torch.randn(2, 3, requires_grad=True)
    (found,) = torch.autograd.grad(kept(x, keep), x, torch.tensor([[1.0] * 3, [math.nan] * 3]))
    assert torch.equal(found, torch.tensor([[1.0] * 3, [0.0] * 3]))


def test_function_transforms(way: str) -> None:
    keep, x = torch.rand(5, 1) < 0.5, torch.randn(3, 5, 2)
    assert torch.equal(torch.func.vmap(lambda x: kept(x, keep))(x), x * keep)


@pytest.mark.parametrize("other", [0.0, -math.inf, 3])
@pytest.mark.parametrize("keep", [torch.tensor([True, False, True]), torch.tensor([[True], [False]])], ids=str)
def test_where_is_that_of_torch_also_where_a_device_must_not_wait(keep: Tensor, other: float, monkeypatch) -> None:
    x = torch.tensor([1.0, math.nan, math.inf], requires_grad=True)
    expected = torch.where(keep, x, other)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    with monkeypatch.context() as patched:
        # What runs on a device, which a CPU can run as well.
        patched.setattr(Tensor, "device", property(lambda _: torch.device("meta")))
        patched.setattr(torch, "where", lambda *_: pytest.fail("a copy to the device"))
        found = where(keep, x, other)
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(torch.autograd.grad(found.sum(), x)[0], slope)


def test_where_of_whole_numbers() -> None:
    x = torch.tensor([1, 2])
    keep = torch.tensor([True, False])
    assert where(keep, x, -1).tolist() == [1, -1]
    assert where(keep, x, math.inf).tolist() == [1.0, math.inf]


def test_a_mask_that_was_changed_before_the_backward_is_noticed():
    x, keep = torch.randn(fill.LARGE_ELEMENTS // 4, 8, requires_grad=True), torch.ones(fill.LARGE_ELEMENTS // 4, 1) > 0
    loss = fill.kept(x, keep).square().sum()
    keep[5:] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
