"""Panels of additive scores by the kernels, under the interpreter or on a GPU, held to what the equation reaches in the same dtype.

The budget is twice the sum of the error of the equation against float64 and one rounding of the size of the result. A single number may
by chance be very near or very small: so error and size are the largest of those found when each query gets a sign of its own, drawn a few
times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from regard.ops.activations import activation
from regard.ops.additive import additive_scores
from regard.ops.triton import additive_panel

# Every size up to 1e4, of which tiles have some that share reciprocals and some that cannot.
MAGNITUDES = (0.0, 1e-3, 1.0, 9.0, 30.0, 60.0, 100.0, 1e3, 1e4)


@dataclass(frozen=True)
class Panel:
    """Operands of a panel: sizes, leading axes of a, u and w, and how far tokens lie from zero."""

    act: str = "tanh"
    dtype: torch.dtype = torch.float32
    nq: int = 70
    n: int = 131
    width: int = 3
    leads: tuple[tuple[int, ...], ...] = ((), (), ())
    reach: str = "normal"

    def __str__(self) -> str:
        lead = " ".join("x".join(map(str, x)) for x in self.leads).strip()
        sizes = f"{self.nq}x{self.n}x{self.width}{f' {lead}' if lead else ''}"
        return f"{self.act}-{str(self.dtype).removeprefix('torch.')}-{sizes}-{self.reach}"

    def operands(self, device: str) -> list[Tensor]:
        """a, u and the matrix of one column."""
        torch.manual_seed(self.n + 3 * self.nq + 5 * self.width)
        sizes = ((self.nq, self.width), (self.n, self.width), (self.width, 1))
        a, u, w = (torch.randn(*lead, *size) for lead, size in zip(self.leads, sizes, strict=True))
        if self.reach == "wide":
            a, u = (0.1 * x + _far(x) for x in (a, u))
        elif self.reach == "both":
            # The first tokens are near, the others beyond what shares a reciprocal.
            a[..., self.nq // 2 :, :] *= 40
            u[..., self.n // 2 :, :] *= 40
        return [x.to(self.dtype).to(device) for x in (a, u, w / self.width**0.5)]


def _far(x: Tensor) -> Tensor:
    """Magnitudes of tokens in turn, with a sign for every hidden unit."""
    sizes = torch.tensor(MAGNITUDES)[torch.arange(x.shape[-2]) % len(MAGNITUDES)]
    return sizes[:, None] * (torch.randint(0, 2, x.shape) * 2 - 1)


def equation(a: Tensor, u: Tensor, weight: Tensor, act: str) -> Tensor:
    """All scores at once, in float32 or wider."""
    a, u, weight = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (a, u, weight))
    hidden = activation(act)(a[..., :, None, :] + u[..., None, :, :])
    return (hidden @ weight[..., None, :, :]).movedim(-1, -3)


def with_gradients(scores: Callable[..., Tensor], operands: list[Tensor], act: str, grad: Tensor) -> dict[str, Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    found = scores(*leaves, act)
    gradients = torch.autograd.grad(found, leaves, grad.to(found.dtype))
    return dict(zip(("e", "da", "du", "dw"), (found.detach(), *gradients), strict=True))


def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The launchers that run from now on, by name."""
    taken: list[str] = []
    for name in ("panel", "gradients"):
        real = getattr(additive_panel, name)

        def noted(*args: object, name: str = name, real: Callable[..., object] = real) -> object:
            taken.append(name)
            return real(*args)

        monkeypatch.setattr(additive_panel, name, noted)
    return taken


def check(panel: Panel, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal runs of the kernels, no further from float64 than the budget."""
    operands = panel.operands(device)
    shape = equation(*operands, panel.act).shape
    grad = torch.randn(shape, device=device)
    signs = torch.randint(0, 2, (4, *shape[:-1], 1), device=device) * 2.0 - 1
    signs[0] = 1
    exact = [with_gradients(equation, [x.double() for x in operands], panel.act, grad * sign) for sign in signs]
    rival = [with_gradients(equation, operands, panel.act, grad * sign) for sign in signs]
    taken = watched(monkeypatch)
    ours, again = (with_gradients(additive_scores, operands, panel.act, grad) for _ in range(2))
    assert taken == ["panel", "gradients"] * 2
    for name, found in ours.items():
        truth = exact[0][name]
        assert found.shape == truth.shape, name
        assert found.dtype == rival[0][name].dtype, name
        assert torch.equal(found, again[name]), f"{name}: two runs differ"
        size = max(float(one[name].norm()) for one in exact)
        error = max(float((low[name].double() - one[name]).norm()) for low, one in zip(rival, exact, strict=True))
        distance, budget = float((found.double() - truth).norm()), 2 * (error + torch.finfo(found.dtype).eps * size)
        assert distance <= budget, f"{name}: distance {distance:.2e}, budget {budget:.2e}, size {size:.2e}"
