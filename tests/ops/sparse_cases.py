"""Sparse weights of rows by an operator, on a CPU, under the interpreter or on a GPU, held to what the equation reaches in the same dtype.

The budget is twice the sum of the error of the equation against float64 and one rounding, of the weights for weights; a gradient is a
difference of gradients of weights, so the rounding is one of those. A single row may by chance be very near: many are drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
from torch import Tensor

from regard.general.alignments.sparse import entmax
from regard.ops.sparse import aligned

# Who computes: for a GPU, and for a CPU.
KERNELS, TORCH = "regard.ops.triton.sparse_rows", "regard.ops.sparse_rows"


@dataclass(frozen=True)
class Rows:
    """Rows of scores: their number, their length, how far they reach, and what they may read."""

    alpha: float = 2.0
    n: int = 37
    rows: int = 19
    dtype: torch.dtype = torch.float32
    reach: float = 1.0
    mask: str = "pairs"
    learned: bool = False

    def __str__(self) -> str:
        name = f"{self.alpha}{' learned' if self.learned else ''}-{self.rows}x{self.n}-{self.reach:g}-{self.mask}"
        return f"{name}-{str(self.dtype).removeprefix('torch.')}"

    def scores(self, device: str) -> Tensor:
        torch.manual_seed(self.n + 3 * self.rows)
        return (self.reach * torch.randn(2, self.rows, self.n)).to(self.dtype).to(device)

    def allowed(self, device: str) -> Tensor | None:
        """Booleans that broadcast to the scores; the first row of pairs may read nothing, the last one key."""
        if self.mask == "none":
            return None
        shape = {
            "pairs": (2, self.rows, self.n),
            "keys": (2, 1, self.n),
            "queries": (self.rows, 1),
            "shared": (self.n,),
        }
        found = torch.rand(shape[self.mask]) > 0.3
        if self.mask == "pairs":
            found[0, 0], found[1, -1] = False, False
            found[1, -1, self.n // 2] = True
        return found.to(device)


def with_gradients(
    weights: Callable[..., Tensor], rows: Rows, scores: Tensor, mask: Tensor | None, grad: Tensor
) -> dict[str, Tensor]:
    """Weights, the gradient of the scores, and that of alpha where it is learned."""
    z = scores.detach().clone().requires_grad_()
    wide = torch.promote_types(scores.dtype, torch.float32)
    # Rounded to float32 once, for everybody.
    alpha = torch.tensor(rows.alpha, device=z.device).to(wide).requires_grad_() if rows.learned else rows.alpha
    p = weights(z, mask, alpha)
    leaves = [z, alpha] if isinstance(alpha, Tensor) else [z]
    found = torch.autograd.grad(p, leaves, grad.to(p.dtype))
    return dict(zip(("p", "dz", "dalpha"), (p.detach(), *found), strict=False))


def watched(monkeypatch: pytest.MonkeyPatch, module: str = KERNELS) -> list[str]:
    """The functions of a module that run from now on, by name."""
    taken: list[str] = []
    sparse_rows = import_module(module)
    for name in ("aligned", "gradients"):
        real = getattr(sparse_rows, name)

        def noted(*args: object, name: str = name, real: Callable[..., object] = real) -> object:
            taken.append(name)
            return real(*args)

        monkeypatch.setattr(sparse_rows, name, noted)
    return taken


def check(rows: Rows, device: str, monkeypatch: pytest.MonkeyPatch, module: str = KERNELS) -> None:
    """Two equal runs of a module, no further from float64 than the budget, with zeros where there must be."""
    scores, mask = rows.scores(device), rows.allowed(device)
    grad = torch.randn(scores.shape, device=device).to(rows.dtype)
    if rows.alpha == 2.0:
        # Half precision has many keys that are exactly at the threshold, where there are two gradients: such rows ask for none.
        wide = scores.double() if mask is None else scores.double().masked_fill(~mask, -torch.inf)
        tau = wide.amax(-1, keepdim=True) - entmax(scores.double(), mask, 2.0).amax(-1, keepdim=True)
        tied = ((wide - tau).abs() < 1e-9).any(-1, keepdim=True)
        assert tied.double().mean() < 0.5
        grad = grad.masked_fill(tied, 0.0)
    exact = with_gradients(entmax, rows, scores.double(), mask, grad.double())
    rival = with_gradients(entmax, rows, scores, mask, grad)
    taken = watched(monkeypatch, module)
    ours, again = (with_gradients(aligned, rows, scores, mask, grad) for _ in range(2))
    assert taken == ["aligned", "gradients"] * 2
    size = {
        "p": exact["p"].norm(),
        "dz": (exact["p"].clamp(min=0) ** (2 - rows.alpha) * grad).where(exact["p"] > 0, 0).norm(),
        "dalpha": grad.double().norm() / (rows.alpha - 1) ** 2,
    }
    for name, found in ours.items():
        assert found.shape == exact[name].shape, name
        assert found.dtype == rival[name].dtype, name
        assert torch.equal(found, again[name]), f"{name}: two runs differ"
        error = float((rival[name].double() - exact[name]).norm())
        distance = float((found.double() - exact[name]).norm())
        budget = 2 * (error + torch.finfo(rows.dtype).eps * float(size[name]))
        assert distance <= budget, (
            f"{name}: distance {distance:.2e}, budget {budget:.2e}, error of equation {error:.2e}"
        )
    kept = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand(scores.shape)
    assert (ours["p"][~kept] == 0).all()
    assert (ours["dz"][~kept] == 0).all()
    sums = ours["p"].double().sum(-1)
    rounding = torch.finfo(rows.dtype).eps * max(4, (rival["p"] > 0).sum(-1).max().item())
    assert ((sums - kept.any(-1).double()).abs() <= rounding).all()
