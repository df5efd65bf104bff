"""Compiled, exported, mapped and differentiated by torch's own transforms."""

import io
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import regard as rg
from regard.ops import forms
from tests.cases import assert_same
from tests.contract.cases import CASES, Case, Inputs, named

EXECUTIONS = {"auto": nullcontext, "panels": lambda: rg.execution("blockwise", panel=2)}
every_execution = pytest.mark.parametrize("execution", EXECUTIONS)
COMPILED = [
    ("additive", "auto"),
    ("additive", "panels"),
    ("soft, fused", "auto"),
    ("negative-l2", "panels"),
    ("hard, sampled", "panels"),
    ("local-predictive", "auto"),
    ("reinforced, sampled, with context", "auto"),
    ("multi-dimensional, sparsemax", "panels"),
    ("directional-self-attention, forward", "panels"),
    ("graph-attention, types of edges", "auto"),
]


class Called(nn.Module):
    """A case as one module, called with dictionaries."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.module = case, case.build()

    def forward(self, tensors, masks):
        return self.case.call(self.module, Inputs(tensors, masks))


def run(function, inputs: Inputs, parameters):
    """The result and all gradients, from the same random numbers."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.tensors.items()}
    torch.manual_seed(2)
    result = function(leaves, inputs.masks)
    return [result, *torch.autograd.grad(result.square().sum(), [*leaves.values(), *parameters], allow_unused=True)]


def assert_compiles(name: str, backend: str) -> None:
    torch._dynamo.reset()
    model = Called(named(name))
    inputs, parameters = model.case.inputs(), list(model.parameters())
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for found, expected in zip(run(compiled, inputs, parameters), run(model, inputs, parameters), strict=True):
        assert (found is None) == (expected is None)
        if expected is not None:
            assert_same(found, expected)


@pytest.mark.parametrize(("name", "execution"), COMPILED)
def test_compile_is_one_graph(name, execution):
    with EXECUTIONS[execution]():
        assert_compiles(name, "aot_eager")


@pytest.mark.slow
@every_execution
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compile_is_one_graph_for_everything(case, execution):
    with EXECUTIONS[execution]():
        assert_compiles(case.name, "aot_eager")


def test_compile_to_machine_code():
    with rg.execution("blockwise", panel=3):
        assert_compiles("additive", "inductor")


@every_execution
@pytest.mark.parametrize("name", ["additive", "scaled-dot", "local-predictive"])
def test_export_is_saved_loaded_and_takes_any_batch(name, execution):
    case = named(name)
    model, inputs = Called(case).eval(), case.inputs()
    batch = tuple({key: {0: torch.export.Dim.AUTO} for key in group} for group in (inputs.tensors, inputs.masks))
    with EXECUTIONS[execution]():
        program = torch.export.export(model, (inputs.tensors, inputs.masks), dynamic_shapes=batch)
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        buffer.seek(0)
        loaded = torch.export.load(buffer).module()
        for size in (3, 11):
            inputs = case.inputs(b=size)
            assert_same(loaded(inputs.tensors, inputs.masks), model(inputs.tensors, inputs.masks))


def losses(model: Called):
    """The loss of one batch entry as a function of the parameters."""

    def loss(parameters, tensors, masks):
        one = ({name: x[None] for name, x in group.items()} for group in (tensors, masks))
        return functional_call(model, parameters, tuple(one)).square().sum()

    return loss


@pytest.mark.parametrize("case", [case for case in CASES if not case.training], ids=str)
def test_per_example_gradients(case):
    if "vmap" in case.lacks:
        pytest.skip(case.lacks["vmap"])
    model, inputs = Called(case), case.inputs()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    loss = losses(model)
    with rg.execution("dense"):
        mapped = vmap(loss, (None, 0, 0))(parameters, inputs.tensors, inputs.masks)
        steepest = vmap(grad(loss), (None, 0, 0))(parameters, inputs.tensors, inputs.masks) if parameters else {}
        for b in range(len(mapped)):
            one = [{name: x[b] for name, x in group.items()} for group in (inputs.tensors, inputs.masks)]
            assert_same(mapped[b], loss(parameters, *one))
            if parameters:
                expected = grad(loss)(parameters, *one)
                assert_same(flat({name: x[b] for name, x in steepest.items()}), flat(expected))


def flat(tensors):
    """All numbers of a dictionary, so that a gradient which is zero but for rounding is measured against the others."""
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def test_the_tiled_additive_form_is_mapped_by_its_own_rule(monkeypatch):
    """One call of the operator for the whole batch, forward and backward, with the weights shared or not."""
    case = named("additive")
    model, inputs = Called(case), case.inputs()
    called = []
    original = forms.additive_scores
    monkeypatch.setattr(forms, "additive_scores", lambda *args: called.append(args[0].shape) or original(*args))
    parameters = {name: p.detach().expand(3, *p.shape).clone() for name, p in model.named_parameters()}
    loss = losses(model)
    with rg.execution("blockwise"):
        for shared in (True, False):
            given = {n: (p[0].clone() if shared else p).requires_grad_() for n, p in parameters.items()}
            called.clear()
            mapped = vmap(loss, (None if shared else 0, 0, 0))(given, inputs.tensors, inputs.masks)
            assert len(called) == 1
            found = torch.autograd.grad(mapped.sum(), list(given.values()))
            one_by_one = [
                loss(
                    {n: p if shared else p[b] for n, p in given.items()},
                    {n: x[b] for n, x in inputs.tensors.items()},
                    {n: x[b] for n, x in inputs.masks.items()},
                )
                for b in range(3)
            ]
            expected = torch.autograd.grad(sum(one_by_one), list(given.values()))
            assert_same(mapped, torch.stack(one_by_one))
            for first, second in zip(found, expected, strict=True):
                assert_same(first, second)


def test_blockwise_additive_refuses_second_derivatives_by_name():
    case = named("additive")
    inputs, module = case.inputs().map(lambda x: x.requires_grad_()), case.build()
    query = inputs.tensors["query"]
    with rg.execution("blockwise"):
        result = case.run(module, inputs)
        (first,) = torch.autograd.grad(result.square().sum(), query, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives of the additive form .* impl='dense'"):
            first.square().sum().backward()
