"""What holds for everything in the catalog, in every execution, written once."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from torch import Tensor

import regard as rg
from regard import catalog
from regard.ops.call import Call
from regard.ops.dense import dense
from regard.ops.dispatch import choose, execute
from tests.cases import assert_same
from tests.contract.cases import CASES, SIZES, Case, Inputs

EXECUTIONS = {
    "auto": nullcontext,
    "dense": lambda: rg.execution("dense"),
    "blockwise": lambda: rg.execution("blockwise", panel=2),
}
GARBAGE = (math.nan, math.inf, -math.inf, 1e30)

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_execution = pytest.mark.parametrize("execution", EXECUTIONS)


def cotangent_of(shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def outcome(case: Case, module: torch.nn.Module, inputs: Inputs, cotangent: Tensor | None = None) -> dict[str, Tensor]:
    """The result, and the gradients of every input and parameter under a cotangent, a fixed random one by default."""
    inputs = inputs.map(lambda x: x.detach().requires_grad_())
    result = case.run(module, inputs)
    wanted = {f"input {name}": x for name, x in inputs.tensors.items()}
    wanted |= {f"parameter {name}": p for name, p in module.named_parameters()}
    cotangent = (cotangent_of(result.shape) if cotangent is None else cotangent).to(result.dtype)
    grads = torch.autograd.grad(result, list(wanted.values()), cotangent, allow_unused=True)
    found = {name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(wanted.items(), grads, strict=True)}
    return {"result": result.detach()} | found


def assert_identical(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), f"{name} differs"


def filled(case: Case, inputs: Inputs, garbage: float) -> Inputs:
    """The inputs with something in every row that nobody may read."""
    tensors = {}
    for name, x in inputs.tensors.items():
        unread = case.unread(case.tensors[name], inputs)
        tensors[name] = x if unread is None else torch.where(unread, garbage, x)
    return replace(inputs, tensors=tensors)


def padded(case: Case, inputs: Inputs, axis: str, by: int) -> Inputs:
    """The inputs with some more rows along an axis, of which no mask knows."""

    def longer(x: Tensor, axes, value) -> Tensor:
        if axis not in axes:
            return x
        k = axes.index(axis)
        more = x.new_full((*x.shape[:k], by, *x.shape[k + 1 :]), value)
        return torch.cat([x, more], k)

    return Inputs(
        {name: longer(x, case.tensors[name], math.nan) for name, x in inputs.tensors.items()},
        {name: longer(x, case.masks[name], False) for name, x in inputs.masks.items()},
    )


def test_everything_in_the_catalog_has_a_case():
    assert {entry.name for entry in catalog.entries()} == {case.entry for case in CASES}


def test_names_of_cases_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_contract_is_broken_nowhere_but_here():
    broken = {(what, case.entry) for case in CASES for what in case.lacks}
    assert broken == {("second derivative", "hard"), ("second derivative", "multi-dimensional")}


def test_cases_hold_unread_rows_of_every_kind():
    """Otherwise half of this file would test nothing."""
    for case in CASES:
        inputs = case.inputs()
        for name, axes in case.tensors.items():
            unread = case.unread(axes, inputs)
            assert unread is not None, f"{case}: no mask covers {name}"
            assert unread.any(), f"{case}: no unread row in {name}"
            assert not unread.all()


@every_case
def test_every_parameter_has_an_axis_to_be_split_along(case):
    """What spreads parameters over processes, such as torch's `fully_shard`, refuses those without."""
    assert not [name for name, x in case.build().named_parameters() if x.ndim == 0]


@every_execution
@every_case
def test_a_row_with_nothing_to_attend_to_is_zero_and_so_are_its_gradients(case, execution):
    inputs, module = case.inputs(), case.build()
    with EXECUTIONS[execution]():
        found = outcome(case, module, inputs)
    dead = case.unread(case.result, inputs)
    assert found["result"].isfinite().all()
    assert not found["result"][dead.expand_as(found["result"])].any()
    assert found["result"].any()
    for name, axes in case.tensors.items():
        unread = case.unread(axes, inputs)
        gradient = found[f"input {name}"]
        assert gradient.isfinite().all()
        assert not gradient[unread.expand_as(gradient)].any()


@every_execution
@every_case
def test_a_call_with_nothing_to_attend_to_has_zero_gradients_everywhere(case, execution):
    inputs, module = case.inputs(), case.build()
    inputs = replace(inputs, masks={name: torch.zeros_like(m) for name, m in inputs.masks.items()})
    with EXECUTIONS[execution]():
        found = outcome(case, module, inputs)
    for name, x in found.items():
        assert not x.any(), f"{name} is not zero"


@every_execution
@every_case
def test_what_nobody_may_read_never_matters_whatever_it_holds(case, execution):
    inputs, module = case.inputs(), case.build()
    with EXECUTIONS[execution]():
        expected = outcome(case, module, filled(case, inputs, 0.0))
        for garbage in GARBAGE:
            assert_identical(outcome(case, module, filled(case, inputs, garbage)), expected)


@every_execution
@every_case
def test_padding_never_matters(case, execution):
    inputs, module = case.inputs(), case.build()
    with EXECUTIONS[execution]():
        expected = outcome(case, module, inputs)
        for axis in {axis for axes in case.masks.values() for axis in axes} - {"b", 1}:
            shape = [
                size + 3 * (name == axis) for name, size in zip(case.result, expected["result"].shape, strict=True)
            ]
            cotangent = cotangent_of(shape)
            inside = tuple(slice(size) for size in expected["result"].shape)
            cotangent[inside] = cotangent_of(expected["result"].shape)
            found = outcome(case, module, padded(case, inputs, axis, 3), cotangent)
            for name, x in found.items():
                axes = case.result if name == "result" else case.tensors.get(name.removeprefix("input "), ())
                if axis in axes:
                    kept, gone = x.split([SIZES[axis], 3], axes.index(axis))
                    assert not gone.any(), f"{name} of padding"
                    x = kept
                assert_same(x, expected[name], name)


@every_execution
@every_case
def test_a_batch_is_its_entries_one_by_one(case, execution):
    inputs, module = case.inputs(), case.build().eval()
    with EXECUTIONS[execution]():
        whole = outcome(case, module, inputs)
        parts = []
        for b in range(SIZES["b"]):
            one = Inputs(
                *({name: x[b : b + 1] for name, x in group.items()} for group in (inputs.tensors, inputs.masks))
            )
            parts.append(outcome(case, module, one, cotangent_of(whole["result"].shape)[b : b + 1]))
    for name in whole:
        each = [part[name] for part in parts]
        joined = sum(each[1:], each[0]) if name.startswith("parameter") else torch.cat(each)
        assert_same(joined, whole[name], name)


@every_execution
@every_case
def test_recorded_is_unrecorded_to_the_bit(case, execution):
    inputs, module = case.inputs(), case.build()
    with EXECUTIONS[execution]():
        plain = outcome(case, module, inputs)
        drawn = torch.get_rng_state()
        with rg.record(module) as trace:
            assert_identical(outcome(case, module, inputs), plain)
            assert torch.equal(torch.get_rng_state(), drawn)
        assert len(trace) > 0
        with rg.record(module, "weights", "entropy"):
            assert_identical(outcome(case, module, inputs), plain)
            assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("execution", ["dense", "blockwise"])
@every_case
def test_the_device_is_kept(case, execution):
    """On the meta device nothing is computed, and mixing in a tensor of the CPU is an error."""
    module, inputs = case.build().to("meta"), case.inputs()
    inputs = Inputs(*({name: x.to("meta") for name, x in group.items()} for group in (inputs.tensors, inputs.masks)))
    with EXECUTIONS[execution]():
        assert case.run(module, inputs).device.type == "meta"


def converted(call: Call, dtype: torch.dtype) -> Call:
    """A call with its operands in another dtype."""
    operands = {
        f.name: x.to(dtype)
        for f in fields(call.form)
        if is_dataclass(call.form) and isinstance(x := getattr(call.form, f.name), Tensor)
    }
    return call.with_(form=replace(call.form, **operands), value=call.value.to(dtype))


def assert_statistics_are_wide(trace: rg.Trace, dtype: torch.dtype) -> None:
    """Every attention inside does no worse than rounding its result (and, fused, its weights) once.

    The reference is the same call, from the same low-precision operands, evaluated in float64.
    """
    roundoff = torch.finfo(dtype).eps / 2
    for _, calls in trace.items():
        for recorded in calls:
            call = recorded.call
            assert call.value.dtype == dtype
            found, fused = execute(call, "auto"), choose(call, "auto").path == "fused"
            if fused and torch.is_autocast_enabled("cpu"):
                # Autocast asks for that: one library call has one dtype.
                narrow = replace(call.form, query=call.form.query.to(dtype), key=call.form.key.to(dtype))
                call = call.with_(form=narrow)
            exact = converted(call, torch.float64)
            reference, single = dense(exact), dense(converted(call, torch.float32))
            allowed = roundoff * reference.abs() + 2 * (single - reference).abs().max()
            if fused:
                allowed = allowed + roundoff * dense(exact.with_(value=exact.value.abs()))
            assert ((found.double() - reference).abs() <= allowed).all()


@every_execution
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@every_case
def test_the_dtype_is_kept_and_statistics_are_wide(case, dtype, execution):
    # Larger inputs make larger scores, which half precision could not hold.
    module, inputs = case.build().to(dtype), case.inputs().map(lambda x: (3 * x).to(dtype))
    with EXECUTIONS[execution](), rg.record(module) as trace:
        found = outcome(case, module, inputs)
        if dtype != torch.float32:
            with torch.no_grad():
                assert_statistics_are_wide(trace, dtype)
    for name, x in found.items():
        assert x.dtype == dtype, name
        assert x.isfinite().all(), name


@every_execution
@every_case
def test_autocast(case, execution):
    module, inputs = case.build().float(), case.inputs().map(lambda x: x.float())
    with EXECUTIONS[execution]():
        with torch.autocast("cpu", torch.bfloat16), rg.record(module) as trace:
            found = outcome(case, module, inputs)
            with torch.no_grad():
                assert_statistics_are_wide(trace, torch.bfloat16)
    assert found["result"].isfinite().all()
    for name, x in found.items():
        if name != "result":
            assert x.dtype == torch.float32
            assert x.isfinite().all(), name


@every_execution
@pytest.mark.parametrize("sizes", [{"n": 0}, {"nq": 0}, {"b": 0}, {"n": 1}], ids=str)
@every_case
def test_empty_and_single(case, sizes, execution):
    inputs, module = case.inputs(**sizes), case.build()
    size = SIZES | sizes
    with EXECUTIONS[execution]():
        found = outcome(case, module, inputs)
    assert found["result"].shape == tuple(size[axis] if isinstance(axis, str) else axis for axis in case.result)
    for name, x in found.items():
        assert x.isfinite().all(), name
    if size["n"] == 0:
        for name, x in found.items():
            assert not x.any(), f"{name} is not zero"


@every_execution
@every_case
def test_any_layout_in_memory(case, execution):
    inputs, module = case.inputs(), case.build()

    def strided(x: Tensor) -> Tensor:
        holes = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 7.0)
        holes[..., ::2] = x
        return holes.mT.contiguous().mT[..., ::2] if x.dim() > 1 else holes[..., ::2]

    with EXECUTIONS[execution]():
        expected = case.run(module, inputs)
        found = case.run(module, inputs.map(strided))
    assert_same(found, expected)


@every_execution
@every_case
def test_expanded_inputs(case, execution):
    """Every batch entry is the same memory, with a stride of 0; the gradient is the sum over its uses."""
    inputs, module = case.inputs(), case.build().eval()
    first = inputs.map(lambda x: x[:1])
    first = replace(first, masks={name: m[:1].expand(m.shape) for name, m in inputs.masks.items()})

    def spread(change) -> dict[str, Tensor]:
        leaves = {name: x.detach().requires_grad_() for name, x in first.tensors.items()}
        wide = Inputs({name: change(x.expand(3, *x.shape[1:])) for name, x in leaves.items()}, first.masks)
        result = case.run(module, wide)
        result.square().sum().backward()
        return {"result": result.detach()} | {name: x.grad for name, x in leaves.items() if x.grad is not None}

    with EXECUTIONS[execution]():
        found, expected = spread(lambda x: x), spread(torch.clone)
    assert found.keys() == expected.keys()
    for name in expected:
        assert_same(found[name], expected[name], name)


@every_execution
@every_case
def test_inference_before_training_changes_nothing(case, execution):
    """Whatever is remembered of a first call, a later one may need for its backward."""
    inputs, module = case.inputs(), case.build()
    with EXECUTIONS[execution]():
        expected = outcome(case, module, inputs)
        other, module = case.inputs(), case.build()
        with torch.inference_mode():
            result = case.run(module, other)
        found = outcome(case, module, other)
    assert_identical(found, expected)
    assert_same(result.clone(), expected["result"])


@every_case
def test_dense_has_second_derivatives(case):
    if "second derivative" in case.lacks:
        pytest.skip(case.lacks["second derivative"])
    module, inputs = case.build(), case.inputs(b=2, nq=2, n=3)
    names = list(inputs.tensors)

    def function(*tensors: Tensor) -> Tensor:
        return case.run(module, replace(inputs, tensors=dict(zip(names, tensors, strict=True))))

    leaves = [inputs.tensors[name].requires_grad_() for name in names]
    with rg.execution("dense"):
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@every_case
def test_execution_does_not_change_the_result(case):
    inputs, module = case.inputs(), case.build()
    found = {}
    for name, execution in EXECUTIONS.items():
        with execution():
            found[name] = outcome(case, module, inputs)
    for name in found["dense"]:
        assert_same(found["blockwise"][name], found["dense"][name], name)
        assert_same(found["auto"][name], found["dense"][name], name)
