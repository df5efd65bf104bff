r"""Scores of the additive form by tiles: nothing of size queries x keys x hidden is ever kept.

$$E_{ij} = \sum_d w_d\, \mathrm{act}(a_{id} + u_{jd}) \qquad E_{ijf} = \sum_d W_{df}\, \mathrm{act}(a_{id} + u_{jd})$$

Backward, from $G = dE$, with $z = a_i + u_j$ recomputed tile by tile and $t_{ijd} = (\sum_f G_{ijf} W_{df})\, \mathrm{act}'(z_{ijd})$:

$$da_{id} = \sum_j t_{ijd} \qquad du_{jd} = \sum_i t_{ijd} \qquad dW_{df} = \sum_{ij} G_{ijf}\, \mathrm{act}(z_{ijd})$$

For a logistic activation, $\mathrm{act}(z) = \alpha + \beta r$, where $r = 1/(1 + e^{\rho z})$, $\mathrm{act}'(z) = -\beta\rho\, r(1 - r)$:
the exponentials are factorised per token, so a pair costs a product and a reciprocal. That is exact while both factors are
normal numbers; a tile in which they would not be takes the library's own function instead. Where all are, and there is one
feature, the units go one by one (ops.additive_units). On CUDA one feature is computed by our kernels, if they know the activation.
Two registered operators, so that compiled graphs keep them whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.ops import additive_units
from regard.ops.activations import Activation, Logistic, activation
from regard.ops.additive_units import Box, boxes
from regard.ops.axes import KERNEL_DTYPES, flat, why_too_many
from regard.ops.ready import kernel_problem
from regard.ops.workspace import Workspace

# Large enough to amortise a dozen kernel launches; on a CPU small enough for its share of the cache.
CPU_TILE_BYTES = 4 << 20
GPU_TILE_BYTES = 256 << 20


def why_not_by_kernel(device: str, dtype: torch.dtype, leads: int, features: int, act: str) -> str | None:
    """The reason why no kernel computes the scores, or None."""
    if device != "cuda":
        return "additive scores have no kernel on this device, only on CUDA"
    if features != 1:
        return "multi-dimensional weights"
    if dtype not in KERNEL_DTYPES:
        return f"{dtype}"
    return why_too_many(leads) or kernel_problem("additive_panel", act) or None


def _panel_kernels(a: Tensor, u: Tensor, weight: Tensor, lead: torch.Size, act: str) -> Any:
    """Our kernels, where they compute these scores; None otherwise."""
    leads = lead.numel()
    if why_not_by_kernel(a.device.type, a.dtype, leads, weight.shape[-1], act) is not None:
        return None
    if 0 in (leads, u.shape[-2], *a.shape[-2:]):
        return None
    from regard.ops.triton import additive_panel

    return additive_panel


def _for_kernels(a: Tensor, u: Tensor, weight: Tensor, lead: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    """The a (L, Nq, D), u (L, N, D) and w (L or 1, D) of a panel."""
    w = flat(weight, lead) if weight[..., 0, 0].numel() > 1 else weight.reshape(1, *weight.shape[-2:])
    return flat(a, lead), flat(u, lead), w[..., 0]


class VmapInfo(Protocol):
    """What torch tells a vmap rule."""

    batch_size: int
    randomness: str


@dataclass(frozen=True)
class _Operands:
    """The operands with one flat leading axis, in the dtype of the arithmetic."""

    a: Tensor  # (L, Nq, D)
    u: Tensor  # (L, N, D)
    weight: Tensor  # (L, D, F)

    @staticmethod
    def of(a: Tensor, u: Tensor, weight: Tensor) -> _Operands:
        lead = torch.broadcast_shapes(a.shape[:-2], u.shape[:-2], weight.shape[:-2])
        dtype = torch.promote_types(a.dtype, torch.float32)

        def flat(x: Tensor) -> Tensor:
            return x.to(dtype).expand(*lead, *x.shape[-2:]).reshape(lead.numel(), *x.shape[-2:])

        return _Operands(flat(a), flat(u), flat(weight))

    def tiles(self) -> Iterator[Box]:
        """Boxes (leading, queries, keys) whose hidden layer fits the budget."""
        budget = CPU_TILE_BYTES if self.a.device.type == "cpu" else GPU_TILE_BYTES
        pairs = max(1, budget // (self.a.element_size() * max(1, self.a.shape[-1])))
        return boxes(self.a.shape[0], self.a.shape[1], self.u.shape[1], pairs)


class _Hidden:
    """Computes the hidden layer of a tile, by the factorised exponentials where they are safe."""

    def __init__(self, operands: _Operands, act: Activation) -> None:
        self.act, self.a, self.u = act, operands.a, operands.u
        self.spaces = Workspace(operands.a)
        self.logistic: Logistic | None = None
        if act.logistic is None or self.a.device.type != "cpu" or 0 in (self.a.numel(), self.u.numel()):
            return
        self.logistic = act.logistic
        # Beyond this a factor underflows although the product is an ordinary number. (NaN compares false: unsafe.)
        limit = 80.0 if self.a.dtype == torch.float32 else 700.0
        a_range, u_range = (x.abs().amax(-1) * act.logistic.rate for x in (self.a, self.u))
        self.a_unsafe, self.u_unsafe = ~(a_range <= limit), ~(u_range <= limit)
        self.range = torch.maximum(a_range.amax(), u_range.amax()).item()
        self.all_safe = self.range <= limit

    def by_units(self, weight: Tensor) -> Logistic | None:
        """The logistic function, where the hidden units may go one by one and are worth it."""
        pairs = self.a.shape[0] * self.a.shape[1] * self.u.shape[1]
        if self.logistic is None or weight.shape[-1] != 1 or pairs < additive_units.FEWEST_PAIRS:
            return None
        # There the weight multiplies a factor, which needs room for it.
        limit = 60.0 if self.a.dtype == torch.float32 else 600.0
        return self.logistic if self.range <= limit and bool(weight.abs().amax() <= 1e9) else None

    @cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        assert self.logistic is not None
        return torch.exp(self.a * self.logistic.rate), torch.exp(self.u * self.logistic.rate)

    def reciprocal(self, box: Box) -> Tensor | None:
        """The r of the tile, or None where the range is unsafe or the activation is not logistic."""
        b, i, j = box
        if self.logistic is None:
            return None
        if not self.all_safe and bool(self.a_unsafe[b, i].any() | self.u_unsafe[b, j].any()):
            return None
        left, right = self.factors[0][b, i, None, :], self.factors[1][b, None, j, :]
        return torch.mul(left, right, out=self.space("tile", left, right)).add_(1).reciprocal_()

    def space(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """Room for the broadcast of both."""
        return self.spaces.shaped(name, torch.broadcast_shapes(left.shape, right.shape))

    def sums(self, box: Box) -> Tensor:
        b, i, j = box
        left, right = self.a[b, i, None, :], self.u[b, None, j, :]
        return torch.add(left, right, out=self.space("tile", left, right))


def _matmul(hidden: Tensor, weight: Tensor) -> Tensor:
    """(b, i, j, D) x (b, D, F) -> (b, F, i, j)."""
    b, i, j, width = hidden.shape
    return torch.bmm(hidden.view(b, i * j, width), weight).view(b, i, j, -1).movedim(-1, 1)


def _scores(a: Tensor, u: Tensor, weight: Tensor, act: str) -> Tensor:
    """Scores (..., F, Nq, N) of a (..., Nq, D), u (..., N, D), weight (..., D, F), in float32 or wider."""
    lead = torch.broadcast_shapes(a.shape[:-2], u.shape[:-2], weight.shape[:-2])
    kernels = _panel_kernels(a, u, weight, lead, act)
    if kernels is not None:
        panel: Tensor = kernels.panel(*_for_kernels(a, u, weight, lead), act)
        return panel.view(*lead, 1, *panel.shape[1:])
    x, function = _Operands.of(a, u, weight), activation(act)
    hidden = _Hidden(x, function)
    logistic = hidden.by_units(x.weight)
    if logistic is not None:
        by_units = additive_units.scores(x.a, x.u, x.weight[..., 0], logistic)
        return by_units.view(*lead, 1, *by_units.shape[1:])
    scores = x.a.new_empty(x.a.shape[0], x.weight.shape[-1], x.a.shape[1], x.u.shape[1])
    for box in x.tiles():
        b, i, j = box
        r = hidden.reciprocal(box)
        if r is None:
            scores[b, :, i, j] = _matmul(function(hidden.sums(box)), x.weight[b])
        else:
            shift, gain, _ = function.logistic  # type: ignore[misc]
            constant = shift * x.weight[b].sum(1)[..., None, None]
            scores[b, :, i, j] = _matmul(r, gain * x.weight[b]) + constant
    return scores.view(*lead, *scores.shape[1:])


def _scores_fake(a: Tensor, u: Tensor, weight: Tensor, act: str) -> Tensor:
    lead = torch.broadcast_shapes(a.shape[:-2], u.shape[:-2], weight.shape[:-2])
    dtype = torch.promote_types(a.dtype, torch.float32)
    return a.new_empty(*lead, weight.shape[-1], a.shape[-2], u.shape[-2], dtype=dtype)


def _gradients(grad: Tensor, a: Tensor, u: Tensor, weight: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `additive_scores` with respect to a, u and weight, in their own shapes and dtypes."""
    lead = torch.broadcast_shapes(a.shape[:-2], u.shape[:-2], weight.shape[:-2])

    def like(x: Tensor, original: Tensor) -> Tensor:
        return x.reshape(*lead, *x.shape[1:]).sum_to_size(original.shape).to(original.dtype).contiguous()

    kernels = _panel_kernels(a, u, weight, lead, act)
    if kernels is not None:
        of_panel = grad.reshape(lead.numel(), *grad.shape[-2:])
        da, du, dw = kernels.gradients(of_panel, *_for_kernels(a, u, weight, lead), act)
        return like(da, a), like(du, u), like(dw[..., None], weight)
    x, function = _Operands.of(a, u, weight), activation(act)
    assert function.derivative is not None
    hidden = _Hidden(x, function)
    grad = grad.to(x.a.dtype).reshape(x.a.shape[0], *grad.shape[-3:])
    logistic = hidden.by_units(x.weight)
    if logistic is not None:
        da, du, dw = additive_units.backward(grad[:, 0], x.a, x.u, x.weight[..., 0], logistic)
        return like(da, a), like(du, u), like(dw[..., None], weight)
    da, du, dweight = torch.zeros_like(x.a), torch.zeros_like(x.u), torch.zeros_like(x.weight)
    for box in x.tiles():
        b, i, j = box
        g = grad[b, :, i, j].movedim(1, -1)  # (b, i, j, F)
        flat = g.reshape(g.shape[0], -1, g.shape[-1])
        r = hidden.reciprocal(box)
        if r is None:
            z = hidden.sums(box)
            dweight[b] += torch.bmm(function(z).view(*flat.shape[:2], -1).mT, flat)
            slope = function.derivative(z)
        else:
            shift, gain, rate = function.logistic  # type: ignore[misc]
            value = torch.mul(r, gain, out=hidden.space("value", r, r)).add_(shift)
            dweight[b] += torch.bmm(value.view(*flat.shape[:2], -1).mT, flat)
            # act' = -gain rate r (1 - r), written over r.
            slope = r.addcmul_(r, r, value=-1).mul_(-gain * rate)
        if g.shape[-1] == 1:
            # One feature: w scales the sums over the tile, not the tile.
            slope.mul_(g)
            da[b, i] += slope.sum(2) * x.weight[b].mT
            du[b, j] += slope.sum(1) * x.weight[b].mT
        else:
            slope.mul_(torch.bmm(flat, x.weight[b].mT).view_as(slope))
            da[b, i] += slope.sum(2)
            du[b, j] += slope.sum(1)
    return like(da, a), like(du, u), like(dweight, weight)


def _gradients_fake(grad: Tensor, a: Tensor, u: Tensor, weight: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor]:
    return a.new_empty(a.shape), u.new_empty(u.shape), weight.new_empty(weight.shape)


def _remember(ctx: object, inputs: tuple[Tensor, Tensor, Tensor, str], output: Tensor) -> None:
    a, u, weight, ctx.act = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(a, u, weight)  # type: ignore[attr-defined]


def _backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    a, u, weight = ctx.saved_tensors  # type: ignore[attr-defined]
    return (*additive_scores_backward(grad, a, u, weight, ctx.act), None)  # type: ignore[attr-defined]


def _no_double_backward(ctx: object, *grads: Tensor) -> None:
    raise NotImplementedError(
        "second derivatives of the additive form are not available in the blockwise execution. "
        "Fix: use impl='dense', or run the forward inside regard.execution('dense')."
    )


def _mapped(size: int, in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Give every operand the mapped axis in front of equally many leading axes; the operators broadcast those."""
    rank = max(x.dim() - (dim is not None) for x, dim in zip(tensors, in_dims, strict=True))
    moved = []
    for x, dim in zip(tensors, in_dims, strict=True):
        x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        moved.append(x.reshape(size, *(1,) * (rank - x.dim() + 1), *x.shape[1:]))
    return moved


def _scores_mapped(info: VmapInfo, in_dims: tuple[int | None, ...], *args: object) -> tuple[Tensor, int]:
    *operands, act = args
    a, u, weight = _mapped(info.batch_size, in_dims[:-1], tuple(operands))  # type: ignore[arg-type]
    return additive_scores(a, u, weight, act), 0


def _gradients_mapped(
    info: VmapInfo, in_dims: tuple[int | None, ...], *args: object
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    grad, *operands, act = args
    # The gradient has one axis more, the feature, so it is aligned by itself.
    (grad,) = _mapped(info.batch_size, in_dims[:1], (grad,))  # type: ignore[arg-type]
    mapped = _mapped(info.batch_size, in_dims[1:-1], tuple(operands))  # type: ignore[arg-type]
    grads = additive_scores_backward(grad, *mapped, act)
    shapes = [
        x.shape if dim is None else x.movedim(dim, 0).shape[1:]  # type: ignore[attr-defined]
        for x, dim in zip(operands, in_dims[1:-1], strict=True)
    ]
    return tuple(g.reshape(info.batch_size, *shape) for g, shape in zip(grads, shapes, strict=True)), (0, 0, 0)


# Registered without torch.library.custom_op, whose wrapper imports the whole compiler on its first call.
_library = torch.library.Library("regard", "FRAGMENT")
_library.define("additive_scores(Tensor a, Tensor u, Tensor weight, str act) -> Tensor")
_library.define(
    "additive_scores_backward(Tensor grad, Tensor a, Tensor u, Tensor weight, str act) -> (Tensor, Tensor, Tensor)"
)
_library.impl("additive_scores", _scores, "CompositeExplicitAutograd")
_library.impl("additive_scores_backward", _gradients, "CompositeExplicitAutograd")
torch.library.register_fake("regard::additive_scores", _scores_fake, lib=_library)
torch.library.register_fake("regard::additive_scores_backward", _gradients_fake, lib=_library)
torch.library.register_autograd("regard::additive_scores", _backward, setup_context=_remember, lib=_library)
torch.library.register_autograd("regard::additive_scores_backward", _no_double_backward, lib=_library)
torch.library.register_vmap("regard::additive_scores", _scores_mapped, lib=_library)
torch.library.register_vmap("regard::additive_scores_backward", _gradients_mapped, lib=_library)

additive_scores: Any = torch.ops.regard.additive_scores.default
additive_scores_backward: Any = torch.ops.regard.additive_scores_backward.default
