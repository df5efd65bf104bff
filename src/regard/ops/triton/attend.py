"""Additive attention as one registered operator: the sine basis for a softmax in half precision, exact otherwise and out of range."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.ops.transforms import asks_for_more
from regard.ops.triton import additive_exact, additive_grads, summaries
from regard.ops.triton.additive_sine import HALVES, Sine, plan_size, prologue, uses_sines
from regard.ops.triton.additive_tile import Conditions, Exact, supports
from regard.ops.triton.align import ALL, FLAT, Align
from regard.ops.triton.mapped import fold, one_by_one, too_many, unfold
from regard.ops.triton.summary_tile import Summary

__all__ = ["additive", "supports"]

# Registered without the wrapper of torch.library.custom_op, which costs the host a little on every call.
_library = torch.library.Library("regard", "FRAGMENT")
_GIVEN = (
    "Tensor? mask, Tensor? bias, Tensor? seed, Tensor? position, float[] numbers, int[] kinds, bool causal, str act"
)
_library.define(
    f"additive(Tensor a, Tensor u, Tensor w, Tensor v, {_GIVEN}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "additive_backward(Tensor grad, Tensor a, Tensor u, Tensor w, Tensor v, "
    f"Tensor out, Tensor lse, Tensor soft, Tensor pick, Tensor plan, bool wants_bias, {_GIVEN}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)

# mask, bias, seed, position, numbers, kinds, causal, act
Given = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, list[float], list[int], bool, str]


def _read(given: Given) -> tuple[Conditions, str]:
    mask, bias, seed, position, numbers, kinds, causal, act = given
    return Conditions(mask, bias, causal, Align.unflat(seed, position, numbers, kinds)), act


# Contexts (L, Nq, d_v) in the dtype of v, and what the backward needs.
#
# That is the log-sum-exp of the scores (L, Nq) in float32, what the softmax weights read in float32, and the single key that was read
# (-1: none) by a choice or in an empty window, and the plan of a sine basis. In the sine basis the log-sum-exp leaves out a constant of
# each row, which cancels in the weights.
Results = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def _results(a: Tensor, v: Tensor, given: Conditions, act: str) -> Results:
    """Room for the results; None for what is not needed."""
    (length, nq), dv, align = a.shape[:2], v.shape[-1], given.align
    # In half precision the contexts are too coarse for exact gradients; the sine basis is as coarse itself.
    sines = uses_sines(a, act, given)
    coarse = v.dtype in HALVES and not sines
    float32 = torch.float32
    return (
        v.new_empty(length, nq, dv),
        a.new_empty((length, nq), dtype=float32),
        a.new_empty((length, nq, dv), dtype=float32) if align.learns and (coarse or align.choice != ALL) else None,
        a.new_empty((length, nq), dtype=torch.int32) if align.choice != ALL or align.position is not None else None,
        a.new_empty(plan_size(a.dtype), dtype=float32) if sines else None,
    )


def _all_there(
    out: Tensor, lse: Tensor, soft: Tensor | None, pick: Tensor | None, plan: Tensor | None
) -> tuple[Tensor, ...]:
    """A registered operator gives and takes tensors: what is not there is empty."""
    soft, plan = (lse.new_empty(0) if x is None else x for x in (soft, plan))
    return out, lse, soft, lse.new_empty(0, dtype=torch.int32) if pick is None else pick, plan


def _forward(a: Tensor, u: Tensor, w: Tensor, v: Tensor, *given_: object, summary: Summary | None = None) -> Results:
    """Of a (L, Nq, D), u (L, N, D), w (L or 1, D), v (L, N, d_v).

    Mask bytes and bias (L or 1, Nq or 1, N or 1); causal aligns the last query with the last key; seed to kinds are an `Align`. A `summary`
    of a softmax is written beside, in the same pass.
    """
    given, act = _read(given_)  # type: ignore[arg-type]
    results = out, lse, soft, pick, plan = _results(a, v, given, act)
    sine, skip = None, None
    if plan is not None:
        sine = Sine(a, u, w, plan, fresh=True)
        sine.forward(v, given, out, lse)
        skip = sine.terms
    # Beside a sine basis it runs only where the device found the range too wide for a series.
    x = Exact(a, u, w, act, prepare=sine is None)
    additive_exact.forward(x, v, given, out, soft, lse, pick, skip, summary)
    if summary is not None:
        summaries.beside_contexts(x, sine, given, lse, summary)
    return results


def _forward_registered(*operands) -> tuple[Tensor, ...]:
    return _all_there(*_forward(*operands))


def _forward_fake(a: Tensor, u: Tensor, w: Tensor, v: Tensor, *given_: object) -> tuple[Tensor, ...]:
    return _all_there(*_results(a, v, *_read(given_)))  # type: ignore[arg-type]


def _gradients(
    grad: Tensor, a: Tensor, u: Tensor, w: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, soft: Tensor | None, pick: Tensor | None, plan: Tensor | None, wants_bias: bool, *given_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of a, u, w, v, bias and position, in their dtypes, from that of the context; None where there is none."""
    given, act = _read(given_)  # type: ignore[arg-type]
    align = given.align
    do = grad.to(v.dtype)
    read = out if soft is None else soft
    dbias: Tensor | None = None
    dposition: Tensor | None = None
    if plan is not None:
        sine = Sine(a, u, w, plan)
        delta = prologue(do, read, v, sine.tops)
        da, du, dw, dv = sine.backward(v, given, lse, do, delta)
        dv = dv.to(v.dtype).contiguous()
        exact = Exact(a, u, w, act, prepare=False)
        more, _, _ = additive_grads.backward(
            exact, v, given, lse, pick, do, delta, sine.terms, (da, torch.zeros_like(da), du, dv)
        )
        dw = dw + (more if w.shape[0] > 1 else more.sum(0, keepdim=True))
    else:
        # Nobody asks for the largest norms.
        delta = prologue(do, read, v, lse.new_empty(2, dtype=torch.int32))
        exact = Exact(a, u, w, act, prepare=True)
        da, by_query = torch.zeros(2, *exact.a.mT.shape, device=v.device).mT.unbind()
        du = torch.zeros_like(exact.u.mT).mT
        dv = torch.empty_like(v, memory_format=torch.contiguous_format)
        dw, dbias, dposition = additive_grads.backward(
            exact, v, given, lse, pick, do, delta, None, (da, by_query, du, dv), wants_bias
        )
        dw = dw if w.shape[0] > 1 else dw.sum(0, keepdim=True)
        da, du = da[:, : exact.nq, : exact.width], du[:, : exact.n, : exact.width]
    if dbias is not None:
        assert given.bias is not None
        dbias = dbias.sum_to_size(given.bias.shape)
    if dposition is not None:
        assert align.position is not None
        dposition = dposition.sum_to_size(align.position.shape)
    return da.to(a.dtype).contiguous(), du.to(u.dtype).contiguous(), dw.to(w.dtype), dv, dbias, dposition


def _gradients_registered(
    grad: Tensor, a: Tensor, u: Tensor, w: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, soft: Tensor, pick: Tensor, plan: Tensor, *given: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    kept = (x if x.numel() else None for x in (soft, pick, plan))
    found = _gradients(grad, a, u, w, v, out, lse, *kept, *given)  # type: ignore[arg-type]
    return tuple(v.new_empty(0) if x is None else x for x in found)


def _gradients_fake(
    grad: Tensor, a: Tensor, u: Tensor, w: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, soft: Tensor, pick: Tensor, plan: Tensor, wants_bias: bool, *given_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    given = _read(given_)[0]  # type: ignore[arg-type]
    position = None if given.align.gaussian == FLAT else given.align.position
    bias = given.bias if wants_bias else None
    found = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (a, u, w, v)]
    found += [v.new_empty(0) if x is None else torch.empty(x.shape, device=x.device) for x in (bias, position)]
    return tuple(found)  # type: ignore[return-value]


def _remember(ctx: object, inputs: tuple[object, ...], output: tuple[Tensor | None, ...]) -> None:
    a, u, w, v, mask, bias, seed, position, *ctx.rest = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(a, u, w, v, mask, bias, seed, position, *output)  # type: ignore[attr-defined]


def _backward(ctx: object, do: Tensor, *unused: object) -> tuple[Tensor | None, ...]:
    return _through(torch.ops.regard.additive_backward, ctx, do)


def _through(gradients, ctx, do: Tensor) -> tuple[Tensor | None, ...]:
    a, u, w, v, mask, bias, seed, position, *results = ctx.saved_tensors
    wants_bias = bias is not None and ctx.needs_input_grad[5]
    results = results if gradients is _gradients else _all_there(*results)
    da, du, dw, dv, dbias, dposition = gradients(
        do, a, u, w, v, *results, wants_bias, mask, bias, seed, position, *ctx.rest
    )
    dbias = dbias if wants_bias else None
    if not ctx.needs_input_grad[7] or (dposition is not None and not dposition.numel()):
        dposition = None
    return da, du, dw, dv, None, dbias, None, dposition, None, None, None, None


def _no_double_backward(ctx: object, *grads: Tensor) -> None:
    raise NotImplementedError(
        "second derivatives of the additive form are not available in the fused execution. "
        "Fix: use impl='dense', or run the forward inside regard.execution('dense')."
    )


_library.impl("additive", _forward_registered, "CompositeExplicitAutograd")
_library.impl("additive_backward", _gradients_registered, "CompositeExplicitAutograd")
torch.library.register_fake("regard::additive", _forward_fake, lib=_library)
torch.library.register_fake("regard::additive_backward", _gradients_fake, lib=_library)
torch.library.register_autograd("regard::additive", _backward, setup_context=_remember, lib=_library)
torch.library.register_autograd("regard::additive_backward", _no_double_backward, lib=_library)


@torch.library.register_vmap("regard::additive", lib=_library)
def _(info, in_dims, a, u, w, v, mask, bias, seed, position, *rest):
    size, length = info.batch_size, a.shape[0 if in_dims[0] != 0 else 1]
    if seed is not None or too_many(size, length):
        given = (a, u, w, v, mask, bias, seed, position, *rest)
        return one_by_one(torch.ops.regard.additive, size, in_dims, given)
    tokens = [fold(x, in_dims[k], size, length) for k, x in ((0, a), (1, u), (3, v))]
    w, mask, bias, position = (
        fold(x, in_dims[k], size, length, shared=True) for k, x in ((2, w), (4, mask), (5, bias), (7, position))
    )
    found = torch.ops.regard.additive(*tokens[:2], w, tokens[2], mask, bias, seed, position, *rest)
    out, plan = unfold(found[:-1], size, (0,) * 4), found[-1]
    # A series is chosen for all entries together.
    return (*out[0], plan), (*out[1], None)


class Additive(torch.autograd.Function):
    """The same operator for eager mode, where the registered one spends as long on the host as the device on the work."""

    @staticmethod
    def forward(ctx, *given):
        inputs, summary = given[:-1], given[-1]
        results = _forward(*inputs, summary=summary)
        _remember(ctx, inputs, results)
        ctx.mark_non_differentiable(*(x for x in results[1:] if x is not None))
        # Nor are zeros made for gradients that these do not have.
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx, do, *unused):
        if do is None:
            # Whatever read the contexts gave them no gradient.
            return (None,) * len(ctx.needs_input_grad)
        # Asked for a graph of the backward, the registered operator refuses its derivative by name; several gradients it takes one by one.
        gradients = torch.ops.regard.additive_backward if asks_for_more(do) else _gradients
        return *_through(gradients, ctx, do), None


def additive(a: Tensor, u: Tensor, w: Tensor, v: Tensor, *given: object, summary: Summary | None = None) -> Results:
    """The same by the quickest way to the kernels; None where the registered operator gives an empty tensor."""
    results: Results = Additive.apply(a, u, w, v, *given, summary)
    return results
