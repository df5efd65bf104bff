"""Additive soft attention as one registered operator: the sine basis in half precision, exact otherwise and out of range."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.ops.triton import additive_exact
from regard.ops.triton.additive_exact import CODES, Exact
from regard.ops.triton.additive_sine import Sine, prologue

HALVES = (torch.float16, torch.bfloat16)


def supports(act: str) -> bool:
    """Whether the kernels know an activation."""
    return act.partition(":")[0] in CODES and not act.startswith("tanh:")


def _uses_sines(a: Tensor, act: str) -> bool:
    return a.dtype in HALVES and act == "tanh" and a.numel() > 0


# Registered without the wrapper of torch.library.custom_op, which costs the host a little on every call.
_library = torch.library.Library("regard", "FRAGMENT")
_library.define(
    "additive_soft(Tensor a, Tensor u, Tensor w, Tensor v, Tensor? mask, bool causal, str act) -> (Tensor, Tensor)"
)
_library.define(
    "additive_soft_backward(Tensor grad, Tensor? grad_lse, Tensor a, Tensor u, Tensor w, Tensor v, Tensor out, Tensor lse, "
    "Tensor? mask, bool causal, str act) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _forward(
    a: Tensor, u: Tensor, w: Tensor, v: Tensor, mask: Tensor | None, causal: bool, act: str
) -> tuple[Tensor, Tensor]:
    """Contexts (L, Nq, d_v) in the dtype of v, and the log-sum-exp of the scores (L, Nq) in float32, for the backward.

    In the sine basis the log-sum-exp leaves out a constant of each row, which cancels in the weights.

    a (L, Nq, D), u (L, N, D), w (L or 1, D), v (L, N, d_v); mask bytes (L or 1, Nq or 1, N or 1); causal aligns the last
    query with the last key.
    """
    out = v.new_empty(a.shape[0], a.shape[1], v.shape[-1])
    lse = torch.empty(a.shape[:2], device=a.device)
    if _uses_sines(a, act):
        sine = Sine(a, u, w)
        sine.forward(v, mask, causal, out, lse)
        # Runs only where the device found the range too wide for a series.
        additive_exact.forward(Exact(a, u, w, act, prepare=False), v, mask, causal, out, lse, sine.terms)
    else:
        never = torch.zeros(1, dtype=torch.int32, device=a.device)
        additive_exact.forward(Exact(a, u, w, act, prepare=True), v, mask, causal, out, lse, never)
    return out, lse


def _forward_fake(
    a: Tensor, u: Tensor, w: Tensor, v: Tensor, mask: Tensor | None, causal: bool, act: str
) -> tuple[Tensor, Tensor]:
    return v.new_empty(a.shape[0], a.shape[1], v.shape[-1]), a.new_empty(a.shape[:2], dtype=torch.float32)


def _gradients(
    grad: Tensor, grad_lse: Tensor | None, a: Tensor, u: Tensor, w: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    mask: Tensor | None, causal: bool, act: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of a, u, w and v, in their dtypes, from those of the context and of the log-sum-exp."""
    do = grad.to(v.dtype)
    delta, tops = prologue(do, out, grad_lse, v)
    if _uses_sines(a, act):
        sine = Sine(a, u, w)
        da, du, dw, dv = sine.backward(v, mask, causal, lse, do, delta, tops)
        dv = dv.to(v.dtype).contiguous()
        exact = Exact(a, u, w, act, prepare=False)
        more = additive_exact.backward(exact, v, mask, causal, lse, do, delta, sine.terms, (da, du, dv))
        dw = dw + (more if w.shape[0] > 1 else more.sum(0, keepdim=True))
    else:
        exact = Exact(a, u, w, act, prepare=True)
        never = torch.zeros(1, dtype=torch.int32, device=a.device)
        da, du = (torch.zeros_like(x.mT).mT for x in (exact.a, exact.u))
        dv = torch.empty_like(v, memory_format=torch.contiguous_format)
        dw = additive_exact.backward(exact, v, mask, causal, lse, do, delta, never, (da, du, dv))
        dw = dw if w.shape[0] > 1 else dw.sum(0, keepdim=True)
        da, du = da[..., : exact.width], du[..., : exact.width]
    return da.to(a.dtype).contiguous(), du.to(u.dtype).contiguous(), dw.to(w.dtype), dv


def _gradients_fake(
    grad: Tensor, grad_lse: Tensor | None, a: Tensor, u: Tensor, w: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    mask: Tensor | None, causal: bool, act: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (a, u, w, v))  # type: ignore[return-value]


def _remember(ctx: object, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    a, u, w, v, mask, ctx.causal, ctx.act = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(a, u, w, v, mask, *output)  # type: ignore[attr-defined]


def _backward(ctx: object, do: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    a, u, w, v, mask, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
    dlse = None if dlse is None else torch.where(lse > -torch.inf, dlse, 0.0)
    grads = torch.ops.regard.additive_soft_backward(do, dlse, a, u, w, v, out, lse, mask, ctx.causal, ctx.act)  # type: ignore[attr-defined]
    return (*grads, None, None, None)


def _no_double_backward(ctx: object, *grads: Tensor) -> None:
    raise NotImplementedError(
        "second derivatives of the additive form are not available in the fused execution. "
        "Fix: use impl='dense', or run the forward inside regard.execution('dense')."
    )


_library.impl("additive_soft", _forward, "CompositeExplicitAutograd")
_library.impl("additive_soft_backward", _gradients, "CompositeExplicitAutograd")
torch.library.register_fake("regard::additive_soft", _forward_fake, lib=_library)
torch.library.register_fake("regard::additive_soft_backward", _gradients_fake, lib=_library)
torch.library.register_autograd("regard::additive_soft", _backward, setup_context=_remember, lib=_library)
torch.library.register_autograd("regard::additive_soft_backward", _no_double_backward, lib=_library)


class AdditiveSoft(torch.autograd.Function):
    """The same operator for eager mode, where the registered one spends as long on the host as the device on the work."""

    @staticmethod
    def forward(ctx, a, u, w, v, mask, causal, act):  # type: ignore[no-untyped-def]
        out, lse = _forward(a, u, w, v, mask, causal, act)
        _remember(ctx, (a, u, w, v, mask, causal, act), (out, lse))
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, do, dlse):  # type: ignore[no-untyped-def]
        a, u, w, v, mask, out, lse = ctx.saved_tensors
        do = torch.zeros_like(out) if do is None else do
        if torch.is_grad_enabled():
            # Asked for a graph of the backward: the registered operator refuses its derivative by name.
            return _backward(ctx, do, dlse)
        dlse = None if dlse is None else torch.where(lse > -torch.inf, dlse, 0.0)
        return (*_gradients(do, dlse, a, u, w, v, out, lse, mask, ctx.causal, ctx.act), None, None, None)


def additive_soft(
    a: Tensor, u: Tensor, w: Tensor, v: Tensor, mask: Tensor | None, causal: bool, act: str
) -> tuple[Tensor, Tensor]:
    """Contexts and log-sum-exp, by the quickest way to the kernels."""
    both: tuple[Tensor, Tensor] = AdditiveSoft.apply(a, u, w, v, mask, causal, act)  # type: ignore[no-untyped-call]
    return both
